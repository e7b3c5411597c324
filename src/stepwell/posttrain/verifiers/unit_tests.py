"""Unit tests of a row, as of HumanEval or MBPP, on the code of a completion (in the sandbox)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stepwell.eval.grade import Verdict
from stepwell.posttrain.sandbox.pool import Outcome, Program
from stepwell.posttrain.verifiers.code import code_block


def tests_of(row: Mapping[str, Any]) -> str | None:
    """Of the column `tests` (or `test`, or `test_list`): a text, or a list of them. None: not
    applicable. Raises ValueError for another form and for no tests at all."""
    value = next((row[k] for k in ("tests", "test", "test_list") if row.get(k) is not None), None)
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        value = "\n".join(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError("`tests` must be a text or a list of texts, and not empty")
    return value


def program(prompt: str, text: str, tests: str, row: Mapping[str, Any]) -> Program | None:
    """The last block of code, else the whole text; where that does not define the column
    `entry_point`, it continues the prompt. None for a text without anything in it."""
    entry_point = str(row.get("entry_point") or "")
    code = code_block(text)
    if code is None:
        if not text.strip():
            return None
        code = text
    if entry_point and not _defines(code, entry_point) and _defines(prompt, entry_point):
        code = prompt + code
    return Program(code, tests=tests, entry_point=entry_point)


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^(?:async def|def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=",
                     code, re.MULTILINE) is not None  # fmt: skip


def judged(outcome: Outcome | None) -> Verdict:
    """1.0 if all tests held. Tests that cannot be run are the grader's failure."""
    if outcome is None:
        return Verdict(0.0, detail="wrong: no code")
    if outcome.ended == "broken":
        return Verdict(None, "error", f"the row's tests cannot be run: {outcome.detail}")
    if outcome.ended != "ok":
        return Verdict(0.0, detail=f"{outcome.ended}: {outcome.detail}")
    return Verdict(1.0)
