"""How strongly the policy is held to its reference: a fixed coefficient, or one that keeps the
divergence at a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepwell.sections.methods import GRPO, PPO

ERROR_BOUND = 0.2
RAISE_BOUND = 0.5


def adapted(coef: float, kl: float, target: float, horizon: float, num_samples: int) -> float:
    """The coefficient after `num_samples` answers whose mean KL (nats an answer) was `kl`.

    coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon): log-space proportional
    control (1909.08593, section 2.2). Never below 0, however many samples there are.
    """
    error = min(max(kl / target - 1.0, -ERROR_BOUND), ERROR_BOUND)
    return coef * max(1.0 + error * num_samples / horizon, 0.0)


def raised(coef: float, kl: float, budget: float) -> float:
    """The coefficient after a rollout whose KL was `kl` (both in nats an answer): over the budget
    it grows by the share that is too much, at most by a half, and it never falls."""
    return coef * (1.0 + min(max(kl / budget - 1.0, 0.0), RAISE_BOUND)) if budget else coef


def next_coef(method: PPO, coef: float, kl: float, num_samples: int) -> float:
    """The coefficient of the next rollout by `method.kl_controller`; it is all the state that a
    controller has, and belongs in the checkpoint."""
    if method.kl_controller == "fixed":
        return coef
    return adapted(coef, kl, method.kl_target, method.kl_horizon, num_samples)


def kept_coef(state: Mapping[str, Any], method: GRPO | PPO) -> float:
    """The coefficient that a checkpoint's loop was at (`kl_coef`); the method's own at the start,
    and in a branch whose method has another one than its trunk's (`method_kl_coef`)."""
    if state.get("method_kl_coef", method.kl_coef) != method.kl_coef:
        return method.kl_coef
    found = state.get("kl_coef")
    return method.kl_coef if found is None else found
