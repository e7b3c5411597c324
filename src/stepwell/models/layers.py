"""The small pieces of a decoder: linear, RMSNorm, rotary positions, SwiGLU.

B rows, T tokens, N = B*T, D d_model, H heads, E head_dim, F d_ff. Weights are kept in the master
dtype and cast where they are used, so the same module runs in one process (float32 masters) and
under FSDP2 (which hands over weights already in compute dtype).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from stepwell.models.collectives import all_gather, reduce_scatter, shared
from stepwell.models.fp8 import Fp8, fp8_linear
from stepwell.sections.model import ModelConfig, RopeScaling


class ContextRanks(NamedTuple):
    """The ranks that divide the rows' tokens among them. method: "ring" or "ulysses". borders: of
    the documents in all tokens of the full rows; chunks (rows, ranks, k): the parts of each row
    that each rank has. Both are on the CPU."""

    group: dist.ProcessGroup
    method: str
    borders: Tensor
    chunks: Tensor


class SharedPrompts(NamedTuple):
    """Tokens that several documents begin with and that are there once. N tokens; M of them with
    each document whole. expand_M: which token stands at each of the M places; kept_N: the first
    place of each token. For the gradients: shared_S, the tokens that stand at several places, and
    for the second place, the third, ... (which of the S, place among the M)."""

    expand_M: Tensor
    kept_N: Tensor
    shared_S: Tensor
    copies: tuple[tuple[Tensor, Tensor], ...]


class Firsts(NamedTuple):
    """The first token of each document whose attention is used, (documents,) on the CPU; None: all
    of them are. all: in every block; active: where active tokens alone go on."""

    all: Tensor | None = None
    active: Tensor | None = None


EVERY = Firsts()


class Context(NamedTuple):
    """What the tokens of a micro-batch share in every block. cos, sin (N, 1, E/2): their rotary
    angles; cu_seqlens: borders of their documents, with cp of those in the full rows, with `shared`
    of whole documents; tp, cp: the ranks of the tensor and the context axis; keys_N: what adapters'
    dropout knows them by, None where nothing is dropped."""

    cos: Tensor
    sin: Tensor
    cu_seqlens: Tensor
    tp: dist.ProcessGroup | None = None
    cp: ContextRanks | None = None
    keys_N: Tensor | None = None
    shared: SharedPrompts | None = None
    firsts: Firsts = EVERY


def upcast(x: Tensor) -> Tensor:
    """At least float32; float64 stays as it is."""
    return x if x.dtype == torch.float64 else x.float()


def local(weight: Tensor) -> Tensor:
    """This rank's part of a weight that tensor parallelism has laid out; others as they are."""
    # By the name of DTensor's method: its import takes half a second, which sampling never needs.
    laid_out: Any = weight
    return laid_out.to_local() if hasattr(type(weight), "to_local") else weight


class SharedRows(NamedTuple):
    """The rows of a weight that this rank uses, where all ranks of `tp` hold the whole of it."""

    tp: dist.ProcessGroup
    start: int
    stop: int

    def of(self, weight: Tensor) -> Tensor:
        return shared(weight, self.tp)[self.start : self.stop]


class Linear(nn.Linear):
    """y = x W^T + b in the dtype of x; with 8-bit operands where precision has set `fp8`, of some
    rows where tensor parallelism has set `rows`."""

    fp8: Fp8 | None = None
    rows: SharedRows | None = None

    def forward(self, input: Tensor, keys_N: Tensor | None = None) -> Tensor:
        """keys_N: for the dropout of adapters (`models/lora`), of which a plain layer has none."""
        return self.with_bias(self.product(input))

    def product(self, input: Tensor) -> Tensor:
        """x W^T."""
        weight = local(self.weight)
        if self.rows is not None:
            weight = self.rows.of(weight)
        if self.fp8 is not None:
            return fp8_linear(input, weight, self.fp8)
        return F.linear(input, weight.to(input.dtype))

    def with_bias(self, product: Tensor) -> Tensor:
        if self.bias is None:
            return product
        bias = local(self.bias)
        if self.rows is not None:
            bias = self.rows.of(bias)
        return product + bias.to(product.dtype)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], where no row is taken twice, with a backward pass that need not add up."""
    if torch.compiler.is_compiling():
        return x[index]
    return _TakeRows.apply(x, index)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (index,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        out[index] = grad
        return out, None


def expand_shared(x: Tensor, shared: SharedPrompts) -> Tensor:
    """x (N, ...) -> (M, ...): each document whole."""
    return _Expand.apply(x, shared)


class _Expand(torch.autograd.Function):
    """Adds up the gradients of a token's places in at least float32."""

    @staticmethod
    def forward(ctx, x: Tensor, shared: SharedPrompts) -> Tensor:
        ctx.shared = shared
        return x.index_select(0, shared.expand_M)

    @staticmethod
    def backward(ctx, grad: Tensor):
        shared: SharedPrompts = ctx.shared
        out = grad.index_select(0, shared.kept_N)
        total = upcast(out.index_select(0, shared.shared_S))
        for which, places in shared.copies:
            total[which] += grad.index_select(0, places)
        out[shared.shared_S] = total.to(out.dtype)
        return out, None


