"""What PPO's policy is trained with: a clipped objective, a leash, and with a shared trunk the
values' errors. B rows, T tokens a row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stepwell.data.batch import Batch
from stepwell.models.transformer import TokenOutputs
from stepwell.posttrain.policy.aggregation import denominator
from stepwell.posttrain.policy.kl import kl_estimate
from stepwell.posttrain.policy.loss import ADVANTAGES, OLD, REFERENCE, SAMPLER
from stepwell.posttrain.policy.objectives import clipped, log_ratio
from stepwell.posttrain.ppo.critic import value_count, value_sums
from stepwell.posttrain.sampling.gauge import Gauge, importance_weights
from stepwell.sections.methods import PPO
from stepwell.train.losses import Loss, LossSums, document_counts, masked_sum

TOKENS = "tokens"  # the denominator's name


def policy_loss(method: PPO, coef: float, gauge: Gauge | None = None) -> Loss:
    """What the policy is trained with: its objective and, where it shares its trunk, the values'.
    gauge: sees old and sampler's log-probabilities."""
    needs = frozenset({"logprobs", "entropy"})

    def alone(outputs: TokenOutputs, batch: Batch) -> LossSums:
        return policy_sums(method, coef, outputs, batch, gauge)

    def both(outputs: TokenOutputs, batch: Batch) -> LossSums:
        policy, values = alone(outputs, batch), value_sums(method, outputs, batch)
        return LossSums({**policy.sums, **values.sums}, {**policy.metrics, **values.metrics})

    if method.critic == "separate":
        return Loss(needs, lambda b: policy_count(method, b), alone)
    return Loss(needs | {"scores"}, lambda b: {**policy_count(method, b), **value_count(b)}, both)


def policy_count(method: PPO, batch: Batch) -> dict[str, float]:
    return {TOKENS: denominator(document_counts(batch).tolist(), method.aggregate)}


def policy_sums(
    method: PPO, coef: float, outputs: TokenOutputs, batch: Batch, gauge: Gauge | None = None
) -> LossSums:
    """The sampler's importance weight times (clipped objective + `coef` times the divergence from
    the reference, with method.kl_in "loss"), less entropy_coef times the entropy.

    The batch carries `advantages`, `sampler_logprobs`, `old_logprobs` (NaN: the current ones, so
    that the ratio is exactly 1) and, for a divergence, `reference_logprobs`. Metrics: entropy;
    kl_old, how far the updates have moved the policy (k3); clipped share; kl in the loss.
    """
    assert outputs.logprobs_BT is not None
    assert outputs.entropy_BT is not None
    logprobs_BT, entropy_BT = outputs.logprobs_BT, outputs.entropy_BT
    now_BT, extra = logprobs_BT.detach(), batch.extra
    old_BT = torch.where(extra[OLD].isnan(), now_BT, extra[OLD])
    value_BT, clipped_BT = clipped(
        log_ratio(logprobs_BT, old_BT), extra[ADVANTAGES], method.clip_low, method.clip_high
    )
    mask_BT = (batch.weights_BT != 0).to(logprobs_BT.dtype)
    count = mask_BT.sum()
    metrics: dict[str, tuple[Tensor, Tensor]] = {
        "entropy": (masked_sum(entropy_BT.detach(), mask_BT), count),
        "kl_old": (masked_sum(kl_estimate(old_BT, now_BT, "k3"), mask_BT), count),
        "clipped_share": (masked_sum(clipped_BT.to(mask_BT.dtype), mask_BT), count),
    }
    if coef and method.kl_in == "loss":
        kl_BT = kl_estimate(logprobs_BT, extra[REFERENCE], method.kl_estimator, old_BT)
        value_BT = value_BT + coef * kl_BT
        metrics["kl"] = (masked_sum(kl_estimate(now_BT, extra[REFERENCE], "k3"), mask_BT), count)
    value_BT = importance_weights(old_BT, extra[SAMPLER], method.importance_cap) * value_BT
    if method.entropy_coef:
        value_BT = value_BT - method.entropy_coef * entropy_BT
    if gauge is not None:
        gauge.add(old_BT, extra[SAMPLER], batch.weights_BT)
    return LossSums({TOKENS: masked_sum(value_BT, batch.weights_BT)}, metrics)


def shared(denominators: Mapping[str, float], loss: Loss, batch: Batch) -> dict[str, float]:
    """Those of the rollout's denominators that a loss divides by."""
    return {name: denominators[name] for name in loss.denominators(batch)}
