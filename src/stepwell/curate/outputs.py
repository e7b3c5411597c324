"""What a curation leaves: documents, what was removed and edited, token stores."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stepwell.curate.datasheet import label_tables, render, store_tables
from stepwell.curate.plan import Plan
from stepwell.curate.recipe import StoreSpec
from stepwell.curate.tasks import shards_of, stage_folder
from stepwell.data.batches import documents, pc, texts_of
from stepwell.data.decontam.index import open_index
from stepwell.data.decontam.report import contamination_report, write_report
from stepwell.data.decontam.step import Decontaminate
from stepwell.data.exports import WRITERS
from stepwell.data.steps import read_batches
from stepwell.data.store import StoreWriter, TokenStore
from stepwell.tokenizer import Tokenizer
from stepwell.types import ConfigError, nearest

DOCUMENTS, REMOVED_FOLDER, EDITS_FOLDER, STORE = "documents", "removed", "edits", "store"
DATASHEET = "datasheet.html"
TRAIN, HELDOUT, TOKENIZER = "train", "heldout", "tokenizer"


def publish(plan: Plan, work: Path, out: Path, counts: dict[str, Any]) -> None:
    """Writes the result beside the work folder; each part appears whole. `counts` gets "stores" and
    "contamination"."""
    final = work / "final"
    shutil.rmtree(final, ignore_errors=True)
    final.mkdir()
    plan.recipe.save(final / "recipe.toml")
    write_documents(plan, work, final / DOCUMENTS)
    gather(plan, work, "removed", final / REMOVED_FOLDER)
    gather(plan, work, "edits", final / EDITS_FOLDER)
    if plan.recipe.store is not None:
        write_stores(plan.recipe.store, kept_batches(plan, work), final / STORE)
        export_stores(final / STORE, plan.recipe.outputs.formats)
    counts["contamination"] = reports = contamination(plan, work)
    for number, report in enumerate(reports):
        write_report(report, final / f"contamination{number or ''}.json")
    counts["stores"] = store_tables(final / STORE)
    labels = label_tables(list(kept_batches(plan, work)))
    (final / DATASHEET).write_text(render(counts, labels, out), "utf-8")
    for path in sorted(final.iterdir()):
        target = out / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)


def kept_batches(plan: Plan, work: Path) -> Iterator[pa.RecordBatch]:
    for path in shards_of(work, len(plan.stages) - 1):
        yield from read_batches(path)


def write_documents(plan: Plan, work: Path, folder: Path) -> None:
    """part-00000.parquet ... (id, source, text, meta and labels), or part-00000.jsonl with labels
    in `meta`."""
    folder.mkdir()
    for number, path in enumerate(shards_of(work, len(plan.stages) - 1)):
        batches = read_batches(path)
        target = folder / f"part-{number:05d}.{plan.recipe.outputs.documents}"
        if plan.recipe.outputs.documents == "parquet":
            with pq.ParquetWriter(target, batches[0].schema, compression="zstd") as file:
                for batch in batches:
                    file.write_batch(batch)
        else:
            with target.open("w", encoding="utf-8") as lines:
                for doc in (doc for batch in batches for doc in documents(batch)):
                    values = {
                        "id": doc.id, "source": doc.source, "text": doc.text, "meta": doc.meta
                    }  # fmt: skip
                    lines.write(json.dumps(values, ensure_ascii=False, default=str) + "\n")


def contamination(plan: Plan, work: Path) -> list[dict[str, Any]]:
    """What each decontamination found, in what it removed and in what it let pass."""
    reports: list[dict[str, Any]] = []
    for step in plan.recipe.steps:
        if isinstance(step, Decontaminate):
            index = open_index(step.index)
            removed = (
                batch
                for path in task_files(plan, work, "removed")
                for batch in pq.ParquetFile(path).iter_batches()
            )
            kept = kept_batches(plan, work)
            reports.append(contamination_report(removed, index, kept, step.rule, step.min_share))
    return reports


def task_files(plan: Plan, work: Path, name: str) -> list[Path]:
    """The files of this name that tasks wrote, in reading order."""
    return [
        path
        for stage in plan.stages
        for path in sorted(stage_folder(work, stage.number).glob(f"[0-9]*/{name}.parquet"))
    ]


def gather(plan: Plan, work: Path, name: str, folder: Path) -> None:
    """The tasks' files of this name as part-00000.parquet ... in reading order."""
    folder.mkdir()
    without_text = name == "removed" and not plan.recipe.outputs.removed_text
    for number, path in enumerate(task_files(plan, work, name)):
        target = folder / f"part-{number:05d}.parquet"
        if without_text:
            pq.write_table(pq.read_table(path).drop_columns(["text"]), target, compression="zstd")
        else:
            shutil.copyfile(path, target)


