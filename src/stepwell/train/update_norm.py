"""The norm of the change that an AdamW step is about to make, without making it.

A refused step must leave weights and moments bit-unchanged, and a step that was made cannot be
taken back exactly: so it is predicted from the moments. The other way, a copy of weights and
moments to restore, costs 12 bytes a weight; the prediction costs the time of a few unfused AdamW
steps and no memory to speak of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stepwell.parallel.init import local_part
from stepwell.train.adamw8bit import AdamW8bit
from stepwell.train.host_optim import HostOptimizer
from stepwell.train.optim import Optimizer, local_and_groups, norm_of_squares

# Temporaries of so many weights at once: within a core's cache, or large enough for a GPU.
CHUNK = {"cpu": 1 << 16}
LARGE_CHUNK = 1 << 24


class _Moving(NamedTuple):
    """gradient: where it lies. weights: what is stepped; state and settings of its step."""

    gradient: Tensor
    weights: Tensor
    state: Mapping[str, Any]
    settings: Mapping[str, Any]


@torch.no_grad()
def predicted_update_norm(
    optimizer: Optimizer | HostOptimizer, stages: dist.ProcessGroup | None = None
) -> float:
    """The 2-norm of what `optimizer.step()` would add to the weights now (decay included), to
    float32 rounding; the same on every rank. Gradients must be clipped already. stages: ranks that
    hold other parameters of the model (a pipeline's).

    Muon's matrices are left out: their update is orthogonal, so its norm hardly depends on the
    gradient. Parameters without a gradient do not move. With offload it is computed on the host,
    from a second copy of the gradients.
    """
    steps = _on_host(optimizer) if isinstance(optimizer, HostOptimizer) else _here(optimizer)
    found = ((_square(moving), local_and_groups(moving.gradient)[1]) for moving in steps)
    return norm_of_squares(found, stages)


def _here(optimizer: Optimizer) -> Iterator[_Moving]:
    for kind, part in optimizer.parts.items():
        if kind == "muon":
            continue
        # The 8-bit optimiser keeps its decay rates with the one that it wraps.
        shared = part.inner.param_groups[0] if isinstance(part, AdamW8bit) else {}
        for group in part.param_groups:
            settings = {"betas": shared.get("betas"), "eps": shared.get("eps"), **group}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = part.state.get(parameter, {})
                    yield _Moving(parameter.grad, parameter, state, settings)


def _on_host(optimizer: HostOptimizer) -> Iterator[_Moving]:
    settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for weight in optimizer.weights:
        if weight.device.grad is not None:
            yield _Moving(
                weight.device.grad, weight.master, weight.moments, settings[id(weight.master)]
            )


def _square(moving: _Moving) -> Tensor:
    """float64 scalar: this rank's share of one parameter's squares (AdamW, 1711.05101)."""
    state, settings = moving.state, moving.settings
    beta1, beta2 = settings["betas"]
    lr, decay, eps = float(settings["lr"]), settings["weight_decay"], settings["eps"]
    weights = _plain(moving.weights)
    gradient = local_and_groups(moving.gradient)[0].to(weights)
    taken = state["step"].double() if "step" in state else torch.zeros((), dtype=torch.float64)
    first = (-lr / (1 - beta1 ** (taken + 1))).to(weights)
    second = (1 - beta2 ** (taken + 1)).rsqrt().to(weights)
    moments = [_plain(state[key]) if key in state else None for key in ("exp_avg", "exp_avg_sq")]
    total = torch.zeros((), dtype=torch.float64, device=weights.device)
    for p, g, old_m, old_v in _chunks(weights, gradient, *moments):
        m = g * (1 - beta1) if old_m is None else torch.lerp(old_m, g, 1 - beta1)
        v = g.square() * (1 - beta2)
        if old_v is not None:
            v.add_(old_v, alpha=beta2)
        m.div_(v.sqrt_().mul_(second).add_(eps)).mul_(first)
        if decay:
            m.add_(p, alpha=-lr * decay)
        total += torch.linalg.vector_norm(m).double().square()
    return total.to(moving.gradient.device)


def _chunks(weights: Tensor, gradient: Tensor, *moments: Tensor | None) -> Iterator[Any]:
    size = CHUNK.get(weights.device.type, LARGE_CHUNK)
    flat = [None if x is None else x.reshape(-1) for x in (weights, gradient, *moments)]
    for start in range(0, weights.numel(), size):
        yield [None if x is None else x[start : start + size] for x in flat]


def _plain(x: Tensor) -> Tensor:
    x = local_part(x)
    return x.dequantize() if hasattr(x, "codes") else x
