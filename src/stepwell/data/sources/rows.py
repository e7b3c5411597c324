"""Rows of JSONL and Parquet files as rows, and as documents.

`records` and `rows` are for training data: one file whose faults end the run. `read_jsonl` is for
curation: part of a file of any size, whose faults are FileFaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.data.sources.opening import (
    PACKED_SUFFIXES,
    FileFault,
    chunks_of,
    open_plain,
    without_magic,
)
from stepwell.data.sources.spec import Piece, SourceSpec
from stepwell.data.sources.texts import Item, checked, kind_of, unpacked_name
from stepwell.types import DataError, Dropped, nearest

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
# Deeper rows could be read here, and then not written or read again deeper in the stack.
MAX_DEPTH = 200


@dataclass(frozen=True)
class Record:
    """One row of a JSONL or Parquet file, with an id that names its place."""

    id: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """offset: where it begins. content: without the line end; None for one above the limit."""

    offset: int
    size_bytes: int
    content: bytes | None


def records(path: str | Path) -> Iterator[Record | Dropped]:
    """The rows of a `.jsonl`, `.jsonl.gz`, `.jsonl.zst` or `.parquet` file.

    Raises DataError for a missing, empty or damaged file and an unknown kind of file.
    """
    from stepwell.data.sources.parquet import parquet_records

    path = Path(path)
    _check_file(path)
    if path.name.lower().endswith(".parquet"):
        yield from parquet_records(path)
    elif unpacked_name(path.name).endswith(JSON_SUFFIXES):
        yield from _json_records(path)
    else:
        raise DataError(
            f"{path} is of no known kind: rows are read from .jsonl, .jsonl.gz, .jsonl.zst and "
            ".parquet, texts from .txt, .md, .rst and source files such as .py"
        )


def rows(
    path: str | Path,
    text_column: str = "text",
    id_column: str = "id",
    source: str | None = None,
) -> Iterator[Item]:
    """Documents from JSONL or Parquet. The source's name is `source`, else the row's own
    `source` column, else the file's stem; other columns become the document's meta.

    Raises DataError as `records` does, and for a Parquet file without `text_column`.
    """
    from stepwell.data.sources.parquet import check_column, open_parquet

    path = Path(path)
    if path.name.lower().endswith(".parquet"):
        _check_file(path)
        check_column(path, open_parquet(path), text_column)
    for record in records(path):
        if isinstance(record, Dropped):
            yield Dropped(record.id, source or record.source, record.reason, record.detail)
            continue
        own = record.values.get("source")
        name = source or (own if isinstance(own, str) and own else _stem(path))
        yield document_of(record, text_column, id_column, name)


def read_jsonl(piece: Piece, spec: SourceSpec) -> Iterator[Item]:
    """The rows that begin in bytes start to stop of the (unpacked) file, so that pieces that meet
    give every row exactly once. A row without an id is named by the byte that it begins at.

    Raises FileFault.
    """
    for line in _lines_of(piece, spec):
        place = f"{piece.name}@{line.offset}"
        if line.content is None:
            detail = f"the line has {line.size_bytes:,} bytes, above {spec.max_document_bytes:,}"
            yield Dropped(place, spec.name, "too_large", detail)
            continue
        record = json_record(line.content, place, spec.name, first=line.offset == 0)
        if isinstance(record, Dropped):
            yield record
            continue
        fault = _unwritable(line.content, record, spec.name)
        yield fault or document_of(record, spec.text_column, spec.id_column, spec.name)


def lines(chunks: Iterator[bytes], max_bytes: int, offset: int = 0) -> Iterator[Line]:
    """Lines that end in `\\n`, holding no more of one than max_bytes and a chunk."""
    held: list[bytes] = []
    size = 0
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        size += len(first)
        if size <= max_bytes:
            held.append(first)
        else:
            held.clear()
        for part in others:
            yield Line(offset, size, b"".join(held) if size <= max_bytes else None)
            offset += size + 1
            size = len(part)
            held = [part] if size <= max_bytes else []
    if size:
        yield Line(offset, size, b"".join(held) if size <= max_bytes else None)


def json_record(line: bytes, place: str, name: str, first: bool = False) -> Record | Dropped:
    """first: a byte order mark may stand before it."""
    try:
        text = line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        return Dropped(place, name, "undecodable", str(error))
    if not text.strip():
        return Dropped(place, name, "blank_line")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Dropped(place, name, "broken_json", str(error))
    if not isinstance(values, dict):
        return Dropped(place, name, "wrong_type", f"the line holds {kind_of(values)}")
    return Record(place, values)


def document_of(record: Record, text_column: str, id_column: str, source: str) -> Item:
    """The row as a document: its text, its id, and all else as meta."""
    values = dict(record.values)
    own_id = values.pop(id_column, None)
    doc_id = record.id if own_id is None else str(own_id)
    if text_column not in values:
        hint = nearest(text_column, values) or f"; the row has {', '.join(values) or 'nothing'}"
        return Dropped(doc_id, source, "missing_column", f"no {text_column!r}{hint}"[:500])
    text = values.pop(text_column)
    if values.get("source") in (None, source):
        values.pop("source", None)
    meta = values.pop("meta", None)
    if isinstance(meta, str):
        meta = _object(meta)
    meta = {**meta, **values} if isinstance(meta, Mapping) else values
    return checked(doc_id, text, source, meta)


def _object(text: str) -> Any:
    """What a Parquet column of JSON holds; other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _lines_of(piece: Piece, spec: SourceSpec) -> Iterator[Line]:
    limit = spec.max_document_bytes
    if piece.start:
        # The row that reaches over `start` belongs to the piece before; it may end right there.
        begin = piece.start - 1
        found = lines(chunks_of(piece.path, start=begin), limit, begin)
        next(found, None)
    else:
        chunks = chunks_of(piece.path, spec.max_compression_ratio)
        found = lines(_checked_start(piece.path, without_magic(piece.path, chunks)), limit)
    is_plain = not piece.path.lower().endswith(PACKED_SUFFIXES)
    for line in found:
        if is_plain and line.offset >= piece.stop:
            return
        yield line


