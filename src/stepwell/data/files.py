"""Folders that are whole or absent: written under a temporary name, then renamed."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepwell.types import DataError

# Open at once beside those that are counted: logs, checkpoints, connections.
SPARE_FILES = 256


@contextmanager
def new_folder(target: str | Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name when the block ends without error;
    otherwise it is removed. Raises DataError if `target` exists, or for a full or locked disk."""
    target = Path(target)
    temporary = begin_folder(target)
    try:
        with clean_disk_errors(target):
            yield temporary
            finish_folder(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def begin_folder(target: Path) -> Path:
    with clean_disk_errors(target):
        if target.exists():
            raise DataError(f"{target} exists already; remove it or choose another name")
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        temporary = temporary_name(target)
        temporary.mkdir()
    return temporary


def finish_folder(temporary: Path, target: Path) -> None:
    sync(temporary)
    os.rename(temporary, target)
    sync(target.parent)


@contextmanager
def clean_disk_errors(target: Path) -> Iterator[None]:
    """Turns an OSError (a full disk, no permission) into a DataError that names the target. One
    that names a path elsewhere, such as an input that can't be read, is left as it is."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str) and not _concerns(Path(error.filename), target):
            raise
        raise DataError(
            f"cannot write {target}: {error.strerror or error}; nothing was kept of it"
        ) from error


def _concerns(path: Path, target: Path) -> bool:
    """Whether `path` is the target, a folder it lies in, or of its temporary folder."""
    target, path = target.absolute(), path.absolute()
    temporary = temporary_name(target)
    return path in (target, *target.parents) or temporary in (path, *path.parents)


def temporary_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp{os.getpid()}")


def remove_leftovers(target: Path) -> None:
    """Removes what killed processes left under temporary names."""
    prefix = f".{target.name}.tmp"
    for path in target.parent.glob(f"{prefix}*"):
        pid = path.name.removeprefix(prefix)
        if pid.isdecimal() and int(pid) != os.getpid() and not _is_running(int(pid)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def allow_open_files(more: int) -> None:
    """Lets this process have `more` files open beside those that it has. Raises DataError where the
    system doesn't."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = open_file_limit(len(os.listdir("/dev/fd")) + more, soft, hard)
    if limit != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def open_file_limit(num_files: int, soft: int, hard: int) -> int:
    """The limit that leaves SPARE_FILES beside num_files; `soft` where it does. Raises DataError
    above `hard`."""
    needed = num_files + SPARE_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return soft
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise DataError(
            f"{needed:,} files would be open at once, and this process may have {hard:,}; raise "
            f"the limit (ulimit -Hn {needed}), or write stores of fewer shards"
        )
    return needed


def stamp(path: str | Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of change of a file, or of what lies in a folder; nothing where there
    is none. What is kept in memory of them must be read anew when this changes."""
    path = Path(path)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    states = [(file.name, file.stat()) for file in files if file.exists()]
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in states)


def file_sha256(path: str | Path) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
