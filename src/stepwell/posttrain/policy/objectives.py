"""Policy-gradient objectives: element-wise, each a value to be minimised and where a bound binds.

With r = policy(token) / old policy(token), A the advantage. Their values say little (on the first
step they are the mean of -A); their gradients are what trains.
"""

from __future__ import annotations

import torch
from torch import Tensor

# e^20 = 4.9e8: further than any ratio that means something, and its products stay finite.
MAX_LOG_RATIO = 20.0


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """log r, held within +-MAX_LOG_RATIO (beyond it without gradient) so that r is finite."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped(
    log_ratios: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, 1707.06347, equation 7; separate bounds:
    DAPO's clip-higher, 2503.14476, equation 10).

    dual_clip: c > 1 bounds the value by -c A where A is negative, so that a token that has become
    much likelier than it was no longer pulls (1912.09729, equation 5); 0: no such bound.
    """
    ratio = log_ratios.exp()
    plain = ratio * advantages
    held = ratio.clamp(1 - low, 1 + high) * advantages
    value, binds = torch.minimum(plain, held), held < plain
    if dual_clip:
        floor = dual_clip * advantages
        below = (advantages < 0) & (value < floor)
        value, binds = torch.where(below, floor, value), binds | below
    return -value, binds


def cispo(
    logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """-sg(clip(r, 1 - low, 1 + high)) A log p (CISPO, 2506.13585, equation 4; sg: no gradient):
    clipped or not, every token has a gradient. The paper leaves the lower bound out: low = 1."""
    ratio = log_ratios.detach().exp()
    weight = ratio.clamp(1 - low, 1 + high)
    return -weight * advantages * logprobs, weight != ratio


def gspo_log_ratios(logprobs: Tensor, mean_log_ratios: Tensor) -> Tensor:
    """Log-ratios for `clipped` whose value at each token is its answer's mean log-ratio, and whose
    gradient is that of the token's log-probability (GSPO-token, 2507.18071, equation 14).

    mean_log_ratios: of the token's answer, at each of its tokens (`aggregation.document_means`).
    """
    held = mean_log_ratios.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return held + (logprobs - logprobs.detach())
