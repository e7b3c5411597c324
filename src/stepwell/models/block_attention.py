"""Causal attention of documents as matrix products over blocks of queries.

Documents of about one length are padded to whole blocks and computed together, and blocks whose
queries nobody asks for are left out.

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
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from stepwell.models.layers import upcast

QUERY_BLOCK = 64
SCORES_BYTES = 2 * 2**20


class Doc(NamedTuple):
    """A document among N tokens. first: its first query whose output is wanted."""

    start: int
    length: int
    first: int = 0


class Part(NamedTuple):
    """Documents to be computed together. length: of each, padded. first: a wanted query before
    which none of them has any."""

    docs: Sequence[Doc]
    length: int
    first: int

    @property
    def in_place(self) -> bool:
        """Whether the documents follow each other and need no padding."""
        start = self.docs[0].start
        return all(d == (start + i * self.length, self.length, d.first)
                   for i, d in enumerate(self.docs))  # fmt: skip

    def load(self, x_NHE: Tensor) -> Tensor:
        """(B, T, H, E): a view where that is possible, else a copy with zeros at the ends, where
        causal attention of earlier tokens does not look."""
        if self.in_place:
            start = self.docs[0].start
            view = x_NHE[start : start + len(self.docs) * self.length]
            return view.unflatten(0, (len(self.docs), self.length))
        out = x_NHE.new_zeros(len(self.docs), self.length, *x_NHE.shape[1:])
        for row, (start, length, _) in zip(out, self.docs, strict=True):
            row[:length] = x_NHE[start : start + length]
        return out

    def room(self, x_NHE: Tensor) -> Tensor:
        """As `load`, for what is written to x, which `store` puts there."""
        if self.in_place:
            return self.load(x_NHE)
        return x_NHE.new_empty(len(self.docs), self.length, *x_NHE.shape[1:])

    def store(self, x_NHE: Tensor, found_BTHE: Tensor) -> None:
        if self.in_place:
            return
        for row, (start, length, _) in zip(found_BTHE, self.docs, strict=True):
            x_NHE[start : start + length] = row[:length]


def parts(docs: Sequence[Doc], num_heads: int) -> Iterator[Part]:
    """Neighbours of one length as they are, if it is one of whole blocks; the others by padded
    length and first wanted block, one, two, four, ... at a time, as stay in cache."""
    others: list[Doc] = []
    for length, run in groupby(docs, lambda d: d.length):
        found = list(run)
        in_place = not _missing(length) and Part(found, length, 0).in_place
        if in_place and not any(d.first >= QUERY_BLOCK for d in found):
            yield Part(found, length, 0)
        else:
            others += found
    key = lambda d: (d.length + _missing(d.length), d.first // QUERY_BLOCK)
    for (length, block), same in groupby(sorted(others, key=key), key):
        left = list(same)
        while left:
            most = min(len(left), _at_once(num_heads, length))
            size = 1 << (most.bit_length() - 1)  # few shapes: `_missing`
            yield Part(left[:size], length, block * QUERY_BLOCK)
            left = left[size:]


def forward_packed(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    out_NHE: Tensor,
    docs: Sequence[Doc],
) -> None:
    """`forward` of documents among N tokens. Of what is not wanted the output is zero, or right."""
    for part in parts(docs, q_NHE.shape[1]):
        q, k, v = (part.load(x) for x in (q_NHE, k_NKE, v_NKE))
        out = part.room(out_NHE)
        if part.first:
            out.zero_()
        forward(q, k, v, out, part.first)
        part.store(out_NHE, out)


def backward_packed(
    grad_NHE: Tensor,
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    grads: Sequence[Tensor],
    docs: Sequence[Doc],
) -> None:
    """`backward` of documents among N tokens; the gradient of outputs that are not wanted is taken
    to be zero."""
    for part in parts(docs, q_NHE.shape[1]):
        grad, q, k, v = (part.load(x) for x in (grad_NHE, q_NHE, k_NKE, v_NKE))
        found = tuple(part.room(x) for x in grads)
        if part.first:
            found[0][:, : part.first] = 0
        backward(grad, q, k, v, found, part.first)
        for whole, x in zip(grads, found, strict=True):
            part.store(whole, x)


def pays(q: Tensor, length: int, backward: bool) -> bool:
    """Whether this beats torch's flash kernel for documents of one length, as measured (Zen 5, one
    thread): flash has a slow backward in 16 bits, and little to launch for short documents."""
    if q.dtype in (torch.bfloat16, torch.float16):
        return backward or length >= 128
    return length >= 256


def forward(
    q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, out_BTHE: Tensor, first: int = 0
) -> None:
    """Fills the output from query `first` on. T and `first` are of whole blocks (`parts`)."""
    K = k_BTKE.shape[2]
    for docs, blocks in _work(q_BTHE, first):
        k, v = (_by_head(x[docs]) for x in (k_BTKE, v_BTKE))
        wide_k = upcast(k)
        for block, S in blocks:
            scores = _scores(_grouped(q_BTHE[docs, block], K), wide_k[:, :S])
            probs = scores.softmax(-1)
            out = torch.bmm(probs.to(v.dtype), v[:, :S])
            _grouped_view(out_BTHE[docs, block], K).copy_(_split(out, K, S, block))


def backward(
    grad_BTHE: Tensor,
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    grads: tuple[Tensor, ...],
    first: int = 0,
) -> None:
    """Fills `grads`, shaped as q, k and v, but for the queries before `first`."""
    K, scale, dtype = k_BTKE.shape[2], _scale(q_BTHE), q_BTHE.dtype
    for docs, blocks in _work(q_BTHE, first):
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


def _at_once(num_heads: int, length: int) -> int:
    """How many documents' scores of one block stay in cache."""
    return max(1, SCORES_BYTES // (4 * num_heads * min(QUERY_BLOCK, length) * length))


def _work(q_BTHE: Tensor, first: int) -> Iterator[tuple[slice, list[tuple[slice, int]]]]:
    """(documents at once, their blocks of queries with the number of keys each sees)."""
    B, T, H, _ = q_BTHE.shape
    starts = range(first, T, QUERY_BLOCK)
    blocks = [(slice(s, min(s + QUERY_BLOCK, T)), min(s + QUERY_BLOCK, T)) for s in starts]
    num_docs = _at_once(H, T)
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
