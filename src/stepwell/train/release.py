"""Gradient release: each parameter is stepped as soon as its gradient is there, which is then freed
(LOMO, 2306.09782, with AdamW instead of SGD).

The gradients that exist at once are those that the backward pass is making: one parameter's in one
process, one block's under FSDP2. Nothing can be judged before it is done: no clipping, no guard, no
second micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from stepwell.hardware import live_tensor_bytes
from stepwell.train.optim import Optimizer, grad_square, norm_of_squares


class GradientRelease:
    """Steps `parameters` within the backward pass, at the rate that `optimizer`'s groups have then.

    peak_gradient_bytes: the most that this rank's gradients took at once.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor]):
        self.optimizer = optimizer
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.squares: dict[int, tuple[Tensor, tuple[Any, ...]]] = {}
        self.peak_gradient_bytes = 0
        for parameter in self.parameters:
            # FSDP2 calls it too, once the shard's gradient has been summed over the ranks.
            parameter.register_post_accumulate_grad_hook(self._release)

    def take_norm(self) -> float:
        """The norm of all gradients since the last call, bit-equal to `grad_norm`'s. Every rank
        must call it together."""
        found = [self.squares[id(p)] for p in self.parameters if id(p) in self.squares]
        self.squares = {}
        return norm_of_squares(found)

    def _release(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        live = (p.grad for p in self.parameters if p.grad is not None)
        self.peak_gradient_bytes = max(self.peak_gradient_bytes, live_tensor_bytes(live))
        self.squares[id(parameter)] = grad_square(parameter.grad)
        self.optimizer.step_only(parameter)
        parameter.grad = None
