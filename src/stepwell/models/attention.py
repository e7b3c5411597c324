"""Causal attention over packed documents.

N tokens of all rows laid end to end, H query heads, K key/value heads, E head_dim. Documents are
given by their borders `cu_seqlens`; a token sees only earlier tokens of its own document.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from stepwell.models import block_attention
from stepwell.models.block_attention import Doc
from stepwell.models.collectives import all_gather, reduce_scatter
from stepwell.models.context_attention import heads_for_tokens, ring_attention, tokens_for_heads
from stepwell.models.layers import (
    Context,
    Linear,
    RMSNorm,
    apply_rope,
    expand_shared,
    take_rows,
)
from stepwell.models.row_padding import missing_rows, with_zeros
from stepwell.sections.model import ModelConfig

ACTIVE_MULTIPLE = 64  # of the rows after attention, where only some are wanted

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
    firsts: Tensor | None = None,
) -> Tensor:
    """Attention output (N, H, E). window: a token sees itself and the window - 1 tokens before it.
    firsts (documents,): each document's first token whose output is used (None: all are); what is
    said of tokens before it may be anything finite.

    On CUDA in 16 bits this is flash attention over variable lengths; in 32 bits, where that kernel
    does not exist, one masked product.
    """
    if q_NHE.device.type == "cpu":
        return packed_attention(q_NHE, k_NKE, v_NKE, cu_seqlens, window or 0, firsts)[0]
    if q_NHE.dtype in (torch.bfloat16, torch.float16):
        return _varlen(q_NHE, k_NKE, v_NKE, cu_seqlens, window)
    return _masked(q_NHE, k_NKE, v_NKE, cu_seqlens, window)


def _varlen(q_NHE, k_NKE, v_NKE, cu_seqlens, window: int | None) -> Tensor:
    # Only CUDA comes here; the import brings the compiler with it, a second and 70 MiB.
    from torch.nn.attention.varlen import varlen_attn

    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    groups = q_NHE.shape[1] // k_NKE.shape[1]
    k_NHE, v_NHE = (x.repeat_interleave(groups, dim=1) for x in (k_NKE, v_NKE))
    if "window_size" in inspect.signature(varlen_attn).parameters:
        causal: dict[str, Any] = {"window_size": ((window - 1) if window else -1, 0)}
    elif window is None or window >= longest:
        causal = {"is_causal": True}
    else:
        return _masked(q_NHE, k_NKE, v_NKE, cu_seqlens, window)
    out = varlen_attn(q_NHE, k_NHE, v_NHE, cu_seqlens, cu_seqlens, longest, longest, **causal)
    assert isinstance(out, Tensor)
    return out


def _masked(q_NHE, k_NKE, v_NKE, cu_seqlens, window: int | None) -> Tensor:
    N = q_NHE.shape[0]
    index = torch.arange(N, device=q_NHE.device)
    doc = torch.searchsorted(cu_seqlens[1:].to(index.dtype), index, right=True)
    gap = index[:, None] - index[None, :]
    seen = (doc[:, None] == doc[None, :]) & (gap >= 0)
    if window:
        seen &= gap < window
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_NHE, k_NKE, v_NKE))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


# On CPU no kernel takes variable lengths: one call for each stretch of documents of one length. An
# operator of its own keeps the loop opaque to torch.compile and countable.


def _divided(
    q: Tensor, cu_seqlens: Tensor, window: int, firsts: Tensor | None, backward: bool
) -> tuple[list[Doc], list[Doc]]:
    """Documents for blocks of queries, and those for torch's kernel."""
    borders = cu_seqlens.tolist()
    wanted = [0] * (len(borders) - 1) if firsts is None else firsts.tolist()
    docs = [
        Doc(a, b - a, first)
        for (a, b), first in zip(itertools.pairwise(borders), wanted, strict=True)
        if b > a
    ]
    pays = lambda d: not 0 < window < d.length and block_attention.pays(q, d.length, backward)
    return [d for d in docs if pays(d)], [d for d in docs if not pays(d)]


def _stretches(docs: list[Doc]) -> Iterator[tuple[int, int, int]]:
    """(first token, number of documents, their length) for neighbours of equal length."""
    for _, run in itertools.groupby(
        enumerate(docs), lambda x: (x[1].length, x[1].start - x[0] * x[1].length)
    ):
        found = [doc for _, doc in run]
        yield found[0].start, len(found), found[0].length


