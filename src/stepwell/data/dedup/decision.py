"""What the decisions of exact and fuzzy dedup read and write."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stepwell.data.batches import Outcome, Removal, name_of, split, with_column
from stepwell.data.dedup.survivor import CLUSTER_SIZE, RANK_SCHEMA, cluster_sizes
from stepwell.data.steps import Shard, read_batches, read_table, write_table

REMOVED_TABLE, SIZES_TABLE, SUMMARY = "removed.arrow", "sizes.arrow", "summary.json"
NUM_LARGEST, NUM_MEMBERS = 10, 5
NAME_SCHEMA = pa.schema([("key", pa.uint64()), ("id", pa.string()), ("source", pa.string())])
# Ascending by key.
REMOVED_SCHEMA = pa.schema(
    [
        ("key", pa.uint64()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("witness", pa.string()),
    ]
)
# Ascending by key; `more`: how many documents a kept one now stands for beside those it did.
SIZES_SCHEMA = pa.schema([("key", pa.uint64()), ("more", pa.int64())])


class Names:
    """`source/id` by row number; rows of indexes (known) come first."""

    def __init__(self, known: list[str], docs: pa.Table) -> None:
        self._known, self._docs = known, docs

    def __getitem__(self, row: int) -> str:
        if row < len(self._known):
            return self._known[row]
        inner = row - len(self._known)
        return name_of(self._docs["source"][inner].as_py(), self._docs["id"][inner].as_py())

    def of(self, rows: np.ndarray) -> list[str]:
        return [self[row] for row in rows.tolist()]


def ranked_documents(shards: Sequence[Shard]) -> pa.Table:
    """What ranks and names documents, of all shards."""
    documents = [_columns(read_batches(shard.documents), NAME_SCHEMA) for shard in shards]
    sketches = [_columns(read_batches(shard.sketch), RANK_SCHEMA) for shard in shards]
    table, ranks = (pa.concat_tables(t) for t in (documents, sketches))
    for name in RANK_SCHEMA.names:
        table = table.append_column(name, ranks[name])
    return table


def _columns(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches([batch.select(schema.names) for batch in batches], schema)


def rows_with(table: pa.Table, batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of the batch have their key in the table (ascending there), and where."""
    known, keys = table["key"].to_numpy(), batch["key"].to_numpy()
    places = np.searchsorted(known, keys)
    inside = np.minimum(places, max(len(known) - 1, 0))
    rows = np.flatnonzero(known[inside] == keys) if len(known) else np.zeros(0, np.int64)
    return rows, places[rows]


def write_removed(
    folder: Path,
    *,
    duplicates: np.ndarray,
    details: Sequence[str],
    witnesses: Sequence[str],
    reason: str,
    blank: np.ndarray,
) -> None:
    """What `apply_removed` needs. duplicates, blank: keys."""
    none = [""] * len(blank)
    table = pa.table(
        {
            "key": np.concatenate([duplicates, blank]).astype(np.uint64),
            "reason": [reason] * len(duplicates) + ["blank"] * len(blank),
            "detail": [*details, *none],
            "witness": [*witnesses, *none],
        },
        REMOVED_SCHEMA,
    )
    write_table(table.sort_by("key").combine_chunks(), folder / REMOVED_TABLE)


def write_sizes(folder: Path, docs: pa.Table, removed: np.ndarray, witness: np.ndarray) -> None:
    """What `apply_removed` needs too. removed, witness: row numbers; each witness now stands for
    what the removed document stood for."""
    heads, number = np.unique(witness, return_inverse=True)
    more = np.zeros(len(heads), np.int64)
    np.add.at(more, number, docs["cluster_size"].to_numpy()[removed])
    table = pa.table({"key": docs["key"].to_numpy()[heads], "more": more}, SIZES_SCHEMA)
    write_table(table.sort_by("key").combine_chunks(), folder / SIZES_TABLE)


def apply_removed(batch: pa.RecordBatch, folder: Path, step: str) -> Outcome:
    """Takes out what was removed; the rest gets the label `cluster_size`."""
    table = read_table(folder / REMOVED_TABLE)
    rows, found = rows_with(table, batch)
    removals: list[Removal | None] = [None] * batch.num_rows
    for row, entry in zip(rows.tolist(), table.take(found).to_pylist(), strict=True):
        removals[row] = Removal(entry["reason"], entry["detail"], entry["witness"])
    sizes = cluster_sizes(batch).to_numpy(zero_copy_only=False).copy()
    larger = read_table(folder / SIZES_TABLE)
    rows, found = rows_with(larger, batch)
    sizes[rows] += larger["more"].to_numpy()[found]
    labelled = with_column(batch, CLUSTER_SIZE, sizes.astype(np.int32), pa.int32())
    return split(labelled, step, removals)


def first_equals(digests: np.ndarray) -> np.ndarray:
    """For each row of (rows, 2) uint64 the number of the first row that is equal."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    is_first = np.ones(len(order), bool)
    is_first[1:] = (digests[order[1:]] != digests[order[:-1]]).any(axis=1)
    firsts = np.empty(len(order), np.int64)
    firsts[order] = order[is_first][np.cumsum(is_first) - 1]
    return firsts


def cluster_summary(removed: np.ndarray, witness: np.ndarray, names: Names) -> dict[str, Any]:
    """How many clusters of which sizes, and the largest. removed, witness: row numbers."""
    by_witness = removed[np.argsort(witness, kind="stable")]
    kept, starts, counts = np.unique(np.sort(witness), return_index=True, return_counts=True)
    sizes = Counter((counts + 1).tolist())
    # Largest first, then by name: row numbers depend on how documents are spread over shards.
    named = sorted(zip((-counts).tolist(), names.of(kept), starts.tolist(), strict=True))
    largest = [
        {
            "kept": name,
            "size": 1 - negative,
            "removed": sorted(names.of(by_witness[start : start - negative]))[:NUM_MEMBERS],
        }
        for negative, name, start in named[:NUM_LARGEST]
    ]
    return {
        "num_clusters": len(kept),
        "cluster_sizes": {str(size): sizes[size] for size in sorted(sizes)},
        "largest_clusters": largest,
    }


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2, ensure_ascii=False), "utf-8")
