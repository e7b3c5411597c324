"""The parts that a curation is cut into. Each reads files, writes files, and can be done by any
process that sees the work folder; doing one twice changes nothing.

A task's folder holds documents-00000.arrow, sketch-00000.arrow (if a decision comes next),
rest-00000.arrow (documents that the decision is not about), removed.parquet, edits.parquet and
tally.json. The tasks of the stage after the last one write what is published.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stepwell.curate.folders import (
    beside,
    decision_folder,
    is_done,
    shards_of,
    task_folder,
    whole,
)
from stepwell.curate.plan import (
    Plan,
    Read,
    Stage,
    check_input,
    in_folder,
    read_plan,
    write_json,
)
from stepwell.curate.tally import Tally, count_cpu, count_read, count_step, new_tally
from stepwell.curate.writing import prepare, write_shard
from stepwell.data.batches import (
    EDITS,
    REMOVED,
    Outcome,
    empty,
    name_of,
    pc,
    removed_batch,
    text_bytes,
    to_batch,
    with_column,
)
from stepwell.data.sources.pieces import PYTHON_SOURCES, read_piece
from stepwell.data.sources.spec import Piece, SourceSpec
from stepwell.data.steps import DocumentStep, GlobalStep, Shard, StepConfig, read_batches
from stepwell.types import DataError, Document, Dropped, StepwellError

BATCH_DOCS = 1024
# A read has fewer documents than this; it leaves 2**32 reads.
READ_KEYS = 1 << 32
SOURCE, OTHER = "read", "other"
TALLY = "tally.json"
# What a stage begins with: documents, what was removed and what was edited before its steps.
Begun = tuple[pa.RecordBatch, pa.RecordBatch, pa.RecordBatch]
Result = TypeVar("Result")


def step_name(number: int, step: StepConfig) -> str:
    return f"{number + 1}. {step.kind}"


def num_tasks(plan: Plan, work: Path, stage: int) -> int:
    return len(plan.reads) if stage == 0 else len(shards_of(work, stage - 1))


def task_bytes(plan: Plan, work: Path, stage: int) -> list[int]:
    """How much each task of a stage reads."""
    if stage == 0:
        return [sum(piece.size_bytes for piece in read.pieces) for read in plan.reads]
    return [path.stat().st_size for path in shards_of(work, stage - 1)]


def run_task(work: Path, stage: int, number: int) -> None:
    """Does nothing if it is done.

    Raises StepwellError that names the step, the document and the file for a step that fails.
    """
    work = work.absolute()
    if is_done(work, stage, number):
        return
    begin = time.process_time()
    plan = read_plan(work)
    with in_folder(plan), whole(task_folder(work, stage, number)) as folder:
        tally = new_tally()
        if stage == len(plan.stages):
            write_shard(plan, work, shards_of(work, stage - 1)[number], folder, tally)
        elif stage == 0:
            read = plan.reads[number]
            batches = _read(plan, read, number, tally)
            _work(plan, plan.stages[stage], batches, folder, tally, _place(read))
        else:
            path = shards_of(work, stage - 1)[number]
            batches = _carried(plan.stages[stage], work, path, tally)
            _work(plan, plan.stages[stage], batches, folder, tally, str(path))
        rest_s = time.process_time() - begin - sum(tally["cpu"].values())
        count_cpu(tally, OTHER, rest_s)
        write_json(folder / TALLY, tally)


def has_decision(plan: Plan, stage: int) -> bool:
    """Whether something is decided about all documents between this stage and the next."""
    return plan.stages[stage].after is not None or (
        stage == len(plan.stages) - 1 and plan.recipe.store is not None
    )


def decide(work: Path, stage: int) -> None:
    """Decides about all documents after a stage. Does nothing if it is done. Raises DataError where
    the stage isn't done or left nothing."""
    work = work.absolute()
    folder = decision_folder(work, stage)
    plan = read_plan(work)
    if folder.exists() or not has_decision(plan, stage):
        return
    missing = [n for n in range(num_tasks(plan, work, stage)) if not is_done(work, stage, n)]
    if missing:
        raise DataError(
            f"stage {stage} of {work.parent} is not done: {len(missing)} of its tasks are missing, "
            f"the first is {missing[0]}; run them before the decision"
        )
    if not shards_of(work, stage):
        raise DataError(f"stage {stage} of {work.parent} left no document to decide about")
    name = decision_name(plan, stage)
    begin = time.process_time()
    tally = new_tally()
    with in_folder(plan), whole(folder) as temporary:
        try:
            _decide(plan, work, stage, temporary)
        except (StepwellError, OSError):
            raise
        except Exception as error:
            raise _fault(name, "all documents", error) from error
        count_cpu(tally, name, time.process_time() - begin)
        write_json(temporary / TALLY, tally)


