"""Estimates of KL(policy || reference) from log-probabilities of the policy's own samples.

With d = log policy(x) - log reference(x) for x from the policy (Schulman, "Approximating KL
divergence", 2020): k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d. k1 and k3 have the KL as their mean,
k2 has not; k2 and k3 are never negative.

Their *gradients*, when an estimate is a term of the loss, are another matter (2506.09477,
2510.01555): k1's is zero on average; k2's is the reverse KL's; k3's is that of the forward
KL(reference || policy). `unbiased` has k3's value and the reverse KL's gradient, also on samples of
an older policy: k3 times the ratio to it, differentiated through both (DeepSeek-V3.2, 2512.02556,
section 3.1). As a part of the *reward* no gradient goes through the estimate, and there k1 is the
one whose policy gradient is the reverse KL's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepwell.posttrain.policy.objectives import log_ratio
from stepwell.types import ConfigError, nearest

KINDS = ("k1", "k2", "k3", "unbiased")


def kl_estimate(
    logprobs: Tensor, reference_logprobs: Tensor, kind: str, old_logprobs: Tensor | None = None
) -> Tensor:
    """Element-wise, in nats; differentiable in `logprobs` only.

    old_logprobs: of the policy that sampled, for `unbiased` (None: the current one). Raises
    ConfigError for an unknown kind.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"method.kl_estimator={kind!r} is unknown{nearest(kind, KINDS)}; known are "
            f"{', '.join(KINDS)}"
        )
    difference = log_ratio(logprobs, reference_logprobs.detach())
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    k3 = torch.expm1(-difference) + difference
    if kind == "k3":
        return k3
    old_logprobs = logprobs if old_logprobs is None else old_logprobs
    return log_ratio(logprobs, old_logprobs.detach()).exp() * k3
