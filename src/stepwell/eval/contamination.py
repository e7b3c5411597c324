"""Scores of the items that training data held and of those it didn't, side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepwell.data.decontam.benchmarks import (
    KEY_CHARACTERS,
    Keys,
    item_ids,
    keys_of,
    make_item,
)
from stepwell.data.decontam.report import FORMAT, VERSION
from stepwell.data.decontam.step import REMOVING
from stepwell.data.sources.rows import Record, records
from stepwell.eval import score
from stepwell.types import DataError

On = Literal["question", "question+answer", "any"]
Where = Literal["all", "kept"]
REPORT_NAME = "contamination.json"


@dataclass(frozen=True)
class Known:
    """Which items of a report those of an evaluation are: `places`, by their ids in the evaluated
    file, as (benchmark, number of the item). names: of these benchmarks."""

    places: Mapping[str, tuple[int, int]]
    names: tuple[str, ...]


def keys_of_rows(rows: Sequence[Record]) -> dict[str, Keys]:
    """By the ids that an evaluation gives them; without rows that have no question."""
    items = (
        make_item(item_id, row.values) for item_id, row in zip(item_ids(rows)[0], rows, strict=True)
    )
    return {item.id: keys_of(item) for item in items if item is not None}


def keys_of_file(path: str | Path) -> dict[str, Keys]:
    return keys_of_rows([row for row in records(path) if isinstance(row, Record)])


def read_contamination(path: str | Path) -> dict[str, Any]:
    """A `contamination.json`, or the one in a curated folder. Raises DataError for anything
    else."""
    path = Path(path)
    file = path / REPORT_NAME if path.is_dir() else path
    try:
        report = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {file}: {error}; give a {REPORT_NAME}, or the folder of a curation with "
            "the step `decontaminate`"
        ) from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise DataError(f"{file} is no contamination report, which a step `decontaminate` makes")
    if report.get("version") != VERSION:
        raise DataError(
            f"{file} is of version {report.get('version')!r}, but this Stepwell reads {VERSION}"
        )
    return report


def find_items(report: Mapping[str, Any], wanted: Mapping[str, Keys], name: str) -> Known:
    """The items of the report that have the same text: question and choices, else the question
    where a benchmark asks it once. Raises DataError where no item of `wanted` is known."""
    whole: dict[str, tuple[int, int]] = {}
    asked: dict[str, tuple[int, int]] = {}
    for b, row in enumerate(report["benchmarks"]):
        for number, key in enumerate(_split_keys(row["keys"])):
            whole.setdefault(key, (b, number))
        questions = _split_keys(row["question_keys"])
        times = Counter(questions)
        for number, key in enumerate(questions):
            if times[key] == 1:
                asked.setdefault(key, (b, number))
    found = {
        item: place
        for item, keys in wanted.items()
        if (place := whole.get(keys.whole, asked.get(keys.question))) is not None
    }
    if not found:
        names = ", ".join(row["name"] for row in report["benchmarks"])
        raise DataError(
            f"the contamination report knows none of the {len(wanted)} items of {name}; it has "
            f"{names}. Make the index from a file with these questions (`stepwell decontam-index`) "
            "and curate anew"
        )
    benchmarks = dict.fromkeys(b for b, _ in sorted(found.values()))
    return Known(found, tuple(report["benchmarks"][b]["name"] for b in benchmarks))


def _split_keys(keys: str) -> list[str]:
    return [keys[i : i + KEY_CHARACTERS] for i in range(0, len(keys), KEY_CHARACTERS)]


def dirty_items(
    report: Mapping[str, Any], known: Known, on: On = "question", where: Where = "all"
) -> set[str]:
    """The ids of known items of which `on` was found: in any document, or (`kept`) only in
    documents that stayed in the training data."""
    dirty = {
        (b, leak["number"])
        for b, row in enumerate(report["benchmarks"])
        for leak in row["items"].values()
        if leak["part"] in REMOVING[on] and (where == "all" or leak["kept"])
    }
    return {item for item, place in known.places.items() if place in dirty}


def split_scores(
    values: Sequence[float | None],
    ids: Sequence[str],
    known: Collection[str],
    dirty: Collection[str],
) -> dict[str, dict[str, Any]]:
    """{"all" | "clean" | "dirty" | "unknown": {"accuracy", "interval", "items"}}; an item without a
    value is in none, one that the report doesn't know is neither clean nor dirty, and a part
    without items has no accuracy."""
    scored = [(v, i) for v, i in zip(values, ids, strict=True) if v is not None]
    return {
        "all": _summary([v for v, _ in scored]),
        "clean": _summary([v for v, i in scored if i in known and i not in dirty]),
        "dirty": _summary([v for v, i in scored if i in dirty]),
        "unknown": _summary([v for v, i in scored if i not in known]),
    }


def _summary(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {"accuracy": None, "interval": None, "items": 0}
    return {
        "accuracy": score.accuracy(values),
        "interval": score.bootstrap_interval(values),
        "items": len(values),
    }
