"""The values that a refusal names, read back from its words."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from stepwell.config import Run
from stepwell.parallel.remedies import RANKS
from stepwell.parallel.rules import check_run
from stepwell.types import ConfigError

WORDS = {"true": True, "false": False, "none": None}
NAMED = re.compile(r"; the nearest legal values? (?:is|are) (.*)$")


def refusal(run: Run, world: int) -> str:
    with pytest.raises(ConfigError) as error:
        check_run(run, world)
    return str(error.value)


def named(line: str) -> list[dict[str, Any]]:
    """The changes that one line of a refusal names; RANKS stands for the number of processes."""
    found = NAMED.search(line)
    return [_change(part) for part in found[1].split(", or ")] if found else []


def _change(words: str) -> dict[str, Any]:
    change = {}
    for part in words.split(" with "):
        if ranks := re.fullmatch(r"(\d+) ranks", part):
            change[RANKS] = int(ranks[1])
            continue
        key, value = part.split("=", 1)
        change[key] = WORDS[value] if value in WORDS else ast.literal_eval(value)
    return change


def changed(run: Run, world: int, change: dict[str, Any]) -> tuple[Run, int]:
    """The run after one change, parsed again, and its ranks."""
    settings = {key: value for key, value in change.items() if key != RANKS}
    return Run.parse(run.model_dump(exclude_none=True), settings), change.get(RANKS, world)


def check_named(run: Run, world: int) -> list[dict[str, Any]]:
    """All values that the refusal of a run with one fault names; each alone mends it."""
    (line,) = refusal(run, world).splitlines()
    changes = named(line)
    assert changes, line
    for change in changes:
        check_run(*changed(run, world, change))
    return changes
