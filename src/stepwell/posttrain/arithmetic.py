"""Addition and subtraction of multi-digit numbers with worked steps, column by column.

A problem belongs to the training or to the held-out part by a hash of what is asked, with the
operands of a sum in a fixed order, so no seed and no commuted operands move it across. The
columns are written from the ones up, each with what is carried or borrowed into the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stepwell.types import ConfigError

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 0.1


@dataclass(frozen=True)
class Problem:
    """left + right, or left - right (which may be negative)."""

    left: int
    right: int
    op: Literal["+", "-"]

    @property
    def answer(self) -> int:
        return self.left + self.right if self.op == "+" else self.left - self.right

    @property
    def key(self) -> tuple[int, int, str]:
        """Equal for problems that ask the same: a + b and b + a, also a - b and b - a, whose
        steps differ in the sign only."""
        return (min(self.left, self.right), max(self.left, self.right), self.op)

    @property
    def prompt(self) -> str:
        return f"{self.left}{self.op}{self.right}=?"

    def completion(self) -> str:
        """Worked steps, then the line that `verifiers.exact` reads."""
        steps = add_steps(self.left, self.right) if self.op == "+" else self._subtract_steps()
        return "\n".join([*steps, f"answer: {self.answer}"])

    def _subtract_steps(self) -> list[str]:
        if self.left >= self.right:
            return subtract_steps(self.left, self.right)
        return ["swap", *subtract_steps(self.right, self.left), "negate"]

    def split(self) -> Split:
        low, high, op = self.key
        digest = hashlib.sha256(f"{low} {op} {high}".encode()).digest()
        return "heldout" if int.from_bytes(digest[:8]) / 2**64 < HELDOUT_SHARE else "train"

    def row(self) -> dict[str, Any]:
        """What SFT (prompt, completion) and GRPO (prompt, answer) read."""
        return {
            "prompt": self.prompt,
            "completion": self.completion(),
            "answer": str(self.answer),
            "digits": max(len(str(self.left)), len(str(self.right))),
        }


def add_steps(left: int, right: int) -> list[str]:
    """One line a column: digit + digit (+ carry) = sum, the digit written and the carry kept."""
    lines, carry = [], 0
    for a, b in _columns(left, right):
        total = a + b + carry
        extra = "+1" if carry else ""
        carry, digit = divmod(total, 10)
        lines.append(f"{a}+{b}{extra}={total} write {digit} carry {carry}")
    if carry:
        lines.append(f"write {carry}")
    return lines


def subtract_steps(left: int, right: int) -> list[str]:
    """For left >= right >= 0: digit - digit (- borrow), ten added where that is negative."""
    lines, borrow = [], 0
    for a, b in _columns(left, right):
        taken = "-1" if borrow else ""
        value = a - b - borrow
        borrow = int(value < 0)
        lines.append(f"{a}-{b}{taken}={value} write {value % 10} borrow {borrow}")
    return lines


def _columns(left: int, right: int) -> Iterator[tuple[int, int]]:
    """Digits of equal place, from the ones up."""
    width = max(len(str(left)), len(str(right)))
    for place in range(width):
        yield left // 10**place % 10, right // 10**place % 10


def problems(
    count: int,
    split: Split,
    seed: int,
    digits: tuple[int, int] = (1, 4),
    ops: str = "+-",
) -> list[Problem]:
    """`count` distinct problems of one split; no two have the same `key`.

    digits: fewest and most digits of the longer operand, each length equally likely as long as
    it has problems left. Raises ConfigError for impossible digits or ops, or if there aren't that
    many problems.
    """
    low, high = digits
    if not 1 <= low <= high <= 15:
        raise ConfigError(f"digits={digits} must be two numbers with 1 <= fewest <= most <= 15")
    if not ops or set(ops) - set("+-"):
        raise ConfigError(f"ops={ops!r} must be '+', '-' or '+-'")
    rng = np.random.default_rng([seed, int(split == "heldout")])
    found: dict[tuple[int, int, str], Problem] = {}
    misses = 0
    while len(found) < count:
        problem = _draw(rng, int(rng.integers(low, high + 1)), ops)
        if problem.split() != split or problem.key in found:
            misses += 1
            if misses > 200 * (count + 100):
                raise ConfigError(
                    f"asked for {count} {split} problems of {low} to {high} digits, but found "
                    f"only {len(found)}; ask for fewer or allow more digits"
                )
            continue
        found[problem.key] = problem
    return list(found.values())


def _draw(rng: np.random.Generator, num_digits: int, ops: str) -> Problem:
    long = int(rng.integers(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits))
    short_digits = int(rng.integers(1, num_digits + 1))
    short = int(rng.integers(10 ** (short_digits - 1) if short_digits > 1 else 0, 10**short_digits))
    left, right = (long, short) if rng.random() < 0.5 else (short, long)
    return Problem(left, right, "+" if ops[int(rng.integers(len(ops)))] == "+" else "-")


def overlap(train: list[Problem], heldout: list[Problem]) -> set[tuple[int, int, str]]:
    """Keys that occur in both, commuted operands included: empty for two splits made here."""
    return {p.key for p in train} & {p.key for p in heldout}
