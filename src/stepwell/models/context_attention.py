"""Attention over a row whose tokens are divided among the ranks of a group.

R ranks, n tokens of this rank, N = R*n, B rows, H query heads, K key/value heads, E head_dim.
chunks (B, R, k): the parts of each row that each rank has (`models.shares`).

Ring (2310.01889): keys and values travel from rank to rank, and each rank merges what its queries
see of them by their log-sum-exp. All-to-all (DeepSpeed-Ulysses, 2309.14509): the ranks trade tokens
for heads, so that each has all tokens of some heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils.flop_counter import register_flop_formula

from stepwell.models.collectives import all_to_all
from stepwell.models.shares import Shares
from stepwell.models.tile_attention import Kernel, add, kernel, merge

# --- ring ----------------------------------------------------------------------------------------


def ring_attention(
    q_nHE: Tensor,
    k_nKE: Tensor,
    v_nKE: Tensor,
    borders: Tensor,
    chunks: Tensor,
    window: int | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Attention output (n, H, E) of this rank's queries. borders: of the documents in all N
    tokens; it and chunks are on the CPU, where the work is planned. Of the others' keys and values
    at most two ranks' are held at a time.

    Each rank sends its K and V to R - 1 others in the forward pass and again in the backward pass,
    where their gradients follow in at least float32.
    """
    out, _ = _ring(q_nHE, k_nKE, v_nKE, borders, chunks, window or 0, group.group_name)
    return out


@torch.library.custom_op("stepwell::ring_attention", mutates_args=())
def _ring(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, chunks: Tensor, window: int, group: str
) -> tuple[Tensor, Tensor]:
    ring = Ring.of(group)
    return ring_forward(q, k, v, ring.shares(borders, chunks, window), ring, kernel(q))


@torch.library.custom_op("stepwell::ring_attention_backward", mutates_args=())
def _ring_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    borders: Tensor,
    chunks: Tensor,
    window: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    ring = Ring.of(group)
    shares = ring.shares(borders, chunks, window)
    return ring_backward(grad, q, k, v, out, lse, shares, ring, kernel(q))


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, shares: Shares, ring: Ring, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Output (n, H, E) and log-sum-exp (n, H)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=wide, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=wide, device=q.device)
    block = torch.stack([k, v])
    for step in range(ring.size):
        source = (ring.rank - step) % ring.size
        coming = ring.pass_on(block) if step + 1 < ring.size else None
        tiles = shares.tiles(ring.rank, source)
        for part in kernel.forward(q, block[0], block[1], tiles, shares.window):
            merge(out, lse, *part)
        if coming:  # what has been sent is let go before the next one is received
            block, coming = coming.wait(), None
    return out.to(q.dtype), lse


def ring_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    shares: Shares,
    ring: Ring,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. Those of a block follow it round the ring, one step behind, and so
    come home after the last step; a rank's own share of its block's waits for them there."""
    wide = torch.promote_types(q.dtype, torch.float32)
    block = torch.stack([k, v])
    grad_q = torch.zeros(q.shape, dtype=wide, device=q.device)
    own, travelling = torch.zeros(block.shape, dtype=wide, device=q.device), None
    for step in range(ring.size):
        source = (ring.rank - step) % ring.size
        coming = ring.pass_on(block) if step + 1 < ring.size else None
        grads = torch.zeros_like(own) if step else own
        tiles = shares.tiles(ring.rank, source)
        parts = kernel.backward(grad, q, block[0], block[1], out, lse, tiles, shares.window)
        for queries, keys, dq, dk, dv in parts:
            add(grad_q, queries, dq)
            add(grads[0], keys, dk)
            add(grads[1], keys, dv)
        if step:
            if travelling is not None:
                grads += travelling.wait()
            travelling = ring.pass_on(grads, tag=1)
        if coming:
            block, coming = coming.wait(), None
    if travelling is not None:
        own += travelling.wait()
    grad_k, grad_v = (x.to(k.dtype, copy=True) for x in own.unbind())
    return grad_q.to(q.dtype), grad_k, grad_v


class Ring(NamedTuple):
    """The ranks of a group in a circle."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @staticmethod
    def of(group_name: str) -> Ring:
        group = distributed_c10d._resolve_process_group(group_name)  # pyright: ignore
        return Ring(group, group.rank(), group.size())

    def shares(self, borders: Tensor, chunks: Tensor, window: int) -> Shares:
        return Shares(borders.tolist(), chunks.tolist(), window)

    def pass_on(self, block: Tensor, tag: int = 0) -> Exchange:
        """Begins to send `block` to the next rank and to receive the one before's."""
        ahead, behind = (
            dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1)
        )
        received = torch.empty_like(block)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, block, ahead, self.group, tag),
                dist.P2POp(dist.irecv, received, behind, self.group, tag),
            ]
        )
        return Exchange(block, received, works)


