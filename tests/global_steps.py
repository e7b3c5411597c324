"""Runs a global step as an executor does: shards in files, a sketch beside each, one decision."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from stepwell.data.batches import to_batch
from stepwell.data.steps import GlobalStep, Shard, write_table
from stepwell.types import Document

Row = dict[str, Any]


@dataclass
class Result:
    """rows: of kept documents, by key; removed, edits: rows, by (source, id)."""

    rows: list[Row]
    removed: list[Row]
    edits: list[Row]
    summary: dict[str, Any]

    @property
    def kept(self) -> dict[str, str]:
        """Texts by `source/id`."""
        return {f"{row['source']}/{row['id']}": row["text"] for row in self.rows}

    @property
    def kept_ids(self) -> list[str]:
        return sorted(row["id"] for row in self.rows)

    @property
    def gone(self) -> dict[str, str]:
        """Reasons by `source/id`."""
        return {f"{row['source']}/{row['id']}": row["reason"] for row in self.removed}

    @property
    def removals(self) -> list[tuple]:
        """Without what depends on the order of documents."""
        columns = ("source", "id", "reason", "detail", "witness", "text")
        return sorted(tuple(row[c] for c in columns) for row in self.removed)


def documents_of(*texts: str, source: str = "s") -> list[Document]:
    return [Document(f"{i:04}", text, source) for i, text in enumerate(texts)]


def plain_documents(*texts: str) -> list[Document]:
    """Their ids, `0` to `10` and on, are not in the order of texts."""
    return [Document(str(i), text, "s") for i, text in enumerate(texts)]


def run_step(
    step: GlobalStep,
    docs: Sequence[Document],
    num_shards: int = 1,
    batch_docs: int = 3,
    labels: Mapping[str, tuple[list, pa.DataType]] | None = None,
) -> Result:
    """Documents are dealt to shards in turn, in batches; keys count in reading order."""
    batch = to_batch(docs, 0)
    for name, (values, kind) in (labels or {}).items():
        batch = batch.append_column(pa.field(name, kind), pa.array(values, kind))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dealt = [
            batch.take(pa.array(range(i, batch.num_rows, num_shards), pa.int64()))
            for i in range(num_shards)
        ]
        cuts = [_cut(rows, batch_docs) for rows in dealt]
        shards = [_shard(step, parts, folder / f"{i}") for i, parts in enumerate(cuts)]
        decision = folder / "decision"
        decision.mkdir()
        step.decide(shards, decision)
        summary = json.loads((decision / "summary.json").read_text("utf-8"))
        outcomes = [step.apply(part, decision) for parts in cuts for part in parts]
    rows, removed, edits = (
        [row for outcome in outcomes for row in getattr(outcome, part).to_pylist()]
        for part in ("kept", "removed", "edits")
    )
    return Result(
        sorted(rows, key=lambda row: row["key"]),
        sorted(removed, key=lambda row: (row["source"], row["id"], row["text"])),
        sorted(edits, key=lambda row: (row["source"], row["id"], row["start"])),
        summary,
    )


def _cut(rows: pa.RecordBatch, batch_docs: int) -> list[pa.RecordBatch]:
    return [rows.slice(i, batch_docs) for i in range(0, max(rows.num_rows, 1), batch_docs)]


def _shard(step: GlobalStep, parts: Sequence[pa.RecordBatch], stem: Path) -> Shard:
    shard = Shard(stem.with_suffix(".documents"), stem.with_suffix(".sketch"))
    write_table(pa.Table.from_batches(parts), shard.documents)
    sketches = [pa.RecordBatch.from_pydict(dict(step.sketch(part))) for part in parts]
    write_table(pa.Table.from_batches(sketches), shard.sketch)
    return shard
