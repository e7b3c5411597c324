"""Initialisation that no layout can change: a counter-based generator keyed by global names.

Element i (flat index in the whole parameter) of parameter `name` is a pure function of
(seed, name, i), so a shard computes its own elements and nothing else. The generator is two
rounds of SplitMix64's output function (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014) around two 64-bit keys taken from SHA-256(seed, name).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Rule = tuple[str, float] | Literal["ones", "zeros"]
Values = Callable[[Tensor, tuple[int, int]], Tensor]

# In cache on a CPU; enough work for each kernel on a GPU. About 100 bytes an element are in use.
_CHUNK_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 22}
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def global_name(name: str) -> str:
    """A parameter's name without the parts that wrappers add to it."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def init_parameters(module: nn.Module, seed: int, rule: Callable[[str, torch.Size], Rule]) -> None:
    """Fills every parameter of `module` in place: plain tensors and DTensors alike.

    `rule(name, global_shape)` gives ("normal", standard deviation), ("uniform", bound), "ones" or
    "zeros" (or a pair whose second part is then ignored). Drawn values are rounded to float32
    whatever the parameter's dtype, so float64 runs start from the same weights. Raises ValueError
    for another kind.
    """
    for name, parameter in module.named_parameters():
        name = global_name(name)
        init_parameter(parameter, seed, name, rule(name, parameter.shape))


def init_parameter(parameter: Tensor, seed: int, name: str, found: Rule) -> None:
    """`init_parameters` of one, whose global name is given."""
    kind, size = found if isinstance(found, tuple) else (found, 0.0)
    if kind == "normal":
        normal_(parameter, seed, name, size)
    elif kind == "uniform":
        uniform_(parameter, seed, name, size)
    elif kind in ("ones", "zeros"):
        local_part(parameter).fill_(1.0 if kind == "ones" else 0.0)
    else:
        raise ValueError(f"{name}: unknown rule {kind!r}; known: normal, uniform, ones, zeros")


def normal_(parameter: Tensor, seed: int, name: str, std: float) -> Tensor:
    """Fills `parameter` (or this rank's shard of it) with N(0, std^2) values, in place."""
    return _fill(parameter, seed, name, lambda index, keys: standard_normal(index, keys) * std)


def uniform_(parameter: Tensor, seed: int, name: str, bound: float) -> Tensor:
    """Fills `parameter` (or this rank's shard of it) with U(-bound, bound) values, in place."""
    return _fill(parameter, seed, name, lambda index, keys: (2 * uniform(index, keys) - 1) * bound)


@torch.no_grad()
def _fill(parameter: Tensor, seed: int, name: str, values: Values) -> Tensor:
    """values: of flat indices in the whole parameter, from its keys."""
    local = local_part(parameter)
    shape, offset = _place(parameter)
    filled = (
        local
        if local.is_contiguous()
        else torch.empty_like(local, memory_format=torch.contiguous_format)
    )
    flat = filled.view(-1)
    keys = stream_keys(seed, name)
    step = _CHUNK_ELEMENTS.get(local.device.type, 1 << 15)
    for start in range(0, flat.numel(), step):
        stop = min(start + step, flat.numel())
        index = torch.arange(start, stop, dtype=torch.int64, device=local.device)
        found = values(global_index(index, local.shape, shape, offset), keys)
        flat[start:stop] = found.to(torch.float32).to(flat.dtype)
    if filled is not local:
        local.copy_(filled)
    return parameter


def stream_keys(seed: int, name: str) -> tuple[int, int]:
    """Two signed 64-bit keys of the parameter's own stream."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return (
        int.from_bytes(digest[:8], "little", signed=True),
        int.from_bytes(digest[8:16], "little", signed=True),
    )


def standard_normal(index: Tensor, keys: tuple[int, int]) -> Tensor:
    """float64 N(0, 1) values of the flat global indices `index` (int64)."""
    return torch.erfinv(uniform(index, keys) * 2.0 - 1.0) * math.sqrt(2.0)


def uniform(index: Tensor, keys: tuple[int, int]) -> Tensor:
    """float64 values between 0 and 1, neither of them, as `standard_normal`."""
    bits = _mix(_mix(index * _signed(0x9E3779B97F4A7C15) + keys[0]) ^ keys[1])
    # 52 bits, not 53: with 53 the largest midpoint would round to 1.0, whose normal is infinite.
    return (_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52


def global_index(
    index: Tensor, local_shape: torch.Size, shape: torch.Size, offset: tuple[int, ...]
) -> Tensor:
    """Flat indices in a block of `local_shape` at `offset` -> flat indices in the whole `shape`."""
    result = torch.zeros_like(index)
    stride = 1
    for dim in reversed(range(len(shape))):
        result += (index % local_shape[dim] + offset[dim]) * stride
        index = index.div(local_shape[dim], rounding_mode="floor")
        stride *= shape[dim]
    return result


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    # int64's own shift copies the sign bit; the mask makes it a logical shift.
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, plain and detached; writing to it writes to the tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(parameter: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """The global shape, and where this rank's block begins in it."""
    if not isinstance(parameter, DTensor):
        return parameter.shape, (0,) * parameter.dim()
    if any(isinstance(p, Partial) for p in parameter.placements):
        raise ValueError(f"a parameter with partial sums has no values: {parameter.placements}")
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.shape, tuple(offset)
