"""Generalised advantage estimation (1506.02438) over answers, tokens of an environment skipped.

L tokens of an answer. Everything is float64 on the host: these are a few numbers a token, and one
batch needs one truth, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepwell.types import ConfigError

Array = np.ndarray


def gae(
    rewards_L: Sequence[float] | Array,
    values_L: Sequence[float] | Array,
    gamma: float,
    lam: float,
    *,
    from_policy_L: Sequence[bool] | Array | None = None,
    bootstrap: float = 0.0,
) -> tuple[Array, Array]:
    """Advantages and returns (advantage + value) of one answer's tokens.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1} (1506.02438, equation
    16), where t + 1 is the next token *of the policy*: an environment's tokens are neither actions
    nor time, their values are not read (they may be NaN), and a reward that stands on one belongs
    to the policy's token before it. values_L: of the state that each token was sampled in.
    bootstrap: the value after the last token, 0 where the answer ended by itself. Skipped tokens
    get 0 for both. Raises ConfigError for lengths that differ and for gamma or lam outside [0, 1].
    """
    rewards, values = np.asarray(rewards_L, np.float64), np.asarray(values_L, np.float64)
    mine = np.ones(len(rewards), bool) if from_policy_L is None else np.asarray(from_policy_L, bool)
    if not len(rewards) == len(values) == len(mine):
        raise ConfigError(
            f"an answer has {len(rewards)} rewards, {len(values)} values and {len(mine)} marks of "
            "its tokens' origin; all must be as many as its tokens"
        )
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ConfigError(
                f"method.{name}={number} must be from 0 to 1; the nearest legal value is "
                f"{min(max(number, 0), 1)}"
            )
    advantages, returns = np.zeros(len(rewards)), np.zeros(len(rewards))
    next_value, next_advantage, earned_since = bootstrap, 0.0, 0.0
    tokens = zip(rewards.tolist(), values.tolist(), mine.tolist(), strict=True)
    for t, (reward, value, by_policy) in reversed(list(enumerate(tokens))):
        if not by_policy:
            earned_since += reward
            continue
        delta = reward + earned_since + gamma * next_value - value
        next_advantage = delta + gamma * lam * next_advantage
        next_value, earned_since = value, 0.0
        advantages[t], returns[t] = next_advantage, next_advantage + value
    return advantages, returns


def whiten(advantages: Sequence[Array], masks: Sequence[Array]) -> list[Array]:
    """(A - mean) / sample standard deviation over the trained tokens of *all* answers given, so
    that no split of them over ranks or minibatches changes a number. Zero elsewhere, and
    everywhere if all are equal."""
    if not advantages:
        return []
    flat = np.concatenate([a[m != 0] for a, m in zip(advantages, masks, strict=True)])
    if len(flat) < 2 or flat.min() == flat.max():
        return [np.zeros_like(a) for a in advantages]
    mean, scale = flat.mean(), flat.std(ddof=1)
    return [
        np.where(m != 0, (a - mean) / scale, 0.0) for a, m in zip(advantages, masks, strict=True)
    ]


def explained_variance(values: Array, returns: Array) -> float:
    """1 - Var(return - value) / Var(return): 1 is a critic that knows, 0 one that says the mean,
    below 0 a harmful one. 0 where the returns are all equal."""
    if len(returns) == 0 or returns.min() == returns.max():
        return 0.0
    return float(1.0 - np.var(returns - values) / np.var(returns))
