"""Mathematical answers, compared by value (extra `math`: math-verify, which parses LaTeX).

math-verify's own time limits are off: they rest on SIGALRM, which threads cannot have, and on what
sympy lets through. Whoever calls this limits the time from outside (`grader_pool`).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from typing import Any

from stepwell.eval.grade import Verifier
from stepwell.posttrain.verifiers.exact import ALTERNATIVES, ANSWER, MINUS, same_text
from stepwell.types import ConfigError

INLINE = re.compile(r"\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
LONGEST_ANSWER = 1000
GLUE = re.compile(r"[\s{}()\[\],]|\\left|\\right|\\cdot|\\,")
TOWER = re.compile(r"\d+(?:\^\d+)+")
FACTORIAL = re.compile(r"(\d+)!")
MOST_DIGITS, MOST_FACTORIAL = 10_000, 1000


def maths() -> Verifier:
    """The verifier `maths_answers`. Raises ConfigError without its package."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "verifier 'math' needs the package: pip install 'stepwell[math]'"
        ) from error
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)  # that the time limits are off
    return maths_answers


def maths_answers(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """1.0 where the completion's final answer has the value of the column `answer`, else 0.0.

    The final answer is the content of the last `\\boxed{}`, or what follows the last "answer", or
    the last formula, or the last line. Several alternatives ("3 or 4") are no answer. Fractions,
    decimals, percentages, roots, intervals, sets and equations are compared by value; what is no
    formula, as `exact` compares texts. None where the answer is None. Raises ValueError for a known
    answer that cannot be read.
    """
    return [
        None if truth is None else float(_is_right(text, str(truth)))
        for text, truth in zip(completions, answer, strict=True)
    ]


def _is_right(text: str, truth: str) -> bool:
    from math_verify import verify

    text, truth = text.translate(MINUS), (boxed(truth) or truth).translate(MINUS)
    given = final_formula(text)
    if given is None or len(given) > LONGEST_ANSWER:
        return False
    if same_text(given, truth):
        return True
    if not is_bounded(given):
        return False
    gold = _parsed(truth)
    if not gold:
        return False
    try:
        found = _parsed(given)
    except Exception:  # noqa: BLE001 - what the model wrote is no formula
        return False
    if not found:
        return False
    # The gold first: verify is not symmetric.
    return bool(verify(gold, found, timeout_seconds=None, raise_on_error=True))


def is_bounded(formula: str) -> bool:
    """Whether no power of numbers has more than MOST_DIGITS digits, and no factorial is of more
    than MOST_FACTORIAL: what is larger could keep the grader busy beyond its time."""
    flat = GLUE.sub("", formula).replace("**", "^")
    for tower in TOWER.findall(flat):
        *bases, exponent = [int(number[:9]) for number in tower.split("^")]
        for base in reversed(bases):
            # Not the product, for which an exponent may be too long.
            if exponent > MOST_DIGITS / math.log10(max(base, 2)):
                return False
            exponent = base**exponent
    numbers = [int(number[:9]) for number in FACTORIAL.findall(flat)]
    return all(n <= MOST_FACTORIAL for n in numbers) and "!!" not in flat


def final_formula(text: str) -> str | None:
    """The final answer without what surrounds it; None if there is none, or several."""
    inside = boxed(text)
    if inside is not None:
        return inside
    marked = ANSWER.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    if not marked and not lines:
        return None
    last = marked[-1] if marked else _last_place(text, lines)
    formulas = _formulas(last)
    if formulas:
        return formulas[0] if len(formulas) == 1 else None
    last = last.strip().rstrip(".").strip()
    if not last or ALTERNATIVES.search(last):
        return None
    numbers = NUMBER.findall(last)
    # One number with words around it, e.g. "42 apples": more than one is for the parser.
    if len(numbers) == 1 and re.search(r"[^\W\d_]{2,}", last) and "\\" not in last:
        return numbers[0] + ("%" if f"{numbers[0]}%" in last else "")
    return last


def _last_place(text: str, lines: list[str]) -> str:
    return lines[-1] if _formulas(lines[-1]) or not _formulas(text) else f"${_formulas(text)[-1]}$"


def _formulas(text: str) -> list[str]:
    return ["".join(groups).strip() for groups in INLINE.findall(text)]


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed{}`, its braces balanced."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin + 1 : place].strip()
    return None


def _parsed(formula: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    formula = formula.strip().strip("$").strip()
    plain = NUMBER.fullmatch(formula.rstrip("%").strip())
    config = ExprExtractionConfig() if plain else LatexExtractionConfig()
    text = formula if plain else f"${formula}$"
    return parse(text, [config], parsing_timeout=0, raise_on_error=True)
