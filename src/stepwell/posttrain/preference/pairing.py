"""Which of the scored answers to a prompt make pairs. Scores of None are no scores: such answers
are in no pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class NoPair(NamedTuple):
    """too_few: less than two answers have a score. tie: all of them score the same. all_right,
    all_wrong: all of them are on one side."""

    reason: str


def best_and_worst(scores: Sequence[float | None]) -> tuple[int, int] | NoPair:
    """(number of the best, of the worst), the first of equal ones, as in online DPO (2402.04792)
    with more than two answers."""
    known = [(score, i) for i, score in enumerate(scores) if score is not None]
    if len(known) < 2:
        return NoPair("too_few")
    best = max(known, key=lambda one: one[0])
    worst = min(known, key=lambda one: one[0])
    return NoPair("tie") if best[0] == worst[0] else (best[1], worst[1])


def right_and_wrong(
    scores: Sequence[float | None], right_at: float, most: int
) -> list[tuple[int, int]] | NoPair:
    """Up to `most` of all pairs of a right answer (a score of at least right_at) and a wrong one,
    chosen so that every answer is used before one is used again."""
    known = [(score, i) for i, score in enumerate(scores) if score is not None]
    right = [i for score, i in known if score >= right_at]
    wrong = [i for score, i in known if score < right_at]
    if len(known) < 2:
        return NoPair("too_few")
    if not right or not wrong:
        return NoPair("all_right" if right else "all_wrong")
    common = math.lcm(len(right), len(wrong))
    count = min(most, len(right) * len(wrong))
    return [(right[k % len(right)], wrong[(k + k // common) % len(wrong)]) for k in range(count)]
