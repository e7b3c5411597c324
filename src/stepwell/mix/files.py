"""What the parts of `mix` keep in a folder: the plan it was begun with, and lines of results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from stepwell.files import write_text
from stepwell.types import ConfigError, DataError

Line = TypeVar("Line")


def check_plan(path: Path, plan: dict[str, Any], what: str) -> None:
    """Writes the plan, or compares it with the one that is there. Raises ConfigError naming what
    differs: results of two plans must not be mixed."""
    plan = json.loads(json.dumps(plan))
    if not path.is_file():
        write_text(path, json.dumps(plan, indent=1) + "\n")
        return
    before = read_json(path)
    for key in plan:
        if before.get(key) != plan[key]:
            raise ConfigError(
                f"{what} has another {_difference(before.get(key), plan[key], key)}; go on with "
                "what it was begun with, or choose another --out"
            )


def _difference(before: Any, now: Any, key: str) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in [*now, *before]:
            if before.get(name) != now.get(name):
                return _difference(before.get(name), now.get(name), f"{key}.{name}")
    return f"{key} ({before!r}, now {now!r})"


def read_json(path: Path) -> dict[str, Any]:
    """Raises DataError for a file that is damaged."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DataError(
            f"{path} is damaged: {error}; restore it, or begin anew elsewhere"
        ) from error
    if not isinstance(found, dict):
        raise DataError(
            f"{path} is damaged: it holds no object; restore it, or begin anew elsewhere"
        )
    return found


def read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """A value a line. Raises DataError, naming the line, for a file that is damaged."""
    found = []
    try:
        with path.open(encoding="utf-8") as file:
            lines = list(file)
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            value = kind(**json.loads(line))
            finite = all(map(math.isfinite, vars(value)["losses"].values()))
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"line {number} of {path} is damaged ({error}); remove it, and the same command "
                "makes its run again"
            ) from error
        if not finite:
            raise DataError(
                f"line {number} of {path} has a loss that is not finite; remove it, and look at "
                "the run's log"
            )
        found.append(value)
    return found
