"""Per-token quantities of the output distribution, without ever holding N*V logits in float32.

N tokens, D d_model, V vocabulary, C tokens of a chunk. The head's product and everything after it
run in chunks of tokens. What the backward pass needs is either kept in compute dtype (the
probabilities, or the logits where the entropy is asked for) or computed a second time. On CPU, the
float32 arithmetic between the products runs over slices of a chunk that stay in cache.

With a group, each rank has a part of the vocabulary (Megatron-LM, 1909.08053): the ranks exchange a
few numbers a token, never logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from stepwell.models.collectives import gathered
from stepwell.models.layers import upcast

SLICE_BYTES = 2 * 2**20
ROW_MULTIPLE = 64


class TokenStats(NamedTuple):
    """float32 (float64 if the hidden states are), each (N,)."""

    logprobs: Tensor
    lse: Tensor
    entropy: Tensor
    mean_logit: Tensor


def token_stats(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    chunk_tokens: int = 1024,
    keep_logits: bool = False,
    inverse_temperature: float = 1.0,
    with_entropy: bool = False,
    with_mean: bool = False,
    compiled: bool = False,
    in_halves: bool = False,
    tp: dist.ProcessGroup | None = None,
) -> TokenStats:
    """Log-probability of the target, log Z, entropy and mean logit of softmax(h W^T / T).

    tp: the ranks that divide the vocabulary evenly, in order. weight_VD is this rank's part, hidden
    states and targets are the same on all; so are the results, whose gradients must be too, and
    that of hidden_ND is then this rank's part of a sum.

    Entropy and mean logit are zero, without gradient, unless asked for. Differentiable in
    hidden_ND and weight_VD, once: the backward pass overwrites what was kept, but not when it comes
    in_halves (gradients of the inputs and of the weights apart).
    """
    N = hidden_ND.shape[0]
    compiled = compiled and hidden_ND.device.type != "cpu"  # slices in cache are faster there
    # Few shapes: compiled code, or oneDNN's, is built anew for each.
    missing = -N % (chunk_tokens if compiled else min(ROW_MULTIPLE, chunk_tokens))
    if missing:
        hidden_ND = F.pad(hidden_ND, (0, 0, 0, missing))
        targets_N = F.pad(targets_N, (0, missing))
    stats = _TokenStats.apply(
        hidden_ND,
        weight_VD,
        targets_N,
        chunk_tokens,
        keep_logits and torch.is_grad_enabled(),
        inverse_temperature,
        with_entropy,
        with_mean,
        compiled,
        in_halves,
        tp,
    )
    return TokenStats(*(value[:N] for value in stats))


class _Wanted(NamedTuple):
    scale: float
    entropy: bool
    mean: bool
    probs: bool  # overwrite the logits with probabilities


def _chunk_stats(logits_CV: Tensor, targets_C: Tensor, wanted: _Wanted) -> tuple[Tensor, ...]:
    """logprobs, lse, entropy, mean."""
    wide = upcast(logits_CV) * wanted.scale
    probs = wide.softmax(-1)
    # The largest logit is top and has probability exp(top - lse), which is at least 1 / V.
    lse = wide.amax(-1) - probs.amax(-1).log()
    logprobs = wide.gather(-1, targets_C[:, None]).squeeze(-1) - lse
    zero = torch.zeros_like(lse)
    entropy = lse - (probs * wide).sum(-1) if wanted.entropy else zero
    mean = wide.mean(-1) if wanted.mean else zero
    if wanted.probs:
        logits_CV.copy_(probs)
    return logprobs, lse, entropy, mean


class _Coefficients(NamedTuple):
    """d(objective)/d(logit v) = probs_v * (prob + entropy * (log probs_v + H)) + mean, but at the
    target, where it is `target` (computed apart: 1 - p loses its digits as p nears 1)."""

    prob: Tensor
    target: Tensor
    entropy: Tensor | None
    mean: Tensor | None

    def rows(self, part: slice) -> _Coefficients:
        entropy, mean = (None if x is None else x[part] for x in (self.entropy, self.mean))
        return _Coefficients(self.prob[part], self.target[part], entropy, mean)


def _coefficients(
    grads: tuple[Tensor | None, ...], logprobs: Tensor, H: Tensor, scale: float, vocab_size: int
) -> _Coefficients:
    zero = torch.zeros_like(logprobs)
    grad_logprob, grad_lse = (zero if g is None else g * scale for g in grads[:2])
    by_entropy = None if grads[2] is None else grads[2] * -scale
    by_mean = None if grads[3] is None else grads[3] * (scale / vocab_size)
    p = logprobs.exp()
    target = p * grad_lse - logprobs.expm1() * grad_logprob
    if by_entropy is not None:
        target = target + by_entropy * p * (logprobs + H)
    if by_mean is not None:
        target = target + by_mean
    return _Coefficients(grad_lse - grad_logprob, target, by_entropy, by_mean)


def _chunk_grad(
    values_CV: Tensor,
    targets_C: Tensor,
    lse: Tensor,
    H: Tensor,
    by: _Coefficients,
    scale: float,
    are_probs: bool,
    owned_C: Tensor | None = None,
) -> None:
    """Overwrites probabilities, or unscaled logits, with the gradient of the logits. owned_C: whose
    target is among these logits (None: all)."""
    wide = upcast(values_CV)
    logprobs = None if are_probs else wide * scale - lse[:, None]
    probs = wide if logprobs is None else logprobs.exp()
    grad = probs * by.prob[:, None]
    if by.entropy is not None and logprobs is not None:
        grad = grad + by.entropy[:, None] * probs * (logprobs + H[:, None])
    if by.mean is not None:
        grad = grad + by.mean[:, None]
    values_CV.copy_(grad)
    at_target = by.target[:, None].to(values_CV.dtype)
    if owned_C is not None:
        there = values_CV.gather(1, targets_C[:, None])
        at_target = torch.where(owned_C[:, None], at_target, there)
    values_CV.scatter_(1, targets_C[:, None], at_target)


class _Share(NamedTuple):
    """This rank's part of the vocabulary. owner_N: the rank that has a token's target; index_N: its
    index there; owned_N: whether that is this rank."""

    owner_N: Tensor
    index_N: Tensor
    owned_N: Tensor


def _share(targets_N: Tensor, num_logits: int, tp: dist.ProcessGroup) -> _Share:
    owner_N = targets_N // num_logits
    return _Share(owner_N, targets_N % num_logits, owner_N == tp.rank())


def _combined(
    stats: tuple[Tensor, ...], owner_N: Tensor, with_entropy: bool, tp: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """The stats over the whole vocabulary from those over each rank's part."""
    every_RSN = gathered(torch.stack(stats), tp).unflatten(0, (tp.size(), -1))
    logprobs_RN, lse_RN, entropy_RN, mean_RN = every_RSN.unbind(1)
    lse = lse_RN.logsumexp(0)
    inside_RN = lse_RN - lse  # log of the probability that falls into each part
    logprobs = (logprobs_RN + inside_RN).gather(0, owner_N[None]).squeeze(0)
    entropy = entropy_RN[0]
    if with_entropy:
        entropy = (inside_RN.exp() * (entropy_RN - inside_RN)).sum(0)
    return logprobs, lse, entropy, mean_RN.mean(0)


