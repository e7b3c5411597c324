"""Losses on pairs of answers, and on labelled ones: pure functions of an answer's log-probability
under the policy and the reference, and the `Loss` that the engine minimises.

P pairs, R labelled rows, D documents of a batch (of pair k, 2k is the chosen answer and 2k + 1 the
rejected one). A log-probability is the sum over the answer's tokens in nats, or their mean where
that is said. Element-wise functions return one loss a pair, never a mean.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, softplus

from stepwell.data.batch import Batch
from stepwell.models.transformer import TokenOutputs
from stepwell.sections.preference import PreferenceLoss
from stepwell.train.losses import Loss, LossSums, document_counts, document_sums, per_document

# Streams of a batch, constant over a document: the reference's sum of log-probabilities; 1 for a
# desirable answer and 0 for an undesirable one; kto's KL term.
REFERENCE, LABEL, KL = "reference_logps", "label", "kl"
# Beyond e^30 a divergence's derivative goes on as a straight line, so that no loss overflows.
MAX_EXPONENT = 30.0
# The share of itself by which a sum of log-probabilities is off that was scored by another path or
# in other rows, by precision.compute. Streams are float32, so in fp64 it is a rounding of that.
ROUNDING = {"bf16": 2.0**-7, "fp16": 2.0**-9, "fp32": 2.0**-20, "fp64": 2.0**-23}
LN2 = math.log(2.0)


class PairLogps(NamedTuple):
    """Log-probabilities of the chosen and the rejected answers, (P,) each."""

    chosen: Tensor
    rejected: Tensor


# --- of pairs ----------------------------------------------------------------------------------


def implicit_reward(
    log_ratio: Tensor, divergence: str = "reverse-kl", alpha: float = 0.5
) -> Tensor:
    """f'(u) at u = exp(log_ratio), up to a constant that cancels in a pair (f-DPO, 2309.16240,
    equation 11 and table 1): log u for the reverse KL, of which DPO is the case. beta is not in it.
    """
    if divergence == "reverse-kl":
        return log_ratio
    if divergence == "forward-kl":
        return -bounded_exp(-log_ratio)
    if divergence == "js":
        return LN2 - softplus(-log_ratio)
    return (1 - bounded_exp(-alpha * log_ratio)) / alpha


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x), and from MAX_EXPONENT on its tangent there: monotone, finite, with a gradient."""
    over = relu(x - MAX_EXPONENT)
    return torch.exp(x.clamp(max=MAX_EXPONENT)) + over * math.exp(MAX_EXPONENT)