def _checked_start(path: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same chunks, unless the file is of another encoding or, by its start, one JSON value of
    many lines."""
    first = next(chunks, b"")
    if not first:
        raise FileFault(path, "empty_file", "is empty")
    if first.startswith(UTF16_MARKS):
        raise FileFault(path, "undecodable", "is UTF-16; rows are read as UTF-8")
    if unpacked_name(path).endswith(".json"):
        start = first.removeprefix(b"\xef\xbb\xbf").lstrip()
        if start.startswith(b"[") or start.splitlines()[:1] == [b"{"]:
            what = "an array" if start.startswith(b"[") else "an object of many lines"
            raise FileFault(
                path,
                "not_json_lines",
                f"holds {what}; rows are one JSON object a line (jq -c '.[]' writes them so)",
            )
    yield first
    yield from chunks


def _unwritable(line: bytes, record: Record, source: str) -> Dropped | None:
    """Why a row that was read could not be written again: nesting, or half of a surrogate pair
    anywhere in it. Looked at only where the line could hold such."""
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _depth(record.values) > MAX_DEPTH:
        return Dropped(record.id, source, "broken_json", f"nested more than {MAX_DEPTH} deep")
    if b"\\ud" in line or b"\\uD" in line:
        try:
            json.dumps(dict(record.values), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return Dropped(record.id, source, "undecodable", str(error))
    return None


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


def _json_records(path: Path) -> Iterator[Record | Dropped]:
    name = _stem(path)
    number = 0
    try:
        chunks = _checked_start(str(path), chunks_of(path))
        for number, line in enumerate(lines(chunks, 2**63), 1):
            content = line.content or b""
            record = json_record(content, f"{path.name}:{number}", name, number == 1)
            fault = _unwritable(content, record, name) if isinstance(record, Record) else None
            yield fault or record
    except FileFault as fault:
        if fault.reason == "empty_file":
            raise
        raise DataError(f"{path} cannot be read after line {number}: {fault.detail}") from fault


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"{path} is a folder; name the file in it")
    if not path.exists():
        raise DataError(f"there is no file {path}")
    with open_plain(path):
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty")


def _stem(path: Path) -> str:
    return path.name.split(".")[0]