def _view(x_NHE: Tensor, start: int, count: int, length: int) -> Tensor:
    """(documents, length, heads, E) without a copy."""
    return x_NHE[start : start + count * length].unflatten(0, (count, length))


def _band(length: int, window: int, q: Tensor) -> Tensor | None:
    """0 where a token may look, -inf elsewhere; None when the causal rule says it all."""
    if not 0 < window < length:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=q.device)
    seen = ones.tril() & ones.triu(1 - window)
    return torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, float("-inf"))


@torch.library.custom_op("stepwell::packed_attention", mutates_args=(), device_types="cpu")
def packed_attention(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    cu_seqlens: Tensor,
    window: int,
    firsts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (N, H, E); and log-sum-exp (N, H) where the backward pass reads it, in documents that
    torch's kernel takes both times. window 0 means none. firsts: as in `attend`."""
    out_NHE = torch.empty_like(q_NHE, memory_format=torch.contiguous_format)
    lse_NH = torch.zeros(q_NHE.shape[:2], dtype=_lse_dtype(q_NHE), device=q_NHE.device)
    whole = (q_NHE, k_NKE, v_NKE, out_NHE, lse_NH)
    in_blocks, others = _divided(q_NHE, cu_seqlens, window, firsts, backward=False)
    block_attention.forward_packed(*whole[:4], in_blocks)
    for stretch in _stretches(others):
        q, k, v, out, lse = (_view(x, *stretch) for x in whole)
        band = _band(stretch[2], window, q)
        by_head = (x.transpose(1, 2) for x in (q, k, v))
        found, found_lse = _flash(*by_head, 0.0, band is None, attn_mask=band)
        out.copy_(found.transpose(1, 2))
        lse.copy_(found_lse.transpose(1, 2))
    return out_NHE, lse_NH


@torch.library.custom_op("stepwell::packed_attention_backward", mutates_args=(), device_types="cpu")
def packed_attention_backward(
    grad_NHE: Tensor,
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    out_NHE: Tensor,
    lse_NH: Tensor,
    cu_seqlens: Tensor,
    window: int,
    firsts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    fresh = (x.new_empty(x.shape) for x in (q_NHE, k_NKE, v_NKE))
    grads = (next(fresh), next(fresh), next(fresh))
    whole = (grad_NHE, q_NHE, k_NKE, v_NKE, out_NHE, lse_NH, *grads)
    in_blocks, others = _divided(q_NHE, cu_seqlens, window, firsts, backward=True)
    block_attention.backward_packed(grad_NHE, q_NHE, k_NKE, v_NKE, grads, in_blocks)
    for stretch in _stretches(others):
        grad, q, k, v, out, lse, *parts = (_view(x, *stretch) for x in whole)
        band = _band(stretch[2], window, q)
        by_head = (x.transpose(1, 2) for x in (grad, q, k, v, out, lse))
        found = _flash_backward(*by_head, 0.0, band is None, attn_mask=band)
        for part, x in zip(parts, found, strict=True):
            part.copy_(x.transpose(1, 2))
    return grads


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@packed_attention.register_fake
def _(q_NHE, k_NKE, v_NKE, cu_seqlens, window, firsts=None):
    return torch.empty_like(q_NHE, memory_format=torch.contiguous_format), q_NHE.new_empty(
        q_NHE.shape[:2], dtype=_lse_dtype(q_NHE)
    )


@packed_attention_backward.register_fake
def _(grad_NHE, q_NHE, k_NKE, v_NKE, out_NHE, lse_NH, cu_seqlens, window, firsts=None):
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_NHE, k_NKE, v_NKE)
    )


def _save(ctx, inputs, output):
    q_NHE, k_NKE, v_NKE, cu_seqlens, ctx.window, ctx.firsts = inputs
    ctx.save_for_backward(q_NHE, k_NKE, v_NKE, *output, cu_seqlens)


def _backward(ctx, grad_NHE, _):
    q_NHE, k_NKE, v_NKE, out_NHE, lse_NH, cu_seqlens = ctx.saved_tensors
    grads = packed_attention_backward(
        grad_NHE, q_NHE, k_NKE, v_NKE, out_NHE, lse_NH, cu_seqlens, ctx.window, ctx.firsts
    )
    return *grads, None, None, None


