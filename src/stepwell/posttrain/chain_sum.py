"""Chains of additions and subtractions with worked steps: a task that a small model can learn, and
whose answers can be checked.

A problem belongs to the training or to the held-out part by a hash of its numbers without their
order, so no seed and no re-ordering of a chain moves it across.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stepwell.types import ConfigError

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 0.1
LARGEST_TERM = 9


@dataclass(frozen=True)
class Problem:
    """terms: the first is positive, the others are added or (negative) subtracted; no running
    total is below zero."""

    terms: tuple[int, ...]

    @property
    def answer(self) -> int:
        return sum(self.terms)

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for chains of the same numbers in another order."""
        return tuple(sorted(self.terms))

    @property
    def prompt(self) -> str:
        return f"{self.terms[0]}{''.join(f'{term:+d}' for term in self.terms[1:])}=?"

    def completion(self, worked: bool = True) -> str:
        """A line a step if worked, then the line that `verifiers.exact` reads."""
        lines, total = [], self.terms[0]
        for term in self.terms[1:]:
            lines.append(f"{total}{term:+d}={total + term}")
            total += term
        return "\n".join([*(lines if worked else []), f"answer: {total}"])

    def split(self) -> Split:
        digest = hashlib.sha256(repr(self.key).encode()).digest()
        return "heldout" if int.from_bytes(digest[:8]) / 2**64 < HELDOUT_SHARE else "train"

    def row(self, worked: bool = True) -> dict[str, Any]:
        """What SFT (prompt and completion as messages) and GRPO (prompt and answer) read."""
        return {
            "prompt": [{"role": "user", "content": self.prompt}],
            "completion": [{"role": "assistant", "content": self.completion(worked)}],
            "answer": str(self.answer),
            "num_terms": len(self.terms),
        }


def problems(
    count: int, split: Split, seed: int, num_terms: tuple[int, int] = (4, 8)
) -> list[Problem]:
    """`count` problems of one split, all of different keys; each length is equally likely.

    Raises ConfigError for a chain of fewer than two terms, or if there aren't that many problems.
    """
    low, high = num_terms
    if not 2 <= low <= high:
        raise ConfigError(f"num_terms={num_terms} must be two numbers with 2 <= fewest <= most")
    rng = np.random.default_rng([seed, int(split == "heldout")])
    found: dict[tuple[int, ...], Problem] = {}
    misses = 0
    while len(found) < count:
        problem = _draw(rng, int(rng.integers(low, high + 1)))
        if problem.split() != split or problem.key in found:
            misses += 1
            if misses > 200 * (count + 100):
                raise ConfigError(
                    f"asked for {count} {split} problems of {low} to {high} terms, but found only "
                    f"{len(found)}; ask for fewer or allow more terms"
                )
            continue
        found[problem.key] = problem
    return list(found.values())


def _draw(rng: np.random.Generator, num_terms: int) -> Problem:
    terms = [int(rng.integers(1, LARGEST_TERM + 1))]
    while len(terms) < num_terms:
        term = int(rng.integers(1, LARGEST_TERM + 1))
        subtract = sum(terms) >= term and rng.random() < 0.5
        terms.append(-term if subtract else term)
    return Problem(tuple(terms))


def overlap(train: list[Problem], heldout: list[Problem]) -> set[tuple[int, ...]]:
    """Keys that occur in both: empty for two splits made here."""
    return {p.key for p in train} & {p.key for p in heldout}