def write_stores(spec: StoreSpec, batches: Iterator[pa.RecordBatch], folder: Path) -> None:
    """folder/train/VALUE (and folder/heldout/VALUE) for each value of the column `spec.by`."""
    folder.mkdir()
    kept = list(batches)  # memory maps
    for column in (spec.by, *([spec.scores] if spec.scores else [])):
        _check_column(column, kept)
    tokenizer = _tokenizer(spec, kept, folder / TOKENIZER)
    head = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    writers: dict[Path, StoreWriter] = {}
    # A document without a score (of a source that was not scored) counts as the worst.
    lowest = min_of(spec.scores, kept) if spec.scores else 0.0
    with ExitStack() as stack:
        for batch in kept:
            names = [str(value) for value in batch[spec.by].to_pylist()]
            scores = batch[spec.scores].to_pylist() if spec.scores else [None] * len(names)
            held = heldout_rows(batch, spec.heldout)
            ids_of_docs = tokenizer.encode_batch(texts_of(batch), special=False)
            for ids, name, score, is_held in zip(ids_of_docs, names, scores, held, strict=True):
                place = folder / (HELDOUT if is_held else TRAIN) / file_name(name)
                if place not in writers:
                    writer = StoreWriter(
                        place,
                        tokenizer.fingerprint,
                        tokenizer.vocab_size,
                        with_scores=spec.scores is not None,
                    )
                    writers[place] = stack.enter_context(writer)
                if spec.scores and score is None:
                    score = lowest
                writers[place].add([*head, *ids, tokenizer.eos_id], score=score)


def export_stores(folder: Path, formats: Sequence[str]) -> None:
    """folder/FORMAT/PART/NAME for each store folder/PART/NAME."""
    for part in (TRAIN, HELDOUT):
        for path in sorted((folder / part).glob("*")):
            for name in formats:
                WRITERS[name](TokenStore.open(path), folder / name / part / path.name)


def heldout_rows(batch: pa.RecordBatch, share: float) -> list[bool]:
    """Chosen by the document's source and id, so that another run of the recipe holds out the same
    ones."""
    if not share:
        return [False] * batch.num_rows
    pairs = zip(batch["source"].to_pylist(), batch["id"].to_pylist(), strict=True)
    return [_fraction(f"{source}/{doc_id}") < share for source, doc_id in pairs]


def file_name(value: str) -> str:
    """A label's value as the name of a folder."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in value)
    return plain if plain.strip(".-") else "none"


def min_of(column: str, batches: Sequence[pa.RecordBatch]) -> float:
    values = [pc.min(batch[column]).as_py() for batch in batches]
    return min((value for value in values if value is not None), default=0.0)


def _check_column(name: str, batches: Sequence[pa.RecordBatch]) -> None:
    names = sorted({column for batch in batches for column in batch.schema.names})
    if any(name not in batch.schema.names for batch in batches):
        raise ConfigError(
            f"store.by and store.scores take `source` or a label that a step adds, and {name!r} is "
            f"none of these documents'{nearest(name, names)}; they have {', '.join(names)}"
        )


def _fraction(name: str) -> float:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _tokenizer(spec: StoreSpec, kept: list[pa.RecordBatch], folder: Path) -> Tokenizer:
    if spec.tokenizer is not None:
        tokenizer = Tokenizer.load(spec.tokenizer)
    else:
        assert spec.vocab_size is not None
        trained_on = (
            text
            for batch in kept
            for text, held in zip(texts_of(batch), heldout_rows(batch, spec.heldout), strict=True)
            if not held
        )
        tokenizer = Tokenizer.train(trained_on, spec.vocab_size)
    tokenizer.save(folder)
    return tokenizer
