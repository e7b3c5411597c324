"""Rows of Parquet files, a few at a time whatever their size."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepwell.data.sources.opening import FREE_BYTES, FileFault, bomb, open_plain
from stepwell.data.sources.rows import Record, document_of
from stepwell.data.sources.spec import MIB, Piece, SourceSpec
from stepwell.data.sources.texts import Item
from stepwell.types import DataError, Dropped, nearest

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MAX_BATCH_ROWS = 256
BATCH_BYTES = 32 * MIB
# Writers end a dictionary at 1 MiB. One that is larger, or that shrank this much, may hold values
# that are large and repeated, which decoding would multiply.
DICTIONARY_BYTES = 1.5 * MIB
DICTIONARY_RATIO = 50


def parquet_records(path: Path) -> Iterator[Record]:
    """All rows of a file of training data. Raises DataError for a damaged file."""
    file = open_parquet(path)
    number = 0
    try:
        for group in range(file.metadata.num_row_groups):
            for batch in _batches(path, file, group):
                for values in batch.to_pylist():
                    number += 1
                    yield Record(f"{path.name}:{number}", values)
    except _faults() as error:
        raise DataError(f"{path} cannot be read after row {number}: {error}") from error
    if number == 0:
        raise DataError(f"{path} holds no rows")


def read_parquet(piece: Piece, spec: SourceSpec) -> Iterator[Item]:
    """The rows of row groups start to stop; a row without an id is named by its group and its
    number in it. What is damaged in a row group ends that one only.

    Raises FileFault for a file that can't be opened, one without the text column, and where rows
    become more than max_compression_ratio times what they take in the file.
    """
    file = open_parquet(piece.path)
    try:
        check_column(piece.path, file, spec.text_column)
    except DataError as error:
        detail = str(error).removeprefix(f"{piece.path} ")
        raise FileFault(piece.path, "missing_column", detail) from error
    if not file.metadata.num_rows:
        raise FileFault(piece.path, "empty_file", "holds no rows")
    left_bytes = FREE_BYTES + spec.max_compression_ratio * piece.size_bytes
    for group in range(piece.start, min(piece.stop, file.metadata.num_row_groups)):
        number = 0
        try:
            for row, num_bytes in _rows(piece.path, file, group, spec.max_document_bytes):
                left_bytes -= num_bytes
                if left_bytes < 0:
                    raise bomb(piece.path, spec.max_compression_ratio, piece.size_bytes)
                number += 1
                yield _item(row, f"{piece.name}:{group}.{number}", spec)
        except FileFault:
            raise
        except _faults() as error:
            detail = f"row group {group} cannot be read after row {number:,}: {error}"
            place = f"{piece.name}:{group}.{number + 1}"
            yield Dropped(place, spec.name, "damaged_file", detail[:500])


def open_parquet(path: str | Path, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
    """dictionaries: columns that are left as values and indices. Raises FileFault."""
    import pyarrow.parquet as pq

    with open_plain(path) as plain:
        if not os.fstat(plain.fileno()).st_size:
            raise FileFault(path, "empty_file", "is empty")
    try:
        return pq.ParquetFile(
            str(path), read_dictionary=list(dictionaries), pre_buffer=False, buffer_size=MIB
        )
    except _faults() as error:
        detail = f"is not a Parquet file that can be read: {error}"
        raise FileFault(path, "damaged_file", detail) from error


def check_column(path: str | Path, file: pq.ParquetFile, column: str) -> None:
    """Raises DataError for a file without the column."""
    names = file.schema_arrow.names
    if column not in names:
        raise DataError(
            f"{path} has no column {column!r}{nearest(column, names)}; it has {', '.join(names)}"
        )


# A row's values, or the reason and detail of one that can't be had.
Row = dict[str, Any] | tuple[str, str]


def _rows(path: str, file: pq.ParquetFile, group: int, max_bytes: int) -> Iterator[tuple[Row, int]]:
    """The rows and their bytes."""
    for batch in _batches(path, file, group):
        batch = _with_written_times(batch)
        sizes = _row_bytes(batch)
        is_small = max(sizes, default=0) <= max_bytes and sum(sizes) <= 2 * BATCH_BYTES
        values = _values(batch) if is_small else None
        if values is not None:
            yield from zip(values, sizes, strict=True)
            continue
        for i, size in enumerate(sizes):
            yield _row(batch, i, size, max_bytes), size


def _values(batch: pa.RecordBatch) -> list[dict[str, Any]] | None:
    """None where one of the rows can't be had; `_row` finds which."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError):
        return None


def _row(batch: pa.RecordBatch, i: int, size: int, max_bytes: int) -> Row:
    if size > max_bytes:
        return "too_large", f"the row has {size:,} bytes, above {max_bytes:,}"
    try:
        return batch.slice(i, 1).to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return "undecodable", str(error)[:300]


def _with_written_times(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Times as text: Python's own end at year 9999 and at microseconds."""
    import pyarrow as pa

    columns = [
        column.cast(pa.string())
        if pa.types.is_temporal(column.type) and not pa.types.is_interval(column.type)
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _row_bytes(batch: pa.RecordBatch) -> list[int]:
    """What each row's texts take; other columns count evenly."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kinds = (
        pa.types.is_string, pa.types.is_large_string,
        pa.types.is_binary, pa.types.is_large_binary,
    )  # fmt: skip
    total = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        words = column.dictionary if pa.types.is_dictionary(column.type) else column
        if any(is_kind(words.type) for is_kind in kinds):
            sizes = pc.call_function("binary_length", [words])
            if words is not column:
                sizes = sizes.take(column.indices)
            total += pc.fill_null(sizes, 0).to_numpy(zero_copy_only=False)
        else:
            total += column.nbytes // max(1, batch.num_rows)
    return total.tolist()


def _item(row: Row, place: str, spec: SourceSpec) -> Item:
    if isinstance(row, tuple):
        return Dropped(place, spec.name, *row)
    return document_of(Record(place, row), spec.text_column, spec.id_column, spec.name)


def _batches(path: str | Path, file: pq.ParquetFile, group: int) -> Iterator[pa.RecordBatch]:
    """As many rows at a time as BATCH_BYTES may hold, by what the file says of them."""
    # Arrow's reader raises for a damaged row group; its metadata, asked directly, ends the process.
    if next(file.iter_batches(1, row_groups=[group], use_threads=False), None) is None:
        return
    about = file.metadata.row_group(group)
    mean_bytes = about.total_byte_size / max(1, about.num_rows)
    num_rows = max(1, min(MAX_BATCH_ROWS, int(BATCH_BYTES / max(1.0, mean_bytes))))
    repeated = _large_dictionaries(about)
    if repeated:
        file = open_parquet(path, repeated)
    yield from file.iter_batches(num_rows, row_groups=[group], use_threads=False)


def _large_dictionaries(about: pq.RowGroupMetaData) -> list[str]:
    """Columns of text that are left as values and indices, to be looked at a row at a time."""
    found = []
    for i in range(about.num_columns):
        column = about.column(i)
        if column.physical_type != "BYTE_ARRAY" or "." in column.path_in_schema:
            continue
        if not column.has_dictionary_page:
            continue
        size = column.data_page_offset - (column.dictionary_page_offset or 0)
        ratio = column.total_uncompressed_size / max(1, column.total_compressed_size)
        if size > DICTIONARY_BYTES or ratio > DICTIONARY_RATIO:
            found.append(column.path_in_schema)
    return found


def _faults() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return (OSError, pa.ArrowException, ValueError, KeyError, OverflowError)
