"""A source as pieces that can be read in any process, and what is in each.

Curation goes on where training data would end the run: a file that can't be read, or not to its
end, is a Dropped with its reason, beside the documents that were read.
"""

from __future__ import annotations

import glob
import importlib.util
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from stepwell.data.sources.html import read_html
from stepwell.data.sources.opening import PACKED_SUFFIXES, FileFault, shown_name
from stepwell.data.sources.parquet import open_parquet, read_parquet
from stepwell.data.sources.python_library import stdlib_code, stdlib_prose
from stepwell.data.sources.rows import JSON_SUFFIXES, read_jsonl, rows
from stepwell.data.sources.spec import MIB, Kind, Piece, SourceSpec
from stepwell.data.sources.texts import CODE_SUFFIXES, TEXT_SUFFIXES, Item, read_text, unpacked_name
from stepwell.data.sources.trees import about, check_finished, is_curated, is_unfinished, walk
from stepwell.data.sources.warc import read_warc
from stepwell.types import DataError, Document, Dropped, nearest

# Plain JSONL and Parquet above it are cut.
PIECE_BYTES = 64 * MIB
# Where the documents of a curated folder are.
CURATED = "documents"
PYTHON_SOURCES = ("stdlib-code", "stdlib-prose")
SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": TEXT_SUFFIXES,
    "code": CODE_SUFFIXES,
    "jsonl": JSON_SUFFIXES,
    "parquet": (".parquet",),
    "html": (".html", ".htm", ".xhtml"),
    "warc": (".warc", ".wet"),
}
READERS: dict[str, Callable[[Piece, SourceSpec], Iterator[Item]]] = {
    "text": read_text,
    "code": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "html": read_html,
    "warc": read_warc,
}
# What each kind of a recipe takes from a folder.
TAKES: dict[str, tuple[str, ...]] = {
    "auto": tuple(READERS),
    "rows": ("jsonl", "parquet"),
    "text": ("text",),
    "code": ("code",),
    "html": ("html",),
    "warc": ("warc",),
}
# As the Hugging Face hub names splits in the names of files and folders.
SPLITS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation",
    "val": "validation", "dev": "validation", "test": "test", "testing": "test", "eval": "test",
    "evaluation": "test",
}  # fmt: skip
SHARD = re.compile(r"^(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?\.")


def open_source(
    path: str | Path | Sequence[str],
    kind: Kind = "auto",
    name: str = "",
    **options: object,
) -> Iterator[Item]:
    """Everything in files, folders and globs, in reading order. options: fields of SourceSpec.

    Raises DataError as `plan_source`.
    """
    paths = (str(path),) if isinstance(path, str | Path) else tuple(path)
    values = {"name": name or Path(paths[0]).name.split(".")[0] or "source", "path": paths}
    yield from read_source(SourceSpec(**values, kind=kind, **options))  # type: ignore[arg-type]


def read_source(spec: SourceSpec) -> Iterator[Item]:
    """The whole source in one process, as far as max_docs. Raises DataError as `plan_source`."""
    num_docs = 0
    for piece in plan_source(spec):
        for item in read_piece(piece, spec):
            yield item
            num_docs += isinstance(item, Document)
            if num_docs == spec.max_docs:
                return


def plan_source(spec: SourceSpec) -> list[Piece]:
    """Every file as a piece (also those that will be dropped), in reading order; plain JSONL above
    PIECE_BYTES in ranges of bytes, Parquet in ranges of row groups. Which pieces these are depends
    on the files alone.

    Raises DataError where there is nothing to read, for a split that isn't there, for a Hugging
    Face folder of several splits when none is chosen, and where a library is missing.
    """
    pieces: list[Piece] = []
    for place in spec.paths:
        pieces += _plan_path(place, spec.kind, spec.split)
    pieces = _unique_names(pieces)
    _check_libraries(pieces)
    return [part for piece in pieces for part in _cut(piece)]


