"""Counts of a curation: additive, so that those of tasks add up to those of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from stepwell.data.batches import pc, text_bytes
from stepwell.types import StepwellError

NUM_EXAMPLES = 3
DETAIL_CHARACTERS = 200
TEXT_CHARACTERS = 400

# A tally: {"read": {source: records}, "steps": {name: {"in": {source: [docs, bytes]}, "out": ...,
# "dropped": {reason: docs}, "edits": {reason: n}, "edited": docs, "examples": {reason: [...]}}},
# "cpu": {what: seconds}}.
Tally = dict[str, Any]


def new_tally() -> Tally:
    return {"read": {}, "steps": {}, "cpu": {}}


def volumes(batch: pa.RecordBatch) -> dict[str, list[int]]:
    """source -> [documents, UTF-8 bytes of text]."""
    table = pa.table({"source": batch["source"], "size": text_bytes(batch)})
    grouped = table.group_by("source").aggregate([("size", "count"), ("size", "sum")])
    return {row["source"]: [row["size_count"], row["size_sum"] or 0] for row in grouped.to_pylist()}


def count_read(tally: Tally, sources: Iterable[str]) -> None:
    for source in sources:
        tally["read"][source] = tally["read"].get(source, 0) + 1


def count_cpu(tally: Tally, what: str, seconds: float) -> None:
    tally["cpu"][what] = tally["cpu"].get(what, 0.0) + seconds


def count_step(
    tally: Tally,
    name: str,
    before: pa.RecordBatch,
    kept: pa.RecordBatch,
    removed: pa.RecordBatch,
    edits: pa.RecordBatch,
) -> None:
    """Raises StepwellError when documents were lost or came out of nowhere."""
    if kept.num_rows + removed.num_rows != before.num_rows:
        raise StepwellError(
            f"step {name} was given {before.num_rows} documents, kept {kept.num_rows} and removed "
            f"{removed.num_rows}: {before.num_rows - kept.num_rows - removed.num_rows} are lost"
        )
    entry = {
        "in": volumes(before),
        "out": volumes(kept),
        "dropped": value_counts(removed["reason"]),
        "edits": value_counts(edits["reason"]),
        "edited": num_changed(before, kept) if edits.num_rows else 0,
        "examples": examples_of(removed),
    }
    tally["steps"][name] = _sum(tally["steps"][name], entry) if name in tally["steps"] else entry


def num_changed(before: pa.RecordBatch, kept: pa.RecordBatch) -> int:
    """Documents that stay with another text. By key: ids may occur twice."""
    was = before["text"].take(pc.index_in(kept["key"], before["key"]))
    return pc.sum(pc.not_equal(kept["text"], was)).as_py() or 0


def value_counts(column: pa.Array | pa.ChunkedArray) -> dict[str, int]:
    return {row["values"]: row["counts"] for row in column.value_counts().to_pylist()}


def examples_of(removed: pa.RecordBatch) -> dict[str, list[dict[str, str]]]:
    """The first few of each reason."""
    found: dict[str, list[dict[str, str]]] = {}
    for i, reason in enumerate(removed["reason"].to_pylist()):
        examples = found.setdefault(reason, [])
        if len(examples) < NUM_EXAMPLES:
            row = removed.slice(i, 1).to_pylist()[0]
            row["detail"] = row["detail"][:DETAIL_CHARACTERS]
            row["text"] = row["text"][:TEXT_CHARACTERS]
            examples.append({k: row[k] for k in ("id", "source", "detail", "witness", "text")})
    return found


def add_tallies(tallies: Iterable[Mapping[str, Any]]) -> Tally:
    """Their sum; the examples are the first ones in the given order."""
    total: Tally = new_tally()
    for tally in tallies:
        total = _sum(total, tally)
    return total


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, dict):
        return {key: _sum(a[key], b[key]) if key in a and key in b else a.get(key, b.get(key))
                for key in [*a, *(k for k in b if k not in a)]}  # fmt: skip
    if isinstance(a, list):
        is_volume = all(isinstance(x, int) for x in [*a, *b])
        return [x + y for x, y in zip(a, b, strict=True)] if is_volume else (a + b)[:NUM_EXAMPLES]
    return a + b
