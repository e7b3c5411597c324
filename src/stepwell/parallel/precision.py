"""8-bit linear layers, the state of delayed scaling, and fp16's loss scale.

What stays high, whatever the recipe: master weights, optimiser state, norms, rotary positions,
softmax, the loss and its head, and sums of gradients over ranks (docs/precision.md).
L layers, H steps of history, R roles (x, w, g).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stepwell.config import Run
from stepwell.models.fp8 import E4M3, E5M2, ROLES, Fp8, scale_for
from stepwell.models.layers import Linear
from stepwell.parallel.fp8_layers import fp8_linears
from stepwell.parallel.init import local_part
from stepwell.parallel.mesh import Mesh, all_reduce_max
from stepwell.sections.layout import LossScaleConfig
from stepwell.types import ConfigError

LARGEST_LOSS_SCALE = 2.0**24
# Ada and Hopper are the first with an 8-bit product.
FP8_CAPABILITY = (8, 9)


# --- which layers ----------------------------------------------------------------------------


def apply_fp8(decoder: nn.Module, mesh: Mesh, run: Run) -> None:
    """Lets the layers that the recipe names compute in 8 bits; names and parameters stay.

    Raises ConfigError on a card without 8-bit products, or for a compute dtype that its kernel
    does not return.
    """
    fp8 = run.precision.fp8
    if fp8.recipe == "none":
        return
    if mesh.device.type == "cuda":
        _check_card(torch.cuda.get_device_capability(mesh.device), run)
    wanted = set(fp8_linears(run, mesh.sizes.tp))
    for name, module in decoder.named_modules():
        if name not in wanted:
            continue
        assert isinstance(module, Linear), f"{name} is no linear layer"
        scales = seen = None
        if fp8.recipe == "delayed":
            scales, seen = (torch.zeros(len(ROLES), device=mesh.device) for _ in range(2))
        module.fp8 = Fp8(fp8.recipe, fp8.wgrad_high_precision, scales, seen)


def _check_card(capability: tuple[int, int], run: Run) -> None:
    recipe, compute = run.precision.fp8.recipe, run.precision.compute
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"precision.fp8.recipe={recipe!r} needs a card of compute capability "
            f"{'.'.join(map(str, FP8_CAPABILITY))} or newer, this one has "
            f"{'.'.join(map(str, capability))}; set recipe='none'"
        )
    if compute not in ("bf16", "fp32"):
        raise ConfigError(
            f"precision.fp8.recipe={recipe!r} on CUDA needs precision.compute='bf16', not "
            f"{compute!r}"
        )


def fp8_layers(pieces: Iterable[nn.Module]) -> dict[str, Linear]:
    """Global name -> layer, of those that compute in 8 bits."""
    return {
        name: module
        for piece in pieces
        for name, module in piece.named_modules()
        if isinstance(module, Linear) and module.fp8 is not None
    }


@contextmanager
def without_fp8(pieces: Iterable[nn.Module]) -> Iterator[None]:
    """The same model in its compute dtype for a while. Maxima are not recorded meanwhile."""
    layers = list(fp8_layers(pieces).values())
    settings = [layer.fp8 for layer in layers]
    try:
        for layer in layers:
            layer.fp8 = None
        yield
    finally:
        for layer, fp8 in zip(layers, settings, strict=True):
            layer.fp8 = fp8


# --- delayed scaling -------------------------------------------------------------------------


class DelayedScaling:
    """Scales from the largest magnitude of the last `history` optimiser steps (2209.05433).

    A step's maximum is that of the whole global batch and the whole weight, over all ranks, so a
    scale does not depend on the layout. history_LRH: newest first, 0 where nothing was seen; all
    ranks hold that of all layers, also of other pipeline stages. Until a layer has a history,
    current maxima serve.
    """

    def __init__(self, names: Sequence[str], layers: Mapping[str, Linear], history: int):
        self.names = list(names)
        self.layers = [(self.names.index(name), _delayed(layer)) for name, layer in layers.items()]
        device = self.layers[0][1][0].device if self.layers else torch.device("cpu")
        self.history_LRH = torch.zeros(len(self.names), len(ROLES), history, device=device)

    def update(self, mesh: Mesh) -> None:
        """Once an optimiser step, on all ranks together. A maximum that is not finite leaves the
        history of its tensor as it is."""
        seen_LR = torch.zeros_like(self.history_LRH[..., 0])
        for i, (_, seen) in self.layers:
            seen_LR[i] = torch.maximum(seen_LR[i], seen.nan_to_num(nan=math.inf))
        self.forget()
        seen_LR1 = all_reduce_max(seen_LR, mesh).unsqueeze(-1)
        newer = torch.cat([seen_LR1, self.history_LRH[..., :-1]], dim=-1)
        self.history_LRH = torch.where(seen_LR1.isfinite(), newer, self.history_LRH)
        self._set_scales()

    def forget(self) -> None:
        """Leaves out what was seen since the last update."""
        for _, (_, seen) in self.layers:
            seen.zero_()

    def _set_scales(self) -> None:
        amax_LR = self.history_LRH.amax(-1)
        by_role = [scale_for(amax_LR[:, r], d) for r, d in enumerate((E4M3, E4M3, E5M2))]
        scales_LR = torch.where(amax_LR > 0, torch.stack(by_role, dim=1), 0.0)
        for i, (scales, _) in self.layers:
            scales.copy_(scales_LR[i])

    def state(self) -> dict[str, Any]:
        """JSON-able; `load` of it goes on exactly."""
        return dict(zip(self.names, self.history_LRH.tolist(), strict=True))

    def load(self, state: Mapping[str, Any]) -> None:
        """Layers that the state lacks start without a history; of a longer one the newest count."""
        self.history_LRH.zero_()
        for i, name in enumerate(self.names):
            for r, values in enumerate(state.get(name, ())):
                newest = torch.tensor(values[: self.history_LRH.shape[-1]])
                self.history_LRH[i, r, : len(newest)] = newest
        self.forget()
        self._set_scales()


def _delayed(layer: Linear) -> tuple[Tensor, Tensor]:
    assert layer.fp8 is not None
    assert layer.fp8.scales is not None
    assert layer.fp8.seen is not None
    return layer.fp8.scales, layer.fp8.seen


def delayed_scaling(run: Run, mesh: Mesh, pieces: Iterable[nn.Module]) -> DelayedScaling | None:
    """The state of the run's recipe, None for one without."""
    fp8 = run.precision.fp8
    if fp8.recipe != "delayed":
        return None
    return DelayedScaling(fp8_linears(run, mesh.sizes.tp), fp8_layers(pieces), fp8.history)


