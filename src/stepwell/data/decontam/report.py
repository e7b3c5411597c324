"""What leaked of each benchmark, and where: the table that a datasheet shows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stepwell.data.batches import name_of
from stepwell.data.decontam.index import Index
from stepwell.data.decontam.rules import RULES, RuleName
from stepwell.data.decontam.scan import PARTS, Hit, find_hits
from stepwell.data.decontam.step import LABEL
from stepwell.data.files import clean_disk_errors
from stepwell.data.word_hashes import word_spans
from stepwell.files import write_text

FORMAT = "stepwell contamination report"
VERSION = 2
EXCERPT_WORDS = 30
DOCUMENTS_AT_ONCE = 64


@dataclass
class _Leak:
    """Of one item, over all documents."""

    part: str
    share: float
    documents: Counter[str] = field(default_factory=Counter)


def contamination_report(
    removed: Iterable[pa.RecordBatch],
    index: Index,
    kept: Iterable[pa.RecordBatch] = (),
    rule: RuleName = "tulu3",
    min_share: float | None = None,
    num_examples: int = 5,
) -> dict[str, Any]:
    """removed: batches of what left (those of other steps are passed over); kept: batches of what
    stayed, with the label `contaminated`. rule, min_share: as in the step. The documents are
    searched again, so that every item in them is listed.

    {"benchmarks": [{"name", "num_items", "leaked": {part: items}, "share": of its items whose
    question leaked, "items": {id: {"number", "part", "share", "removed", "kept": documents}},
    "sources": {source: documents}, "examples": [...], "keys", "question_keys"}], "documents":
    {"removed", "kept"}, ...}. An item's number is its place in the benchmark and in the keys, which
    are those of `benchmarks.Keys` one after another: by these an evaluation knows it.
    """
    leaks: dict[int, _Leak] = {}
    benchmarks = index.manifest["benchmarks"]
    sources: list[Counter[str]] = [Counter() for _ in benchmarks]
    examples: list[list[dict[str, Any]]] = [[] for _ in benchmarks]
    totals: Counter[str] = Counter()
    for fate, rows in _contaminated(removed, kept):
        texts = [row["text"] for row in rows]
        for row, hits in zip(rows, find_hits(texts, index, RULES[rule], min_share), strict=True):
            totals[fate] += bool(hits)
            for b in {int(index.benchmarks_I[hit.item]) for hit in hits}:
                sources[b][row["source"]] += 1
            for hit in hits:
                _note(leaks, hit, fate)
                shown = examples[index.benchmarks_I[hit.item]]
                if len(shown) < num_examples:
                    shown.append(_example(index, row, hit, fate))
    return {
        "format": FORMAT,
        "version": VERSION,
        "rule": {"name": rule, "min_share": _min_share(rule, min_share)},
        "documents": {fate: totals[fate] for fate in ("removed", "kept")},
        "benchmarks": [
            _benchmark(index, b, leaks, sources[b], examples[b]) for b in range(len(benchmarks))
        ],
    }


def _contaminated(
    removed: Iterable[pa.RecordBatch], kept: Iterable[pa.RecordBatch]
) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    """(fate, rows) of the contaminated documents, a few at a time."""
    gone = (
        row
        for batch in removed
        for row in batch.to_pylist()
        if row["reason"].startswith("contaminated_")
    )
    stays = (
        row
        for batch in kept
        if LABEL in batch.schema.names
        for row in batch.filter(batch[LABEL].is_valid()).to_pylist()
    )
    for fate, rows in (("removed", gone), ("kept", stays)):
        rows = iter(rows)
        while some := list(islice(rows, DOCUMENTS_AT_ONCE)):
            yield fate, some


def _note(leaks: dict[int, _Leak], hit: Hit, fate: str) -> None:
    leak = leaks.setdefault(hit.item, _Leak(hit.part, hit.share))
    leak.documents[fate] += 1
    if (PARTS.index(hit.part), -hit.share) < (PARTS.index(leak.part), -leak.share):
        leak.part, leak.share = hit.part, hit.share


def _example(index: Index, row: Mapping[str, Any], hit: Hit, fate: str) -> dict[str, Any]:
    return {
        "item": index.item_ids[hit.item],
        "document": name_of(row["source"], row["id"]),
        "fate": fate,
        "part": hit.part,
        "share": round(hit.share, 4),
        "excerpt": excerpt(row["text"], hit.word),
    }


def excerpt(text: str, first_word: int, num_words: int = EXCERPT_WORDS) -> str:
    """The stretch of a text that holds these words (counted as `word_hashes` does), on one line."""
    spans = list(islice(word_spans(text), first_word, first_word + num_words))
    return " ".join(text[spans[0][0] : spans[-1][1]].split()) if spans else ""


def _benchmark(
    index: Index,
    number: int,
    leaks: Mapping[int, _Leak],
    sources: Counter[str],
    examples: list[dict[str, Any]],
) -> dict[str, Any]:
    row = index.manifest["benchmarks"][number]
    mine = {item: leak for item, leak in leaks.items() if index.benchmarks_I[item] == number}
    parts = Counter(leak.part for leak in mine.values())
    questions = parts["question"] + parts["question+answer"]
    numbers = np.flatnonzero(index.benchmarks_I == number).tolist()
    keys = [index.item_keys[item] for item in numbers]
    return {
        **{key: row[key] for key in ("name", "sha256", "num_items", "num_too_short")},
        "leaked": {part: parts[part] for part in PARTS},
        "share": questions / row["num_items"],
        "items": {
            index.item_ids[item]: {
                "number": item - numbers[0],
                "part": leak.part,
                "share": round(leak.share, 4),
                "removed": leak.documents["removed"],
                "kept": leak.documents["kept"],
            }
            for item, leak in sorted(mine.items())
        },
        "sources": dict(sources.most_common()),
        "examples": examples,
        "keys": "".join(key.whole for key in keys),
        "question_keys": "".join(key.question for key in keys),
    }


def _min_share(rule: RuleName, min_share: float | None) -> float:
    return RULES[rule].min_share if min_share is None else min_share


def write_report(report: Mapping[str, Any], path: str | Path) -> None:
    """As JSON, whole or not at all."""
    path = Path(path)
    with clean_disk_errors(path):
        write_text(path, json.dumps(report, ensure_ascii=False, indent=1))


def report_text(report: Mapping[str, Any]) -> str:
    """The table for a terminal: a line a benchmark, then the examples of those that leaked."""
    documents = report["documents"]
    lines = [
        f"contamination by rule {report['rule']['name']}: {documents['removed']:,} documents "
        f"removed, {documents['kept']:,} kept with a label",
        f"{'benchmark':<24}{'items':>8}{'q+answer':>10}{'question':>10}{'answer':>8}"
        f"{'passage':>9}{'leaked':>8}  where",
    ]
    for row in report["benchmarks"]:
        leaked = row["leaked"]
        where = ", ".join(f"{source} {n}" for source, n in list(row["sources"].items())[:3])
        lines.append(
            f"{row['name']:<24}{row['num_items']:>8,}{leaked['question+answer']:>10,}"
            f"{leaked['question']:>10,}{leaked['answer']:>8,}{leaked['passage']:>9,}"
            f"{row['share']:>8.1%}  {where}".rstrip()
        )
    for row in report["benchmarks"]:
        for example in row["examples"]:
            lines.append(
                f"  {row['name']}/{example['item']} ({example['part']}, {example['share']:.0%}) in "
                f"{example['document']} ({example['fate']}): {example['excerpt']}"
            )
    return "\n".join(lines)
