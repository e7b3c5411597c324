"""Rewards for a known answer, compared as a value or as a text, and for a pattern."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from stepwell.eval.grade import Verifier
from stepwell.types import ConfigError

# Possessive, so that a long run of blanks costs no more than its length.
ANSWER = re.compile(r"answer\s*+(?:(?:is|:|=)\s*+)*+(.+)", re.IGNORECASE)
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?"
NUMBER = re.compile(rf"([-+]?)\s*\$?({DIGITS})(?:\s*/\s*({DIGITS}))?")
# 5kg, 3m; not 3x, which is an expression.
UNIT = re.compile(rf"([-+]?\$?{DIGITS})(?:[^\W\d_]{{2,}}|[ghms])")
ALTERNATIVES = re.compile(r"\bor\b|;|\bmaybe\b|\beither\b", re.IGNORECASE)
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
TAG = re.compile(r"</?\w+>")
OPERATORS = tuple("+-*/^\u00d7\u00f7\u00b7")
AROUND = " ,!?;\"'`*()[]<>$\u20ac\u00a3%\u00b0\\"
# U+2212, and its small and its wide form.
MINUS = str.maketrans("\u2212\ufe63\uff0d", "---")
LONGEST_NUMBER = 1000


def exact(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """1.0 where the completion's final answer equals the column `answer`, else 0.0.

    The final answer is what follows the last "answer" in the text, otherwise the last number, or
    the whole text if it has none. Numbers are compared by value ("1,204.0" is "1204", ".5" is
    "1/2", "1e3" is "1000"): what follows the last "=", alone or with words or a unit around it. A
    number that is part of an expression ("5-3", "10^3") is not its value, and several numbers or
    alternatives ("5 or 6") are no answer. Other answers are compared without case, outer
    punctuation and repeated blanks. None where the answer is None.
    """
    return [
        None if truth is None else float(_same(text, str(truth)))
        for text, truth in zip(completions, answer, strict=True)
    ]


def _same(text: str, truth: str) -> bool:
    marked = ANSWER.findall(text)
    given, wanted = marked[-1] if marked else text, _number(truth)
    if wanted is None:
        return same_text(given if marked else _last_number(text) or text, truth)
    if marked and ALTERNATIVES.search(given):
        return False
    given = _plain(given)
    if marked:
        given = given.rpartition("=")[2]
        return wanted in (_number(given), _among_words(given.split(), only=True))
    return _among_words(given.replace("=", " = ").split(), only=False) == wanted


def _last_number(text: str) -> str | None:
    return next((w for w in reversed(_plain(text).split()) if _number(w) is not None), None)


def _plain(text: str) -> str:
    """Without tags and boxes; what follows a colon is a word of its own."""
    return TAG.sub(" ", BOXED.sub(r" \1 ", text)).translate(MINUS).replace(":", " ")


def _among_words(words: Sequence[str], only: bool) -> Fraction | None:
    """The last word with a digit, if it is a number and no operator stands beside it. only: there
    must be no other word with one."""
    places = [i for i, word in enumerate(words) if any(c.isdigit() for c in word)]
    if not places or (only and len(places) > 1):
        return None
    last = places[-1]
    before, after = words[max(0, last - 1) : last], words[last + 1 : last + 2]
    if any(w.endswith(OPERATORS) and w.strip("*") for w in before):  # stars alone are emphasis
        return None
    if any(w.startswith(OPERATORS) and w.strip("*") for w in after):
        return None
    word = words[last].strip(AROUND).rstrip(".").strip(AROUND)
    unit = UNIT.fullmatch(word[:LONGEST_NUMBER])
    return _number(unit[1] if unit and _number(word) is None else word)


def _number(text: str) -> Fraction | None:
    """Of a whole text: a decimal number, or a fraction of two."""
    found = NUMBER.fullmatch(_normal(text).rstrip("$").strip()[: LONGEST_NUMBER + 1])
    if found is None or found.end() > LONGEST_NUMBER:
        return None
    sign, *parts = found.groups()
    values = [Fraction(Decimal(part.replace(",", ""))) for part in parts if part is not None]
    if len(values) == 2 and values[1] == 0:
        return None
    value = values[0] / values[1] if len(values) == 2 else values[0]
    return -value if sign == "-" else value


def same_text(given: str, truth: str) -> bool:
    """Without case, outer punctuation and repeated blanks; an empty text is like none."""
    return _normal(given) == _normal(truth) != ""


def _normal(text: str) -> str:
    whole = " ".join(text.translate(MINUS).split()).strip(" !?\"'`*").rstrip(" .!?\"'`*").casefold()
    bare = whole.lstrip(" .!?\"'`*")
    return f".{bare}" if bare[:1].isdigit() and whole.endswith(f".{bare}") else bare


def regex(pattern: str) -> Verifier:
    """1.0 where the regular expression is found in the completion (dots match newlines).

    Raises ConfigError for one that cannot be compiled."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{pattern!r} is not a regular expression: {error}") from error

    # No parameter of a verifier, because a row may have a column of any name.
    def matches(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float | None]:
        return [float(compiled.search(text) is not None) for text in completions]

    return matches
