"""Which of equal documents stays: an order of all documents, best first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
import xxhash

from stepwell.types import DataError

pc: Any = pyarrow.compute
Rule = Literal["quality", "longest", "shortest", "newest", "oldest"]
ORDERS: dict[str, tuple[str, str]] = {
    "quality": ("quality", "descending"),
    "longest": ("length", "descending"),
    "shortest": ("length", "ascending"),
    "newest": ("date", "descending"),
    "oldest": ("date", "ascending"),
}
RANK_SCHEMA = pa.schema(
    [
        ("quality", pa.float64()),
        ("length", pa.int64()),
        ("date", pa.float64()),
        ("text_digest", pa.binary(16)),
    ]
)
# What decides when the rules don't: never the order in which documents came.
TIES = [("source", "ascending"), ("id", "ascending"), ("text_digest", "ascending")]


def rank_columns(
    batch: pa.RecordBatch, rules: Sequence[Rule], quality: str = "quality", date: str = "date"
) -> dict[str, pa.Array]:
    """What `ranked` orders by, an entry for each document.

    quality: the label (a number, more is better); date: the key of `meta` (ISO 8601, a year, or
    seconds since 1970). A document without one ranks behind those that have it. Raises DataError
    for a label that is no number.
    """
    unknown = pa.nulls(batch.num_rows, pa.float64())
    return {
        "quality": _quality(batch, quality) if "quality" in rules else unknown,
        "length": pc.utf8_length(batch["text"].cast(pa.large_string())),
        "date": _dates(batch, date) if {"newest", "oldest"} & {*rules} else unknown,
        "text_digest": _text_digests(batch["text"]),
    }


def ranked(docs: pa.Table, rules: Sequence[Rule]) -> np.ndarray:
    """Row numbers, best first. docs: `rank_columns` with the columns source and id."""
    keys = [ORDERS[rule] for rule in rules] + TIES
    order = pc.sort_indices(docs, sort_keys=list(dict(keys).items()))
    return order.to_numpy().astype(np.int64)


def timestamp(value: Any) -> float | None:
    """Seconds since 1970 of a date, or None for what is no date."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, str):
        return None
    text = value.strip()
    if len(text) in (4, 7):
        text += "-01-01"[: 10 - len(text)] if len(text) == 4 else "-01"
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _quality(batch: pa.RecordBatch, name: str) -> pa.Array:
    if name not in batch.schema.names:
        return pa.nulls(batch.num_rows, pa.float64())
    try:
        return batch[name].cast(pa.float64())
    except pa.ArrowInvalid as error:
        raise DataError(
            f"the label {name!r} is {batch[name].type}; the survivor rule 'quality' needs a number "
            "(name another label with quality=..., or leave the rule out)"
        ) from error


def _dates(batch: pa.RecordBatch, key: str) -> pa.Array:
    metas = batch["meta"].to_pylist()
    values = [
        timestamp(json.loads(meta).get(key)) if meta and key in meta else None for meta in metas
    ]
    return pa.array(values, pa.float64())


def _text_digests(texts: pa.Array) -> pa.Array:
    digests = [xxhash.xxh3_128_digest((text or "").encode()) for text in texts.to_pylist()]
    return pa.array(digests, pa.binary(16))
