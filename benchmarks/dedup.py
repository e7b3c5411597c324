"""Fuzzy dedup beside datatrove's MinHash pipeline: speed, recall, justified removals, memory.

    .venv/bin/python -m benchmarks.dedup [--mb 50] [--rounds 3] [--words whitespace]

On real text with planted near-duplicates (`planted.py`; needs `.cache/corpus`, which `stepwell
corpus` makes). Every measurement is a process of its own, on one thread, in CPU seconds; datatrove
runs in its own environment (`setup_peers.sh`), in turns with Stepwell, on the same file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks import planted
from benchmarks.protocol import peak_rss_mb
from benchmarks.workload import CACHE, ROOT, SCRATCH
from stepwell.data.batches import to_batch
from stepwell.data.dedup.fuzzy import FuzzyDedup
from stepwell.data.steps import Shard, read_batches
from stepwell.types import Document

BATCH_DOCS = 1024
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


def batches_of(path: Path) -> Iterator[pa.RecordBatch]:
    docs, first = [], 0
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            docs.append(Document(row["id"], row["text"], "x"))
            if len(docs) == BATCH_DOCS:
                yield to_batch(docs, first)
                first, docs = first + len(docs), []
    if docs:
        yield to_batch(docs, first)


def ours(texts_path: Path, folder: Path) -> dict[str, Any]:
    """In this process: reading JSONL, the step (sketch, decide, apply), writing what stays."""
    step = FuzzyDedup()
    step.sketch(to_batch([Document("0", "Warm up, once, with six words.", "x")], 0))
    shard = Shard(folder / "documents.arrow", folder / "sketch.arrow")
    decision = folder / "decision"
    decision.mkdir()
    begin, sketching = time.process_time(), 0.0
    documents = sketches = None
    with pa.OSFile(str(shard.documents), "wb") as one, pa.OSFile(str(shard.sketch), "wb") as two:
        for batch in batches_of(texts_path):
            start = time.process_time()
            sketch = pa.RecordBatch.from_pydict(dict(step.sketch(batch)))
            sketches = sketches or pa.ipc.new_file(two, sketch.schema)
            sketches.write(sketch)
            sketching += time.process_time() - start
            documents = documents or pa.ipc.new_file(one, batch.schema)
            documents.write(batch)
        assert documents is not None
        assert sketches is not None
        documents.close()
        sketches.close()
    start = time.process_time()
    step.decide([shard], decision)
    deciding = time.process_time() - start
    kept, witness, applying, writer = [], {}, 0.0, None
    with pa.OSFile(str(folder / "kept.arrow"), "wb") as file:
        for batch in read_batches(shard.documents):
            start = time.process_time()
            outcome = step.apply(batch, decision)
            applying += time.process_time() - start
            writer = writer or pa.ipc.new_file(file, outcome.kept.schema)
            writer.write(outcome.kept)
            kept += outcome.kept["id"].to_pylist()
            removed = outcome.removed.select(["id", "witness"]).to_pylist()
            witness |= {row["id"]: row["witness"].removeprefix("x/") for row in removed}
        assert writer is not None
        writer.close()
    return {
        "total_s": time.process_time() - begin,
        "step_s": sketching + deciding + applying,
        "parts_s": [sketching, deciding, applying],
        "peak_mb": peak_rss_mb(),
        "kept": kept,
        "witness": witness,
        "summary": json.loads((decision / "summary.json").read_text("utf-8")),
    }


def run_ours(texts_path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.dedup", "--child", str(texts_path)]
    return _child(command, SCRATCH / "dedup-ours")


def run_theirs(texts_path: Path, words: str) -> dict[str, Any]:
    python = CACHE / "envs" / "datatrove" / "bin" / "python"
    script = ROOT / "benchmarks" / "peers" / "datatrove_dedup.py"
    folder = SCRATCH / "dedup-theirs"
    result = _child([str(python), str(script), str(texts_path)], folder, words)
    return {**result, "total_s": sum(result["seconds"])}


def _child(command: list[str], folder: Path, *more: str) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    out = folder / "out.json"
    done = subprocess.run(
        [*command, str(folder), str(out), *more],
        cwd=ROOT,
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    result = json.loads(out.read_text("utf-8"))
    shutil.rmtree(folder)
    return result


def write_texts(texts: list[str], path: Path) -> float:
    """Returns the megabytes of text."""
    rows = (json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(texts))
    with path.open("w", encoding="utf-8") as file:
        file.writelines(rows)
    return sum(len(text.encode()) for text in texts) / 1e6


def quality(
    kept_ids: list[str], pairs: dict[tuple[int, int], float], num_docs: int
) -> dict[str, float]:
    """recall: of the true pairs, those of which at least one document went. justified: of the
    removed documents, those with a kept one at the threshold."""
    kept = {int(doc_id) for doc_id in kept_ids}
    removed = set(range(num_docs)) - kept
    resolved = sum(not (a in kept and b in kept) for a, b in pairs)
    has_kept = {b for a, b in pairs if a in kept} | {a for a, b in pairs if b in kept}
    return {
        "pairs": len(pairs),
        "recall": resolved / max(len(pairs), 1),
        "removed": len(removed),
        "justified": len(removed & has_kept) / max(len(removed), 1),
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    texts = planted.build(args.mb)
    path = SCRATCH / "dedup.jsonl"
    megabytes = write_texts(texts, path)
    pairs = planted.similar_pairs(texts)
    values: dict[str, Any] = {"docs": len(texts), "mb": megabytes}
    print(f"{len(texts):,} pages, {megabytes:.1f} MB, {len(pairs):,} pairs at J >= .8")
    rounds = [(run_ours(path), run_theirs(path, args.words)) for _ in range(args.rounds)]
    first_ours, first_theirs = rounds[0]
    ratios = [b["total_s"] / a["total_s"] for a, b in rounds]
    mine = statistics.median(a["step_s"] for a, _ in rounds)
    values["ours"] = {
        "step_mb_per_cpu_s": megabytes / mine,
        "total_mb_per_cpu_s": megabytes / statistics.median(a["total_s"] for a, _ in rounds),
        "sketch_decide_apply_s": first_ours["parts_s"],
        "peak_mb": max(a["peak_mb"] for a, _ in rounds),
        **quality(first_ours["kept"], pairs, len(texts)),
        "precision_of_candidates": first_ours["summary"]["precision_of_candidates"],
        "candidates": first_ours["summary"]["num_candidates"],
        "not_compared": first_ours["summary"]["num_not_compared"],
    }
    values["datatrove"] = {
        "words": args.words,
        "total_mb_per_cpu_s": megabytes / statistics.median(b["total_s"] for _, b in rounds),
        "peak_mb": max(b["peak_mb"] for _, b in rounds),
        **quality(first_theirs["kept"], pairs, len(texts)),
    }
    values["ratio"] = [min(ratios), statistics.median(ratios), max(ratios)]
    path.unlink()
    return values


def growth(megabytes: float, factors: tuple[int, ...] = (1, 2, 4, 8)) -> dict[str, Any]:
    """CPU seconds of the step as the corpus grows: more real text, planted alike."""
    rows = {}
    for factor in factors:
        path = SCRATCH / "dedup-growth.jsonl"
        size = write_texts(planted.build(factor * megabytes), path)
        result = run_ours(path)
        rows[f"x{factor}"] = {"mb": size, "step_s": result["step_s"],
                              "peak_mb": result["peak_mb"]}  # fmt: skip
        path.unlink()
    return rows


def crowded(num_pages: int) -> dict[str, Any]:
    """Pages of one template: duplicates of each other (J of .96), or none of them (J of .77)."""
    rows = {}
    for name, share in (("duplicates", 0.02), ("no duplicates", 0.15)):
        for part in (4, 2, 1):
            path = SCRATCH / "dedup-crowded.jsonl"
            size = write_texts(planted.template_pages(num_pages // part, share), path)
            result = run_ours(path)
            rows[f"{name}, {num_pages // part} pages"] = {
                "mb": size, "step_s": result["step_s"], "peak_mb": result["peak_mb"],
                "removed": result["summary"]["num_removed"],
                "compared": result["summary"]["num_compared"],
            }  # fmt: skip
            path.unlink()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dedup", description=__doc__)
    parser.add_argument("--mb", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--words", choices=("whitespace", "default"), default="whitespace")
    parser.add_argument("--only", choices=("compare", "growth", "crowded"))
    parser.add_argument("--growth-mb", type=float, default=12.0, help="the smallest of x1 to x8")
    parser.add_argument("--pages", type=int, default=50_000)
    parser.add_argument("--json", help="where the numbers are written")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        texts, folder, out = map(Path, args.child)
        out.write_text(json.dumps(ours(texts, folder)), "utf-8")
        return
    SCRATCH.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {}
    if args.only in (None, "compare"):
        values["compare"] = compare(args)
        print(json.dumps(values["compare"], indent=1))
    if args.only in (None, "growth"):
        values["growth"] = growth(args.growth_mb)
        print(json.dumps(values["growth"], indent=1))
    if args.only in (None, "crowded"):
        values["crowded"] = crowded(args.pages)
        print(json.dumps(values["crowded"], indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(values, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