def dpo(margins: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(m) - e log sigmoid(-m) (2305.18290, equation 7; smoothed: Mitchell's
    conservative DPO). margins: beta times the difference of implicit rewards."""
    loss = -(1 - label_smoothing) * logsigmoid(margins)
    return loss - label_smoothing * logsigmoid(-margins) if label_smoothing else loss


def robust_dpo(margins: Tensor, flip_rate: float) -> Tensor:
    """The unbiased estimate of DPO's loss where a share flip_rate of labels is swapped
    (2403.00409, equation 9)."""
    kept, swapped = (1 - flip_rate) * logsigmoid(margins), flip_rate * logsigmoid(-margins)
    return -(kept - swapped) / (1 - 2 * flip_rate)


def ipo(log_ratio_differences: Tensor, beta: float) -> Tensor:
    """(h - 1 / (2 beta))^2, h without beta (2310.12036, equation 17)."""
    return (log_ratio_differences - 1 / (2 * beta)).square()


def hinge(margins: Tensor) -> Tensor:
    """max(0, 1 - m) (SLiC-HF, 2305.10425, with the reference's log-ratios)."""
    return relu(1 - margins)


def dpo_positive(
    policy: PairLogps, reference: PairLogps, beta: float, coef: float, eps: float = 0.0
) -> Tensor:
    """DPO that is charged for chosen answers below the reference (2402.13228, equation 3).

    eps: a fall of up to eps times the reference's own size is free. The charge has a kink at the
    reference, where training starts: without that, rounding alone would decide whether the first
    step's gradient is that of DPO or many times it.
    """
    chosen, rejected = policy.chosen - reference.chosen, policy.rejected - reference.rejected
    fall = relu(-chosen - eps * reference.chosen.abs())
    return -logsigmoid(beta * (chosen - rejected - coef * fall))


def simpo(means: PairLogps, beta: float, margin: float) -> Tensor:
    """-log sigmoid(beta (mean chosen - mean rejected) - margin) (2405.14734, equation 6)."""
    return -logsigmoid(beta * (means.chosen - means.rejected) - margin)


def cpo(policy: PairLogps, beta: float) -> Tensor:
    """DPO against a uniform reference (2401.08417, equation 4); its likelihood term is sft's."""
    return -logsigmoid(beta * (policy.chosen - policy.rejected))


def orpo(means: PairLogps) -> Tensor:
    """-log sigmoid(log odds ratio) of the answers' mean log-probabilities (2403.07691, equation 7).
    lambda and the likelihood term are left to the caller."""
    return -logsigmoid(log_odds(means.chosen) - log_odds(means.rejected))


def log_odds(logps: Tensor) -> Tensor:
    """log(p / (1 - p)), stable at both ends; p is taken to be at most 1 - eps."""
    logps = logps.clamp(max=-torch.finfo(logps.dtype).eps)
    near_one = logps > -LN2
    # Each branch sees a value at which it is finite, so that `where` has no NaN in its gradient.
    high = torch.where(near_one, logps, -LN2).expm1().neg().log()
    low = torch.where(near_one, -LN2, logps).exp().neg().log1p()
    return logps - torch.where(near_one, high, low)


# --- of labelled answers -----------------------------------------------------------------------


def kto(
    log_ratios: Tensor,
    desirable: Tensor,
    kl: Tensor | float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """(R,): w (1 - sigmoid(beta (r - z))), for undesirable answers w (1 - sigmoid(beta (z - r)))
    (2402.01306, equation 8 without its constant). desirable: bool (R,). kl: z of `kto.kl_term`."""
    gap = beta * (log_ratios - torch.as_tensor(kl).detach())
    return torch.where(
        desirable,
        desirable_weight * torch.sigmoid(-gap),
        undesirable_weight * torch.sigmoid(gap),
    )


# --- the losses --------------------------------------------------------------------------------


def preference_loss(config: PreferenceLoss, compute: str | None = None) -> Loss:
    """The mean over all pairs (rows, in kto) of the global batch. The batch carries REFERENCE if
    config.needs_reference, and in kto LABEL and KL. compute: precision.compute, whose rounding
    dpop forgives (None: none).

    Metrics, means over pairs: `loss`; `rewards/chosen`, `rewards/rejected` and their difference
    `rewards/margin` (beta is in them once), `rewards/accuracy` (a tie counts half); `logps/chosen`,
    `logps/rejected`; `logps/chosen_shift`, `logps/rejected_shift` (nats above the reference);
    `logps/*_per_token`, means over tokens.
    """
    eps = 0.0 if compute is None else ROUNDING[compute]
    fn = _kto_sums if config.kind == "kto" else _pair_sums
    count = _count_rows if config.kind == "kto" else _count_pairs

    def sums(outputs: TokenOutputs, batch: Batch) -> LossSums:
        return fn(config, outputs, batch, eps)

    return Loss(frozenset({"logprobs"}), count, sums, whole_rows=True)


def _count_pairs(batch: Batch) -> dict[str, float]:
    return {"pairs": document_counts(batch).numel() // 2}


def _count_rows(batch: Batch) -> dict[str, float]:
    return {"rows": document_counts(batch).numel()}


def pair_losses(
    config: PreferenceLoss,
    policy: PairLogps,
    reference: PairLogps | None,
    lengths: PairLogps,
    eps: float = 0.0,
) -> Tensor:
    """(P,). policy, reference: sums; lengths: tokens of each answer; eps: as in `dpo_positive`."""
    means = PairLogps(*(total / n for total, n in zip(policy, lengths, strict=True)))
    kind, beta = config.kind, config.beta
    if kind == "simpo":
        losses = simpo(means, beta, config.margin)
    elif kind == "orpo":
        losses = beta * orpo(means)
    elif kind == "cpo":
        losses = cpo(means if config.length_normalised else policy, beta)
    else:
        assert reference is not None
        losses = _against_reference(config, policy, reference, lengths, eps)
    weight = config.sft_weight
    return losses - weight * means.chosen if weight else losses


def _against_reference(
    config: PreferenceLoss,
    policy: PairLogps,
    reference: PairLogps,
    lengths: PairLogps,
    eps: float,
) -> Tensor:
    beta = config.beta
    if config.length_normalised:
        policy = PairLogps(*(total / n for total, n in zip(policy, lengths, strict=True)))
        reference = PairLogps(*(total / n for total, n in zip(reference, lengths, strict=True)))
    if config.kind == "dpop":
        return dpo_positive(policy, reference, beta, config.positive_coef, eps)
    rewards = [
        implicit_reward(mine - theirs, config.divergence, config.alpha)
        for mine, theirs in zip(policy, reference, strict=True)
    ]
    differences = rewards[0] - rewards[1]
    if config.kind == "ipo":
        return ipo(differences, beta)
    if config.kind == "hinge":
        return hinge(beta * differences)
    if config.kind == "robust":
        return robust_dpo(beta * differences, config.label_smoothing)
    return dpo(beta * differences, config.label_smoothing)


def rewards_of(config: PreferenceLoss, logps: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
    """beta times the implicit reward of answers, by their sums of log-probabilities; without a
    reference (zeros), of log-probabilities as such."""
    if config.length_normalised or config.kind in ("simpo", "orpo"):
        logps, reference = logps / lengths, reference / lengths
    return config.beta * implicit_reward(logps - reference, config.divergence, config.alpha)


def _pair_sums(config: PreferenceLoss, outputs: TokenOutputs, batch: Batch, eps: float) -> LossSums:
    logps = _logps(outputs, batch)
    dtype = logps.chosen.dtype
    lengths, reference = _pairs(document_counts(batch).to(dtype)), None
    if config.needs_reference:
        reference = _pairs(per_document(batch.extra[REFERENCE], batch).to(dtype))
    losses = pair_losses(config, logps, reference, lengths, eps)
    detached = PairLogps(*(x.detach() for x in logps))
    metrics = pair_metrics(config, detached, reference, lengths, losses.detach())
    return LossSums({"pairs": losses.sum()}, metrics)


def pair_metrics(
    config: PreferenceLoss,
    logps: PairLogps,
    reference: PairLogps | None,
    lengths: PairLogps,
    losses: Tensor,
) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> (sum, count): `preference_loss`'s. All (P,), without gradient."""
    against = reference or PairLogps(*(torch.zeros_like(x) for x in logps))
    chosen, rejected = (
        rewards_of(config, mine, theirs, n)
        for mine, theirs, n in zip(logps, against, lengths, strict=True)
    )
    count = torch.full_like(losses.sum(), losses.numel())
    means = {
        "loss": losses,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margin": chosen - rejected,
        "rewards/accuracy": wins(chosen, rejected),
        "logps/chosen": logps.chosen,
        "logps/rejected": logps.rejected,
    }
    if reference is not None:
        means["logps/chosen_shift"] = logps.chosen - reference.chosen
        means["logps/rejected_shift"] = logps.rejected - reference.rejected
    found = {name: (values.sum(), count) for name, values in means.items()}
    found["logps/chosen_per_token"] = (logps.chosen.sum(), lengths.chosen.sum())
    found["logps/rejected_per_token"] = (logps.rejected.sum(), lengths.rejected.sum())
    return found


def wins(chosen: Tensor, rejected: Tensor) -> Tensor:
    """1 where chosen is above rejected, 1/2 where they are equal, else 0."""
    return ((chosen > rejected).to(chosen.dtype) + (chosen >= rejected).to(chosen.dtype)) / 2


def _kto_sums(config: PreferenceLoss, outputs: TokenOutputs, batch: Batch, _eps: float) -> LossSums:
    assert outputs.logprobs_BT is not None
    logps_R = document_sums(outputs.logprobs_BT, batch, batch.weights_BT)
    reference_R = per_document(batch.extra[REFERENCE], batch)
    good_R = per_document(batch.extra[LABEL], batch) != 0
    kl_R = per_document(batch.extra[KL], batch)
    weights = config.desirable_weight, config.undesirable_weight
    losses_R = kto(logps_R - reference_R, good_R, kl_R, config.beta, *weights)
    with torch.no_grad():
        count = torch.full_like(losses_R.sum(), losses_R.numel())
        shift_R = logps_R - reference_R
        metrics = {"loss": (losses_R.sum(), count), "kl": (kl_R.double().sum(), count)}
        for name, mask_R in (("chosen", good_R), ("rejected", ~good_R)):
            of = mask_R.sum()
            metrics[f"rewards/{name}"] = (config.beta * shift_R[mask_R].sum(), of)
            metrics[f"logps/{name}"] = (logps_R[mask_R].sum(), of)
            metrics[f"logps/{name}_shift"] = (shift_R[mask_R].sum(), of)
            tokens = document_counts(batch)[mask_R].sum()
            metrics[f"logps/{name}_per_token"] = (logps_R[mask_R].sum(), tokens)
    return LossSums({"rows": losses_R.sum()}, metrics)


def _logps(outputs: TokenOutputs, batch: Batch) -> PairLogps:
    assert outputs.logprobs_BT is not None
    return _pairs(document_sums(outputs.logprobs_BT, batch, batch.weights_BT))


def _pairs(values_D: Tensor) -> PairLogps:
    return PairLogps(values_D[0::2], values_D[1::2])