def read_piece(piece: Piece, spec: SourceSpec) -> Iterator[Item]:
    """The documents of a piece, and a Dropped for each record or file that can't be one. Ends after
    max_docs documents; a source of several pieces may then hold more."""
    num_docs = 0
    for item in _items(piece, spec):
        yield item
        num_docs += isinstance(item, Document)
        if num_docs == spec.max_docs:
            return


def kind_of_file(name: str) -> str | None:
    """How a file of this name is read; None: not at all."""
    bare = unpacked_name(name)
    if bare != name.lower() and bare.endswith(".parquet"):
        return None
    return next((kind for kind, ends in SUFFIXES.items() if bare.endswith(ends)), None)


def split_of(name: str) -> str | None:
    """The split that a file's place in a folder names: `data/train-00000-of-00002.parquet`,
    `test/part.jsonl`, `my_dev.jsonl`; None: none."""
    path = Path(name)
    if shard := SHARD.match(path.name):
        split = shard.group("split")
        return SPLITS.get(split, split)
    words = [
        word for part in (path.name, *path.parts[-2::-1]) for word in re.split(r"[\W_]+", part)
    ]
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def _items(piece: Piece, spec: SourceSpec) -> Iterator[Item]:
    if piece.kind == "dropped":
        yield Dropped(piece.name, spec.name, piece.reason, piece.detail)
        return
    if piece.kind in PYTHON_SOURCES:
        yield from stdlib_code(spec.name) if piece.kind == "stdlib-code" else (
            stdlib_prose(spec.name))  # fmt: skip
        return
    try:
        yield from READERS[piece.kind](piece, spec)
    except FileFault as fault:
        yield Dropped(piece.name, spec.name, fault.reason, fault.detail)


def _plan_path(place: str, kind: Kind, split: str | None) -> list[Piece]:
    if place in PYTHON_SOURCES and not os.path.lexists(place):
        return [Piece(place, place, place)]
    if os.path.isdir(place):
        return _plan_folder(Path(place), kind, split)
    if os.path.lexists(place):
        return [_plan_file(place, os.path.basename(place), kind)]
    found = sorted(glob.glob(place, recursive=True)) if glob.has_magic(place) else []
    if not found:
        hint = nearest(place, PYTHON_SOURCES)
        raise DataError(
            f"there is nothing to read at {place!r}{hint}: give files, folders, globs such as "
            f"'data/**/*.jsonl', or {' or '.join(PYTHON_SOURCES)}"
        )
    fixed = _fixed_part(place)
    pieces: list[Piece] = []
    for path in found:
        name = shown_name(os.path.relpath(path, fixed))
        ours = _curated_above(path, fixed)
        if os.path.isdir(path):
            below = [] if "**" in place or ours else _plan_folder(Path(path), kind, split)
            pieces += [replace(piece, name=f"{name}/{piece.name}") for piece in below]
        elif split in (None, "all") or split_of(name) == SPLITS.get(split, split):
            piece = _plan_file(path, name, kind) if ours is None else _drop_curated(ours, fixed)
            pieces.append(piece)
    if not any(piece.reason != "curated_folder" for piece in pieces):
        raise DataError(
            f"{place!r} matches no file{f' of split {split!r}' if split else ''}"
            f"{' but those of curated folders; name such a folder itself' if pieces else ''}"
        )
    return pieces


def _curated_above(path: str, fixed: str) -> str | None:
    """The curated folder that a file found by a glob lies in, unless the glob begins in it."""
    place = os.path.dirname(path)
    while place and len(place) > len(fixed) and os.path.dirname(place) != place:
        if is_curated(place) or is_unfinished(place):
            return place
        place = os.path.dirname(place)
    return None


def _drop_curated(folder: str, root: str | Path) -> Piece:
    name = shown_name(os.path.relpath(folder, root))
    return _drop(folder, name, "curated_folder", about(folder))


def curated_documents(folder: str | Path, text_column: str = "text") -> Iterator[Item]:
    """What a curation kept, each document with the source that it came from. Raises DataError."""
    for path in sorted((Path(folder) / CURATED).iterdir()):
        yield from rows(path, text_column)


