"""Collectives that autograd can go through, on the first dim of plain tensors.

n rows of this rank, R ranks of the group. Each says what its gradient is: a value that every rank
then uses in its own way has a partial gradient on each rank, a value that every rank uses in the
same way has the whole gradient on each. They are made of the functional operators, so that
torch.compile can trace them. With group None each is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def all_gather(x: Tensor, group: Group) -> Tensor:
    """(n, ...) of each rank -> (R*n, ...) in rank order on all.

    For use in different ways: the ranks' gradients are partial and are reduce-scattered.
    """
    return x if group is None else _AllGather.apply(x, group)


def gather_same(x: Tensor, group: Group) -> Tensor:
    """(n, ...) of each rank -> (R*n, ...) in rank order on all.

    For use in the same way on every rank: all have the whole gradient and each takes its rows.
    """
    return x if group is None else _GatherSame.apply(x, group)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """(R*n, ...) of each rank -> rank r's n rows of the sum, in the dtype of x. The gradient is
    all-gathered. Raises ValueError if the rows do not divide."""
    if group is None:
        return x
    if x.shape[0] % group.size():
        raise ValueError(
            f"{x.shape[0]} rows do not divide among {group.size()} ranks; the nearest number that "
            f"does is {max(1, round(x.shape[0] / group.size())) * group.size()}"
        )
    return _ReduceScatter.apply(x, group)


def shared(weight: Tensor, group: Group) -> Tensor:
    """The same tensor. For a replicated weight that each rank uses in its own way: the partial
    gradients are summed over the ranks in at least float32, so that all replicas get the same
    bits."""
    return weight if group is None else _Shared.apply(weight, group)


def all_to_all(
    x: Tensor,
    group: Group,
    receive_counts: Sequence[int] | None = None,
    send_counts: Sequence[int] | None = None,
) -> Tensor:
    """Rank s's r-th part of rows goes to rank r, where the parts lie in the order of s. Counts are
    rows for or from each rank; None: equal parts. The gradient takes the way back."""
    if group is None:
        return x
    if receive_counts is None or send_counts is None:
        if x.shape[0] % group.size():
            raise ValueError(f"{x.shape[0]} rows do not divide among {group.size()} ranks")
        receive_counts = send_counts = [x.shape[0] // group.size()] * group.size()
    return _AllToAll.apply(x, list(receive_counts), list(send_counts), group)


# --- without gradients -----------------------------------------------------------------------


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`all_gather`'s values."""
    return _wait(_ops().all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))


def scattered_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`reduce_scatter`'s values."""
    return _wait(
        _ops().reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name)
    )


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, in at least float32, rounded to the dtype of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return _wait(_ops().all_reduce(wide.contiguous(), "sum", group.group_name)).to(x.dtype)


def exchanged(
    x: Tensor,
    receive_counts: list[int],
    send_counts: list[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """`all_to_all`'s values."""
    return _wait(
        _ops().all_to_all_single(x.contiguous(), receive_counts, send_counts, group.group_name)
    )


def _ops() -> Any:
    return torch.ops._c10d_functional


def _wait(x: Tensor) -> Tensor:
    return _ops().wait_tensor(x)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, grad):
        return scattered_sum(grad, ctx.group), None


class _GatherSame(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, grad):
        rows = grad.shape[0] // ctx.group.size()
        return grad.narrow(0, ctx.group.rank() * rows, rows), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scattered_sum(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.group), None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, group):
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, receive_counts, send_counts, group):
        ctx.group, ctx.sent, ctx.received = group, send_counts, receive_counts
        return exchanged(x, receive_counts, send_counts, group)

    @staticmethod
    def backward(ctx, grad):
        return exchanged(grad, ctx.sent, ctx.received, ctx.group), None, None, None
