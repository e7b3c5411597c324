"""The parts that a curation is cut into. Each reads files, writes files, and can be done by any
process that sees the work folder; doing one twice changes nothing.

s00/00003/ is task 3 of stage 0: documents-00000.arrow, sketch-00000.arrow (if a decision comes
next), rest-00000.arrow (documents that the decision is not about), removed.parquet, edits.parquet
and tally.json. d00/ is the decision after stage 0.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stepwell.curate.plan import Plan, Read, Stage, read_plan, write_json
from stepwell.curate.tally import Tally, count_read, count_step, new_tally
from stepwell.data.batches import (
    EDITS,
    REMOVED,
    Outcome,
    pc,
    removed_batch,
    text_bytes,
    to_batch,
)
from stepwell.data.sources.pieces import read_piece
from stepwell.data.steps import DocumentStep, GlobalStep, Shard, StepConfig, read_batches
from stepwell.types import Document, Dropped

BATCH_DOCS = 1024
# A read has fewer documents than this; it leaves 2**32 reads.
READ_KEYS = 1 << 32
SOURCE = "read"


def step_name(number: int, step: StepConfig) -> str:
    return f"{number + 1}. {step.kind}"


def stage_folder(work: Path, stage: int) -> Path:
    return work / f"s{stage:02d}"


def decision_folder(work: Path, stage: int) -> Path:
    return work / f"d{stage:02d}"


def task_folder(work: Path, stage: int, number: int) -> Path:
    return stage_folder(work, stage) / f"{number:05d}"


def shards_of(work: Path, stage: int) -> list[Path]:
    """What a stage has written, in reading order: the tasks of the next one."""
    return sorted(stage_folder(work, stage).glob("[0-9]*/documents-*.arrow"))


def num_tasks(plan: Plan, work: Path, stage: int) -> int:
    return len(plan.reads) if stage == 0 else len(shards_of(work, stage - 1))


def is_done(work: Path, stage: int, number: int) -> bool:
    return task_folder(work, stage, number).exists()


def run_task(work: Path, stage: int, number: int) -> None:
    """Does nothing if it is done."""
    if is_done(work, stage, number):
        return
    plan = read_plan(work)
    with _whole(task_folder(work, stage, number)) as folder:
        tally = new_tally()
        batches: Iterable[tuple[pa.RecordBatch, pa.RecordBatch, pa.RecordBatch]]
        if stage == 0:
            batches = _read(plan, plan.reads[number], number, tally)
        else:
            batches = _carried(plan.stages[stage], work, shards_of(work, stage - 1)[number], tally)
        _work(plan, plan.stages[stage], batches, folder, tally)


def decide(work: Path, stage: int) -> None:
    """Decides about all documents after a stage. Does nothing if it is done."""
    folder = decision_folder(work, stage)
    after = read_plan(work).stages[stage].after
    if folder.exists() or after is None:
        return
    shards = [Shard(path, _beside(path, "sketch")) for path in shards_of(work, stage)]
    with _whole(folder) as temporary:
        after[1].decide(shards, temporary)


def _read(
    plan: Plan, read: Read, number: int, tally: Tally
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch, pa.RecordBatch]]:
    """Batches of what is read, each with what could not be."""
    key = number * READ_KEYS
    source = plan.source(read.source)
    items = chain.from_iterable(read_piece(piece, source) for piece in read.pieces)
    if source.max_docs is not None:
        items = first_documents(items, source.max_docs)
    for docs, dropped in _grouped(items, plan.recipe.batch_bytes):
        count_read(tally, (item.source for item in [*docs, *dropped]))
        batch = to_batch(docs, key)
        removed = removed_batch(dropped, SOURCE)
        key += len(docs)
        _count_unread(tally, batch, removed)
        yield batch, removed, pa.RecordBatch.from_pylist([], EDITS)


def first_documents(items: Iterable[Document | Dropped], num_docs: int) -> Iterator[Any]:
    """Up to the num_docs-th document."""
    for item in items:
        yield item
        num_docs -= isinstance(item, Document)
        if not num_docs:
            return


def _grouped(
    items: Iterable[Document | Dropped], batch_bytes: int
) -> Iterator[tuple[list[Document], list[Dropped]]]:
    docs: list[Document] = []
    dropped: list[Dropped] = []
    size = 0
    for item in items:
        if isinstance(item, Dropped):
            dropped.append(item)
        else:
            docs.append(item)
            size += len(item.text)
        if size >= batch_bytes or len(docs) + len(dropped) >= BATCH_DOCS:
            yield docs, dropped
            docs, dropped, size = [], [], 0
    yield docs, dropped


def _count_unread(tally: Tally, batch: pa.RecordBatch, removed: pa.RecordBatch) -> None:
    unread = pa.RecordBatch.from_arrays(
        [removed["id"], removed["source"], removed["text"]], ["id", "source", "text"]
    )
    before = pa.Table.from_batches([batch.select(["id", "source", "text"]), unread])
    everything = before.combine_chunks().to_batches()
    edits = pa.RecordBatch.from_pylist([], EDITS)
    if everything:
        count_step(tally, SOURCE, everything[0], batch, removed, edits, 0.0)


def _carried(
    stage: Stage, work: Path, path: Path, tally: Tally
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch, pa.RecordBatch]]:
    """A shard's batches after the decision that precedes the stage."""
    assert stage.before is not None
    number, step = stage.before
    folder = decision_folder(work, stage.number - 1)
    rest_path = _beside(path, "rest")
    rests = iter(read_batches(rest_path)) if rest_path.exists() else None
    for batch in read_batches(path):
        begin = time.process_time()
        outcome = step.apply(batch, folder)
        cpu_s = time.process_time() - begin
        name = step_name(number, step)
        count_step(tally, name, batch, outcome.kept, outcome.removed, outcome.edits, cpu_s)
        rest = next(rests) if rests is not None else None
        kept = outcome.kept if rest is None else merged(outcome.kept, rest)
        yield kept, outcome.removed, outcome.edits