def _fixed_part(pattern: str) -> str:
    """The folder that a glob starts in."""
    parts = Path(pattern).parts
    fixed = [part for i, part in enumerate(parts) if not any(map(glob.has_magic, parts[: i + 1]))]
    return str(Path(*fixed)) if fixed else "."


def _plan_folder(root: Path, kind: Kind, split: str | None) -> list[Piece]:
    check_finished(root)
    root = root / CURATED if is_curated(root) else root
    faults: list[OSError] = []
    curated: list[Path] = []
    pieces: list[Piece] = []
    for path in walk(root, faults=faults, curated=curated):
        name = shown_name(path.relative_to(root))
        pieces.append(_plan_entry(path, name, TAKES[kind]))
    pieces += [_drop_curated(str(folder), root) for folder in curated]
    for fault in faults:
        name = shown_name(os.path.relpath(fault.filename, root))
        detail = f"the folder cannot be listed: {fault.strerror}"
        pieces.append(_drop(str(fault.filename), name, "unreadable_file", detail))
    if kind in ("auto", "rows"):
        pieces = _choose_split(root, pieces, kind, split)
    if not any(piece.kind != "dropped" for piece in pieces):
        raise DataError(
            f"{root} holds no file to read{_of_kind(kind)}: {len(pieces):,} files, none that ends "
            f"in {', '.join(s for k in TAKES[kind] for s in SUFFIXES[k])}"
        )
    return pieces


def _choose_split(root: Path, pieces: list[Piece], kind: Kind, split: str | None) -> list[Piece]:
    """A folder whose rows all name their split is a Hugging Face data set: the card and scripts
    beside them are not documents, and its splits are not to be mixed unasked."""
    readable = [piece for piece in pieces if piece.kind in TAKES["rows"]]
    splits = {piece.name: split_of(piece.name) for piece in readable}
    names = sorted({name for name in splits.values() if name})
    is_dataset = bool(readable) and all(splits.values())
    if split is None and not ((is_dataset and kind != "auto") or _looks_like_hub(readable, splits)):
        return pieces
    if split is None and len(names) > 1:
        raise DataError(
            f"{root} holds the splits {', '.join(names)}; name one with split, or all of them with "
            "split = 'all'"
        )
    if split not in (None, "all") and SPLITS.get(split, split) not in names:
        raise DataError(
            f"{root} has no split {split!r}{nearest(split, names)}; it has "
            f"{', '.join(names) or 'none'}"
        )
    wanted = names if split in (None, "all") else [SPLITS.get(split, split)]
    kept: list[Piece] = []
    for piece in pieces:
        if piece.name in splits and (splits[piece.name] in wanted or split == "all"):
            kept.append(piece)
        elif piece.name in splits:
            detail = f"of split {splits[piece.name]}, not {split}"
            kept.append(_drop(piece.path, piece.name, "other_split", detail))
        elif piece.kind == "dropped" or (split is None and "/" in piece.name):
            kept.append(piece)
        else:
            detail = "beside the rows of a data set"
            kept.append(_drop(piece.path, piece.name, "not_rows", detail))
    return kept


def _looks_like_hub(readable: Sequence[Piece], splits: dict[str, str | None]) -> bool:
    """All files of rows name their split, and lie in `data/`, are numbered, or are called by it."""
    return bool(readable) and all(
        splits[piece.name]
        and (
            piece.name.startswith("data/")
            or SHARD.match(Path(piece.name).name)
            or Path(piece.name).name.split(".")[0] in SPLITS
        )
        for piece in readable
    )


def _plan_entry(path: Path, name: str, takes: Sequence[str]) -> Piece:
    """A file that was found in a folder: its suffix says what it is."""
    kind = kind_of_file(path.name)
    if path.is_symlink() and path.is_dir():
        return _drop(str(path), name, "linked_folder", "folders are not followed through links")
    if kind is None or kind not in takes:
        what = f"read as {kind}" if kind else "of no known kind"
        return _drop(str(path), name, "unknown_kind" if kind is None else "other_kind", what)
    return _piece(str(path), name, kind)


