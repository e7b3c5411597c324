"""Process rewards: the steps of an answer, their labels, and one reward of several step scores."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal, get_args

from stepwell.data.preference import IGNORED, SEPARATOR
from stepwell.types import ConfigError, DataError, nearest

Aggregation = Literal["product", "min", "last", "mean"]


def aggregate(chances: Sequence[float], how: Aggregation = "min") -> float:
    """One reward of the chances that each step is right: their product (all are right, if they were
    independent; 2305.20050), the lowest (2312.08935), the last, or the mean.

    Raises ConfigError for another word, DataError for no step.
    """
    if how not in get_args(Aggregation):
        legal = get_args(Aggregation)
        raise ConfigError(
            f"{how!r} is no aggregation of steps: one of {', '.join(legal)}{nearest(how, legal)}"
        )
    if not chances:
        raise DataError("an answer without a step has no process reward")
    if how == "product":
        return math.prod(chances)
    if how == "min":
        return min(chances)
    return chances[-1] if how == "last" else sum(chances) / len(chances)


def first_error(chances: Sequence[float], threshold: float = 0.5) -> int | None:
    """The first step whose chance of being right is below the threshold; None if there is none
    (ProcessBench's question, 2412.06559)."""
    return next((i for i, chance in enumerate(chances) if chance < threshold), None)


def hard_labels(num_steps: int, first_wrong: int | None) -> list[int]:
    """1 up to the first wrong step, 0 there, and after it not judged: what follows from a mistake
    is neither right nor wrong (PRM800K, 2305.20050). first_wrong None: all are right.

    Raises DataError for a step that is not there.
    """
    if first_wrong is None:
        return [1] * num_steps
    if not 0 <= first_wrong < num_steps:
        raise DataError(
            f"first_wrong={first_wrong} is none of the {num_steps} steps; the nearest is "
            f"{min(max(first_wrong, 0), num_steps - 1)}"
        )
    return [1] * first_wrong + [0] + [IGNORED] * (num_steps - first_wrong - 1)


def rollout_labels(
    outcomes: Sequence[Sequence[float]], kind: Literal["soft", "hard"] = "soft"
) -> list[float]:
    """Labels from completions sampled after each step and their outcomes (1 right, 0 wrong): the
    share that is right, or (hard) whether any is (Math-Shepherd, 2312.08935, equations 3 and 4).

    Raises DataError for a step without completions and for an outcome outside [0, 1].
    """
    labels = []
    for i, results in enumerate(outcomes):
        if not results:
            raise DataError(f"step {i} has no completions to be judged by; sample at least one")
        wrong = [x for x in results if not 0 <= x <= 1]
        if wrong:
            raise DataError(f"step {i} has the outcome {wrong[0]:g}; outcomes lie in [0, 1]")
        share = sum(results) / len(results)
        labels.append(share if kind == "soft" else float(share > 0))
    return labels


def split_steps(text: str, separator: str = SEPARATOR) -> list[str]:
    """The steps of an answer: its parts after each `separator`, which stays at their ends, so that
    the steps joined are the answer. Parts of blanks alone go with the step before.

    Raises ConfigError for an empty separator, DataError for an answer of blanks.
    """
    if not separator:
        raise ConfigError(f"the separator of steps is empty; {SEPARATOR!r} is usual")
    if not text.strip():
        raise DataError("the answer is blank: it has no steps")
    steps: list[str] = []
    for part in re.findall(f".*?{re.escape(separator)}|.+$", text, flags=re.DOTALL):
        if steps and (not part.strip() or not steps[-1].strip()):
            steps[-1] += part
        else:
            steps.append(part)
    return steps
