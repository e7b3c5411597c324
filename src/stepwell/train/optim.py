"""The optimiser and the gradient norm.

AdamW (1711.05101) for everything, also with 8-bit moments, or Muon (2502.16982) for the hidden
matrices with AdamW for the rest. State is addressed by global parameter names, so a checkpoint
knows nothing of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from stepwell.parallel.init import global_name, local_part
from stepwell.sections.optim import OptimConfig
from stepwell.train.adamw8bit import AdamW8bit
from stepwell.train.muon import Muon
from stepwell.types import CheckpointError, ConfigError

SLOTS = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}


@dataclass(frozen=True)
class Optimizer:
    """One or two torch optimisers behind one face.

    parts: "adamw" (or "adamw8bit") and, with Muon, "muon". names: id of each parameter -> its
    global name.
    """

    parts: dict[str, torch.optim.Optimizer]
    names: dict[int, str]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts.values() for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts.values():
            part.step()

    def step_only(self, parameter: Tensor) -> None:
        """Steps one parameter, as `step` does when no other has a gradient, but without a look at
        the others."""
        part, group = self._places[id(parameter)]
        groups = part.param_groups
        part.param_groups = [{**group, "params": [parameter]}]
        try:
            part.step()
        finally:
            part.param_groups = groups

    @cached_property
    def _places(self) -> dict[int, tuple[torch.optim.Optimizer, dict[str, Any]]]:
        return {
            id(parameter): (part, group)
            for part in self.parts.values()
            for group in part.param_groups
            for parameter in group["params"]
        }

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """`{parameter}.{slot}` -> the live state tensor (DTensor where the parameter is one).

        State that no step has created yet is created here as zeros, which is what the first step
        would start from. Loading into these tensors in place restores the optimiser.
        """
        state = {}
        for kind, part in self.parts.items():
            for parameter in _parameters(part):
                name = self.names[id(parameter)]
                if isinstance(part, AdamW8bit):
                    slots = part.named_state(parameter)
                else:
                    slots = _materialise(part, kind, parameter)
                state.update({f"{name}.{slot}": value for slot, value in slots.items()})
        return state

    def hyperparameters(self) -> dict[str, dict[str, float]]:
        """JSON-able lr, base_lr and weight_decay, for every parameter by its global name."""
        return {
            self.names[id(parameter)]: {key: float(group[key]) for key in _KEPT}
            for group in self.param_groups
            for parameter in group["params"]
        }

    def load_hyperparameters(self, values: dict[str, dict[str, float]]) -> None:
        """Restores what `hyperparameters` gave; every group must find one value for all its
        parameters. Raises CheckpointError naming the parameter that does not fit."""
        for group in self.param_groups:
            names = [self.names[id(parameter)] for parameter in group["params"]]
            missing = [name for name in names if name not in values]
            if missing:
                raise CheckpointError(f"the checkpoint has no optimiser settings for {missing[0]}")
            for name in names:
                if values[name] != values[names[0]]:
                    raise CheckpointError(
                        f"optimiser settings of {name} ({values[name]}) differ from those of "
                        f"{names[0]} ({values[names[0]]}), which is in the same group now"
                    )
            group.update(values[names[0]])


_KEPT = ("lr", "base_lr", "weight_decay")


def build_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]], optim: OptimConfig
) -> Optimizer:
    """Groups the trainable parameters and gives each group its rate and decay.

    Matrices decay (the embedding and the head too), norms and biases do not. With Muon, the
    matrices inside the blocks go to it at `muon_lr`. Raises ConfigError if nothing is trainable.
    """
    trainable = [(global_name(n), p) for n, p in named_parameters if p.requires_grad]
    if not trainable:
        raise ConfigError("no parameter is trainable; at least one must have requires_grad")
    groups: dict[tuple[str, bool, Any], list[Tensor]] = {}
    for name, parameter in trainable:
        kind = "adamw8bit" if optim.kind == "adamw8bit" else "adamw"
        if optim.kind == "muon" and is_hidden_matrix(name, parameter):
            kind = "muon"
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((kind, parameter.dim() >= 2, mesh), []).append(parameter)
    settings = {
        kind: [
            {
                "params": parameters,
                "weight_decay": optim.weight_decay if decays else 0.0,
                "base_lr": optim.muon_lr if kind == "muon" else optim.lr,
            }
            for (of, decays, _), parameters in groups.items()
            if of == kind
        ]
        for kind in ("adamw", "adamw8bit", "muon")
    }
    parts: dict[str, torch.optim.Optimizer] = {}
    if settings["adamw"]:
        parts["adamw"] = torch.optim.AdamW(
            settings["adamw"],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=all(p.device.type in ("cpu", "cuda") for _, p in trainable),
        )
    if settings["adamw8bit"]:
        parts["adamw8bit"] = AdamW8bit(
            settings["adamw8bit"], lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps
        )
    if settings["muon"]:
        parts["muon"] = Muon(settings["muon"], lr=optim.muon_lr)
    optimizer = Optimizer(parts, {id(p): name for name, p in trainable})
    set_lr(optimizer, 1.0)
    return optimizer


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes it: a matrix inside a block, not the embedding or the head."""
    return parameter.dim() == 2 and name.startswith("blocks.")


