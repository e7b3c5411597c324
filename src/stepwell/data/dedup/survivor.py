"""Which of equal documents stays: an order of all documents, best first."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
import xxhash
from pydantic import model_validator

from stepwell.data.steps import GlobalStep
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
DEFAULT_RULES: tuple[Rule, ...] = ("quality", "longest", "newest")
RANK_SCHEMA = pa.schema(
    [
        ("quality", pa.float64()),
        ("length", pa.int64()),
        ("date", pa.float64()),
        ("text_digest", pa.binary(16)),
        ("cluster_size", pa.int64()),
    ]
)
CLUSTER_SIZE = "cluster_size"
# What decides when the rules don't: never the order in which documents came.
TIES = [("source", "ascending"), ("id", "ascending"), ("text_digest", "ascending")]
SPACES = bytes(range(9, 14)) + bytes(range(28, 33))
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
YEARS = (1000, 9999)


class SurvivorStep(GlobalStep):
    """A step that keeps one of several documents.

    survivor: rules in order, of which the first that tells two documents apart decides who stays;
    quality, date: the label or key of meta that the rules read.
    """

    survivor: tuple[Rule, ...] = DEFAULT_RULES
    quality: str = "quality"
    date: str = "date"

    @model_validator(mode="after")
    def _survivor_rules(self) -> SurvivorStep:
        first: dict[str, Rule] = {}
        for rule in self.survivor:
            first.setdefault(ORDERS[rule][0], rule)
        idle = [rule for i, rule in enumerate(self.survivor) if rule in self.survivor[:i]]
        idle += [rule for rule in self.survivor if rule not in first.values()]
        if idle:
            raise ValueError(
                f"survivor={list(self.survivor)}: {idle[0]!r} can't decide anything after "
                f"{first[ORDERS[idle[0]][0]]!r}, which reads the same; take {[*first.values()]}"
            )
        return self

    def adds(self) -> dict[str, pa.DataType]:
        return {CLUSTER_SIZE: pa.int32()}

    def ranks(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        return rank_columns(batch, self.survivor, self.quality, self.date)

    def best_first(self, docs: pa.Table) -> np.ndarray:
        """Row numbers. docs: `ranks` with the columns source and id. Raises DataError where the
        step was told what to read and no document has it; without the default's it does well."""
        for column, name in (("quality", self.quality), ("date", self.date)):
            rules = [rule for rule in self.survivor if ORDERS[rule][0] == column]
            default = self.survivor == DEFAULT_RULES and name == column
            if rules and not default and docs.num_rows == docs[column].null_count > 0:
                what = "number" if column == "quality" else "date"
                raise DataError(
                    f"{self.kind}: no document has a {what} in {name!r}, neither as a label nor in "
                    f"its meta, so the survivor rule {rules[0]!r} can't decide; name another with "
                    f"{column}=..., or leave the rule out"
                )
        return ranked(docs, self.survivor)


def rank_columns(
    batch: pa.RecordBatch, rules: Sequence[Rule], quality: str = "quality", date: str = "date"
) -> dict[str, pa.Array]:
    """What `ranked` orders by, an entry for each document, and how many documents it stands for.

    quality: a label, or for documents without it a key of `meta` (a number, more is better); date:
    likewise (`timestamp`). A document without one ranks behind those that have it. The length is
    in characters other than white space. Raises DataError for a label that is no number.
    """
    unknown = pa.nulls(batch.num_rows, pa.float64())
    return {
        "quality": _quality(batch, quality) if "quality" in rules else unknown,
        "date": _dates(batch, date) if {"newest", "oldest"} & {*rules} else unknown,
        **_lengths_and_digests(batch["text"]),
        "cluster_size": cluster_sizes(batch),
    }


def ranked(docs: pa.Table, rules: Sequence[Rule]) -> np.ndarray:
    """Row numbers, best first. docs: `rank_columns` with the columns source and id."""
    keys = [ORDERS[rule] for rule in rules] + TIES
    order = pc.sort_indices(docs, sort_keys=keys)
    return order.to_numpy().astype(np.int64)


def cluster_sizes(batch: pa.RecordBatch) -> pa.Array:
    """How many documents each stands for by the label of an earlier step; without it itself."""
    if CLUSTER_SIZE not in batch.schema.names:
        return pa.array(np.ones(batch.num_rows, np.int64))
    return pc.fill_null(batch[CLUSTER_SIZE].cast(pa.int64()), 1)


def timestamp(value: Any) -> float | None:
    """Seconds since 1970 of a date (ISO 8601), a year (1000 to 9999) or a number of seconds, also
    one in a string; None for what is no finite date."""
    if isinstance(value, str):
        text = value.strip()
        moment = _iso(text)
        if moment is not None or not NUMBER.fullmatch(text):
            return moment
        value = float(text)
    seconds = number(value)
    if seconds is not None and seconds.is_integer() and YEARS[0] <= seconds <= YEARS[1]:
        return _iso(f"{int(seconds)}")
    return seconds


def number(value: Any) -> float | None:
    """A finite number, also one in a string; None for anything else, also true and false."""
    if isinstance(value, str) and NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def _iso(text: str) -> float | None:
    if len(text) in (4, 7):
        text += "-01-01"[: 10 - len(text)] if len(text) == 4 else "-01"
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _quality(batch: pa.RecordBatch, name: str) -> pa.Array:
    of_meta = pa.array([number(value) for value in _values(batch, name)], pa.float64())
    if name not in batch.schema.names:
        return of_meta
    try:
        label = batch[name].cast(pa.float64())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"the label {name!r} is {batch[name].type}; the survivor rule 'quality' needs a number "
            "(name another label with quality=..., or leave the rule out)"
        ) from error
    return pc.coalesce(pc.if_else(pc.is_nan(label), None, label), of_meta)


def _dates(batch: pa.RecordBatch, key: str) -> pa.Array:
    labels: Sequence[Any] = [None] * batch.num_rows
    if key in batch.schema.names:
        labels = batch[key].to_pylist()
    values = [
        timestamp(value if label is None else label)
        for label, value in zip(labels, _values(batch, key), strict=True)
    ]
    return pa.array(values, pa.float64())


def _values(batch: pa.RecordBatch, key: str) -> Iterator[Any]:
    """Of a key of each document's meta. Whole numbers come as floats, however long they are."""
    quoted = {json.dumps(key), json.dumps(key, ensure_ascii=False)}
    for meta in batch["meta"].to_pylist():
        found = None
        if meta and any(name in meta for name in quoted):
            found = json.loads(meta, parse_int=float)
        yield found.get(key) if isinstance(found, Mapping) else None


def _lengths_and_digests(texts: pa.Array) -> dict[str, pa.Array]:
    lengths, digests = [], []
    for text in texts.to_pylist():
        text = text or ""
        content = text.encode()
        plain = content.translate(None, SPACES) if text.isascii() else "".join(text.split())
        lengths.append(len(plain))
        digests.append(xxhash.xxh3_128_digest(content))
    return {
        "length": pa.array(lengths, pa.int64()),
        "text_digest": pa.array(digests, pa.binary(16)),
    }
