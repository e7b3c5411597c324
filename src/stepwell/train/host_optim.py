"""Optimiser offload (ZeRO-Offload, 2101.06840): AdamW steps on the host.

Master weights and both moments are there. A step copies the gradients down, steps parameter after
parameter and copies each new weight up; on CUDA through pinned memory, with a stream for each
direction, so that the two copies and the arithmetic overlap. The device keeps its weights in the
masters' own precision: FSDP2 would round summed gradients to the precision of the weights, and so
no number depends on where the optimiser runs.

Bytes a parameter in float32: device 4 weight + 4 gradient (instead of 16), host 4 master + 8
moments + 4 for copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stepwell.parallel.init import global_name, local_part
from stepwell.sections.optim import OptimConfig
from stepwell.train.optim import Optimizer, build_optimizer
from stepwell.types import ConfigError


@dataclass(frozen=True)
class _Weight:
    """device: the parameter as the model has it. master: this rank's part, on the host. moments:
    by slot; DTensors where the parameter is one, whose local parts the optimiser steps. buffer:
    the gradient on its way down, then the weight on its way up."""

    name: str
    device: Tensor
    master: nn.Parameter
    moments: dict[str, Tensor]
    buffer: Tensor


class HostOptimizer:
    """`optim.Optimizer`'s face over AdamW on the host.

    Its state has the same names, so checkpoints with and without offload are the same. Whoever
    changes the model's weights otherwise calls `reload_masters`. Raises ConfigError for an
    optimiser other than AdamW.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], optim: OptimConfig):
        if optim.kind != "adamw":
            raise ConfigError(
                f"offload.optimizer=true steps AdamW on the host, not optim.kind={optim.kind!r}; "
                "set optim.kind='adamw' or offload.optimizer=false"
            )
        self.weights = [_weight(global_name(n), p) for n, p in named_parameters if p.requires_grad]
        self.inner: Optimizer = build_optimizer(((w.name, w.master) for w in self.weights), optim)
        for weight in self.weights:
            state = {slot: local_part(moment) for slot, moment in weight.moments.items()}
            self.inner.parts["adamw"].state[weight.master] = state
        self.down = self.up = None
        if self.weights[0].device.device.type == "cuda":
            device = self.weights[0].device.device
            self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Steps every parameter that has a gradient. The next kernel of the current stream sees
        the new weights."""
        moving = [weight for weight in self.weights if weight.device.grad is not None]
        arrived = [self._down(weight) for weight in moving]
        for weight, event in zip(moving, arrived, strict=True):
            if event is not None:
                event.synchronize()
            weight.master.grad = weight.buffer
            self.inner.step_only(weight.master)
            weight.master.grad = None
            weight.buffer.copy_(weight.master)
            self._up(weight)
        if self.up is not None:
            torch.cuda.current_stream().wait_stream(self.up)

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.device.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """As `Optimizer.state_dict`; the tensors are on the host."""
        return {
            f"{w.name}.{slot}": value for w in self.weights for slot, value in w.moments.items()
        }

    def hyperparameters(self) -> dict[str, dict[str, float]]:
        return self.inner.hyperparameters()

    def load_hyperparameters(self, values: dict[str, dict[str, float]]) -> None:
        self.inner.load_hyperparameters(values)

    @torch.no_grad()
    def reload_masters(self) -> None:
        """Copies the model's weights into the masters."""
        for weight in self.weights:
            weight.master.copy_(local_part(weight.device))

    def _down(self, weight: _Weight) -> torch.Event | None:
        assert weight.device.grad is not None
        gradient = local_part(weight.device.grad)
        if self.down is None or self.up is None:
            weight.buffer.copy_(gradient)
            return None
        self.down.wait_stream(torch.cuda.current_stream())
        self.down.wait_stream(self.up)  # the step before has left the buffer
        with torch.cuda.stream(self.down):
            weight.buffer.copy_(gradient, non_blocking=True)
        gradient.record_stream(self.down)
        return self.down.record_event()

    def _up(self, weight: _Weight) -> None:
        target = local_part(weight.device)
        if self.up is None:
            target.copy_(weight.buffer)
            return
        with torch.cuda.stream(self.up):
            target.copy_(weight.buffer, non_blocking=True)


def _weight(name: str, parameter: Tensor) -> _Weight:
    host = parameter.detach().to("cpu", copy=True)
    master = nn.Parameter(local_part(host))
    pinned = parameter.device.type == "cuda"
    return _Weight(
        name=name,
        device=parameter,
        master=master,
        moments={
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(host),
            "exp_avg_sq": torch.zeros_like(host),
        },
        buffer=torch.empty_like(master, requires_grad=False, pin_memory=pinned),
    )