class _Groups(Protocol):
    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


def set_lr(optimizer: _Groups, fraction: float) -> None:
    """Sets every group's rate to `fraction` of its own peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * fraction


def grad_norm(parameters: Iterable[Tensor], stages: dist.ProcessGroup | None = None) -> float:
    """The 2-norm of all gradients together, the same on every rank, summed in float64.

    Takes plain tensors and DTensors of several meshes in any mixture; parameters without a
    gradient count as zero. stages: ranks that hold other parameters of the model (a pipeline's).
    One collective per mesh axis.
    """
    found = (grad_square(gradient) for gradient in _gradients(parameters))
    return norm_of_squares(found, stages)


def grad_square(gradient: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """The sum of squares of this rank's part of a gradient (float64 scalar), and the process groups
    over which it must be summed."""
    local, groups = local_and_groups(gradient)
    return _sum_of_squares(local), groups


def norm_of_squares(
    found: Iterable[tuple[Tensor, tuple[Any, ...]]], stages: dist.ProcessGroup | None = None
) -> float:
    """`grad_norm` of the gradients whose `grad_square`s are given, in the parameters' order."""
    squares: dict[tuple[Any, ...], Tensor] = {}
    for square, groups in found:
        squares[groups] = squares[groups] + square if groups in squares else square
    for groups, square in squares.items():
        for group in groups:
            dist.all_reduce(square, group=group)
    total = sum(square.item() for square in squares.values())
    if stages is not None:
        whole = torch.full_like(next(iter(squares.values())), total)
        dist.all_reduce(whole, group=stages)
        total = whole.item()
    return math.sqrt(total) if total >= 0 else math.nan


@torch.no_grad()
def clip(parameters: Iterable[Tensor], max_norm: float, norm: float) -> None:
    """Scales all gradients by min(1, max_norm / (norm + 1e-6)), where `norm` is `grad_norm`'s.

    The factor is torch.nn.utils.clip_grad_norm_'s. max_norm 0 means no clipping.
    """
    factor = max_norm / (norm + 1e-6)
    if max_norm == 0 or factor >= 1:
        return
    for gradient in _gradients(parameters):
        local_part(gradient).mul_(factor)


def _gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    return (p.grad for p in parameters if p.grad is not None)


def local_and_groups(gradient: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """This rank's part, and the process groups over which its squares must be summed."""
    gradient = gradient.detach()
    if not isinstance(gradient, DTensor):
        return gradient, ()
    if any(isinstance(p, Partial) for p in gradient.placements):
        whole = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
        gradient = gradient.redistribute(placements=whole)
    mesh = gradient.device_mesh
    sharded = [i for i, p in enumerate(gradient.placements) if not isinstance(p, Replicate)]
    return gradient.to_local(), tuple(mesh.get_group(i) for i in sharded)


def _sum_of_squares(x: Tensor) -> Tensor:
    """float64 scalar. Blocks of float32 sums of at most 4096 squares, added up in float64: exact
    to float32 rounding at any size, without a float64 copy."""
    if x.dtype == torch.float64 or x.numel() <= 4096:
        return x.double().square().sum()
    flat = x.float().reshape(-1)
    whole = flat.numel() // 4096 * 4096
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, 4096), dim=1)
    return blocks.double().square().sum() + flat[whole:].double().square().sum()


def _parameters(part: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in part.param_groups for parameter in group["params"])


def _materialise(part: torch.optim.Optimizer, kind: str, parameter: Tensor) -> dict[str, Tensor]:
    slots = part.state[parameter]
    for slot in SLOTS[kind]:
        if slot in slots:
            continue
        if slot == "step":
            fused = part.param_groups[0]["fused"]
            device = parameter.device if fused else torch.device("cpu")
            slots[slot] = torch.zeros((), dtype=torch.float32, device=device)
        else:
            slots[slot] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return {slot: slots[slot] for slot in SLOTS[kind]}
