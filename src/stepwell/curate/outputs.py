"""What a curation leaves: documents, what was removed and edited, token stores, the datasheet. Put
together of what tasks have written, a document at a time."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stepwell.curate.datasheet import label_tables, render, store_tables
from stepwell.curate.folders import decision_folder, shards_of, stage_folder
from stepwell.curate.plan import Plan, read_json
from stepwell.curate.tally import count_cpu
from stepwell.curate.tasks import step_name
from stepwell.curate.writing import DOCUMENTS, HELDOUT, PLACES, TOKENIZER, TRAIN
from stepwell.data.batches import pc
from stepwell.data.decontam.index import open_index
from stepwell.data.decontam.report import contamination_report, write_report
from stepwell.data.decontam.step import Decontaminate
from stepwell.data.exports import WRITERS
from stepwell.data.steps import read_batches
from stepwell.data.store import StoreWriter, TokenStore
from stepwell.tokenizer import Tokenizer

REMOVED_FOLDER, EDITS_FOLDER, STORE = "removed", "edits", "store"
DATASHEET = "datasheet.html"
# Of those removed, read at once: each may be long.
REMOVED_ROWS = 256


def publish(plan: Plan, work: Path, out: Path, counts: dict[str, Any]) -> Iterator[str]:
    """Writes the result beside the work folder, and yields what it begins with; each part appears
    whole. `counts` gets "stores" and "contamination"."""
    final = work / "final"
    shutil.rmtree(final, ignore_errors=True)
    final.mkdir()
    begin = time.process_time()
    plan.recipe.save(final / "recipe.toml")
    yield "documents"
    take_documents(plan, work, final / DOCUMENTS)
    yield "removed and edits"
    gather(plan, work, "removed", final / REMOVED_FOLDER)
    gather(plan, work, "edits", final / EDITS_FOLDER)
    values: dict[str, str | int | None] = {}
    if plan.recipe.store is not None:
        yield "stores"
        values = put_stores(plan, work, final / STORE)
        export_stores(final / STORE, plan.recipe.outputs.formats)
    yield "datasheet"
    counts["contamination"] = reports = contamination(plan, work)
    for number, report in enumerate(reports):
        write_report(report, final / f"contamination{number or ''}.json")
    counts["stores"] = store_tables(final / STORE, values)
    labels = label_tables(kept_batches(plan, work))
    count_cpu(counts["tally"], "publish", time.process_time() - begin)
    (final / DATASHEET).write_text(render(counts, labels, out), "utf-8")
    for path in sorted(final.iterdir()):
        target = out / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)


def kept_batches(plan: Plan, work: Path) -> Iterator[pa.RecordBatch]:
    for path in shards_of(work, len(plan.stages) - 1):
        yield from read_batches(path)


def take_documents(plan: Plan, work: Path, folder: Path) -> None:
    """part-00000.parquet ... or part-00000.jsonl ... (see `writing.write_documents`)."""
    folder.mkdir()
    suffix = plan.recipe.outputs.documents
    for number, task in enumerate(written(plan, work)):
        _link(task / f"{DOCUMENTS}.{suffix}", folder / f"part-{number:05d}.{suffix}")


def written(plan: Plan, work: Path) -> list[Path]:
    """The folders of the tasks that wrote shards, in reading order."""
    tasks = stage_folder(work, len(plan.stages)).glob("[0-9]*")
    return sorted(tasks, key=lambda path: int(path.name))


def contamination(plan: Plan, work: Path) -> list[dict[str, Any]]:
    """What each decontamination found, in what it removed and in what it let pass."""
    reports: list[dict[str, Any]] = []
    for number, step in enumerate(plan.recipe.steps):
        if isinstance(step, Decontaminate):
            index = open_index(step.index)
            removed = (
                batch.filter(pc.equal(batch["step"], step_name(number, step)))
                for path in task_files(plan, work, "removed")
                for batch in pq.ParquetFile(path).iter_batches(batch_size=REMOVED_ROWS)
            )
            kept = kept_batches(plan, work)
            reports.append(contamination_report(removed, index, kept, step.rule, step.min_share))
    return reports


def task_files(plan: Plan, work: Path, name: str) -> list[Path]:
    """The files of this name that tasks wrote, in reading order."""
    return [
        path
        for stage in plan.stages
        for path in sorted(
            stage_folder(work, stage.number).glob(f"[0-9]*/{name}.parquet"),
            key=lambda path: int(path.parent.name),
        )
    ]


def gather(plan: Plan, work: Path, name: str, folder: Path) -> None:
    """The tasks' files of this name as part-00000.parquet ... in reading order."""
    folder.mkdir()
    without_text = name == "removed" and not plan.recipe.outputs.removed_text
    for number, path in enumerate(task_files(plan, work, name)):
        target = folder / f"part-{number:05d}.parquet"
        if not without_text:
            _link(path, target)
            continue
        source = pq.ParquetFile(path)
        names = [column for column in source.schema_arrow.names if column != "text"]
        schema = pa.schema([source.schema_arrow.field(column) for column in names])
        with pq.ParquetWriter(target, schema, compression="zstd") as file:
            for batch in source.iter_batches(batch_size=REMOVED_ROWS, columns=names):
                file.write_batch(batch)


def put_stores(plan: Plan, work: Path, folder: Path) -> dict[str, str | int | None]:
    """folder/train/VALUE (and folder/heldout/VALUE) for each value of the column `store.by`.
    Returns the value of each such place."""
    assert plan.recipe.store is not None
    made = decision_folder(work, len(plan.stages) - 1) / TOKENIZER
    shutil.copytree(made, folder / TOKENIZER)
    tokenizer = Tokenizer.load(made)
    with_scores = plan.recipe.store.scores is not None
    files: dict[str, list[tuple[Path, int]]] = {}
    values: dict[str, str | int | None] = {}
    for task in written(plan, work):
        for i, (place, value) in enumerate(read_json(task / PLACES)):
            values[place] = value
            files.setdefault(place, []).append((task, i))
    for place, parts in sorted(files.items()):
        with StoreWriter(
            folder / place, tokenizer.fingerprint, tokenizer.vocab_size, with_scores=with_scores
        ) as writer:
            for task, i in parts:
                _add_documents(writer, task, i)
    return values


def _add_documents(writer: StoreWriter, task: Path, number: int) -> None:
    tokens = np.load(task / f"tokens-{number}.npy", mmap_mode="r")
    stops = np.cumsum(np.load(task / f"lengths-{number}.npy"))
    scores = [None] * len(stops)
    if writer.with_scores:
        scores = np.load(task / f"scores-{number}.npy").tolist()
    start = 0
    for stop, score in zip(stops.tolist(), scores, strict=True):
        writer.add(tokens[start:stop], score=score)
        start = stop


def _link(path: Path, target: Path) -> None:
    """The same file under another name, or its copy where file systems don't do that."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)


def export_stores(folder: Path, formats: Sequence[str]) -> None:
    """folder/FORMAT/PART/NAME for each store folder/PART/NAME."""
    for part in (TRAIN, HELDOUT):
        for path in sorted((folder / part).glob("*")):
            for name in formats:
                WRITERS[name](TokenStore.open(path), folder / name / part / path.name)