def decision_name(plan: Plan, stage: int) -> str:
    after = plan.stages[stage].after
    return "tokenizer" if after is None else f"{step_name(*after)}: decide"


def _decide(plan: Plan, work: Path, stage: int, folder: Path) -> None:
    after = plan.stages[stage].after
    shards = shards_of(work, stage)
    if after is not None:
        after[1].decide([Shard(path, beside(path, "sketch")) for path in shards], folder)
    elif plan.recipe.store is not None:
        prepare(plan.recipe.store, shards, folder)


def _read(plan: Plan, read: Read, number: int, tally: Tally) -> Iterator[Begun]:
    """Batches of what is read, each with what could not be."""
    key = number * READ_KEYS
    source = plan.source(read.source)
    items = chain.from_iterable(_items(plan, piece, source) for piece in read.pieces)
    if source.max_docs is not None:
        items = first_documents(items, source.max_docs)
    begin = time.process_time()
    for docs, dropped in _grouped(items, plan.recipe.batch_bytes):
        count_read(tally, (item.source for item in [*docs, *dropped]))
        batch = to_batch(docs, key)
        removed = removed_batch(dropped, SOURCE)
        key += len(docs)
        docs, dropped = [], []
        count_cpu(tally, SOURCE, time.process_time() - begin)
        _count_unread(tally, batch, removed)
        yield batch, removed, empty(EDITS)
        begin = time.process_time()


def _items(plan: Plan, piece: Piece, source: SourceSpec) -> Iterator[Document | Dropped]:
    last = "the first document"
    is_file = piece.kind not in ("dropped", *PYTHON_SOURCES)
    if is_file:
        check_input(plan, piece.path)
    try:
        for item in read_piece(piece, source):
            last = f"what follows {item.id}"
            yield item
    except (StepwellError, OSError):
        raise
    except Exception as error:
        raise _fault(f"reading {piece.path} (source {source.name})", last, error) from error
    if is_file:
        check_input(plan, piece.path)


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
    for everything in before.combine_chunks().to_batches():
        count_step(tally, SOURCE, everything, batch, removed, empty(EDITS))


def _carried(stage: Stage, work: Path, path: Path, tally: Tally) -> Iterator[Begun]:
    """A shard's batches after the decision that precedes the stage."""
    assert stage.before is not None
    number, step = stage.before
    folder = decision_folder(work, stage.number - 1)
    rest_path = beside(path, "rest")
    rests = iter(read_batches(rest_path)) if rest_path.exists() else None
    name = step_name(number, step)
    for batch in read_batches(path):
        outcome = _timed(tally, name, batch, lambda b: step.apply(b, folder), str(path))
        outcome = numbered(outcome, name)
        count_step(tally, name, batch, outcome.kept, outcome.removed, outcome.edits)
        rest = next(rests) if rests is not None else None
        kept = outcome.kept if rest is None else merged(outcome.kept, rest)
        yield kept, outcome.removed, outcome.edits