# --- fp16 ------------------------------------------------------------------------------------


class LossScale:
    """What the loss is multiplied by, so that small gradients do not vanish in fp16 (1710.03740,
    section 3.2): halved when a gradient overflows, doubled after growth_steps steps without.
    Always a power of two times the initial value, at most 2^24 (or the initial value)."""

    def __init__(self, config: LossScaleConfig):
        self.config = config
        self.value = config.initial
        self.good_steps = 0

    @property
    def at_floor(self) -> bool:
        """Whether overflow can no longer be the scale's fault."""
        return self.value <= 1.0

    def update(self, overflowed: bool) -> None:
        """After each step's gradients are known; the same on all ranks."""
        if overflowed:
            self.value, self.good_steps = self.value / 2, 0
            return
        self.good_steps += 1
        if self.good_steps >= self.config.growth_steps:
            self.good_steps = 0
            if self.value * 2 <= LARGEST_LOSS_SCALE:
                self.value *= 2

    def state(self) -> dict[str, Any]:
        """JSON-able; `load` of it goes on exactly."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load(self, state: Mapping[str, Any]) -> None:
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


def loss_scale(run: Run) -> LossScale | None:
    """Of a run in fp16; the other dtypes reach far enough."""
    return LossScale(run.precision.loss_scale) if run.precision.compute == "fp16" else None


@torch.no_grad()
def unscale(parameters: Iterable[Tensor], scale: float) -> None:
    """Divides every gradient by `scale`, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            local_part(parameter.grad).div_(scale)
