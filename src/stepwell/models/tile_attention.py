"""Attention of some queries to some keys with its log-sum-exp, for results that are merged.

n queries, m keys, H query heads, K key/value heads, E head_dim. Tiles (`models.shares.Tile`) say
which queries meet which keys. The backward pass takes the output and the log-sum-exp over *all*
keys and gives this tile's share of the gradients (FlashAttention-2, 2307.08691, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepwell.models.shares import Tile

Index = slice | Tensor


class Kernel(NamedTuple):
    """forward(q, k, v, tiles, window) yields (queries, out, lse); each query once in a part.
    backward(grad, q, k, v, out, lse, tiles, window) yields (queries, keys, dq, dk, dv). Tensors are
    (tokens, heads, E), log-sum-exps (tokens, H); indices name tokens of the arguments."""

    forward: Callable[..., Iterator[Any]]
    backward: Callable[..., Iterator[Any]]


def kernel(q: Tensor) -> Kernel:
    """What computes tiles of tensors like q."""
    if q.device.type == "cpu":
        return Kernel(cpu_forward, cpu_backward)
    if q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return Kernel(varlen_forward, varlen_backward)
    return Kernel(product_forward, product_backward)


def add(total: Tensor, index: Index, part: Tensor) -> None:
    """total[index] += part, in the dtype of total."""
    if isinstance(index, slice):
        total[index] += part
    else:
        total.index_add_(0, index, part.to(total.dtype))


def merge(out: Tensor, lse: Tensor, index: Index, part: Tensor, part_lse: Tensor) -> None:
    """Takes further keys into the attention of out[index]; both in at least float32."""
    before = lse[index]
    after = torch.logaddexp(before, part_lse)
    weighted = out[index] * (before - after).exp().unsqueeze(-1)
    out[index] = weighted + part * (part_lse - after).exp().unsqueeze(-1)
    lse[index] = after


def _seen(tile: Tile, window: int, device: torch.device) -> Tensor | None:
    """(n, m) of bool; None if all is seen."""
    if tile.gap is None:
        return None
    rows = torch.arange(tile.num_queries, device=device)[:, None] + tile.gap
    distance = rows - torch.arange(tile.num_keys, device=device)[None, :]
    return (distance >= 0) & (distance < window) if window else distance >= 0


# --- CPU: torch's flash kernel -----------------------------------------------------------------

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cpu_forward(q, k, v, tiles: Sequence[Tile], window: int):
    for tile in tiles:
        mask = _mask(tile, window, q)
        by_head = (_by_head(x) for x in (q[tile.queries], k[tile.keys], v[tile.keys]))
        out, lse = _flash(*by_head, 0.0, _causal(tile, window), attn_mask=mask)
        yield tile.queries, _by_token(out), _by_token(lse)


def cpu_backward(grad, q, k, v, out, lse, tiles: Sequence[Tile], window: int):
    for tile in tiles:
        grad_n, q_n, out_n, lse_n = (x[tile.queries] for x in (grad, q, out, lse))
        by_head = (_by_head(x) for x in (grad_n, q_n, k[tile.keys], v[tile.keys], out_n, lse_n))
        mask = _mask(tile, window, q)
        found = _flash_backward(*by_head, 0.0, _causal(tile, window), attn_mask=mask)
        dq, dk, dv = (_by_token(x) for x in found)
        yield tile.queries, tile.keys, dq, dk, dv


def _causal(tile: Tile, window: int) -> bool:
    """The plain causal triangle, which needs no mask."""
    return tile.gap == 0 and not 0 < window < tile.num_queries


def _mask(tile: Tile, window: int, like: Tensor) -> Tensor | None:
    seen = None if _causal(tile, window) else _seen(tile, window, like.device)
    if seen is None:
        return None
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, float("-inf"))


def _by_head(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _by_token(x: Tensor) -> Tensor:
    return x.squeeze(0).transpose(0, 1)


# --- plain products, for what no kernel takes ----------------------------------------------------


def product_forward(q, k, v, tiles: Sequence[Tile], window: int):
    for tile in tiles:
        scores = _scores(q[tile.queries], k[tile.keys], _seen(tile, window, q.device))
        lse = scores.logsumexp(-1)
        probs = (scores - lse.unsqueeze(-1)).exp()
        out = torch.einsum("kgnm,mke->nkge", probs, v[tile.keys].to(probs.dtype))
        yield tile.queries, out.flatten(1, 2), lse.flatten(0, 1).T


def product_backward(grad, q, k, v, out, lse, tiles: Sequence[Tile], window: int):
    groups, scale = (-1, q.shape[1] // k.shape[1]), q.shape[-1] ** -0.5
    for tile in tiles:
        keys = tile.keys
        scores = _scores(q[tile.queries], k[keys], _seen(tile, window, q.device))
        wide = scores.dtype
        grad_n, q_n, out_n, lse_n = (
            x[tile.queries].to(wide).unflatten(1, groups) for x in (grad, q, out, lse)
        )
        probs = (scores - lse_n.permute(1, 2, 0).unsqueeze(-1)).exp()
        grad_probs = torch.einsum("nkge,mke->kgnm", grad_n, v[keys].to(wide))
        along = (grad_n * out_n).sum(-1).permute(1, 2, 0).unsqueeze(-1)
        grad_scores = probs * (grad_probs - along) * scale
        dq = torch.einsum("kgnm,mke->nkge", grad_scores, k[keys].to(wide)).flatten(1, 2)
        dk = torch.einsum("kgnm,nkge->mke", grad_scores, q_n)
        dv = torch.einsum("kgnm,nkge->mke", probs, grad_n)
        yield tile.queries, keys, dq, dk, dv


def _scores(q: Tensor, k: Tensor, seen: Tensor | None) -> Tensor:
    """(K, H/K, n, m) in at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide).unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    scores = torch.einsum("nkge,mke->kgnm", q, k.to(wide))
    return scores if seen is None else scores.masked_fill(~seen, float("-inf"))


