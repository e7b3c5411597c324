"""Rewards for a known answer, compared as a value or as a text, and for a pattern."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

from stepwell.eval.grade import Verifier
from stepwell.types import ConfigError

# Possessive, so that a long run of blanks costs no more than its length.
ANSWER = re.compile(r"answer\s*+(?:(?:is|:|=)\s*+)*+(.+)", re.IGNORECASE)
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")


def exact(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """1.0 where the completion's final answer equals the column `answer`, else 0.0.

    The final answer is what follows the last "answer" in the text, otherwise the last number, or
    the whole text if it has none. Numbers are compared by value ("1,204.0" is "1204"), other
    answers without case, outer punctuation and repeated blanks. None where the answer is None.
    """
    return [
        None if truth is None else float(_same(final_answer(text), str(truth)))
        for text, truth in zip(completions, answer, strict=True)
    ]


def final_answer(text: str) -> str:
    marked = ANSWER.findall(text)
    if marked:
        return marked[-1]
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else text


def _same(given: str, truth: str) -> bool:
    wanted = _number(truth)
    if wanted is None:
        return same_text(given, truth)
    given = given.rpartition("=")[2]
    found = _number(given)
    if found is None:  # words around it, e.g. "42 apples"; several numbers are no answer
        numbers = NUMBER.findall(given)
        found = _number(numbers[0]) if len(numbers) == 1 else None
    return found == wanted


def same_text(given: str, truth: str) -> bool:
    """Without case, outer punctuation and repeated blanks; an empty text is like none."""
    return _normal(given) == _normal(truth) != ""


def _number(text: str) -> Decimal | None:
    text = _normal(text).replace("$", "").strip()
    if not NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


def _normal(text: str) -> str:
    return " ".join(text.split()).strip(" .!?\"'`*").casefold()


def regex(pattern: str) -> Verifier:
    """The verifier `matches` of one pattern. Raises ConfigError for one that cannot be compiled."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{pattern!r} is not a regular expression: {error}") from error
    return partial(matches, pattern=compiled)


def matches(
    prompts: Sequence[str], completions: Sequence[str], pattern: re.Pattern[str], **_: Any
) -> list[float | None]:
    """1.0 where the regular expression is found in the completion (dots match newlines)."""
    return [float(pattern.search(text) is not None) for text in completions]
