"""Counting collectives as they are issued: what a layout really sends, beside the formulas. What a
rank puts on the wire for them is in `parallel/wire`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stepwell.parallel.wire import wire_bytes

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# In this order: a name of torch's that holds the first word is of that kind.
_KINDS = {
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
}


@dataclass(frozen=True)
class Collective:
    """kind: e.g. "all-gather". num_bytes: the whole tensor (the gathered output, the input of a
    scatter). group: the process group's name."""

    kind: str
    num_ranks: int
    num_bytes: int
    group: str = field(default="", compare=False)

    @property
    def wire_bytes(self) -> float:
        """What one rank sends, by the ring algorithms."""
        return wire_bytes(self.kind, self.num_bytes, self.num_ranks)


@contextmanager
def count_collectives() -> Iterator[list[Collective]]:
    """The collectives that this process issues inside, in order; those of a group of one and
    barriers are left out."""
    counter = _Counter()
    with counter:
        yield counter.found


def summary(collectives: Iterable[Collective]) -> dict[str, tuple[int, int]]:
    """kind -> (number, bytes)."""
    table: dict[str, tuple[int, int]] = {}
    for one in collectives:
        number, num_bytes = table.get(one.kind, (0, 0))
        table[one.kind] = (number + 1, num_bytes + one.num_bytes)
    return table


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        found = collective_of(func, args, kwargs, out)
        if found is not None:
            self.found.append(found)
        return out


def collective_of(func: Any, args: Any, kwargs: Any, out: Any) -> Collective | None:
    """The collective that an operator was, or None; a group of one does not communicate."""
    if func.namespace not in _NAMESPACES:
        return None
    name = func._schema.name.split("::")[1]
    kind = next((kind for word, kind in _KINDS.items() if word in name), None)
    if kind is None:
        return None
    leaves = pytree.tree_leaves((args, kwargs, out))
    group = _group(leaves)
    if group is None or group.size() == 1:
        return None
    return Collective(kind, group.size(), _largest(leaves), group.group_name)


def _largest(leaves: list[Any]) -> int:
    return max((x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor)), default=0)


def _group(leaves: list[Any]) -> dist.ProcessGroup | None:
    """Functional collectives name their group, the others carry it boxed."""
    groups = {str(name): group for group, name in dist.distributed_c10d._world.pg_names.items()}
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf)
        if isinstance(leaf, str) and leaf in groups:
            return groups[leaf]
    return None
