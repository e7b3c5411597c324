"""Cells of a table of measured runs: text, empty where a source prints nothing. No torch.

What is read here is a number, a word or a flag of one cell; DataError says what the cell has and
what it may have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from stepwell.types import DataError, nearest

Cells = Mapping[str, str]
# As people and data frames write them.
FLAGS = {"true": True, "yes": True, "1": True, "1.0": True} | {
    "false": False, "no": False, "0": False, "0.0": False,
}  # fmt: skip


def number(cells: Cells, name: str) -> float:
    text = cells.get(name, "")
    if not text:
        raise DataError(f"{name} is not printed")
    try:
        value = float(text)
    except ValueError as error:
        raise DataError(f"{name}={text!r} is not a number") from error
    if not math.isfinite(value):
        raise DataError(f"{name}={text!r} is not a finite number")
    if value <= 0:
        raise DataError(f"{name}={text!r} must be above 0")
    return value


def optional(cells: Cells, name: str) -> float | None:
    return number(cells, name) if cells.get(name) else None


def count(cells: Cells, name: str) -> int:
    value = number(cells, name)
    if value != int(value):
        raise DataError(f"{name}={cells[name]!r} is not a whole number")
    return int(value)


def optional_count(cells: Cells, name: str) -> int | None:
    return count(cells, name) if cells.get(name) else None


def choice(cells: Cells, name: str, known: Iterable[str]) -> str:
    """The known word, however it is capitalised."""
    text, words = cells.get(name, ""), {word.casefold(): word for word in known}
    if not text:
        raise DataError(f"no {name} printed")
    if text.casefold() not in words:
        legal = ", ".join(words.values())
        raise DataError(f"{name}={text!r} is none of {legal}{nearest(text, words.values())}")
    return words[text.casefold()]


def optional_choice(cells: Cells, name: str, known: Iterable[str]) -> str | None:
    return choice(cells, name, known) if cells.get(name) else None


def optional_flag(cells: Cells, name: str) -> bool | None:
    text = cells.get(name, "")
    if text and text.casefold() not in FLAGS:
        raise DataError(f"{name}={text!r} is neither true nor false")
    return FLAGS[text.casefold()] if text else None


def optional_share(cells: Cells, name: str) -> float | None:
    """Above 0, at most 1."""
    value = optional(cells, name)
    if value is not None and value > 1:
        raise DataError(f"{name}={cells[name]!r} must be at most 1")
    return value


def optional_words(cells: Cells, name: str, known: Iterable[str]) -> tuple[str, ...] | None:
    """Several, as "optimizer+activations" or with spaces; `none` alone is no word."""
    if not cells.get(name):
        return None
    words = [word for word in re.split(r"[\s+,;]+", cells[name]) if word]
    if [word.casefold() for word in words] == ["none"]:
        return ()
    return tuple(choice({name: word}, name, known) for word in words)
