"""Muon: momentum whose update is made orthogonal (Jordan, "Muon: an optimizer for hidden layers in
neural networks", 2024; at scale: 2502.16982).

On one process it equals torch.optim.Muon. On sharded parameters torch's runs the iteration itself
on shards, in bfloat16, and each sum rounds differently: updates then differ by several percent
between layouts. Here a matrix is gathered once and every rank computes the same update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

# The quintic a x + b x^3 + c x^5, steepest at 0: singular values end within about 0.7 and 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Steps matrices (2-D parameters) only. momentum is Nesterov's; decay is decoupled."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        num_iterations: int = 5,
    ):
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "num_iterations": num_iterations,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(state["momentum_buffer"], group["momentum"])
        update = _on_full_matrix(update, group["num_iterations"])
        rows, columns = parameter.shape
        rate = group["lr"] * math.sqrt(max(1.0, rows / columns))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-rate)


def orthogonalise(update: Tensor, num_iterations: int) -> Tensor:
    """Newton-Schulz in bfloat16: U S V^T -> nearly U V^T, any 2-D shape."""
    x = update.bfloat16()
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(num_iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _on_full_matrix(update: Tensor, num_iterations: int) -> Tensor:
    if not isinstance(update, DTensor):
        return orthogonalise(update, num_iterations).to(update.dtype)
    full = orthogonalise(update.full_tensor(), num_iterations).to(update.dtype)
    return distribute_tensor(
        full.contiguous(), update.device_mesh, update.placements, src_data_rank=None
    )
