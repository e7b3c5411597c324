"""A calculator as an environment: `calc: 12*(3+4)` as the last line of a turn is answered with the
number, `answer: ...` ends the sample. An example of the protocol, and a tool that works."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from typing import Any

CALL, ANSWER = "calc:", "answer:"
MAX_DIGITS = 100
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Calculator:
    """What it doesn't understand it says so, and the policy may try again."""

    def reset(self, row: Mapping[str, Any]) -> None:
        return None

    def step(self, text: str) -> tuple[str | None, float | None, bool]:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        if last.lower().startswith(ANSWER):
            return None, None, True
        if last.lower().startswith(CALL):
            return calculate(last[len(CALL) :].strip()), None, False
        return f"error: end with '{CALL} EXPRESSION' or '{ANSWER} NUMBER'", None, False


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % and brackets, or what is wrong."""
    if len(expression) > MAX_DIGITS:
        return f"error: longer than {MAX_DIGITS} characters"
    try:
        value = _value(ast.parse(expression, mode="eval").body)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        return str(value)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return "error: not an expression of numbers, + - * / // % and brackets"


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(value := node.value) is not bool:
        if not isinstance(value, int | float):
            raise ValueError("not a number")
        return value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("not arithmetic")
