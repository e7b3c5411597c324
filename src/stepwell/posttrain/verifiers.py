"""Rewards that are computed from a text and a known answer.

What a verifier is, and how a failing one is kept from freezing a run: `eval.grade`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

from stepwell.eval.grade import Verifier
from stepwell.types import ConfigError, nearest

ANSWER = re.compile(r"answer\s*(?:is|:|=)*\s*(.+)", re.IGNORECASE)
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
# Sets of reasoning-gym whose scorers give a wrong answer nothing (others give junk some credit).
GYM_SETS = (
    "base_conversion",
    "basic_arithmetic",
    "caesar_cipher",
    "calendar_arithmetic",
    "chain_sum",
    "countdown",
    "gcd",
    "gsm_symbolic",
    "lcm",
    "letter_counting",
    "number_sorting",
    "spell_backward",
    "word_sorting",
)
SOLVED = 0.99


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
        return _normal(given) == _normal(truth)
    given = given.rpartition("=")[2]
    found = _number(given)
    if found is None:  # words around it, e.g. "42 apples"; several numbers are no answer
        numbers = NUMBER.findall(given)
        found = _number(numbers[0]) if len(numbers) == 1 else None
    return found == wanted


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


def matches(
    prompts: Sequence[str], completions: Sequence[str], pattern: str, **_: Any
) -> list[float | None]:
    """1.0 where the regular expression is found in the completion (dots match newlines)."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{pattern!r} is not a regular expression: {error}") from error
    return [float(compiled.search(text) is not None) for text in completions]


def gym(name: str) -> Verifier:
    """The scorer of a reasoning-gym set (extra `reasoning-gym`), binarised at 0.99; it needs the
    column `entry`, the set's own row. The text is cut to its final answer first.

    Raises ConfigError for a set that is not among GYM_SETS, or when the package is missing.
    """
    score = _gym_dataset(name, size=1, seed=0).score_answer

    def verify(prompts: Sequence[str], completions: Sequence[str], entry: Sequence[dict], **_: Any):
        rewards: list[float | None] = []
        for text, row in zip(completions, entry, strict=True):
            marked = ANSWER.findall(text)
            rewards.append(float(score((marked[-1] if marked else text).strip(), row) >= SOLVED))
        return rewards

    return verify


def gym_rows(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    """`count` problems of a reasoning-gym set: prompt, answer and the set's own row `entry`."""
    return [
        {"prompt": row["question"], "answer": row["answer"], "entry": row}
        for row in _gym_dataset(name, size=count, seed=seed)
    ]


def _gym_dataset(name: str, size: int, seed: int) -> Any:
    if name not in GYM_SETS:
        raise ConfigError(
            f"reasoning-gym set {name!r} is not on the list of those whose scorer gives no credit "
            f"for junk{nearest(name, GYM_SETS)}; listed: {', '.join(GYM_SETS)}"
        )
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            "verifier 'gym:...' needs the package: pip install 'stepwell[reasoning-gym]'"
        ) from error
    return reasoning_gym.create_dataset(name, size=size, seed=seed)


def find_verifier(name: str) -> Verifier:
    """`exact`, `regex:PATTERN` or `gym:SET`. Raises ConfigError for another name."""
    kind, _, detail = name.partition(":")
    if kind == "exact" and not detail:
        return exact
    if kind == "regex" and detail:
        verifier = partial(matches, pattern=detail)
        verifier([], [])
        return verifier
    if kind == "gym" and detail:
        return gym(detail)
    kinds = ("exact", "regex:PATTERN", "gym:SET")
    raise ConfigError(f"unknown verifier {name!r}{nearest(name, kinds)}; known: {', '.join(kinds)}")
