"""Divergences between a student's and a teacher's distributions over the vocabulary, one a token.

N tokens, V vocabulary (with tp: this rank's even part of it), p the teacher's probabilities, q the
student's, both at one temperature. With tp the ranks exchange a few numbers a token, never logits:
every rank gets the same values, and must use them in the same way; the gradients are those of its
own part of the student's logits. The teacher has none.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from stepwell.models.collectives import gathered
from stepwell.models.layers import upcast

Group = dist.ProcessGroup | None


def forward_kl(
    student_NV: Tensor, teacher_NV: Tensor, temperature: float = 1.0, tp: Group = None
) -> Tensor:
    """KL(p || q) = sum_v p (log p - log q), (N,) in at least float32."""
    log_q, log_p = _both(student_NV, teacher_NV, temperature, tp)
    return _sum(log_p.exp() * (log_p - log_q), tp)


def reverse_kl(
    student_NV: Tensor, teacher_NV: Tensor, temperature: float = 1.0, tp: Group = None
) -> Tensor:
    """KL(q || p) = sum_v q (log q - log p), (N,) in at least float32."""
    log_q, log_p = _both(student_NV, teacher_NV, temperature, tp)
    return _sum(log_q.exp() * (log_q - log_p), tp)


def jensen_shannon(
    student_NV: Tensor,
    teacher_NV: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    tp: Group = None,
) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, (N,) in at least
    float32 (generalised Jensen-Shannon, 2306.13649, eq. 1).

    beta is within (0, 1), or ValueError is raised: at both ends it is zero, and divided by beta or
    1 - beta it tends to the forward and to the reverse KL.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta} must lie between 0 and 1; 0.5 is the symmetric divergence")
    log_q, log_p = _both(student_NV, teacher_NV, temperature, tp)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    terms = beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m)
    return _sum(terms, tp)


def _both(
    student_NV: Tensor, teacher_NV: Tensor, temperature: float, tp: Group
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the student and the teacher."""
    student, teacher = (upcast(x) / temperature for x in (student_NV, teacher_NV.detach()))
    if tp is None:
        return student.log_softmax(-1), teacher.log_softmax(-1)
    lse_2N = _lse(torch.stack([student.detach(), teacher]), tp)
    return _LogSoftmax.apply(student, lse_2N[0], tp), teacher - lse_2N[1][:, None]


def _lse(logits: Tensor, tp: dist.ProcessGroup) -> Tensor:
    """log-sum-exp over the last dim of all ranks."""
    return gathered(logits.logsumexp(-1)[None], tp).logsumexp(0)


def _sum(terms_NV: Tensor, tp: Group) -> Tensor:
    local = terms_NV.sum(-1)
    return local if tp is None else _SumSame.apply(local, tp)


class _LogSoftmax(torch.autograd.Function):
    """z - lse, where lse is over all ranks."""

    @staticmethod
    def forward(ctx, logits_NV, lse_N, tp):
        logprobs = logits_NV - lse_N[:, None]
        ctx.tp = tp
        ctx.save_for_backward(logprobs)
        return logprobs

    @staticmethod
    def backward(ctx, grad_NV):
        (logprobs,) = ctx.saved_tensors
        total_N = gathered(grad_NV.sum(-1)[None], ctx.tp).sum(0)
        return grad_NV - logprobs.exp() * total_N[:, None], None, None


class _SumSame(torch.autograd.Function):
    """The sum over the ranks, which all use in the same way: the gradient of each term is whole."""

    @staticmethod
    def forward(ctx, x, tp):
        return gathered(x[None], tp).sum(0)

    @staticmethod
    def backward(ctx, grad):
        return grad, None
