"""GRPO's loss on packed answers: objective, importance weights, divergence from the reference,
entropy. B rows, T tokens a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepwell.data.batch import Batch
from stepwell.models.transformer import TokenOutputs
from stepwell.posttrain.policy.aggregation import denominator, document_means
from stepwell.posttrain.policy.kl import kl_estimate
from stepwell.posttrain.policy.objectives import cispo, clipped, gspo_log_ratios, log_ratio
from stepwell.posttrain.sampling.gauge import Gauge, importance_weights
from stepwell.sections.methods import GRPO
from stepwell.train.losses import Loss, LossSums, document_counts, masked_sum

ADVANTAGES, OLD, SAMPLER, REFERENCE = (
    "advantages",
    "old_logprobs",
    "sampler_logprobs",
    "reference_logprobs",
)
STREAM = "answers"  # the denominator's name


def streams(method: GRPO) -> tuple[str, ...]:
    """What the batch carries for each token."""
    return (ADVANTAGES, OLD, SAMPLER, *((REFERENCE,) if kl_in_loss(method) else ()))


def kl_in_loss(method: GRPO) -> bool:
    return method.kl_coef > 0 and method.kl_in == "loss"


def policy_loss(method: GRPO, gauge: Gauge | None = None) -> Loss:
    """Importance weight times (objective + kl_coef * divergence) - entropy_coef * entropy, summed
    with the batch's weights.

    The batch carries `streams`. old_logprobs: of the weights that the rollout's updates start from;
    NaN stands for the current ones, so that the ratio is exactly 1 whatever the forward pass draws
    (dropout). Metrics, means over trained tokens: entropy; kl_old, how far the updates have moved
    the policy (k3); clipped_share; kl, from the reference. gauge: sees old and sampler's
    log-probabilities.
    """

    whole_rows = method.objective == "gspo"

    def fn(outputs: TokenOutputs, batch: Batch) -> LossSums:
        assert outputs.logprobs_BT is not None
        assert outputs.entropy_BT is not None
        logprobs_BT, weights_BT = outputs.logprobs_BT, batch.weights_BT
        now_BT = logprobs_BT.detach()
        held = {name: batch.extra[name].to(now_BT.dtype) for name in streams(method)}
        old_BT = torch.where(held[OLD].isnan(), now_BT, held[OLD])
        value_BT, clipped_BT = objective(method, logprobs_BT, old_BT, held[ADVANTAGES], batch)
        with torch.no_grad():
            mask_BT = (weights_BT != 0).to(logprobs_BT.dtype)
            count = mask_BT.sum()
            mean = lambda values_BT: (masked_sum(values_BT, mask_BT), count)
            metrics = {
                "entropy": mean(outputs.entropy_BT),
                "kl_old": mean(kl_estimate(old_BT, now_BT, "k3")),
                "clipped_share": mean(clipped_BT.to(mask_BT.dtype)),
            }
            if gauge is not None:
                gauge.add(old_BT, held[SAMPLER], weights_BT, whole_rows)
        if kl_in_loss(method):
            kl_BT = kl_estimate(logprobs_BT, held[REFERENCE], method.kl_estimator, old_BT)
            value_BT = value_BT + method.kl_coef * kl_BT
            metrics["kl"] = mean(kl_estimate(now_BT, held[REFERENCE], "k3"))
        value_BT = importance_weights(old_BT, held[SAMPLER], method.importance_cap) * value_BT
        if method.entropy_coef:
            value_BT = value_BT - method.entropy_coef * outputs.entropy_BT
        return LossSums({STREAM: masked_sum(value_BT, weights_BT)}, metrics)

    return Loss(
        frozenset({"logprobs", "entropy"}),
        lambda batch: denominators(method, document_counts(batch).tolist()),
        fn,
        whole_rows,
    )


def objective(
    method: GRPO, logprobs_BT: Tensor, old_BT: Tensor, advantages_BT: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    """method.objective's value at each token, and where its bound binds."""
    low, high = method.clip_low, method.clip_high
    ratios_BT = log_ratio(logprobs_BT, old_BT)
    if method.objective == "cispo":
        return cispo(logprobs_BT, ratios_BT, advantages_BT, low, high)
    if method.objective == "gspo":
        means_BT = document_means(ratios_BT.detach(), batch.weights_BT, batch.docs_BT)
        ratios_BT = gspo_log_ratios(logprobs_BT, means_BT)
    return clipped(ratios_BT, advantages_BT, low, high, method.dual_clip)


def denominators(method: GRPO, lengths: Sequence[float], parts: int = 1) -> dict[str, float]:
    """Of each of `parts` minibatches that together hold answers of these numbers of trained tokens:
    their gradients' mean is then the gradient of all answers at once."""
    return {STREAM: denominator(lengths, method.aggregate) / parts}
