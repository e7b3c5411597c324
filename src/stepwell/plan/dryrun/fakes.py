"""A world of ranks that are not there, and a device whose tensors have shapes but no values.

Torch's fake process group answers every collective at once, and its fake tensors know what an
operator would return without computing it. Here the two stand in for the accelerators: what a
program puts on a device is fake, what it keeps on the host (a tensor for which it names no device,
and what follows from such tensors) is real. So a batch is looked at as ever, and a model of any
size fits into one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, debug
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from stepwell.models import logits
from stepwell.parallel import init, offload
from stepwell.parallel.mesh import Mesh, mesh_of_ranks
from stepwell.parallel.rules import axis_sizes
from stepwell.sections.layout import LayoutConfig
from stepwell.train import update_norm
from stepwell.types import TrainingError

CPU = torch.device("cpu")
_FACTORIES = (
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
)
# Where gradients are never asked for, operators made of others arrive as they are.
_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


@contextmanager
def fake_ranks(
    layout: LayoutConfig, world: int, rank: int, gpus_per_node: int = 8, grouped: bool = False
) -> Iterator[Mesh]:
    """The mesh of one of `world` ranks, while the others only answer. grouped: a single one has a
    group of its own, too, as with --nproc 1 (offload of parameters needs one). Whatever torch keeps
    for a whole process is afterwards as it was.

    Raises TrainingError where this process is among real ranks.
    """
    if dist.is_initialized():
        raise TrainingError(
            "a dry run plays all ranks in one process, which must not be one of several; run it "
            "without torchrun or --nproc"
        )
    sizes, local = axis_sizes(layout, world), min(world, gpus_per_node)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(local)}))
        if world == 1 and not grouped:
            yield Mesh(1, 0, 0, CPU)
            return
        # Torch puts the rank before every line of an error.
        stack.enter_context(patch.object(sys, "excepthook", sys.excepthook))
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        stack.callback(_forget_meshes)
        stack.callback(dist.destroy_process_group)
        yield mesh_of_ranks(layout, sizes, rank, rank % local, CPU)


def _forget_meshes() -> None:
    """Torch remembers how DTensors are laid out by meshes that are equal, whose groups are gone."""
    debug._clear_sharding_prop_cache()


@contextmanager
def fake_device(answers: Answers | None = None) -> Iterator[None]:
    """What the program puts on its device (the CPU's, by name) is fake."""
    answers = answers or Answers()
    host = _Host()
    with ExitStack() as stack:
        deterministic = torch.are_deterministic_algorithms_enabled()
        stack.callback(torch.use_deterministic_algorithms, deterministic)
        stack.enter_context(patch.object(init, "_fill", _leave))  # no values, so none are drawn
        # As on an accelerator, which has no cache to keep within.
        stack.enter_context(patch.object(logits, "SLICE_BYTES", 1 << 62))
        stack.enter_context(patch.object(offload, "PLAIN", (FakeTensor,)))
        stack.enter_context(patch.dict(update_norm.CHUNK, {"cpu": update_norm.LARGE_CHUNK}))
        stack.enter_context(patch.object(dist, "broadcast_object_list", answers.broadcast))
        stack.enter_context(patch.object(dist, "all_gather_object", answers.all_gather))
        _device_constructors()  # torch's own list for `with torch.device(...)`, kept once made
        for name in _FACTORIES:
            heeding = host.heeding(getattr(torch, name))
            stack.enter_context(patch.object(torch, name, heeding))
        stack.enter_context(_Device(host))
        yield


class Answers:
    """What the other ranks say where objects are exchanged: the same as this one; where it listens,
    what was said there when another rank was played."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.heard = 0

    def listen(self) -> None:
        """Another rank is played, from the beginning."""
        self.heard = 0

    def broadcast(self, objects: list[Any], src: int, *_: Any, **__: Any) -> None:
        if src == dist.get_rank():
            self.said.append(list(objects))
        elif self.heard < len(self.said):
            objects[:] = self.said[self.heard]
            self.heard += 1

    def all_gather(self, objects: list[Any], value: Any, *_: Any, **__: Any) -> None:
        objects[:] = [value] * len(objects)


class _Host:
    """Knows when a tensor is made for which no device is named."""

    def __init__(self) -> None:
        self.making = False

    def heeding(self, factory: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                return factory(*args, **kwargs)
            before, self.making = self.making, True
            try:
                return factory(*args, **kwargs)
            finally:
                self.making = before

        return make


class _Device(TorchDispatchMode):
    """Carries out operators: on the device if an operand is there or the result is to be. A value
    that nobody knows reads as one."""

    def __init__(self, host: _Host):
        super().__init__()
        self.host, self.fake = host, FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) for x in tensors):
            if func in _READS:
                return _one(tensors[0].dtype)
            with self.fake:
                return func(*args, **kwargs)
        if not self.host.making and all(x.device.type == "meta" for x in tensors):
            wanted = kwargs.get("device")
            if wanted is not None and torch.device(wanted).type == "cpu":
                with self.fake:
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


def _leave(parameter: Tensor, *_: Any) -> Tensor:
    return parameter


def _one(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