class Exchange(NamedTuple):
    """Until it has been waited for, nobody may write to `sent`."""

    sent: Tensor
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


@_ring.register_fake
def _(q, k, v, borders, chunks, window, group):
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide)


@_ring_backward.register_fake
def _(grad, q, k, v, out, lse, borders, chunks, window, group):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx, inputs, output):
    *tensors, ctx.window, ctx.group = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad, _):
    q, k, v, borders, chunks, out, lse = ctx.saved_tensors
    grads = _ring_backward(grad, q, k, v, out, lse, borders, chunks, ctx.window, ctx.group)
    return *grads, None, None, None, None


_ring.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.stepwell.ring_attention, get_raw=True)
def _forward_flops(q, k, v, borders, chunks, window, group, *args, **kwargs) -> int:
    return 4 * q.shape[1] * q.shape[2] * _pairs(q, borders, chunks, window, group)


@register_flop_formula(torch.ops.stepwell.ring_attention_backward, get_raw=True)
def _backward_flops(
    grad, q, k, v, out, lse, borders, chunks, window, group, *args, **kwargs
) -> int:
    return 8 * q.shape[1] * q.shape[2] * _pairs(q, borders, chunks, window, group)


def _pairs(q: Tensor, borders: Tensor, chunks: Tensor, window: int, group: str) -> int:
    """This rank's part of half of each document's square, the convention of `models/flops`."""
    ring = Ring.of(group)
    return ring.shares(borders, chunks, window).visible_pairs()[ring.rank] - q.shape[0] // 2


# --- all-to-all ----------------------------------------------------------------------------------


def tokens_for_heads(
    q_nHE: Tensor, k_nKE: Tensor, v_nKE: Tensor, chunks: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's share of the heads, for all N tokens in their order: (N, H/R, E) and twice
    (N, K'/R, E). Where R does not divide K, key/value heads are repeated to the least number K'
    that it does divide. R must divide H."""
    heads, keyvalue, ranks = q_nHE.shape[1], k_nKE.shape[1], group.size()
    repeats = math.lcm(keyvalue, ranks) // keyvalue
    if repeats > 1:
        k_nKE, v_nKE = (x.repeat_interleave(repeats, dim=1) for x in (k_nKE, v_nKE))
    by_rank = [x.unflatten(1, (ranks, -1)) for x in (q_nHE, k_nKE, v_nKE)]
    sent = torch.cat(by_rank, dim=2).transpose(0, 1).flatten(0, 1)  # (R*n, heads, E)
    tokens = in_order(all_to_all(sent, group).unflatten(0, (ranks, -1)), chunks)
    share = keyvalue * repeats // ranks
    return tokens.split([heads // ranks, share, share], dim=1)  # pyright: ignore[reportReturnType]


def heads_for_tokens(out_NhE: Tensor, chunks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: all N tokens of this rank's h heads to (n, R*h, E)."""
    sent = dealt(out_NhE, chunks).flatten(0, 1)
    return all_to_all(sent, group).unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)


def dealt(x_N: Tensor, chunks_BRk: Tensor) -> Tensor:
    """(N, ...) tokens in order -> (R, n, ...), each rank's tokens."""
    order, inverse = _orders(chunks_BRk)
    x = _Reorder.apply(x_N.unflatten(0, (order.numel(), -1)), order, inverse)
    return x.unflatten(0, (chunks_BRk.shape[1], -1)).flatten(1, 2)


def in_order(x_Rn: Tensor, chunks_BRk: Tensor) -> Tensor:
    """(R, n, ...), each rank's tokens -> (N, ...) tokens in order."""
    order, inverse = _orders(chunks_BRk)
    x = x_Rn.unflatten(1, (order.numel() // x_Rn.shape[0], -1)).flatten(0, 1)
    return _Reorder.apply(x, inverse, order).flatten(0, 1)


def _orders(chunks_BRk: Tensor) -> tuple[Tensor, Tensor]:
    """Which of all chunks comes where when each rank's lie together, and the inverse."""
    B, R, k = chunks_BRk.shape
    rows = torch.arange(B)[:, None, None] * (R * k)
    order = (chunks_BRk + rows).transpose(0, 1).flatten()
    return order, order.argsort()


class _Reorder(torch.autograd.Function):
    """x[order], whose gradient is grad[inverse]: a gather each way, without atomic sums."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse.to(x.device))
        return x.index_select(0, order.to(x.device))

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None
