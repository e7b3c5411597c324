"""Best-of-n: sample n answers, keep the one that a reward likes best. How far that is from the
sampling policy, what it is expected to gain, and an estimate for every n from one set of samples.

N answers to a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.integrate import quad
from scipy.special import gammaln
from scipy.stats import norm

from stepwell.eval.grade import Prompt
from stepwell.generate import Sampling
from stepwell.posttrain.rollout import Group, Scorer, collect
from stepwell.posttrain.sampling.episodes import Sampler
from stepwell.tokenizer import Tokenizer
from stepwell.types import ConfigError, DataError

Numbers = Sequence[float] | np.ndarray


class Picked(NamedTuple):
    """best: which of the group's answers has the highest reward (of equal ones the first); None
    where none has a reward."""

    group: Group
    best: int | None


def best_of_n(
    engine: Sampler,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    rewards: Scorer,
    tokenizer: Tokenizer,
    seed: int = 0,
) -> list[Picked]:
    """Of n answers to each prompt the one with the highest reward. Answers are those of
    `rollout.collect`, so the same seed gives the same ones, and a larger n further ones. Answers
    without a reward (no dimension applies, a grader failed) are never picked."""
    rollouts = collect(engine, prompts, n, sampling, rewards, tokenizer, seed)
    return [Picked(group, pick(group.rewards)) for group in rollouts.groups]


def pick(rewards: Sequence[float | None]) -> int | None:
    """The place of the highest reward, the first of equal ones; None without any."""
    known = [(reward, -i) for i, reward in enumerate(rewards) if reward is not None]
    return -max(known)[1] if known else None


# --- distance and expectation ------------------------------------------------------------------


def kl_bound(n: int) -> float:
    """ln n - (n - 1) / n nats: KL(best-of-n || policy) is at most this, and exactly this only where
    no two answers ever score the same (2401.01879)."""
    _check_n(n)
    return math.log(n) - (n - 1) / n


def kl_of_levels(chances: Sequence[float], n: int) -> float:
    """KL(best-of-n || policy) of a reward that takes finitely many values, in nats. chances: of
    these values under the policy, from the lowest to the highest; equal answers are picked among at
    random, so within a value nothing changes.

    Raises DataError unless the chances are a distribution.
    """
    _check_n(n)
    p = np.asarray(chances, np.float64)
    if not len(p) or (p < 0).any() or not math.isclose(math.fsum(p), 1.0, abs_tol=1e-9):
        raise DataError(f"chances {list(chances)[:8]} must be at least 0 and add up to 1")
    below = np.concatenate([[0.0], np.cumsum(p)])
    q = np.diff(below**n)
    some = q > 0
    return float((q[some] * np.log(q[some] / p[some])).sum())


def expected_max_normal(n: int) -> float:
    """The mean of the highest of n standard normal numbers: what best-of-n gains, in standard
    deviations, on a reward that is normal over answers."""
    _check_n(n)

    def density(x: float) -> float:
        return x * n * float(np.exp(norm.logpdf(x) + (n - 1) * norm.logcdf(x)))

    value, _ = quad(density, -12.0, 12.0, limit=400)
    return float(value)


# --- every n from one set of samples -----------------------------------------------------------


def pick_chances(num_samples: int, n: int) -> np.ndarray:
    """(N,): the chance that the i-th lowest of N samples is the best of n drawn from them without
    replacement, C(i - 1, n - 1) / C(N, n) for i from 1.

    Raises ConfigError unless 1 <= n <= N.
    """
    _check_n(n)
    if n > num_samples:
        raise ConfigError(
            f"the best of n={n} cannot be estimated from {num_samples} samples; the nearest legal "
            f"value is {num_samples}"
        )
    below = np.arange(num_samples, dtype=np.float64)  # i - 1
    found = np.zeros(num_samples)
    some = below >= n - 1
    found[some] = np.exp(_log_choose(below[some], n - 1) - _log_choose(num_samples, n))
    return found / found.sum()


def best_of(rewards: Numbers, n: int, values: Numbers | None = None) -> float:
    """An unbiased estimate of what the best of n by `rewards` has of `values` (by default of the
    rewards themselves), from N >= n samples: its mean over all sets of n of them (2112.09332,
    2210.10760, appendix). Equal rewards are picked among at random. With rewards of 0 and 1 this is
    pass@n.

    Raises ConfigError for n above N, DataError for numbers that are not finite.
    """
    by = np.asarray(rewards, np.float64)
    what = by if values is None else np.asarray(values, np.float64)
    if by.shape != what.shape or by.ndim != 1:
        raise DataError(f"{by.size} rewards but {what.size} values; give one for each")
    if not (np.isfinite(by).all() and np.isfinite(what).all()):
        raise DataError("a reward or value is not finite; leave out answers without a reward")
    chances = pick_chances(len(by), n)
    order = np.argsort(by, kind="stable")
    _, level = np.unique(by[order], return_inverse=True)
    means = np.bincount(level, what[order]) / np.bincount(level)
    return float((chances * means[level]).sum())


def _log_choose(n: np.ndarray | float, k: float) -> np.ndarray:
    return gammaln(np.asarray(n) + 1) - gammaln(k + 1) - gammaln(np.asarray(n) - k + 1)


def _check_n(n: int) -> None:
    if n < 1:
        raise ConfigError(f"n={n} answers: the nearest legal value is 1")
