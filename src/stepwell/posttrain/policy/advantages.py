"""Advantages: how much better an answer was than the others, from rewards alone.

A group holds the answers to one prompt. A reward of None means "not applicable": the answer is left
out of its group and gets 0. 0.0 is a reward. No small constant is added to a divisor: rewards that
are equal (to rounding) give exactly 0 instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stepwell.types import ConfigError, DataError, nearest

Rewards = Sequence[float | None]

KINDS = (
    "std",
    "population-std",
    "none",
    "batch-std",
    "leave-one-out",
    "reinforce++",
    "maxrl",
)
# Rewards that differ by less than this share of the largest one differ by rounding.
ROUNDING = 1e-9


def group_advantages(groups: Sequence[Rewards], kind: str) -> list[list[float]]:
    """One advantage an answer, for all groups of a rollout (over all ranks); r: reward, n: answers.

    std: (r - mean) / the group's sample standard deviation (GRPO, 2402.03300, section 4.1.2).
    population-std: the same with the divisor n instead of n - 1.
    none: r - mean (Dr. GRPO, 2503.20783, section 3.2).
    batch-std: (r - the group's mean) / the sample standard deviation of all rewards (2508.08221).
    leave-one-out: r - the mean of the group's other answers (RLOO, 2402.14740, equation 8).
    reinforce++: (r - the mean of all rewards) / their sample standard deviation (2501.03262).
    maxrl: (r - mean) / mean, which follows the log of the solve rate (MaxRL, 2602.02710).

    Raises ConfigError for an unknown kind, and for a group of one where the kind compares within
    groups; DataError for a reward that is no finite number, and for a negative one under maxrl.
    """
    _check(groups, kind)
    if kind in ("batch-std", "reinforce++"):
        return _over_the_batch(groups, kind)
    return [_within(group, kind) for group in groups]


def dead_share(groups: Sequence[Rewards]) -> float:
    """The share of groups whose rewards are all equal: they teach nothing."""
    return sum(map(is_dead, groups)) / len(groups) if groups else 0.0


def is_dead(group: Rewards) -> bool:
    return _equal(_known(group))


def _check(groups: Sequence[Rewards], kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(
            f"method.advantage={kind!r} is unknown{nearest(kind, KINDS)}; known are "
            f"{', '.join(KINDS)}"
        )
    for group in groups:
        if len(group) < 2 and kind != "reinforce++":
            raise ConfigError(
                f"a group has {len(group)} answers; an advantage relative to the group needs at "
                "least 2"
            )
        for reward in _known(group):
            if not math.isfinite(reward):
                raise DataError(f"a reward is {reward}; it must be a finite number, or None")
            if kind == "maxrl" and reward < 0:
                raise DataError(
                    f"method.advantage='maxrl' divides by the mean reward, so a reward of "
                    f"{reward:g} cannot be; the nearest legal value is 0"
                )


def _within(group: Rewards, kind: str) -> list[float]:
    known = _known(group)
    if _equal(known):
        return [0.0] * len(group)
    mean = _mean(known)
    scale = {
        "none": lambda: 1.0,
        "std": lambda: _deviation(known, len(known) - 1),
        "population-std": lambda: _deviation(known, len(known)),
        "leave-one-out": lambda: 1 - 1 / len(known),
        "maxrl": lambda: mean,
    }[kind]()
    return [0.0 if r is None else (r - mean) / scale for r in group]


def _over_the_batch(groups: Sequence[Rewards], kind: str) -> list[list[float]]:
    every = [r for group in groups for r in _known(group)]
    if _equal(every):
        return [[0.0] * len(group) for group in groups]
    scale = _deviation(every, len(every) - 1)
    found = []
    for group in groups:
        known = _known(group)
        if kind == "batch-std" and _equal(known):
            found.append([0.0] * len(group))
            continue
        mean = _mean(every if kind == "reinforce++" else known)
        found.append([0.0 if r is None else (r - mean) / scale for r in group])
    return found


def _known(group: Rewards) -> list[float]:
    return [r for r in group if r is not None]


def _equal(rewards: Sequence[float]) -> bool:
    """Also where there are fewer than two."""
    if len(rewards) < 2:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= ROUNDING * max(abs(low), abs(high))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _deviation(values: Sequence[float], divisor: int) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / divisor)
