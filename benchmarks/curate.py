"""A whole curation: what its work costs, how it scales from one worker to two, and tokenising
beside the tokenizers library alone.

    python -m benchmarks.curate [--corpus .cache/corpus] [--workers 1 2] [--json results.json]

The corpus comes from `stepwell corpus`. Wall-clock times mean something on an idle machine only;
CPU seconds and the ratio of tokenising hold under load too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.workload import CACHE

RECIPE = "curate-mixed"
ROUNDS = 3


def whole(corpus: Path, workers: list[int]) -> list[dict[str, Any]]:
    """The shipped recipe, by the command line."""
    rows = []
    with TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        (data / "corpus").symlink_to(corpus.absolute())
        command = [sys.executable, "-m", "stepwell"]
        index = ["decontam-index", "data/corpus/evals", "--out", str(data / "decontam")]
        subprocess.run([*command, *index], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for number in workers:
            out = f"out{number}"
            words = ["curate", RECIPE, "--out", out, "--workers", str(number)]
            before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run([*command, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            wall_s = time.perf_counter() - begin
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            tally = json.loads((Path(folder) / out / "curation.json").read_text())["tally"]
            read_bytes = sum(size for _, size in tally["steps"]["read"]["in"].values())
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            rows.append(
                {
                    "workers": number, "wall_s": wall_s, "cpu_s": cpu_s, "work": tally["cpu"],
                    "text_mb": read_bytes / 1e6, "mb_per_cpu_s": read_bytes / 1e6 / cpu_s,
                }
            )  # fmt: skip
    return rows


def tokenising(corpus: Path) -> dict[str, float]:
    """CPU seconds of the same documents: encoded by the library, and written as token files."""
    # Read when the library encodes: one core each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from stepwell.curate.plan import write_json
    from stepwell.curate.recipe import StoreSpec
    from stepwell.curate.writing import SCORES, TOKENIZER, write_tokens
    from stepwell.data.batches import to_batch
    from stepwell.data.steps import write_table
    from stepwell.tokenizer import Tokenizer
    from stepwell.types import Document

    texts = [path.read_text() for path in sorted((corpus / "books").rglob("*.txt"))[:200]]
    docs = [Document(str(i), text, "books") for i, text in enumerate(texts)]
    alone, ours = [], []
    with TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = Tokenizer.train(texts, 8192)
        tokenizer.save(folder / TOKENIZER)
        write_json(folder / SCORES, {"lowest": 0.0})
        write_table(to_batch(docs, 0), folder / "documents-00000.arrow")
        import tokenizers

        library = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER / "tokenizer.json"))
        library.encode_special_tokens = True
        for _ in range(ROUNDS):
            begin = time.process_time()
            library.encode_batch_fast(texts, add_special_tokens=False)
            alone.append(time.process_time() - begin)
            begin = time.process_time()
            spec = StoreSpec(vocab_size=8192)
            write_tokens(spec, folder / "documents-00000.arrow", folder, folder)
            ours.append(time.process_time() - begin)
    size = sum(len(text.encode()) for text in texts) / 1e6
    return {
        "text_mb": size,
        "library_s": statistics.median(alone),
        "ours_s": statistics.median(ours),
        "ratio": statistics.median(a / b for a, b in zip(alone, ours, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=CACHE.parent / "corpus")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens = tokenising(options.corpus)
    print(
        f"tokenising {tokens['text_mb']:.1f} MB: the library alone {tokens['library_s']:.2f} s, "
        f"token files {tokens['ours_s']:.2f} s of one core: {tokens['ratio']:.2f} of its speed"
    )
    rows = whole(options.corpus, options.workers)
    for row in rows:
        print(
            f"{RECIPE}, {row['workers']} workers: {row['wall_s']:.0f} s, {row['cpu_s']:.0f} CPU s, "
            f"{row['mb_per_cpu_s']:.2f} MB of text per CPU second"
        )
        for work, cpu_s in sorted(row["work"].items(), key=lambda pair: -pair[1]):
            print(f"  {work:<28}{cpu_s:8.2f} s{cpu_s / row['cpu_s']:8.1%}")
    if options.json:
        result = {"tokenising": tokens, "whole": rows, "cores": len(os.sched_getaffinity(0))}
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
