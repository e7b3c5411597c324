"""Programs that a completion holds: their text, and what they print (in the sandbox)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepwell.eval.grade import Verdict
from stepwell.posttrain.sandbox.pool import Outcome, Program

FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
PYTHON = ("", "python", "py", "python3")


@dataclass(frozen=True)
class Case:
    stdin: str
    stdout: str


def code_block(text: str) -> str | None:
    """The last fenced block of Python; None where there is none."""
    blocks = [body for language, body in FENCE.findall(text) if language.lower() in PYTHON]
    return blocks[-1] if blocks else None


def cases_of(row: Mapping[str, Any]) -> list[Case] | None:
    """Of the column `cases`, a list of tables with `stdin` (or `input`) and `stdout` (or `output`);
    or of `answer`, what a program prints, with `stdin` if the row has it. None: not applicable.

    Raises ValueError for cases of another form, and for none at all.
    """
    if row.get("cases") is None:
        if row.get("answer") is None:
            return None
        return [Case(str(row.get("stdin") or ""), str(row["answer"]))]
    cases = row["cases"]
    if not isinstance(cases, list) or not cases or not all(isinstance(c, dict) for c in cases):
        raise ValueError("`cases` must be a list of tables, at least one")
    found = []
    for case in cases:
        expected = case.get("stdout", case.get("output"))
        if expected is None:
            raise ValueError(f"a case has `stdin` and `stdout`, this one has {sorted(case)}")
        found.append(Case(str(case.get("stdin", case.get("input", ""))), str(expected)))
    return found


def programs(text: str, cases: Sequence[Case]) -> list[Program]:
    """One a case, of the completion's last block of code; none where it has no code."""
    code = code_block(text)
    return [] if code is None else [Program(code, stdin=case.stdin) for case in cases]


def judged(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> Verdict:
    """1.0 if every program ended well and printed what was expected, without regard to blanks at
    the ends of lines and of the text; otherwise 0.0, with how the first one failed."""
    if not outcomes:
        return Verdict(0.0, detail="wrong: no block of code")
    for number, (case, outcome) in enumerate(zip(cases, outcomes, strict=True)):
        if outcome.ended != "ok":
            return Verdict(0.0, detail=f"{outcome.ended}: case {number}: {outcome.detail}")
        if _lines(outcome.stdout) != _lines(case.stdout):
            return Verdict(0.0, detail=f"wrong: case {number} printed something else")
    return Verdict(1.0)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").rstrip().splitlines()]