packed_attention.register_autograd(_backward, setup_context=_save)


# torch's counter cannot see into an operator; the causal half of what is asked for is counted.
@register_flop_formula(torch.ops.stepwell.packed_attention, get_raw=True)
def _forward_flops(q, k, v, cu_seqlens, window, firsts=None, *args, **kwargs) -> int:
    return 4 * q.shape[1] * q.shape[2] * _pairs(cu_seqlens, firsts)


@register_flop_formula(torch.ops.stepwell.packed_attention_backward, get_raw=True)
def _backward_flops(
    grad, q, k, v, out, lse, cu_seqlens, window, firsts=None, *args, **kwargs
) -> int:
    return 8 * q.shape[1] * q.shape[2] * _pairs(cu_seqlens, firsts)


def _pairs(cu_seqlens: Tensor, firsts: Tensor | None) -> int:
    """Half of each document's square, the convention of `models/flops`, less that of the part that
    is not asked for."""
    lengths = cu_seqlens.diff().tolist()
    skipped = [] if firsts is None else firsts.tolist()
    return (sum(n * n for n in lengths) - sum(n * n for n in skipped)) // 2


class Attention(nn.Module):
    """Grouped-query attention (2305.13245) with rotary positions and optional QK-norm."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.head_dim, self.window = cfg.head_dim, cfg.sliding_window
        query, keyvalue = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        self.wq = Linear(cfg.d_model, query, bias=cfg.qkv_bias)
        self.wk = Linear(cfg.d_model, keyvalue, bias=cfg.qkv_bias)
        self.wv = Linear(cfg.d_model, keyvalue, bias=cfg.qkv_bias)
        self.wo = Linear(query, cfg.d_model, bias=False)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None

    def forward(self, x_ND: Tensor, context: Context, active_M: Tensor | None = None) -> Tensor:
        """active_M: the tokens whose output is wanted (never with tp); None: all. Rows of no token
        may follow theirs (`row_padding`)."""
        x_ND = all_gather(x_ND, context.tp)
        q_NHE, k_NKE, v_NKE = (
            w(x_ND, context.keys_N).unflatten(-1, (-1, self.head_dim))
            for w in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_NHE, k_NKE = self.q_norm(q_NHE, context.tp), self.k_norm(k_NKE, context.tp)
        q_NHE, k_NKE = (apply_rope(x, context.cos, context.sin) for x in (q_NHE, k_NKE))
        firsts = context.firsts.all if active_M is None else context.firsts.active
        out_NHE = self._attend(q_NHE, k_NKE, v_NKE, context, firsts)
        out_NX, keys_N = out_NHE.flatten(1), context.keys_N
        if active_M is not None:
            missing = missing_rows(len(active_M), x_ND.dtype, x_ND.device, ACTIVE_MULTIPLE)
            out_NX = with_zeros(take_rows(out_NX, active_M), missing)
            keys_N = None if keys_N is None else with_zeros(keys_N[active_M], missing)
        return reduce_scatter(self.wo(out_NX, keys_N), context.tp)

    def _attend(
        self,
        q_NHE: Tensor,
        k_NKE: Tensor,
        v_NKE: Tensor,
        context: Context,
        firsts: Tensor | None,
    ) -> Tensor:
        cp, shared = context.cp, context.shared
        if shared is not None:
            q_MHE, k_MKE, v_MKE = (expand_shared(x, shared) for x in (q_NHE, k_NKE, v_NKE))
            out_MHE = attend(q_MHE, k_MKE, v_MKE, context.cu_seqlens, self.window, firsts)
            return take_rows(out_MHE, shared.kept_N)
        if cp is None:
            return attend(q_NHE, k_NKE, v_NKE, context.cu_seqlens, self.window, firsts)
        if cp.method == "ring":
            shares = cp.borders, cp.chunks, self.window, cp.group
            return ring_attention(q_NHE, k_NKE, v_NKE, *shares)
        q_NHE, k_NKE, v_NKE = tokens_for_heads(q_NHE, k_NKE, v_NKE, cp.chunks, cp.group)
        out_NHE = attend(q_NHE, k_NKE, v_NKE, context.cu_seqlens, self.window)
        return heads_for_tokens(out_NHE, cp.chunks, cp.group)
