"""Scores of the items that training data held and of those it didn't, side by side."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepwell.data.decontam.benchmarks import file_sha256, item_ids
from stepwell.data.decontam.report import FORMAT, VERSION
from stepwell.data.decontam.step import REMOVING
from stepwell.data.sources.rows import Record, records
from stepwell.eval import score
from stepwell.types import DataError

On = Literal["question", "question+answer", "any"]
Where = Literal["all", "kept"]
REPORT_NAME = "contamination.json"


@dataclass(frozen=True)
class Identity:
    """Which items a file holds. own_ids: they are the rows' own, so another file of this name may
    hold the same ones."""

    name: str
    sha256: str
    own_ids: bool


def identity_of(path: str | Path) -> Identity:
    rows = [row for row in records(path) if isinstance(row, Record)]
    return Identity(Path(path).name.split(".")[0], file_sha256(path), item_ids(rows)[1])


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


def find_benchmark(report: Mapping[str, Any], wanted: Identity) -> Mapping[str, Any]:
    """The benchmark of the same file, else of the same name with ids of its rows' own. Raises
    DataError where there is none."""
    rows = report["benchmarks"]
    same = [row for row in rows if row["sha256"] == wanted.sha256]
    same += [
        row for row in rows if row["own_ids"] and wanted.own_ids and row["name"] == wanted.name
    ]
    if not same:
        names = ", ".join(row["name"] for row in rows)
        raise DataError(
            f"the contamination report has no benchmark with the items of {wanted.name}; it has "
            f"{names}. Build the index from the file that is evaluated, or give its rows ids"
        )
    return same[0]


def dirty_items(
    benchmark: Mapping[str, Any], on: On = "question", where: Where = "all"
) -> set[str]:
    """The ids of items of which `on` was found: in any document, or (`kept`) only in documents that
    stayed in the training data."""
    return {
        item
        for item, leak in benchmark["items"].items()
        if leak["part"] in REMOVING[on] and (where == "all" or leak["kept"])
    }


def split_scores(
    values: Sequence[float | None], ids: Sequence[str], dirty: Collection[str]
) -> dict[str, dict[str, Any]]:
    """{"all" | "clean" | "dirty": {"accuracy", "interval", "items"}}; an item without a value is in
    none, and a part without items has no accuracy."""
    scored = [(v, i in dirty) for v, i in zip(values, ids, strict=True) if v is not None]
    return {
        "all": _summary([v for v, _ in scored]),
        "clean": _summary([v for v, is_dirty in scored if not is_dirty]),
        "dirty": _summary([v for v, is_dirty in scored if is_dirty]),
    }


def _summary(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {"accuracy": None, "interval": None, "items": 0}
    return {
        "accuracy": score.accuracy(values),
        "interval": score.bootstrap_interval(values),
        "items": len(values),
    }
