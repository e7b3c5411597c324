"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepwell.types import ConfigError

LOCK = "run.lock"
# File systems without locks: a run there goes unguarded rather than not at all.
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Holds `folder` (made if missing) for this process; the system lets go of it however the
    process ends. A folder that was made here and is still empty at the end is removed.

    Raises ConfigError naming the process that holds it already, and for a path that cannot be
    written.
    """
    folder = Path(folder)
    made = not folder.exists()
    handle = _locked(folder)
    try:
        yield
    finally:
        # Unlinked while it is held, so that nobody's new lock file is removed.
        (folder / LOCK).unlink(missing_ok=True)
        os.close(handle)
        if made and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _locked(folder: Path) -> int:
    """A file descriptor that holds the lock."""
    path = folder / LOCK
    while True:
        handle = _opened(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in UNSUPPORTED:
                return handle
            holder = os.pread(handle, 200, 0).decode("utf-8", "replace") or "another process"
            os.close(handle)
            raise ConfigError(
                f"a run is going on in {folder} ({holder}); wait for it or stop it, or choose "
                "another dir"
            ) from None
        if _is_at(handle, path):
            break
        os.close(handle)  # the holder removed the file between our opening and locking it
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return handle


def _opened(path: Path) -> int:
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno in FULL:
            raise
        blocked = [p for p in (folder, *folder.parents) if p.exists() and not p.is_dir()]
        why = f"{blocked[0]} is a file" if blocked else (error.strerror or str(error)).lower()
        raise ConfigError(
            f"dir={str(folder)!r} cannot be a run's folder: {why}; choose another dir"
        ) from error


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
