"""Runs a global step on documents cut into shards and batches, as the executor does."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from stepwell.data.batches import to_batch
from stepwell.data.steps import GlobalStep, Shard, write_table
from stepwell.types import Document


@dataclass
class Result:
    kept: list[dict[str, Any]]
    removed: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def kept_ids(self) -> list[str]:
        return sorted(row["id"] for row in self.kept)

    @property
    def removals(self) -> list[tuple]:
        """Without what depends on the order of documents."""
        columns = ("source", "id", "reason", "detail", "witness", "text")
        return sorted(tuple(row[c] for c in columns) for row in self.removed)


def documents_of(*texts: str) -> list[Document]:
    return [Document(str(i), text, "s") for i, text in enumerate(texts)]


def run_step(
    step: GlobalStep,
    docs: Sequence[Document],
    folder: Path,
    num_shards: int = 1,
    batch_docs: int = 3,
    labels: dict[str, tuple[list, pa.DataType]] | None = None,
) -> Result:
    folder.mkdir(parents=True, exist_ok=True)
    rows = to_batch(docs, 0)
    for name, (values, kind) in (labels or {}).items():
        rows = rows.append_column(pa.field(name, kind), pa.array(values, kind))
    per_shard = -(-len(docs) // num_shards)
    shards, batches = [], []
    for number in range(num_shards):
        part = rows.slice(number * per_shard, per_shard)
        cuts = [part.slice(i, batch_docs) for i in range(0, max(part.num_rows, 1), batch_docs)]
        sketches = [pa.RecordBatch.from_pydict(dict(step.sketch(cut))) for cut in cuts]
        shard = Shard(folder / f"documents-{number}.arrow", folder / f"sketch-{number}.arrow")
        write_table(pa.Table.from_batches(cuts), shard.documents)
        write_table(pa.Table.from_batches(sketches), shard.sketch)
        shards.append(shard)
        batches += cuts
    decision = folder / "decision"
    decision.mkdir()
    step.decide(shards, decision)
    outcomes = [step.apply(batch, decision) for batch in batches]
    return Result(
        [row for outcome in outcomes for row in outcome.kept.to_pylist()],
        [row for outcome in outcomes for row in outcome.removed.to_pylist()],
        json.loads((decision / "summary.json").read_text("utf-8")),
    )
