"""AdamW with its two moments in 8 bits (2110.02861), by torchao's tensors and arithmetic.

A moment is quantised in blocks of 256 elements along the last dim, each with its largest value in
float32: 1 + 4/256 bytes an element instead of 4. Whether a moment is quantised and where its blocks
lie depends on the whole parameter, never on a shard: rows may be divided among any number of ranks,
and a checkpoint holds `codes` like the parameter and `scale` with a 256th of its columns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepwell.parallel import lever_rules
from stepwell.parallel.init import local_part
from stepwell.parallel.lever_rules import QUANTISED_BLOCK as BLOCK
from stepwell.types import ConfigError

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether it is signed


class AdamW8bit(torch.optim.Optimizer):
    """Steps the local parts of its parameters. Raises ConfigError without torchao, and for
    parameters other than float32 (the arithmetic would round them)."""

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float):
        try:
            with _without_enum_warning():
                from torchao.optim import AdamW8bit as Inner
        except ImportError as error:
            raise ConfigError(
                f"optim.kind='adamw8bit' needs torchao ({error}): pip install 'stepwell[lowbit]', "
                "or set optim.kind='adamw'"
            ) from error
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype != torch.float32:
                    raise ConfigError(
                        f"optim.kind='adamw8bit' computes in float32, but a parameter is "
                        f"{parameter.dtype}; set precision.param='fp32'"
                    )
        # Plain tensors over the same memory: what is compiled then never sees a mesh.
        groups = [
            {**group, "params": [nn.Parameter(local_part(p)) for p in group["params"]]}
            for group in self.param_groups
        ]
        self.inner = Inner(groups, lr=lr, betas=betas, eps=eps, block_size=BLOCK)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"].fill_(group["lr"])
            inner["weight_decay"] = group["weight_decay"]
            for parameter, plain in zip(group["params"], inner["params"], strict=True):
                if parameter.grad is None or local_part(parameter).numel() == 0:
                    continue
                # FSDP2 lays its shards out anew before the first step.
                plain.data = local_part(parameter)
                plain.grad = local_part(parameter.grad)
                self.inner.state[plain] = self._materialise(parameter)
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)

    def named_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Slot -> live tensor, DTensors where the parameter is one; zeros before the first step."""
        state = self._materialise(parameter)
        named = {"step": state["step"]}
        for slot in _MOMENTS:
            moment = state[slot]
            if not is_quantised(parameter):
                named[slot] = _like(parameter, moment, 1)
                continue
            rows = moment.shape[:-1]
            if moment.numel():
                codes, scale = moment.codes, moment.scale.view(*rows, -1)
            else:
                codes = torch.empty_like(moment, dtype=torch.uint8)
                scale = moment.new_empty(*rows, moment.shape[-1] // BLOCK)
            named[f"{slot}.codes"] = _like(parameter, codes, 1)
            named[f"{slot}.scale"] = _like(parameter, scale, BLOCK)
        return named

    def _materialise(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for slot, signed in _MOMENTS.items():
                state[slot] = _zeros(parameter, signed)
        return state


@contextmanager
def _without_enum_warning() -> Iterator[None]:
    """torchao registers an enum in a way that torch 2.13 logs as deprecated."""

    def other(record: logging.LogRecord) -> bool:
        return "register_constant() on Enum" not in record.getMessage()

    logger = logging.getLogger("torch.utils._pytree")
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def is_quantised(parameter: Tensor) -> bool:
    """Whether its moments are kept in 8 bits: large matrices whose rows are whole blocks."""
    return lever_rules.is_quantised(tuple(parameter.shape), local_part(parameter).shape[-1])


def _zeros(parameter: Tensor, signed: bool) -> Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    local = local_part(parameter)
    if not is_quantised(parameter) or local.numel() == 0:
        return torch.zeros_like(local)
    return OptimState8bit.zeros(local.shape, signed, BLOCK, local.device, dtype=local.dtype)


def _like(parameter: Tensor, local: Tensor, columns_per: int) -> Tensor:
    """`local` as the part of a tensor sharded like `parameter`, with `columns_per` times fewer
    columns."""
    if not isinstance(parameter, DTensor):
        return local
    shape = [*parameter.shape[:-1], parameter.shape[-1] // columns_per]
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )
