"""Advantages of a group of answers to one prompt, and the weights that add their tokens up.

A reward of None means "not applicable": the answer is left out of its group. 0.0 is a reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stepwell.types import ConfigError


def group_advantages(rewards: Sequence[float | None], kind: str) -> list[float]:
    """One advantage an answer.

    std: (r - mean) / sample standard deviation (GRPO, 2402.03300). none: r - mean (Dr. GRPO,
    2503.20783). A group of equal rewards gives exactly 0, as does an answer without a reward.
    Raises ConfigError for a group of one and for an unknown kind.
    """
    if kind not in ("std", "none"):
        raise ConfigError(f"method.advantage={kind!r} is unknown; known are 'std' and 'none'")
    if len(rewards) < 2:
        raise ConfigError(
            f"a group has {len(rewards)} answers; an advantage relative to the group needs at "
            "least 2"
        )
    known = [r for r in rewards if r is not None]
    if len(known) < 2 or min(known) == max(known):
        return [0.0] * len(rewards)
    mean = math.fsum(known) / len(known)
    scale = 1.0
    if kind == "std":
        scale = math.sqrt(math.fsum((r - mean) ** 2 for r in known) / (len(known) - 1))
    return [0.0 if r is None else (r - mean) / scale for r in rewards]


def token_weight(num_tokens: int, aggregate: str) -> float:
    """The weight of each of an answer's tokens. token: 1, so that the mean runs over all tokens
    (DAPO, 2503.14476); sequence: 1 / length, so that it runs over answers (GRPO)."""
    if aggregate not in ("token", "sequence"):
        raise ConfigError(
            f"method.aggregate={aggregate!r} is unknown; known are 'token' and 'sequence'"
        )
    return 1.0 if aggregate == "token" else 1.0 / max(num_tokens, 1)


def dead_share(groups: Sequence[Sequence[float | None]]) -> float:
    """The share of groups whose rewards are all equal: they teach nothing."""
    dead = sum(len({r for r in group if r is not None}) < 2 for group in groups)
    return dead / len(groups) if groups else 0.0