def _work(
    plan: Plan,
    stage: Stage,
    batches: Iterable[tuple[pa.RecordBatch, pa.RecordBatch, pa.RecordBatch]],
    folder: Path,
    tally: Tally,
) -> None:
    with ExitStack() as stack:
        removed_file = stack.enter_context(_Rows(folder / "removed.parquet", REMOVED))
        edits_file = stack.enter_context(_Rows(folder / "edits.parquet", EDITS))
        shards = stack.enter_context(_Shards(folder, stage.after, plan.recipe.shard_bytes))
        for batch, removed, edits in batches:
            removed_file.add(removed)
            edits_file.add(edits)
            for number, step in stage.steps:
                outcome = _counted(tally, number, step, batch)
                removed_file.add(outcome.removed)
                edits_file.add(outcome.edits)
                batch = outcome.kept
            shards.add(batch)
    write_json(folder / "tally.json", tally)


def _counted(tally: Tally, number: int, step: DocumentStep, batch: pa.RecordBatch) -> Outcome:
    """The step on those documents that it is about; the others pass."""
    mine, rest = parted(batch, step.sources)
    begin = time.process_time()
    outcome = step(mine)
    cpu_s = time.process_time() - begin
    name = step_name(number, step)
    count_step(tally, name, mine, outcome.kept, outcome.removed, outcome.edits, cpu_s)
    return Outcome(merged(outcome.kept, rest), outcome.removed, outcome.edits)


def parted(batch: pa.RecordBatch, sources: Sequence[str]) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """(the documents of these sources, the others); no sources: all."""
    if not sources:
        return batch, batch.slice(0, 0)
    mine = pc.is_in(batch["source"], pa.array(sources, pa.string()))
    return batch.filter(mine), batch.filter(pc.invert(mine))


def merged(kept: pa.RecordBatch, rest: pa.RecordBatch) -> pa.RecordBatch:
    """Both in the order of their keys, with no value in the labels that `rest` lacks."""
    if not rest.num_rows:
        return kept
    both = pa.concat_tables([pa.table(kept), pa.table(rest)], promote_options="default")
    both = both.sort_by("key").combine_chunks()
    return both.to_batches()[0]


class _Shards:
    """Files of documents of up to `limit` bytes of text, with their sketches."""

    def __init__(self, folder: Path, after: tuple[int, GlobalStep] | None, limit: int):
        self._folder, self._limit = folder, limit
        self._step = after[1] if after is not None else None
        self._number, self._size = 0, 0
        self._files: dict[str, pa.RecordBatchFileWriter] = {}

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._step is None:
            self._write("documents", batch)
        else:
            mine, rest = parted(batch, self._step.sources)
            columns = self._step.sketch(mine)
            sketch = {"key": mine["key"], **{k: _array(v) for k, v in columns.items()}}
            self._write("documents", mine)
            self._write("sketch", pa.RecordBatch.from_pydict(sketch))
            if self._step.sources:
                self._write("rest", rest)
        self._size += text_bytes(batch).sum().as_py() or 0
        if self._size >= self._limit:
            self._close()

    def _write(self, name: str, batch: pa.RecordBatch) -> None:
        if name not in self._files:
            path = self._folder / f"{name}-{self._number:05d}.arrow"
            self._files[name] = pa.ipc.new_file(str(path), batch.schema)
        self._files[name].write_batch(batch)

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._files:
            self._number += 1
        self._files, self._size = {}, 0


@dataclass
class _Rows:
    """A Parquet file that is only made if there are rows for it."""

    path: Path
    schema: pa.Schema
    _writer: pq.ParquetWriter | None = field(default=None)

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.path, self.schema, compression="zstd")
        self._writer.write_batch(batch)


class _whole:
    """A folder that gets its name when the block has ended well. Another process may have been
    faster: its output is the same."""

    def __init__(self, target: Path):
        self._target = target
        self._temporary = target.with_name(f".{target.name}.tmp{os.getpid()}")

    def __enter__(self) -> Path:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            try:
                os.rename(self._temporary, self._target)
                return
            except OSError:
                if not self._target.exists():
                    raise
        shutil.rmtree(self._temporary, ignore_errors=True)


def _array(values: np.ndarray | pa.Array) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values)


def _beside(documents: Path, name: str) -> Path:
    return documents.with_name(documents.name.replace("documents", name))