def _plan_file(path: str, name: str, kind: Kind) -> Piece:
    """A file that was named: it is read as `kind`, whatever its suffix."""
    name = shown_name(name)
    known = kind_of_file(os.path.basename(path))
    if kind == "rows":
        return _piece(path, name, known if known in TAKES["rows"] else "jsonl")
    if kind != "auto":
        return _piece(path, name, kind)
    if known is None:
        ends = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
        raise DataError(f"{path} is of no known kind: set kind, or give a file in {ends}")
    return _piece(path, name, known)


def _piece(path: str, name: str, kind: str) -> Piece:
    if path != shown_name(path):
        detail = "its name is not UTF-8, as those that go into a plan must be"
        return _drop(path, name, "undecodable_name", detail)
    try:
        about = os.stat(path)
    except OSError as error:
        reason = "broken_link" if os.path.islink(path) else "unreadable_file"
        return _drop(path, name, reason, f"cannot be looked at: {error.strerror}")
    if not stat.S_ISREG(about.st_mode):
        return _drop(path, name, "not_a_file", "a pipe, socket, device or folder")
    return Piece(path, name, kind, 0, about.st_size, about.st_size)


def _drop(path: str, name: str, reason: str, detail: str) -> Piece:
    return Piece(shown_name(path), name, "dropped", reason=reason, detail=detail)


def _cut(piece: Piece) -> list[Piece]:
    if piece.kind == "parquet":
        return _cut_parquet(piece)
    if piece.kind != "jsonl" or piece.path.lower().endswith(PACKED_SUFFIXES):
        return [piece]
    starts = range(0, max(1, piece.size_bytes - PIECE_BYTES // 4), PIECE_BYTES)
    stops = [*starts[1:], piece.size_bytes]
    return [
        replace(piece, start=start, stop=stop, size_bytes=stop - start)
        for start, stop in zip(starts, stops, strict=True)
    ]


def _cut_parquet(piece: Piece) -> list[Piece]:
    """In ranges of row groups, taken to be of one size."""
    try:
        num_groups = open_parquet(piece.path).metadata.num_row_groups
    except FileFault as fault:
        return [_drop(piece.path, piece.name, fault.reason, fault.detail)]
    num_parts = max(1, min(num_groups, round(piece.size_bytes / PIECE_BYTES)))
    borders = [num_groups * i // num_parts for i in range(num_parts + 1)]
    size_bytes = piece.size_bytes // num_parts
    return [
        replace(piece, start=start, stop=stop, size_bytes=size_bytes)
        for start, stop in itertools.pairwise(borders)
    ]


def _unique_names(pieces: list[Piece]) -> list[Piece]:
    """Files of one name from several places are called by their whole paths; one that was found
    twice is read once."""
    first: dict[tuple[str, str], Piece] = {}
    for piece in pieces:
        first.setdefault((os.path.realpath(piece.path), piece.kind), piece)
    unique = list(first.values())
    seen: dict[str, int] = {}
    for piece in unique:
        seen[piece.name] = seen.get(piece.name, 0) + 1
    return [
        piece if seen[piece.name] == 1 else replace(piece, name=shown_name(piece.path))
        for piece in unique
    ]


def _check_libraries(pieces: Sequence[Piece]) -> None:
    kinds = {piece.kind for piece in pieces}
    needs = {"html": ("trafilatura",), "warc": ("trafilatura", "warcio")}
    for kind in kinds & needs.keys():
        missing = [name for name in needs[kind] if importlib.util.find_spec(name) is None]
        if missing:
            raise DataError(
                f"reading {kind.upper()} needs {' and '.join(missing)}: pip install 'stepwell[web]'"
            )


def _of_kind(kind: Kind) -> str:
    return "" if kind == "auto" else f" as {kind}"
