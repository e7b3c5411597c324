"""Scores from counts and log-probabilities: plain functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stepwell.types import ConfigError


def bits_per_byte(sum_logprobs: float, num_bytes: int) -> float:
    """-log2 p of a text, per UTF-8 byte; sum_logprobs is in nats. Comparable across tokenizers.

    Raises ConfigError for a text without bytes.
    """
    if num_bytes < 1:
        raise ConfigError(f"bits per byte of {num_bytes} bytes: there must be at least 1")
    return -sum_logprobs / math.log(2) / num_bytes


def accuracy(correct: Sequence[bool | float | None]) -> float:
    """The mean over what was scored (None: not applicable). NaN when nothing was."""
    scored = [float(c) for c in correct if c is not None]
    return sum(scored) / len(scored) if scored else math.nan


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k samples is right, unbiased from c right ones among n:
    1 - C(n-c, k) / C(n, k) (2107.03374). Raises ConfigError unless 0 <= c <= n and 1 <= k <= n."""
    if not 0 <= c <= n:
        raise ConfigError(f"pass@k: c={c} right samples must be between 0 and n={n}")
    if not 1 <= k <= n:
        raise ConfigError(f"pass@k: k={k} must be between 1 and the n={n} samples taken")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap_interval(
    values: Sequence[float],
    seed: int = 0,
    level: float = 0.95,
    other: Sequence[float] | None = None,
    num_resamples: int = 2000,
) -> tuple[float, float]:
    """Percentile interval of the mean (Efron 1979). With `other`, of mean(values) - mean(other)
    where both were taken on the same items: items are resampled, so the pairing is kept.

    Raises ConfigError for no values, unequal lengths and a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ConfigError(f"level={level} must be between 0 and 1, e.g. 0.95")
    data = np.asarray(values, dtype=np.float64)
    if other is not None:
        if len(other) != len(values):
            raise ConfigError(
                f"a paired difference needs the same items: {len(values)} and {len(other)} values"
            )
        data = data - np.asarray(other, dtype=np.float64)
    if not len(data):
        raise ConfigError("there are no values to take an interval of")
    rng = np.random.default_rng(seed)
    means = np.array(
        [data[rng.integers(0, len(data), len(data))].mean() for _ in range(num_resamples)]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def pick(sum_logprobs: Sequence[float], lengths: Sequence[int] | None = None) -> int:
    """The choice with the largest log-probability, divided by its length if lengths are given
    (bytes or tokens, as the caller counts them). The first of equals."""
    if lengths is None:
        lengths = [1] * len(sum_logprobs)
    scores = [lp / max(n, 1) for lp, n in zip(sum_logprobs, lengths, strict=True)]
    return scores.index(max(scores))
