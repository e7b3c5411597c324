"""Several reward models as one: what they say together, and how far they disagree (2310.02743).

K models, D answers.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from stepwell.types import ConfigError, nearest

Combination = Literal["mean", "min", "mean-k-sd"]


def combine(scores_KD: Tensor, how: Combination = "mean", k: float = 1.0) -> Tensor:
    """(D,): the mean, the lowest (worst case), or the mean less k standard deviations (2310.02743
    takes the variance there; the deviation keeps the score's unit).

    Raises ConfigError for another word, a negative k, no model, and, where models are compared,
    fewer than two.
    """
    if how not in get_args(Combination):
        legal = get_args(Combination)
        raise ConfigError(
            f"aggregate={how!r} is no way to combine scores: one of {', '.join(legal)}"
            f"{nearest(str(how), legal)}"
        )
    num_models = scores_KD.shape[0]
    if k < 0:
        raise ConfigError(f"k={k:g} would reward disagreement; the nearest legal value is 0")
    if num_models < (1 if how == "mean" else 2):
        raise ConfigError(
            f"aggregate={how!r} of {num_models} reward model{'' if num_models == 1 else 's'}: give "
            + ("at least one" if how == "mean" else "two or more, or take 'mean'")
        )
    if how == "min":
        return scores_KD.amin(0)
    mean_D = scores_KD.mean(0)
    return mean_D if how == "mean" else mean_D - k * disagreement(scores_KD)


def disagreement(scores_KD: Tensor) -> Tensor:
    """(D,): the sample standard deviation over the models; zero for a single one."""
    if scores_KD.shape[0] == 1:
        return torch.zeros_like(scores_KD[0])
    return scores_KD.std(0, correction=1)


def standardised(scores_KD: Tensor, means_K: Tensor, sds_K: Tensor) -> Tensor:
    """(score - mean) / sd of each model: pairs fix a model's scores up to a constant only, and
    models trained apart have different ones, so that without this the lowest of several scores
    would mostly be the lowest constant's. Raises ConfigError for a deviation that is not above 0.
    """
    flat = (sds_K <= 0) | ~sds_K.isfinite()
    if flat.any():
        at = int(flat.nonzero()[0])
        raise ConfigError(
            f"reward model {at} has scores with the standard deviation {float(sds_K[at]):g}, which "
            "cannot be brought to 1; leave it out, or the standardising"
        )
    return (scores_KD - means_K[:, None]) / sds_K[:, None]
