"""The files below a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepwell.data.sources.opening import shown_name
from stepwell.data.sources.texts import (
    CODE_SUFFIXES,
    TEXT_SUFFIXES,
    Item,
    declared_encoding,
    decoded,
)
from stepwell.types import DataError, Dropped

SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
# What `stepwell curate` leaves in its folder, at the end and until then.
CURATION, UNFINISHED = "curation.json", ".work"
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


def source_tree(
    root: str | Path,
    source: str | None = None,
    suffixes: Sequence[str] = CODE_SUFFIXES + TEXT_SUFFIXES,
    skip: frozenset[str] = SKIPPED_FOLDERS,
) -> Iterator[Item]:
    """One document a file of code or text below `root`, in sorted order; folders that are
    hidden or named in `skip` are passed over, as are links; curated ones are Dropped. A Python file
    is read in the encoding it declares.

    Raises DataError for a missing folder, an unfinished curation, and a folder without such files.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"there is no folder {root}")
    check_finished(root)
    name = source or root.name
    empty = True
    curated: list[Path] = []
    for path in walk(root, skip, curated=curated):
        if path.suffix.lower() not in suffixes or path.is_symlink() or not path.is_file():
            continue
        empty = False
        relative = shown_name(path.relative_to(root))
        try:
            content = path.read_bytes()
        except OSError as error:
            yield Dropped(relative, name, "unreadable", str(error.strerror))
            continue
        yield decoded(relative, name, content, declared_encoding(path, content), {"path": relative})
    for folder in curated:
        yield Dropped(shown_name(folder.relative_to(root)), name, "curated_folder", about(folder))
    if empty:
        raise DataError(
            f"{root} holds no files that end in {', '.join(suffixes)}; files of rows (.jsonl, "
            ".jsonl.gz, .parquet) are named one by one"
        )


def is_curated(place: str | Path) -> bool:
    """Whether `stepwell curate` has made this folder."""
    return os.path.isfile(os.path.join(place, CURATION))


def is_unfinished(place: str | Path) -> bool:
    """Whether `stepwell curate` has begun this folder and not ended."""
    return os.path.isdir(os.path.join(place, UNFINISHED)) and not is_curated(place)


def check_finished(folder: str | Path) -> None:
    """Raises DataError for an unfinished curation."""
    if is_unfinished(folder):
        raise DataError(
            f"{folder} holds an unfinished curation, whose documents are not all there; finish it "
            "first (start it again to go on)"
        )


def about(folder: str | Path) -> str:
    """Why a curated folder below a source is not read with it."""
    how = "unfinished curation" if is_unfinished(folder) else "curated folder"
    return f"{how}: name it as a source to read what it kept"


def walk(
    root: Path,
    skip: frozenset[str] = SKIPPED_FOLDERS,
    faults: list[OSError] | None = None,
    curated: list[Path] | None = None,
) -> Iterator[Path]:
    """Everything in `root` that is no folder, and links to folders, in sorted order. Folders that
    are hidden or named in `skip` are passed over, and so are curated ones, which hold what they
    removed and reports too: those go to `curated`. Folders that can't be listed go to `faults`."""
    listing = faults.append if faults is not None else None
    for folder, subfolders, files in os.walk(root, onerror=listing):
        kept = sorted(d for d in subfolders if d not in skip and not d.startswith("."))
        links = [name for name in kept if os.path.islink(os.path.join(folder, name))]
        ours = {name for name in kept if name not in links and _is_ours(os.path.join(folder, name))}
        if curated is not None:
            curated += [Path(folder) / name for name in sorted(ours)]
        subfolders[:] = [name for name in kept if name not in ours]
        for name in sorted([*files, *links]):
            yield Path(folder) / name


def _is_ours(folder: str) -> bool:
    return is_curated(folder) or is_unfinished(folder)
