"""Curation as a stream: a source, then steps, then kept documents and a reason for each other one.

A step is a function from an iterable of documents to an iterator of what became of them. It sees
documents one by one, so memory is bounded by what a step itself remembers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from stepwell.data.files import new_folder
from stepwell.types import DataError, Document, Dropped

Item = Document | Dropped
Step = Callable[[Iterable[Any]], Iterator[Item]]
Rule = Callable[[str], tuple[str, str] | None]

NUM_EXAMPLES = 3
DETAIL_CHARACTERS = 200
SOURCE = "source"
KEPT, REMOVED, REPORT = "kept.jsonl", "removed.jsonl", "report.json"


@dataclass
class Volume:
    docs: int = 0
    characters: int = 0
    bytes: int = 0

    @property
    def size_text(self) -> str:
        return f"{self.bytes / 1e6:,.2f} MB" if self.bytes >= 1e6 else f"{self.bytes / 1e3:,.1f} kB"

    def add(self, text: str) -> None:
        self.docs += 1
        self.characters += len(text)
        self.bytes += len(text) if text.isascii() else len(text.encode("utf-8"))


@dataclass
class Drops:
    """How many were dropped for each reason, with the first few of each as examples."""

    by_reason: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.by_reason.values())

    def add(self, item: Dropped) -> None:
        self.by_reason[item.reason] = self.by_reason.get(item.reason, 0) + 1
        examples = self.examples.setdefault(item.reason, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append(
                {"id": item.id, "source": item.source, "detail": item.detail[:DETAIL_CHARACTERS]}
            )


@dataclass
class Report:
    """What went in and came out. `read`: records the source gave, readable or not;
    `volume_in`: those that were documents; `steps`: drops by step, the source's own first."""

    read: int = 0
    volume_in: Volume = field(default_factory=Volume)
    kept: Volume = field(default_factory=Volume)
    kept_by_source: dict[str, Volume] = field(default_factory=dict)
    steps: dict[str, Drops] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        return sum(drops.total for drops in self.steps.values())

    @property
    def by_reason(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        for drops in self.steps.values():
            for reason, count in drops.by_reason.items():
                totals[reason] = totals.get(reason, 0) + count
        return totals

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "dropped": self.dropped, "by_reason": self.by_reason}


def drop_if(rule: Rule, sources: Collection[str] | None = None) -> Step:
    """The step that drops what `rule(text)` gives a (reason, detail) for; sources: the only ones
    that it judges (None: all)."""

    def step(docs: Iterable[Item]) -> Iterator[Item]:
        for doc in docs:
            if isinstance(doc, Dropped) or (sources is not None and doc.source not in sources):
                yield doc
                continue
            verdict = rule(doc.text)
            yield doc if verdict is None else Dropped(doc.id, doc.source, *verdict)

    return step


def stream_pipeline(
    source: Iterable[Item],
    steps: Sequence[tuple[str, Step]],
    report: Report,
    removed: TextIO | None = None,
) -> Iterator[Document]:
    """The documents that pass every step, as they come. `report` fills while this is consumed;
    removed: where each dropped document becomes a JSON line."""
    for name in (SOURCE, *(name for name, _ in steps)):
        report.steps[name] = Drops()
    docs = _documents(_counted_in(source, report), SOURCE, report, removed)
    for name, step in steps:
        docs = _documents(step(docs), name, report, removed)
    for doc in docs:
        report.kept.add(doc.text)
        report.kept_by_source.setdefault(doc.source, Volume()).add(doc.text)
        yield doc


def run_pipeline(
    source: Iterable[Item], steps: Sequence[tuple[str, Step]], folder: str | Path
) -> Report:
    """Writes `kept.jsonl` (id, source, text, meta), `removed.jsonl` (id, source, step, reason,
    detail) and `report.json` to a new folder, all of them or nothing.

    steps: (name, step) in order. Raises DataError as the source does, when no document is kept, for
    an existing folder and for a full disk.
    """
    report = Report()
    with new_folder(folder) as temporary:
        with (
            (temporary / KEPT).open("w", encoding="utf-8") as kept,
            (temporary / REMOVED).open("w", encoding="utf-8") as removed,
        ):
            for doc in stream_pipeline(source, steps, report, removed):
                kept.write(_line(asdict(doc)))
        if not report.kept.docs:
            raise DataError(nothing_kept(report, folder))
        (temporary / REPORT).write_text(json.dumps(report.to_json(), indent=1), "utf-8")
    return report


def nothing_kept(report: Report, folder: str | Path) -> str:
    """Why nothing is left: each reason with its count and an example."""
    records = "1 record" if report.read == 1 else f"{report.read:,} records"
    lines = [f"no document is left of {records}, so {folder} was not written"]
    for step, drops in report.steps.items():
        for reason, count in sorted(drops.by_reason.items(), key=lambda pair: -pair[1]):
            first = drops.examples[reason][0]
            detail = f": {first['detail']}" if first["detail"] else ""
            lines.append(f"  dropped {count:>8,}  {step}: {reason}, e.g. {first['id']}{detail}")
    return "\n".join(lines)


def _counted_in(source: Iterable[Item], report: Report) -> Iterator[Item]:
    for item in source:
        report.read += 1
        if isinstance(item, Document):
            report.volume_in.add(item.text)
        yield item


def _documents(
    items: Iterable[Item], step: str, report: Report, removed: TextIO | None
) -> Iterator[Document]:
    drops = report.steps[step]
    for item in items:
        if isinstance(item, Document):
            yield item
            continue
        drops.add(item)
        if removed is not None:
            removed.write(_line({**asdict(item), "step": step}))


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, default=str) + "\n"
