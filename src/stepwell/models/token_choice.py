"""Which token follows: one draw a row from logits, by a uniform number that seed and position fix.

R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 64  # the distribution is searched by blocks of this many ids
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seed: int, start: int, count: int) -> np.ndarray:
    """float32 numbers in (0, 1) for positions start, start + 1, ...: a hash of each
    (seed, position) by the finaliser of SplitMix64 (Steele et al. 2014), applied twice."""
    with np.errstate(over="ignore"):
        position = np.arange(start, start + count, dtype=np.uint64)
        mixed = _mix(np.uint64(seed % 2**64) + _GOLDEN) ^ position
        bits = _mix(mixed * _GOLDEN + _GOLDEN) >> np.uint64(41)
    return ((bits.astype(np.float64) + 0.5) / 2**23).astype(np.float32)


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    x = np.atleast_1d(x)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(
    logits_RV: Tensor,
    uniforms_R: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    num_ids: int | None = None,
) -> tuple[Tensor, Tensor]:
    """One token a row and its log-probability at the temperature over the full support.

    logits_RV: at least float32; V must be a multiple of BLOCK (pad with -inf).
    temperature 0: the likeliest (log-probabilities are then those at temperature 1). top_k 0 and
    top_p 1 keep all; both together: the k likeliest, then the nucleus of those (1904.09751).
    num_ids: only ids below it are chosen (None: all).
    The token is the inverse of the cumulative distribution at the uniform number.
    """
    plain = temperature in (0, 1)
    scaled = logits_RV if plain else logits_RV / temperature
    probs_RV = scaled.softmax(-1)
    if temperature == 0:
        tokens_R = _argmax(_first(logits_RV, num_ids, float("-inf")))
    else:
        allowed_RV = _first(probs_RV.float(), num_ids, 0.0)
        tokens_R = _invert_blocks(_truncate(allowed_RV, top_k, top_p), uniforms_R)
    logprobs_R = probs_RV.gather(1, tokens_R[:, None]).log()
    return tokens_R, logprobs_R.squeeze(1)


def _first(values_RV: Tensor, num_ids: int | None, fill: float) -> Tensor:
    """The values of the first `num_ids` ids, and `fill` for the rest."""
    surplus = 0 if num_ids is None else values_RV.shape[1] - num_ids
    if surplus <= 0:
        return values_RV
    return F.pad(values_RV[:, :num_ids], (0, surplus), value=fill)


def _argmax(logits_RV: Tensor) -> Tensor:
    """The first of the largest; by blocks, which is several times faster on CPU."""
    blocks = logits_RV.unflatten(1, (-1, BLOCK))
    best_R1 = blocks.amax(-1).argmax(-1, keepdim=True)
    inside = blocks.gather(1, best_R1[..., None].expand(-1, -1, BLOCK)).squeeze(1)
    return best_R1.squeeze(1) * BLOCK + inside.argmax(-1)


def _invert_blocks(probs_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """Finds the block first, then the id within it, so only V / BLOCK numbers are accumulated."""
    blocks = probs_RV.unflatten(1, (-1, BLOCK))
    masses = blocks.sum(-1)
    block_R1, left_R1 = _invert(masses, uniforms_R[:, None] * masses.sum(-1, keepdim=True))
    inside = blocks.gather(1, block_R1[..., None].expand(-1, -1, BLOCK)).squeeze(1)
    return (block_R1 * BLOCK + _invert(inside, left_R1)[0]).squeeze(1)


def _invert(masses_RC: Tensor, target_R1: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose cumulative mass exceeds the target, and what of the target is left
    at its start. An entry without mass is never chosen, whatever the rounding."""
    ends_RC = masses_RC.cumsum(-1)
    last_R1 = (ends_RC < ends_RC[:, -1:]).sum(-1, keepdim=True)
    index_R1 = torch.minimum((ends_RC <= target_R1).sum(-1, keepdim=True), last_R1)
    before_R1 = torch.where(index_R1 > 0, ends_RC.gather(1, (index_R1 - 1).clamp(min=0)), 0)
    return index_R1, target_R1 - before_R1


def _truncate(probs_RV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zero outside the top k and the nucleus; not normalised. Ids that tie with the last kept one
    are kept too."""
    if 0 < top_k < probs_RV.shape[1]:
        least_R1 = probs_RV.topk(top_k, dim=-1).values[:, -1:]
        probs_RV = torch.where(probs_RV >= least_R1, probs_RV, 0)
    if top_p < 1:
        probs_RV = torch.where(probs_RV >= _nucleus_threshold(probs_RV, top_p), probs_RV, 0)
    return probs_RV


def _nucleus_threshold(probs_RV: Tensor, top_p: float) -> Tensor:
    """The largest t for which entries >= t hold top_p of the mass, (R, 1)."""
    if probs_RV.device.type == "cpu":  # numpy sorts values alone, fifty times faster than torch
        falling_RV = torch.from_numpy(np.sort(probs_RV.numpy(), axis=-1)).flip(-1)
    else:
        falling_RV = probs_RV.sort(dim=-1, descending=True).values
    ends_RV = falling_RV.cumsum(-1)
    index_R1 = torch.searchsorted(ends_RV, top_p * ends_RV[:, -1:])
    return falling_RV.gather(1, index_R1.clamp(max=probs_RV.shape[1] - 1))
