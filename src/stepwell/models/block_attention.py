"""Causal attention of documents of one length as matrix products over blocks of queries.

B documents, T tokens each, H query heads, K key/value heads, G = H/K, E head_dim, S keys seen.

On CPU in bfloat16 this is up to twice as fast as the flash kernel, because nearly all work lands in
large matrix products. The G query heads that share keys are rows of one product, a
block of queries sees only the keys up to its end, and the scores of a block stay in cache. As in
flash attention (2205.14135), the backward pass computes the scores a second time.

In 16 bits the scores are products of float32 copies: rounding them would multiply the error of the
output by three. Everything else multiplies in 16 bits with float32 sums, as the flash kernel does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from stepwell.models.layers import upcast

QUERY_BLOCK = 64
SCORES_BYTES = 2 * 2**20


def pays(q: Tensor, length: int, backward: bool) -> bool:
    """Whether this beats torch's flash kernel for documents of one length, as measured (Zen 5, one
    thread): flash has a slow backward in 16 bits, and little to launch for short documents."""
    if q.dtype in (torch.bfloat16, torch.float16):
        return backward or length >= 128
    return length >= 256


def forward(
    q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, out_BTHE: Tensor, lse_BTH: Tensor
) -> None:
    """Fills the output and the log-sum-exp of the scores."""
    K, T, missing = k_BTKE.shape[2], q_BTHE.shape[1], _missing(q_BTHE.shape[1])
    if missing:
        q, k, v = (_padded(x, missing) for x in (q_BTHE, k_BTKE, v_BTKE))
        out, lse = torch.empty_like(q), lse_BTH.new_empty(q.shape[:3])
        forward(q, k, v, out, lse)
        out_BTHE.copy_(out[:, :T])
        lse_BTH.copy_(lse[:, :T])
        return
    for docs, blocks in _work(q_BTHE, K):
        k, v = (_by_head(x[docs]) for x in (k_BTKE, v_BTKE))
        wide_k = upcast(k)
        for block, S in blocks:
            scores = _scores(_grouped(q_BTHE[docs, block], K), wide_k[:, :S])
            probs = scores.softmax(-1)
            out = torch.bmm(probs.to(v.dtype), v[:, :S])
            _grouped_view(out_BTHE[docs, block], K).copy_(_split(out, K, S, block))
            # The largest score has probability exp(score - lse), at least 1 / S.
            lse = scores.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log_()
            _grouped_view(lse_BTH[docs, block, :, None], K).copy_(_split(lse, K, S, block))


def backward(
    grad_BTHE: Tensor,
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    grads: tuple[Tensor, ...],
) -> None:
    """Fills `grads`, shaped as q, k and v."""
    T, missing = q_BTHE.shape[1], _missing(q_BTHE.shape[1])
    if missing:
        grad, q, k, v = (_padded(x, missing) for x in (grad_BTHE, q_BTHE, k_BTKE, v_BTKE))
        found = tuple(torch.empty_like(x) for x in (q, k, v))
        backward(grad, q, k, v, found)
        for whole, x in zip(grads, found, strict=True):
            whole.copy_(x[:, :T])
        return
    K, scale, dtype = k_BTKE.shape[2], _scale(q_BTHE), q_BTHE.dtype
    for docs, blocks in _work(q_BTHE, K):
        k, v = (_by_head(x[docs]) for x in (k_BTKE, v_BTKE))
        wide_k = upcast(k)
        grad_k, grad_v = torch.zeros_like(wide_k), torch.zeros_like(wide_k)
        for block, S in blocks:
            q, grad = (_grouped(x[docs, block], K) for x in (q_BTHE, grad_BTHE))
            probs = _scores(q, wide_k[:, :S]).softmax(-1).to(dtype)
            grad_v[:, :S] += torch.bmm(probs.transpose(1, 2), grad)
            grad_probs = torch.bmm(grad, v[:, :S].transpose(1, 2))
            grad_scores = torch.ops.aten._softmax_backward_data(grad_probs, probs, -1, dtype)
            grad_k[:, :S] += torch.bmm(grad_scores.transpose(1, 2), q)
            grad_q = torch.bmm(grad_scores, k[:, :S]).mul_(scale)
            _grouped_view(grads[0][docs, block], K).copy_(_split(grad_q, K, S, block))
        for whole, part in ((grads[1], grad_k.mul_(scale)), (grads[2], grad_v)):
            whole[docs].transpose(1, 2).copy_(part.unflatten(0, (-1, K)))


def _missing(length: int) -> int:
    """What lengthens a document to whole blocks. oneDNN builds and keeps code for every new shape,
    which takes longer than a product: few lengths are far quicker than just the right ones."""
    return -length % (QUERY_BLOCK if length > QUERY_BLOCK else 16)


def _padded(x_BTHE: Tensor, missing: int) -> Tensor:
    """Zeros at the end, where causal attention of earlier tokens does not look."""
    return F.pad(x_BTHE, (0, 0, 0, 0, 0, missing))


def _work(q_BTHE: Tensor, K: int) -> Iterator[tuple[slice, list[tuple[slice, int]]]]:
    """(documents at once, their blocks of queries with the number of keys each sees)."""
    B, T, H, _ = q_BTHE.shape
    starts = range(0, T, QUERY_BLOCK)
    blocks = [(slice(s, min(s + QUERY_BLOCK, T)), min(s + QUERY_BLOCK, T)) for s in starts]
    num_docs = max(1, SCORES_BYTES // (4 * H * min(QUERY_BLOCK, T) * T))
    return ((slice(b, b + num_docs), blocks) for b in range(0, B, num_docs))


def _scores(q: Tensor, wide_k: Tensor) -> Tensor:
    """Scaled scores of a block whose last query sees the last key, -inf above the diagonal."""
    S, wide_q = wide_k.shape[1], upcast(q) * _scale(q)
    scores = torch.bmm(wide_q, wide_k.transpose(1, 2))
    t = S - (S - 1) // QUERY_BLOCK * QUERY_BLOCK
    hidden = torch.full((t, t), -math.inf, dtype=scores.dtype).triu_(1)
    scores.unflatten(1, (-1, t))[..., S - t :].add_(hidden)
    return scores


def _scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


def _by_head(x_BTKE: Tensor) -> Tensor:
    """(B K, T, E)."""
    return x_BTKE.transpose(1, 2).flatten(0, 1)


def _grouped_view(x_BtHE: Tensor, K: int) -> Tensor:
    """(B, K, G, t, E)."""
    return x_BtHE.unflatten(2, (K, -1)).permute(0, 2, 3, 1, 4)


def _grouped(x_BtHE: Tensor, K: int) -> Tensor:
    """(B K, G t, E): the queries that share keys, as rows of one matrix."""
    view = _grouped_view(x_BtHE, K)
    return view.reshape(view.shape[0] * K, -1, view.shape[-1])


def _split(x: Tensor, K: int, S: int, block: slice) -> Tensor:
    """`_grouped` undone as far as a view goes: (B, K, G, t, E)."""
    return x.view(
        -1, K, x.shape[1] // (block.stop - block.start), block.stop - block.start, x.shape[2]
    )