# --- CUDA in 16 bits: flash attention over variable lengths --------------------------------------
# Tiles of one mask are sequences of one call. Its window counts from the last key back, as the
# last query sees it: a tile's band is the same for all tiles only if they agree in `_band`.


def varlen_forward(q, k, v, tiles: Sequence[Tile], window: int):
    for group, band in _groups(tiles, window):
        call = _Call.of(group, q.device)
        q_n, k_m, v_m = q[call.queries], *(_expand(x[call.keys], q) for x in (k, v))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q_n, k_m, v_m, *call.lengths, 0.0, band == (-1, 0), False,
            window_size_left=band[0], window_size_right=band[1],
        )  # fmt: skip
        yield call.queries, out, lse.T


def varlen_backward(grad, q, k, v, out, lse, tiles: Sequence[Tile], window: int):
    # Without dropout the state of the random numbers is not read.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    for group, band in _groups(tiles, window):
        call = _Call.of(group, q.device)
        grad_n, q_n, out_n, lse_n = (x[call.queries] for x in (grad, q, out, lse))
        k_m, v_m = (_expand(x[call.keys], q) for x in (k, v))
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_n, q_n, k_m, v_m, out_n, lse_n.T.contiguous(), *call.lengths, 0.0,
            band == (-1, 0), state, unused,
            window_size_left=band[0], window_size_right=band[1],
        )  # fmt: skip
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2, dtype=torch.float32) for x in (dk, dv))
        yield call.queries, call.keys, dq, dk, dv


def _groups(tiles: Sequence[Tile], window: int) -> list[tuple[list[Tile], tuple[int, int]]]:
    """Tiles with one band that share no query, with that band."""
    groups: list[tuple[list[Tile], tuple[int, int]]] = []
    for tile in tiles:
        band = _band(tile, window)
        for group, other in groups:
            if band == other and group[-1].queries.stop <= tile.query:
                group.append(tile)
                break
        else:
            groups.append(([tile], band))
    return groups


def _band(tile: Tile, window: int) -> tuple[int, int]:
    """Flash's (left, right): query i sees keys i + m - n - left to i + m - n + right; -1: all."""
    if tile.gap is None:
        return -1, -1
    shift = tile.gap - (tile.num_keys - tile.num_queries)
    right = -1 if tile.gap >= tile.num_keys else shift
    binds = 0 < window < tile.gap + tile.num_queries
    return (window - 1 - shift if binds else -1), right


class _Call(NamedTuple):
    """queries, keys: token numbers of the sequences laid end to end. lengths: borders of the
    queries' and the keys' sequences, and the longest of each."""

    queries: Tensor
    keys: Tensor
    lengths: tuple[Tensor, Tensor, int, int]

    @staticmethod
    def of(tiles: Sequence[Tile], device: torch.device) -> _Call:
        num_queries, num_keys = [t.num_queries for t in tiles], [t.num_keys for t in tiles]
        return _Call(
            torch.cat([torch.arange(t.queries.start, t.queries.stop) for t in tiles]).to(device),
            torch.cat([torch.arange(t.keys.start, t.keys.stop) for t in tiles]).to(device),
            (_borders(num_queries, device), _borders(num_keys, device),
             max(num_queries), max(num_keys)),
        )  # fmt: skip


def _borders(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def _expand(x_mKE: Tensor, q: Tensor) -> Tensor:
    return x_mKE.repeat_interleave(q.shape[1] // x_mKE.shape[1], dim=1)