@cache
def _compiled(function: Callable) -> Callable:
    """Built on first use: the compiler's import alone takes a second and 50 MiB."""
    return torch.compile(function, dynamic=False)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        targets,
        chunk,
        keep,
        scale,
        with_entropy,
        with_mean,
        compiled,
        in_halves,
        tp,
    ):
        ctx.set_materialize_grads(False)
        chunk_stats = _compiled(_chunk_stats) if compiled else _chunk_stats
        keeps_probs = keep and not with_entropy
        wanted = _Wanted(scale, with_entropy, with_mean, keeps_probs)
        head = weight.to(hidden.dtype)
        share = None if tp is None else _share(targets, weight.shape[0], tp)
        targets = targets if share is None else share.index_N
        slices, kept = [], []
        for part in _parts(hidden.shape[0], chunk):
            logits = hidden[part] @ head.t()
            if keep:
                kept.append(logits)
            for rows in _slices(logits, compiled):
                slices.append(chunk_stats(logits[rows], targets[part][rows], wanted))
        stats = tuple(torch.cat(pieces) for pieces in zip(*slices, strict=True))
        owned = inside = None
        if tp is not None and share is not None:
            local_lse, owned = stats[1], share.owned_N
            stats = _combined(stats, share.owner_N, with_entropy, tp)
            inside = (local_lse - stats[1]).exp() if keeps_probs else None
        ctx.save_for_backward(hidden, weight, head, targets, *stats[:3], owned, inside, *kept)
        ctx.options = (chunk, scale, keeps_probs, compiled, in_halves)
        ctx.num_parts = 1 if tp is None else tp.size()
        ctx.asked = (True, True, with_entropy, with_mean)
        return stats

    @staticmethod
    def backward(ctx, *grads):
        hidden, weight, head, targets, logprobs, lse, entropy, owned, inside, *kept = (
            ctx.saved_tensors
        )
        chunk, scale, keeps_probs, compiled, in_halves = ctx.options
        chunk_grad = _compiled(_chunk_grad) if compiled else _chunk_grad
        grads = tuple(g if asked else None for g, asked in zip(grads, ctx.asked, strict=True))
        vocab_size = weight.shape[0] * ctx.num_parts
        coefficients = _coefficients(grads, logprobs, entropy, scale, vocab_size)
        if inside is not None:  # what was kept are probabilities within this rank's part
            coefficients = coefficients._replace(prob=coefficients.prob * inside)
        grad_hidden = torch.empty_like(hidden)
        grad_weight, trains_head = None, ctx.needs_input_grad[1]
        for i, part in enumerate(_parts(hidden.shape[0], chunk)):
            values = kept[i] if kept else hidden[part] @ head.t()
            if kept and in_halves:
                values = values.clone()
            for rows in _slices(values, compiled):
                chunk_grad(
                    values[rows],
                    targets[part][rows],
                    lse[part][rows],
                    entropy[part][rows],
                    coefficients.rows(part).rows(rows),
                    scale,
                    keeps_probs,
                    None if owned is None else owned[part][rows],
                )
            torch.mm(values, head, out=grad_hidden[part])
            if trains_head:
                product = values.t() @ hidden[part]
                if grad_weight is None:
                    grad_weight = product.to(weight.dtype)
                else:
                    grad_weight += product
                del product
            if kept:
                kept[i] = None
        return grad_hidden, grad_weight, *[None] * 9


def _parts(N: int, size: int) -> Iterator[slice]:
    """Covers N tokens; one empty part when there are none."""
    return (slice(start, start + size) for start in range(0, max(N, 1), size))


def _slices(chunk_CV: Tensor, compiled: bool) -> Iterator[slice]:
    """Rows whose float32 copy stays in a CPU's cache; all at once for compiled code and on GPUs."""
    C, V = chunk_CV.shape
    whole = compiled or chunk_CV.device.type != "cpu"
    return _parts(C, C if whole and C else max(1, SLICE_BYTES // (4 * V)))
