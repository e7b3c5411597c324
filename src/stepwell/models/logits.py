"""Per-token quantities of the output distribution, without ever holding N*V logits in float32.

N tokens, D d_model, V vocabulary. The head's product and everything after it run in chunks of
tokens; the backward pass either reads the chunk's logits again (kept in compute dtype) or computes
them a second time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from stepwell.models.layers import upcast


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
) -> TokenStats:
    """Log-probability of the target, log Z, entropy and mean logit of softmax(h W^T / T).

    Entropy and mean logit are zero, without gradient, unless asked for. Differentiable in
    hidden_ND and weight_VD.
    """
    N = hidden_ND.shape[0]
    if compiled:  # one shape for every chunk: the compiled code is then built once
        missing = -N % chunk_tokens
        hidden_ND = F.pad(hidden_ND, (0, 0, 0, missing))
        targets_N = F.pad(targets_N, (0, missing))
    stats = _TokenStats.apply(
        hidden_ND,
        weight_VD,
        targets_N,
        chunk_tokens,
        keep_logits,
        inverse_temperature,
        with_entropy,
        with_mean,
        compiled,
    )
    return TokenStats(*(value[:N] for value in stats))


def _chunk_stats(
    logits_CV: Tensor, targets_C: Tensor, scale: float, with_entropy: bool, with_mean: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = upcast(logits_CV) * scale
    lse = torch.logsumexp(wide, dim=-1)
    logprobs = wide.gather(-1, targets_C[:, None]).squeeze(-1) - lse
    zero = torch.zeros_like(lse)
    entropy = lse - ((wide - lse[:, None]).exp() * wide).sum(-1) if with_entropy else zero
    return logprobs, lse, entropy, wide.mean(-1) if with_mean else zero


def _chunk_grad(
    logits_CV: Tensor,
    targets_C: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grads: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    with_entropy: bool,
    with_mean: bool,
) -> Tensor:
    """Gradient of the logits, in their dtype."""
    grad_logprob, grad_lse, grad_entropy, grad_mean = grads
    logprob = upcast(logits_CV) * scale - lse[:, None]
    p = logprob.exp()
    grad = p * (grad_lse - grad_logprob)[:, None]
    if with_entropy:
        grad = grad - grad_entropy[:, None] * p * (logprob + entropy[:, None])
    if with_mean:
        grad = grad + (grad_mean / logits_CV.shape[-1])[:, None]
    hit = torch.arange(logits_CV.shape[-1], device=logits_CV.device) == targets_C[:, None]
    grad = torch.where(hit, grad + grad_logprob[:, None], grad)
    return (grad * scale).to(logits_CV.dtype)


_compiled_chunk_stats = torch.compile(_chunk_stats, dynamic=False)
_compiled_chunk_grad = torch.compile(_chunk_grad, dynamic=False)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, targets, chunk, keep, scale, with_entropy, with_mean, compiled
    ):
        stats = _compiled_chunk_stats if compiled else _chunk_stats
        head = weight.to(hidden.dtype).t()
        chunks, kept = [], []
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = h @ head
            chunks.append(stats(logits, t, scale, with_entropy, with_mean))
            if keep:
                kept.append(logits)
        logprobs, lse, entropy, mean = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.save_for_backward(hidden, weight, targets, lse, entropy, *kept)
        ctx.options = (chunk, scale, with_entropy, with_mean, compiled)
        return logprobs, lse, entropy, mean

    @staticmethod
    def backward(ctx, *grads):
        hidden, weight, targets, lse, entropy, *kept = ctx.saved_tensors
        chunk, scale, with_entropy, with_mean, compiled = ctx.options
        chunk_grad = _compiled_chunk_grad if compiled else _chunk_grad
        head = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for i, start in enumerate(range(0, hidden.shape[0], chunk)):
            part = slice(start, start + chunk)
            logits = kept[i] if kept else hidden[part] @ head.t()
            if kept:
                kept[i] = None
            pieces = tuple(g[part] for g in grads)
            grad_logits = chunk_grad(
                logits,
                targets[part],
                lse[part],
                entropy[part],
                pieces,
                scale,
                with_entropy,
                with_mean,
            )
            torch.mm(grad_logits, head, out=grad_hidden[part])
            grad_weight += grad_logits.t() @ hidden[part]
        return grad_hidden, grad_weight, *[None] * 7
