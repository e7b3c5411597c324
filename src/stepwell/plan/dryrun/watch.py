"""What a program holds and sends, seen from below: every operator's results and every collective.

The same watch looks at a real rank and at one whose tensors are fake, so that one can be held
against the other. DTensors and the wrappers of asynchronous collectives are looked through: what
counts is the plain tensors that one rank has. What offload puts on the host is not held by the
device, also where the two are one (a CPU, a fake device).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator as _Propagator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from stepwell.models import context_attention
from stepwell.parallel.init import local_part
from stepwell.parallel.offload import ActivationOffload
from stepwell.parallel.pipeline import Pipeline
from stepwell.parallel.traffic import Collective, collective_of
from stepwell.parallel.wire import wire_bytes
from stepwell.plan.comms.step import Phase

# A pipeline's gradients are reduced after its last pass: how much is held then does not depend on
# how many passes there were.
Peak = Phase | Literal["reduction"]

_PROPAGATE = "_propagate_tensor_meta_non_cached"
# Operators of ours that communicate inside: they are looked into.
_OPENED = {
    "stepwell::ring_attention": context_attention._ring,
    "stepwell::ring_attention_backward": context_attention._ring_backward,
}


class Issued(NamedTuple):
    """`calls` equal collectives. group: name of the process group."""

    kind: str
    group: str
    num_ranks: int
    num_bytes: int
    phase: Phase
    calls: int

    @property
    def wire_bytes(self) -> float:
        return wire_bytes(self.kind, self.num_bytes, self.num_ranks)


@dataclass(frozen=True)
class Moment:
    """Live bytes, and those of gathered weights among them."""

    live: int
    gathered: int


class Watch(TorchDispatchMode):
    """stepping: set by the caller, for phase "optimizer"; what autograd's engine runs, with FSDP2's
    last reductions, is "backward". Reductions after the engine's last run have a peak of their own.

    gathered: asked for gathered weights when the first backward pass begins, which is
    `after_forward`.
    """

    def __init__(self, gathered: Callable[[], Iterable[Tensor]]):
        super().__init__()
        self.gathered = gathered
        self.counting = True
        self.sizes: dict[int, int] = {}
        self.on_host: set[int] = set()
        self.making_on_host = False
        self.live = 0
        self.peaks: dict[Peak, int] = {"forward": 0, "backward": 0, "optimizer": 0}
        self.stepping = self.in_backward = self.in_engine = False
        self.after_forward: Moment | None = None
        self.counts: Counter[tuple[str, str, int, int, Phase]] = Counter()

    @property
    def phase(self) -> Phase:
        if self.stepping:
            return "optimizer"
        return "backward" if self.in_backward else "forward"

    @property
    def issued(self) -> list[Issued]:
        return [Issued(*key, calls) for key, calls in self.counts.items()]

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Takes what is there already into account."""
        for tensor in tensors:
            self._see(tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    def put_on_host(self, tensors: Iterable[Tensor]) -> None:
        """These are none of the device's, from now on."""
        for tensor in tensors:
            self._put_on_host(local_part(tensor).untyped_storage())

    def _put_on_host(self, storage: Any) -> None:
        key = storage._cdata
        self.live -= self.sizes.pop(key, 0)
        self.on_host.add(key)
        weakref.finalize(storage, self.on_host.discard, key)

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """What is held of these now."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(self.sizes.get(key, 0) for key in keys)

    def resized(self, storage: Any, num_bytes: int) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self._add(storage, num_bytes)
            return
        self.live += num_bytes - self.sizes[key]
        self.sizes[key] = num_bytes
        self._note()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        phase = self.phase
        if phase == "backward" and self.after_forward is None:
            self.after_forward = Moment(self.live, self.bytes_of(self.gathered()))
        opened = _OPENED.get(func._schema.name)
        if opened is not None:
            with self:
                return opened._init_fn(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self._see(leaf)
        found = collective_of(func, args, kwargs, out)
        if found is not None:
            self._count(found, phase)
        return out

    def _count(self, found: Collective, phase: Phase) -> None:
        if self.counting:
            self.counts[(found.kind, found.group, found.num_ranks, found.num_bytes, phase)] += 1

    def _see(self, tensor: Tensor) -> None:
        if type(tensor).__name__ == "AsyncCollectiveTensor" or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self.sizes or storage._cdata in self.on_host:
            return
        if self.making_on_host:
            self._put_on_host(storage)
        else:
            self._add(storage, storage.nbytes())

    def _add(self, storage: Any, num_bytes: int) -> None:
        key = storage._cdata
        self.sizes[key] = num_bytes
        self.live += num_bytes
        weakref.finalize(storage, self._forget, key)
        self._note()

    def _forget(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)

    def _note(self) -> None:
        after_passes = self.phase == "backward" and not self.in_engine
        name: Peak = "reduction" if after_passes else self.phase
        self.peaks[name] = max(self.peaks.get(name, 0), self.live)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """The watch also hears of storages that are resized (so FSDP2 lets gathered weights go), and
    does not count the exchange of objects, whose bytes are a matter of pickling."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, num_bytes: int) -> Any:
        watch.resized(storage, num_bytes)
        return resize(storage, num_bytes)

    def uncounted(exchange: Callable[..., None]) -> Callable[..., None]:
        def quietly(*args: Any, **kwargs: Any) -> None:
            watch.counting = False
            try:
                exchange(*args, **kwargs)
            finally:
                watch.counting = True

        return quietly

    def as_backward(call: Callable[..., Any], engine: bool = False) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            before = watch.in_backward, watch.in_engine
            watch.in_backward, watch.in_engine = True, engine or watch.in_engine
            try:
                return call(*args, **kwargs)
            finally:
                watch.in_backward, watch.in_engine = before

        return backward

    run_backward = as_backward(torch.autograd._engine_run_backward, True)  # pyright: ignore
    # A pipeline's schedule reduces gradients itself, after its last pass.
    reduce_group, to_host = as_backward(FSDPParamGroup.post_backward), ActivationOffload._to_host

    def reduce(group: FSDPParamGroup, *args: Any) -> None:
        reduce_group(group, *args)
        for one in group.fsdp_params:
            if one.offload_to_cpu and one.sharded_param.grad is not None:
                watch.put_on_host([one.sharded_param.grad])

    def saved_on_host(offload: ActivationOffload, flat: Tensor) -> Any:
        watch.making_on_host = True
        try:
            return to_host(offload, flat)
        finally:
            watch.making_on_host = False

    exchange = Pipeline._collect_tied_gradient

    def after_passes(pipeline: Pipeline) -> None:
        watch.stepping = True
        try:
            exchange(pipeline)
        finally:
            watch.stepping = False

    propagate = getattr(_Propagator, _PROPAGATE)

    def apart(*args: Any, **kwargs: Any) -> Any:
        # How a DTensor's result is laid out is asked of whole tensors that no rank has.
        with _disable_current_modes():
            return propagate(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        for name in ("broadcast_object_list", "all_gather_object"):
            stack.enter_context(patch.object(dist, name, uncounted(getattr(dist, name))))
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", run_backward))
        stack.enter_context(patch.object(FSDPParamGroup, "post_backward", reduce))
        stack.enter_context(patch.object(ActivationOffload, "_to_host", saved_on_host))
        stack.enter_context(patch.object(Pipeline, "_collect_tied_gradient", after_passes))
        stack.enter_context(patch.object(_Propagator, _PROPAGATE, apart))
        stack.enter_context(watch)
        yield
