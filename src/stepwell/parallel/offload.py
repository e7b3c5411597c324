"""Activation offload: what blocks save for the backward pass waits on the host.

Copies run beside the computation, on a stream for each direction (CUDA); on their way back they
are started ahead of the operation that asks for them. Values return bit-equal, in the strides that
they had. On a CPU device the copies are real too, so that counts and equality can be tested there.
Optimiser offload is `train/host_optim.py`; parameter offload is FSDP2's (`parallel/fsdp.py`).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

MIN_BYTES = 64 * 2**10
PREFETCH_COPIES = 16  # about what one block saves
_RECENT = 16  # saves that are looked through for the same tensor
PLAIN: tuple[type, ...] = (Tensor,)  # what moves; not parameters and other subclasses
_SAME_WEIGHT = (
    "TBackward",
    "TransposeBackward",
    "PermuteBackward",
    "ViewBackward",
    "ToCopyBackward",
    "_ToTorchTensorBackward",  # the local part of a sharded one
    "_SharedBackward",  # models.collectives: one that all tensor ranks have
)


class _Copy:
    """One tensor's data on the host; `on_device` while it is on its way back or just there."""

    def __init__(self, host: Tensor, owner: ActivationOffload, tape: list[Any]):
        self.host, self.owner, self.tape = host, owner, tape
        self.index = len(tape)
        self.num_packed = self.num_unpacked = 0
        self.written: Any = None
        self.read: Any = None
        self.on_device: Tensor | None = None
        tape.append(weakref.ref(self))
        owner.host_bytes += host.nbytes
        owner.peak_host_bytes = max(owner.peak_host_bytes, owner.host_bytes)

    def __del__(self) -> None:
        self.owner.host_bytes -= self.host.nbytes


@dataclass(frozen=True)
class _Packed:
    """A saved tensor: `copy`'s elements in this shape and these strides."""

    copy: _Copy
    shape: torch.Size
    stride: tuple[int, ...]


class ActivationOffload:
    """Moves the saved tensors of a decoder's blocks, between `attach` and the end of training.

    Tensors below `min_bytes`, of whole numbers, and weights (also transposed or cast ones) stay
    where they are; a tensor that several operations save moves once. bytes_to_host and
    bytes_to_device count what was moved; host_bytes is what waits there now.
    """

    def __init__(
        self,
        device: torch.device,
        min_bytes: int = MIN_BYTES,
        prefetch_copies: int = PREFETCH_COPIES,
    ):
        self.device, self.min_bytes, self.prefetch_copies = device, min_bytes, prefetch_copies
        self.bytes_to_host = self.bytes_to_device = 0
        self.host_bytes = self.peak_host_bytes = 0
        self.down = self.up = None
        if device.type == "cuda":
            self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._open = ExitStack()
        self._tape: list[Any] = []
        # Storages by identity, and alive as long as they are keys: an address would be reused, at
        # once where FSDP2 takes the memory of gathered weights away from a living tensor.
        self._recent: OrderedDict[Any, tuple[Any, _Copy]] = OrderedDict()

    def attach(self, decoder: nn.Module) -> ActivationOffload:
        """Works from the start of `decoder`'s forward to its last norm (or its end, for a pipeline
        stage that has none): everything that blocks save, and nothing of the head. That is outside
        of any checkpointed or compiled block, so of the former the inputs move."""
        decoder.register_forward_pre_hook(lambda *_: self._begin())
        decoder.register_forward_hook(lambda *_: self._end(), always_call=True)
        if isinstance(decoder.norm, nn.Module):
            decoder.norm.register_forward_pre_hook(lambda *_: self._end())
        return self

    def _begin(self) -> None:
        self._end()
        self._tape = []
        self._open.enter_context(saved_tensors_hooks(self._pack, self._unpack))

    def _end(self) -> None:
        self._open.close()
        self._recent.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _Packed:
        if not self._moves(tensor):
            return tensor
        source = tensor.detach()
        storage = source.untyped_storage()
        whole = storage.nbytes() == source.nbytes and _is_dense(source)
        if whole:
            key = (id(storage), source._version)
            flat, stride = source.as_strided((source.numel(),), (1,), 0), source.stride()
        else:
            place = (source.storage_offset(), source.shape, source.stride())
            key = (id(storage), source._version, place)
            flat = source.contiguous().view(-1)
            stride = torch.empty(source.shape, device="meta").stride()
        key = (key, source.dtype)
        if key not in self._recent:
            self._recent[key] = storage, self._to_host(flat)
            if len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
        self._recent.move_to_end(key)  # what every block saves (rotary angles) stays known
        copy = self._recent[key][1]
        copy.num_packed += 1
        return _Packed(copy, source.shape, tuple(stride))

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) not in PLAIN or tensor.device.type != self.device.type:
            return False
        large = tensor.is_floating_point() and tensor.nbytes >= self.min_bytes
        return large and not _is_weight(tensor)

    def _unpack(self, packed: Tensor | _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        copy = packed.copy
        data = self._to_device(copy)
        if self.up is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copy.read)
            data.record_stream(current)
        copy.num_unpacked += 1
        if copy.num_unpacked % copy.num_packed == 0:
            copy.on_device = None
        ahead = copy.tape[max(copy.index - self.prefetch_copies, 0) : copy.index]
        for earlier in (reference() for reference in reversed(ahead)):
            if earlier is not None and not earlier.num_unpacked:
                self._to_device(earlier)
        return data.as_strided(packed.shape, packed.stride)

    def _to_host(self, flat: Tensor) -> _Copy:
        self.bytes_to_host += flat.nbytes
        pinned = self.down is not None
        copy = _Copy(torch.empty_like(flat, device="cpu", pin_memory=pinned), self, self._tape)
        if self.down is None:
            copy.host.copy_(flat)
            return copy
        self.down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.down):
            copy.host.copy_(flat, non_blocking=True)
        flat.record_stream(self.down)
        copy.written = self.down.record_event()
        return copy

    def _to_device(self, copy: _Copy) -> Tensor:
        if copy.on_device is not None:
            return copy.on_device
        self.bytes_to_device += copy.host.nbytes
        if self.up is None:
            copy.on_device = copy.host.clone()
            return copy.on_device
        self.up.wait_event(copy.written)
        with torch.cuda.stream(self.up):
            copy.on_device = torch.empty_like(copy.host, device=self.device)
            copy.on_device.copy_(copy.host, non_blocking=True)
        copy.read = self.up.record_event()
        return copy.on_device


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill their stretch of memory, in some order of the dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is a leaf that wants a gradient, transposed, viewed, cast or localised at most."""
    if tensor.is_leaf:
        return tensor.requires_grad
    node = tensor.grad_fn
    while node is not None and node.name().startswith(_SAME_WEIGHT):
        node = node.next_functions[0][0]
    return node is not None and "AccumulateGrad" in node.name()
