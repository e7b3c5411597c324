"""4-bit NormalFloat with double quantisation (QLoRA, 2305.14314, section 3).

M out-features, D in-features, N tokens. A weight is flattened and cut into blocks of 64. Each block
has its largest magnitude as scale, and each value becomes the nearest of 16 levels, the quantiles
of a normal distribution. Double quantisation takes the mean off the scales and keeps what is left
as 8-bit floats in blocks of 256.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK, SCALE_BLOCK = 64, 256
_FP8 = torch.float8_e4m3fn
# The outermost quantile, so that both tails have finite levels: the mean of 1 - 1/30 and 1 - 1/32
# of the distribution, as in the paper's released implementation.
_OFFSET = 0.5 * ((1 - 1 / 30) + (1 - 1 / 32))


@cache
def nf4_levels() -> Tensor:
    """The 16 levels in order, float32 in [-1, 1]: eight quantiles of the positive half, seven of
    the negative one and an exact zero (2305.14314, equation 4 and the asymmetric type)."""
    positive = torch.special.ndtri(torch.linspace(_OFFSET, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(_OFFSET, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([positive, negative, torch.zeros(1, dtype=torch.float64)]).sort().values
    return (levels / levels.max()).float()


class Nf4(NamedTuple):
    """A matrix in 4 bits. codes: uint8, two values each, the first in the upper half. scales: of
    each block, float32, or float8 with double quantisation; then scale_scales (float32, one for
    256 of them) and mean (float32, ()) restore them. shape: (M, D)."""

    codes: Tensor
    scales: Tensor
    scale_scales: Tensor | None
    mean: Tensor | None
    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scales, self.scale_scales, self.mean)
        return sum(part.nbytes for part in parts if part is not None)


@torch.no_grad()
def quantise_nf4(weight_MD: Tensor, double: bool = True) -> Nf4:
    """The nearest levels. A last block may be shorter. Raises ValueError for values that are not
    finite."""
    if not weight_MD.isfinite().all():
        raise ValueError("a weight with values that are not finite has no 4-bit form")
    M, D = weight_MD.shape
    flat = weight_MD.detach().reshape(-1).float()
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    scale_scales = mean = None
    if double:
        scales, scale_scales, mean = _quantise_scales(scales)
    used = _scales(scales, scale_scales, mean)[:, None]
    levels = nf4_levels().to(flat.device)
    # A scale that rounding has brought to zero, or below, leaves only the level zero.
    unit = torch.where(used > 0, blocks / used, 0.0)
    codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).view(-1)
    codes = F.pad(codes[: flat.numel()], (0, flat.numel() % 2)).view(-1, 2)
    return Nf4((codes[:, 0] << 4) | codes[:, 1], scales, scale_scales, mean, (M, D))


def dequantise_nf4(weight: Nf4, dtype: torch.dtype) -> Tensor:
    """(M, D): level times scale in float32, rounded once to `dtype`."""
    M, D = weight.shape
    scales = _scales(weight.scales, weight.scale_scales, weight.mean)
    values = F.embedding(weight.codes.int(), _pairs(weight.codes.device)).view(-1)[: M * D]
    whole = M * D // BLOCK * BLOCK
    values[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK, None])
    values[whole:].mul_(scales[-1])
    return values.view(M, D).to(dtype)


def nf4_linear(x_ND: Tensor, weight: Nf4) -> Tensor:
    """x W^T in the dtype of x. The matrix is restored for each pass and let go; its gradient is
    never asked for."""
    return _Nf4Linear.apply(x_ND, *weight)


def quantising_error(weight_MD: Tensor, double: bool = True) -> float:
    """|Q(W) - W| / |W| (Frobenius) of bringing a matrix to 4 bits."""
    weight_MD = weight_MD.float()
    restored = dequantise_nf4(quantise_nf4(weight_MD, double), torch.float32)
    norm = weight_MD.norm().item()
    return (restored - weight_MD).norm().item() / norm if norm else 0.0


def _quantise_scales(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean = scales.mean()
    rest = F.pad(scales - mean, (0, -scales.numel() % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
    largest = rest.abs().amax(dim=1)
    scale_scales = largest / torch.finfo(_FP8).max
    unit = torch.where(largest[:, None] > 0, rest / scale_scales[:, None], 0.0)
    return unit.to(_FP8).view(-1)[: scales.numel()].clone(), scale_scales, mean


def _scales(scales: Tensor, scale_scales: Tensor | None, mean: Tensor | None) -> Tensor:
    if scale_scales is None or mean is None:
        return scales
    factors = scale_scales.repeat_interleave(SCALE_BLOCK)[: scales.numel()]
    return scales.float() * factors + mean


@cache
def _pairs(device: torch.device) -> Tensor:
    """(256, 2): both values of each byte."""
    byte = torch.arange(256)
    return nf4_levels()[torch.stack([byte >> 4, byte & 15], dim=1)].to(device)


class _Nf4Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, scales, scale_scales, mean, shape):
        ctx.save_for_backward(codes, scales, scale_scales, mean)
        ctx.shape = shape
        weight = Nf4(codes, scales, scale_scales, mean, shape)
        return F.linear(x, dequantise_nf4(weight, x.dtype))

    @staticmethod
    def backward(ctx, grad):
        if not ctx.needs_input_grad[0]:
            return (None,) * 6
        codes, scales, scale_scales, mean = ctx.saved_tensors
        weight = Nf4(codes, scales, scale_scales, mean, ctx.shape)
        return grad @ dequantise_nf4(weight, grad.dtype), None, None, None, None, None
