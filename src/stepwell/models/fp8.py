"""Linear layers in 8 bits: quantisation, the scaled product, and the layer's own gradients.

N tokens, D in-features, M out-features. E4M3 (largest value 448, no infinities) carries activations
and weights, E5M2 (largest 57344) carries gradients ("FP8 formats for deep learning", 2209.05433).

Scales are powers of two, rounded down. Multiplying by them is exact, so a value is rounded once;
what a product sees is exact in bfloat16, so on a CPU a bfloat16 product of the dequantised operands
is the same arithmetic as the scaled kernel of a GPU; and two scales give the same numbers but for
those under the smallest normal one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Of a delayed scale: activations, weights, gradients of the output.
ROLES = ("x", "w", "g")
X, W, G = range(3)
# Both sides of the kernel's products come in pieces of 16 bytes.
MULTIPLE = 16

_EXPONENT_BITS = 0x7F800000
_LARGEST_SCALE = 2.0**126


@dataclass(frozen=True)
class Fp8:
    """How one linear layer computes.

    scales, seen: of the delayed recipe, float32 (3,) in the order of `ROLES`. scales: what tensors
    are multiplied by; 0 where nothing is known yet, then the current maximum serves. seen: the
    largest magnitude since the last optimiser step; computing a step twice changes nothing in it.
    """

    recipe: Literal["tensorwise", "delayed", "rowwise"]
    wgrad_high_precision: bool = False
    scales: Tensor | None = None
    seen: Tensor | None = None


class Quantised(NamedTuple):
    """values: float8. inverse: float32, what they are multiplied by, () or broadcast over them."""

    values: Tensor
    inverse: Tensor

    def t(self) -> Quantised:
        return Quantised(self.values.t(), self.inverse.t() if self.inverse.dim() else self.inverse)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype) * self.inverse.to(dtype)


def largest(x: Tensor, dim: int | None = None) -> Tensor:
    """The largest magnitude, float32: of all (), or along `dim`, which stays with size 1."""
    found = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return found.float()


def scale_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two (at most 2^126) that keeps amax within `dtype`; NaN where amax is
    not finite, so that what is not finite never looks sound in 8 bits."""
    ratio = (torch.finfo(dtype).max / amax).clamp(max=_LARGEST_SCALE)
    power = (ratio.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return torch.where(amax.isfinite(), power, torch.nan)


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Quantised:
    """x * scale in 8 bits: to nearest, ties to even; too large values become the largest one."""
    limit = torch.finfo(dtype).max
    wide = x if x.dtype == torch.float64 else x.float()
    return Quantised((wide * scale).clamp(-limit, limit).to(dtype), 1.0 / scale)


def scaled_product(a: Quantised, b: Quantised, dtype: torch.dtype, kernel: bool) -> Tensor:
    """a (R, C) @ b (C, S) of what the operands stand for, as `dtype`.

    kernel: by torch's scaled matmul, which wants C and S in multiples of 16; otherwise the same
    numbers by an ordinary product in `dtype`. Scales are one a tensor, or a (R, 1) and b (1, S).
    """
    if not kernel:
        return a.dequantised(dtype) @ b.dequantised(dtype)
    missing = -a.values.shape[1] % MULTIPLE
    left, right = _widened(a.values, missing), _widened(b.values.t(), missing)
    rowwise = a.inverse.dim() > 0
    product = torch.ops.aten._scaled_mm(
        left,
        right.t(),
        scale_a=a.inverse.flatten().unsqueeze(1) if rowwise else a.inverse,
        scale_b=b.inverse.flatten().unsqueeze(0) if rowwise else b.inverse,
        out_dtype=torch.bfloat16 if rowwise else dtype,  # the row-wise kernel has no other
    )
    return product.to(dtype)


def _widened(x: Tensor, columns: int) -> Tensor:
    """Row-major, with so many columns of zeros more (padding knows no 8-bit floats)."""
    if not columns:
        return x.contiguous()
    return F.pad(x.contiguous().view(torch.uint8), (0, columns)).view(x.dtype)


def fp8_linear(x: Tensor, weight_MD: Tensor, fp8: Fp8, kernel: bool | None = None) -> Tensor:
    """x (..., D) W^T in the dtype of x, with 8-bit operands forward and backward.

    Forward x and w are E4M3. Backward, g is E5M2: grad_x = g w; grad_w = g^T x, or in x's dtype
    with wgrad_high_precision. Row-wise scales run along each product's sum, so w and x are
    quantised anew for the backward ones. The maxima are those of the tensors given: a shard of a
    weight, or of a batch, has its own.
    kernel: `scaled_product`'s; None: on CUDA.
    """
    if x.numel() == 0:
        return F.linear(x, weight_MD.to(x.dtype))
    seen = fp8.seen if torch.is_grad_enabled() else None
    y_NM = _Fp8Linear.apply(
        x.reshape(-1, x.shape[-1]),
        weight_MD,
        fp8.scales,
        seen,
        fp8.recipe == "rowwise",
        fp8.wgrad_high_precision,
        x.device.type == "cuda" if kernel is None else kernel,
    )
    return y_NM.reshape(*x.shape[:-1], weight_MD.shape[0])


def _by_tensor(
    x: Tensor, dtype: torch.dtype, role: int, scales: Tensor | None, seen: Tensor | None
) -> Quantised:
    amax = largest(x)
    scale = scale_for(amax, dtype)
    if scales is not None:
        known = (scales[role] > 0) & amax.isfinite()
        scale = torch.where(known, scales[role], scale)
    if seen is not None:
        seen[role] = torch.maximum(seen[role], amax)
    return quantise(x, dtype, scale)


def _along(x: Tensor, dtype: torch.dtype, dim: int) -> Quantised:
    return quantise(x, dtype, scale_for(largest(x, dim), dtype))


class _Fp8Linear(torch.autograd.Function):
    """Saves the weight as it was given, which sharding may free and gather again, never an 8-bit
    copy of it; and x in 8 bits where that is all the backward pass needs."""

    @staticmethod
    def forward(ctx, x_ND, weight_MD, scales, seen, rowwise, high_precision, kernel):
        w_MD = weight_MD.to(x_ND.dtype)
        if rowwise:
            x8, w8 = _along(x_ND, E4M3, 1), _along(w_MD, E4M3, 1)
        else:
            x8 = _by_tensor(x_ND, E4M3, X, scales, seen)
            w8 = _by_tensor(w_MD, E4M3, W, scales, seen)
        ctx.options = (x_ND.dtype, rowwise, high_precision, kernel)
        ctx.seen = seen
        kept = (x_ND,) if rowwise or high_precision else tuple(x8)
        ctx.save_for_backward(weight_MD, scales, *kept)
        return scaled_product(x8, w8.t(), x_ND.dtype, kernel)

    @staticmethod
    def backward(ctx, grad_NM):
        weight_MD, scales, *kept = ctx.saved_tensors
        dtype, rowwise, high_precision, kernel = ctx.options
        grad_x = grad_w = None
        by_tensor = None if rowwise else _by_tensor(grad_NM, E5M2, G, scales, ctx.seen)
        if ctx.needs_input_grad[0]:
            w_MD = weight_MD.to(dtype)
            if by_tensor is None:
                g8, w8 = _along(grad_NM, E5M2, 1), _along(w_MD, E4M3, 0)
            else:
                g8, w8 = by_tensor, _by_tensor(w_MD, E4M3, W, scales, None)
            grad_x = scaled_product(g8, w8, dtype, kernel)
        if ctx.needs_input_grad[1]:
            if high_precision:
                grad_w = grad_NM.t() @ kept[0]
            elif by_tensor is None:
                g8, x8 = _along(grad_NM, E5M2, 0), _along(kept[0], E4M3, 0)
                grad_w = scaled_product(g8.t(), x8, dtype, kernel)
            else:
                grad_w = scaled_product(by_tensor.t(), Quantised(*kept), dtype, kernel)
            grad_w = grad_w.to(weight_MD.dtype)
        return grad_x, grad_w, None, None, None, None, None