def _work(
    plan: Plan,
    stage: Stage,
    batches: Iterable[Begun],
    folder: Path,
    tally: Tally,
    place: str,
) -> None:
    """place: what is worked on, for error messages."""
    with ExitStack() as stack:
        removed_file = stack.enter_context(_Rows(folder / "removed.parquet", REMOVED))
        edits_file = stack.enter_context(_Rows(folder / "edits.parquet", EDITS))
        shards = stack.enter_context(_Shards(folder, stage.after, plan.recipe.shard_bytes, place))
        for batch, removed, edits in batches:
            removed_file.add(removed)
            edits_file.add(edits)
            for number, step in stage.steps:
                outcome = _counted(tally, number, step, batch, place)
                removed_file.add(outcome.removed)
                edits_file.add(outcome.edits)
                batch = outcome.kept
            shards.add(batch, tally)


def _counted(
    tally: Tally, number: int, step: DocumentStep, batch: pa.RecordBatch, place: str
) -> Outcome:
    """The step on those documents that it is about; the others pass."""
    mine, rest = parted(batch, step.sources)
    name = step_name(number, step)
    outcome = numbered(_timed(tally, name, mine, step, place), name)
    count_step(tally, name, mine, outcome.kept, outcome.removed, outcome.edits)
    return Outcome(merged(outcome.kept, rest), outcome.removed, outcome.edits)


def numbered(outcome: Outcome, name: str) -> Outcome:
    """With the step's name in the recipe, which tells two steps of one kind apart."""
    removed, edits = (_with_step(rows, name) for rows in (outcome.removed, outcome.edits))
    return Outcome(outcome.kept, removed, edits)


def _with_step(rows: pa.RecordBatch, name: str) -> pa.RecordBatch:
    return with_column(rows, "step", [name] * rows.num_rows, pa.string()) if rows.num_rows else rows


def _timed(
    tally: Tally,
    name: str,
    batch: pa.RecordBatch,
    call: Callable[[pa.RecordBatch], Result],
    place: str,
) -> Result:
    begin = time.process_time()
    try:
        return call(batch)
    except (StepwellError, OSError):
        raise
    except Exception as error:
        raise _fault(f"step {name}", f"{culprit(batch, call)} of {place}", error) from error
    finally:
        count_cpu(tally, name, time.process_time() - begin)


def culprit(batch: pa.RecordBatch, call: Callable[[pa.RecordBatch], Any]) -> str:
    """The document that a step fails on, found by halving; all of them where no half fails."""
    while batch.num_rows > 1:
        half = batch.num_rows // 2
        halves = (batch.slice(0, half), batch.slice(half))
        failing = next((part for part in halves if _fails(call, part)), None)
        if failing is None:
            return f"{batch.num_rows} documents together, the first {_first_name(batch)},"
        batch = failing
    return f"document {_first_name(batch)}" if batch.num_rows else "no documents"


def _fails(call: Callable[[pa.RecordBatch], Any], batch: pa.RecordBatch) -> bool:
    try:
        call(batch)
    except Exception:  # noqa: BLE001  whatever the step raised before
        return True
    return False


def _first_name(batch: pa.RecordBatch) -> str:
    return name_of(batch["source"][0].as_py(), batch["id"][0].as_py())


def _fault(what: str, where: str, error: Exception) -> StepwellError:
    at = list(traceback.extract_tb(error.__traceback__))[-1]
    return StepwellError(
        f"{what} failed on {where}: {type(error).__name__}: {error} "
        f"({Path(at.filename).name}:{at.lineno}); what was finished is kept"
    )


def _place(read: Read) -> str:
    first, *others = read.pieces
    return f"{first.path}{f' and {len(others)} more' if others else ''}"


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

    def __init__(self, folder: Path, after: tuple[int, GlobalStep] | None, limit: int, place: str):
        self._folder, self._limit, self._place = folder, limit, place
        self._step = after[1] if after is not None else None
        self._name = f"{step_name(*after)}: sketch" if after is not None else ""
        self._number, self._size = 0, 0
        self._files: dict[str, pa.RecordBatchFileWriter] = {}

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def add(self, batch: pa.RecordBatch, tally: Tally) -> None:
        if not batch.num_rows:
            return
        if self._step is None:
            self._write("documents", batch)
        else:
            mine, rest = parted(batch, self._step.sources)
            columns = _timed(tally, self._name, mine, self._step.sketch, self._place)
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


def _array(values: np.ndarray | pa.Array) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values)