def embed(
    tokens_N: Tensor, weight_VD: Tensor, dtype: torch.dtype, tp: dist.ProcessGroup | None
) -> Tensor:
    """Rows of the embedding as `dtype`. With tp, weight_VD is this rank's part of the vocabulary,
    and the result is this rank's N / tp tokens."""
    if tp is None:
        return F.embedding(tokens_N, weight_VD).to(dtype)
    index = tokens_N - tp.rank() * weight_VD.shape[0]
    mine = (index >= 0) & (index < weight_VD.shape[0])
    x_ND = F.embedding(torch.where(mine, index, 0), weight_VD).to(dtype)
    return reduce_scatter(torch.where(mine[:, None], x_ND, 0), tp)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim, computed in at least float32 (1910.07467)."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _rms_norm(x, weight, eps)[0]
    return _RMSNorm.apply(x, weight, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = upcast(x)
    scale = torch.rsqrt(_mean_square(wide) + eps)
    return (wide * scale * weight).to(x.dtype), scale


def _mean_square(x: Tensor) -> Tensor:
    """Over the last dim, which stays; without a copy of x, unless a compiler sees to that."""
    if torch.compiler.is_compiling():
        return x.square().mean(-1, keepdim=True)
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square().div(x.shape[-1])


class _RMSNorm(torch.autograd.Function):
    """Saves x and one scale a row, where autograd would save several copies of x in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, scale = ctx.saved_tensors
        normed, wide = upcast(x) * scale, upcast(grad)
        product, grad_weight = wide * normed, None
        if ctx.needs_input_grad[1]:
            grad_weight = product.sum(tuple(range(x.dim() - 1))).to(weight.dtype)
        along = product.mul_(weight).mean(-1, keepdim=True)
        grad_x = (wide * weight).addcmul_(normed, along, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor, tp: dist.ProcessGroup | None = None) -> Tensor:
        """tp: the ranks that norm other tokens, or heads, with the same weight."""
        weight = local(self.weight)
        if tp is not None:
            weight = shared(upcast(weight), tp)
        return rms_norm(x, weight, self.eps)


def rope_frequencies(cfg: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Angular frequency of each rotated pair, float32 (E/2,) (RoFormer, 2104.09864)."""
    steps = torch.arange(0, cfg.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / (cfg.rope_theta ** (steps / cfg.head_dim))
    return stretch(frequencies, cfg.rope_scaling) if cfg.rope_scaling else frequencies


def stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's rule: slow frequencies are divided by `factor`, fast ones stay, between them a
    linear blend in the number of turns over the original context."""
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def rope_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of shape positions.shape + (1, E/2), ready for (..., heads, E) tensors."""
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-2)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (i, i + E/2) of the last dim; x (..., heads, E)."""
    if torch.compiler.is_compiling():
        low, high = upcast(x).chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
    if not torch.is_grad_enabled():  # the same to the last bit as what is trained
        return _rotate(x, cos, sin, 1)
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back; x need not be saved."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    wide = upcast(x)
    low, high = wide.chunk(2, dim=-1)
    out = torch.empty_like(x)
    half = low.shape[-1]
    out[..., :half] = (low * cos).addcmul_(high, sin, value=-sign)
    out[..., half:] = (high * cos).addcmul_(low, sin, value=sign)
    return out


class SwiGLU(nn.Module):
    """w_down(silu(w_gate x) * w_up x) (2002.05202)."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.w_gate = Linear(d_model, d_ff, bias=False)
        self.w_up = Linear(d_model, d_ff, bias=False)
        self.w_down = Linear(d_ff, d_model, bias=False)

    def forward(self, x_ND: Tensor, context: Context) -> Tensor:
        x_ND = all_gather(x_ND, context.tp)
        keys_N = context.keys_N
        hidden_NF = F.silu(self.w_gate(x_ND, keys_N)) * self.w_up(x_ND, keys_N)
        y_ND = self.w_down(hidden_NF, keys_N)
        return reduce_scatter(y_ND, context.tp)
