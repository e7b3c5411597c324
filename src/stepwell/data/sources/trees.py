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
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


def source_tree(
    root: str | Path,
    source: str | None = None,
    suffixes: Sequence[str] = CODE_SUFFIXES + TEXT_SUFFIXES,
    skip: frozenset[str] = SKIPPED_FOLDERS,
) -> Iterator[Item]:
    """One document a file of code or text below `root`, in sorted order; folders that are
    hidden or named in `skip` are passed over, as are links. A Python file is read in the encoding
    it declares.

    Raises DataError for a missing folder and one without such files.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"there is no folder {root}")
    name = source or root.name
    empty = True
    for path in walk(root, skip):
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
    if empty:
        raise DataError(
            f"{root} holds no files that end in {', '.join(suffixes)}; files of rows (.jsonl, "
            ".jsonl.gz, .parquet) are named one by one"
        )


def walk(
    root: Path, skip: frozenset[str] = SKIPPED_FOLDERS, faults: list[OSError] | None = None
) -> Iterator[Path]:
    """Everything in `root` that is no folder, and links to folders, in sorted order. Folders that
    are hidden or named in `skip` are passed over; those that can't be listed go to `faults`."""
    listing = faults.append if faults is not None else None
    for folder, subfolders, files in os.walk(root, onerror=listing):
        subfolders[:] = sorted(d for d in subfolders if d not in skip and not d.startswith("."))
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        for name in sorted([*files, *links]):
            yield Path(folder) / name
