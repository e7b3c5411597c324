"""Runs a global step as an executor does: shards in files, a sketch beside each, one decision."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from stepwell.data.batches import SCHEMA, to_batch
from stepwell.data.steps import GlobalStep, Shard, write_table
from stepwell.types import Document


@dataclass
class Result:
    """kept: texts by `source/id`; rows of what was removed and edited."""

    kept: dict[str, str]
    removed: list[dict]
    edits: list[dict]
    summary: dict

    @property
    def gone(self) -> dict[str, str]:
        return {f"{row['source']}/{row['id']}": row["reason"] for row in self.removed}


def documents_of(*texts: str, source: str = "s") -> list[Document]:
    return [Document(f"{i:04}", text, source) for i, text in enumerate(texts)]


def run_step(step: GlobalStep, docs: Sequence[Document], num_shards: int = 1) -> Result:
    """Documents are dealt to shards in turn, each of two batches; keys count in reading order."""
    batch = to_batch(docs, 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = [_shard(step, batch, folder, i, num_shards) for i in range(num_shards)]
        decision = folder / "decision"
        decision.mkdir()
        step.decide(shards, decision)
        summary = json.loads((decision / "summary.json").read_text("utf-8"))
        outcomes = [step.apply(b, decision) for s in shards for b in _batches(s.documents)]
    rows = [row for o in outcomes for row in o.kept.to_pylist()]
    rows.sort(key=lambda row: row["key"])
    return Result(
        {f"{row['source']}/{row['id']}": row["text"] for row in rows},
        sorted(
            (row for o in outcomes for row in o.removed.to_pylist()),
            key=lambda row: (row["source"], row["id"], row["text"]),
        ),
        sorted(
            (row for o in outcomes for row in o.edits.to_pylist()),
            key=lambda row: (row["source"], row["id"], row["start"]),
        ),
        summary,
    )


def _shard(step: GlobalStep, batch: pa.RecordBatch, folder: Path, i: int, num: int) -> Shard:
    shard = Shard(folder / f"{i}.arrow", folder / f"{i}.sketch.arrow")
    rows = batch.take(pa.array(range(i, batch.num_rows, num), pa.int64()))
    middle = rows.num_rows // 2
    parts = [rows.slice(0, middle), rows.slice(middle)]
    write_table(pa.Table.from_batches(parts, SCHEMA), shard.documents)
    sketches = [pa.RecordBatch.from_pydict(dict(step.sketch(part))) for part in parts]
    write_table(pa.Table.from_batches(sketches), shard.sketch)
    return shard


def _batches(path: Path) -> list[pa.RecordBatch]:
    # Copied, because the files go away.
    table = pa.ipc.open_file(path.read_bytes()).read_all()
    return table.to_batches()
