"""What passes through the layers in one forward-backward pass: sizes of activations and gradients,
and where the first non-finite value is.

The pass is the engine's own, with hooks that only read: so it works under every layout, and its
loss is that of the step. Each rank sees what it computes itself.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepwell.data.batch import Batch
from stepwell.parallel.init import global_name, local_part
from stepwell.parallel.mesh import all_gather_objects
from stepwell.parallel.pipeline import full_shapes
from stepwell.train.engine import Engine, Stats
from stepwell.train.losses import Loss
from stepwell.train.optim import grad_norm

# The modules that a table shows, in the order in which a token meets them.
SHOWN = re.compile(r"blocks\.\d+(\.(attn|mlp))?|norm")
EMBED, HEAD = "embed", "head"


@dataclass
class Tally:
    """Sums over all values of one kind at one module; `rms`, `largest` and `bad_share` of them.

    Non-finite values are counted and left out of the rest.
    """

    squares: float = 0.0
    largest: float = 0.0
    num_values: int = 0
    num_bad: int = 0

    def add(self, other: Tally) -> None:
        self.squares += other.squares
        self.largest = max(self.largest, other.largest)
        self.num_values += other.num_values
        self.num_bad += other.num_bad

    @property
    def rms(self) -> float:
        good = self.num_values - self.num_bad
        return (self.squares / good) ** 0.5 if good else 0.0

    @property
    def bad_share(self) -> float:
        return self.num_bad / self.num_values if self.num_values else 0.0


class Finding(NamedTuple):
    """The first non-finite value. kind: "activation", "gradient" (of a module's output) or "weight
    gradient". micro_batch: counted from 0; sample_ids: its rows."""

    layer: str
    kind: str
    rank: int
    micro_batch: int
    sample_ids: tuple[int, ...]


@dataclass
class Probe:
    """Filled by hooks. tallies: (layer, "activation" or "gradient") -> its numbers, in the order in
    which they were met. first: (micro-batch, layer, kind) of this rank's first non-finite value."""

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    first: tuple[int, str, str] | None = None
    micro_batch: int = 0

    def see(self, layer: str, kind: str, value: Tensor, micro_batch: int) -> None:
        tally = measure(value)
        if tally.num_bad and self.first is None:
            self.first = (micro_batch, layer, kind)
        self.tallies.setdefault((layer, kind), Tally()).add(tally)


@torch.no_grad()
def measure(value: Tensor) -> Tally:
    value = local_part(value)
    finite = value.isfinite()
    good = torch.where(finite, value, 0).double()
    if good.numel() == 0:
        return Tally()
    num_bad = value.numel() - int(finite.sum())
    return Tally(good.square().sum().item(), good.abs().max().item(), value.numel(), num_bad)


@contextmanager
def watching(modules: list[nn.Module]) -> Iterator[Probe]:
    """Reads along while the decoder (or this rank's pieces of it) runs."""
    probe, handles = Probe(), []
    for module in modules:
        for name, part in module.named_modules():
            layer = global_name(name)
            if layer == "":
                handles.append(part.register_forward_pre_hook(_starts_a_micro_batch(probe)))
                handles.append(part.register_forward_hook(_output_hook(probe, HEAD)))
            elif layer == "blocks.0":
                handles.append(part.register_forward_pre_hook(_input_hook(probe)))
            if layer and not isinstance(part, nn.ModuleList):
                handles.append(part.register_forward_hook(_output_hook(probe, layer)))
    try:
        yield probe
    finally:
        for handle in handles:
            handle.remove()


def _starts_a_micro_batch(probe: Probe) -> Any:
    count = itertools.count()

    def hook(_module: nn.Module, _inputs: Any) -> None:
        probe.micro_batch = next(count)

    return hook


def _input_hook(probe: Probe) -> Any:
    def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        _see_both(probe, EMBED, inputs[0])

    return hook


def _output_hook(probe: Probe, layer: str) -> Any:
    def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        for value in outputs if isinstance(outputs, tuple) else (outputs,):
            _see_both(probe, layer, value)

    return hook


def _see_both(probe: Probe, layer: str, value: Any) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return
    micro_batch = probe.micro_batch  # backward passes may come in another order
    probe.see(layer, "activation", value, micro_batch)
    if value.requires_grad:
        value.register_hook(lambda g: probe.see(layer, "gradient", g, micro_batch))


def probe_step(
    engine: Engine, batch: Batch, loss: Loss, temperature: float = 1.0
) -> tuple[Stats, Probe]:
    """One forward-backward pass under watch; its gradients stay. Every rank must call it."""
    with watching(list(engine.pieces)) as probe:
        stats = engine.forward_backward(batch, loss, temperature)
    return stats, probe


def first_non_finite(
    engine: Engine, batch: Batch, loss: Loss, temperature: float = 1.0, step: int | None = None
) -> Finding | None:
    """Where the batch's first non-finite value appears: the earliest micro-batch, in it the forward
    pass before the backward pass. Every rank must call it, and all get the same answer; None if
    everything is finite (this time).

    step: that the batch was of (0 is the first), which dropout and noise are drawn by; by default
    the step at hand. The pass changes nothing: gradients are dropped, buffers (fp8 histories) set
    back.
    """
    at_hand = engine.step
    buffers = [buffer for piece in engine.pieces for buffer in piece.buffers()]
    kept = [buffer.clone() for buffer in buffers]
    engine.drop_gradients()
    engine.step = at_hand if step is None else step
    _, probe = probe_step(engine, batch, loss, temperature)
    engine.step = at_hand
    first = probe.first or _first_bad_weight(engine, probe.micro_batch)
    engine.drop_gradients()
    with torch.no_grad():
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)
    found = None
    if first is not None:
        micro, layer, kind = first
        size = max(1, min(engine.run.train.micro_batch_rows, batch.num_rows))
        ids = batch.sample_ids[micro * size : (micro + 1) * size]
        found = Finding(layer, kind, engine.mesh.rank, micro, ids)
    every = [f for f in all_gather_objects(found, engine.mesh) if f is not None]
    layers = _depths(every)
    return min(every, key=lambda f: _order(f, layers), default=None)


def _first_bad_weight(engine: Engine, micro_batch: int) -> tuple[int, str, str] | None:
    """A weight's gradient that overflows by itself, the last layer's first (as backward goes)."""
    named = [(global_name(name), p.grad) for name, p in engine.named_parameters()]
    for name, gradient in reversed(named):
        if gradient is not None and measure(gradient).num_bad:
            return micro_batch, name, "weight gradient"
    return None


@torch.no_grad()
def non_finite_state(engine: Engine) -> list[str]:
    """Names of the parameters, then of the optimiser's moments, that hold a NaN or an infinity, on
    whatever rank. Every rank must call it."""
    weights = [(global_name(name), value) for name, value in engine.named_parameters()]
    found = [
        name
        for name, value in (*weights, *engine.optimizer.state_dict().items())
        if not local_part(value).isfinite().all()
    ]
    every = all_gather_objects(found, engine.mesh)
    names = dict.fromkeys(name for part in every for name in part)
    parameters = set(full_shapes(engine.run.model))
    return sorted(names, key=lambda name: name not in parameters)


def _depths(findings: list[Finding]) -> dict[str, int]:
    def place(layer: str) -> tuple[int, int, str]:
        number = re.search(r"\d+", layer)
        ends = {EMBED: 0, "norm": 2, HEAD: 3}
        return ends.get(layer.split(".")[0], 1), int(number[0]) if number else 0, layer

    return {layer: i for i, layer in enumerate(sorted({f.layer for f in findings}, key=place))}


def _order(finding: Finding, depths: dict[str, int]) -> tuple[int, int, int, int]:
    kinds = ("activation", "gradient", "weight gradient")
    phase, depth = kinds.index(finding.kind), depths[finding.layer]
    return finding.micro_batch, phase, depth if phase == 0 else -depth, finding.rank


# --- the table -----------------------------------------------------------------------------------


class LayerRow(NamedTuple):
    """activation and gradient: of the module's output. weight_gradient: the norm of its weights'
    gradients, its norm's too; None for a layer without."""

    layer: str
    activation: Tally
    gradient: Tally
    weight_gradient: float | None


def layer_table(engine: Engine, probe: Probe) -> list[LayerRow]:
    """Over all ranks: the embedding, each block with its two halves, the last norm and the
    log-probabilities. Every rank must call it, before the gradients are dropped."""
    total: dict[tuple[str, str], Tally] = {}
    for part in all_gather_objects(probe.tallies, engine.mesh):
        for key, tally in part.items():
            total.setdefault(key, Tally()).add(tally)
    shown = dict.fromkeys(layer for layer, _ in total if layer == EMBED or SHOWN.fullmatch(layer))
    order = [*shown, *([HEAD] if (HEAD, "activation") in total else [])]
    mine = {layer: _weight_gradient(engine, layer) for layer in order}
    norms: dict[str, float] = {}
    for part in all_gather_objects(mine, engine.mesh):
        norms.update({layer: norm for layer, norm in part.items() if norm is not None})
    return [
        LayerRow(
            layer,
            total.get((layer, "activation"), Tally()),
            total.get((layer, "gradient"), Tally()),
            norms.get(layer),
        )
        for layer in order
    ]


def _weight_gradient(engine: Engine, layer: str) -> float | None:
    """None where this rank has nothing of the layer. Ranks that share it must call it together."""
    prefixes = (f"{layer}.", f"{layer}_norm.")
    mine = [p for name, p in engine.named_parameters() if name.startswith(prefixes)]
    if not any(p.grad is not None for p in mine):
        return None
    return grad_norm(mine) / engine.loss_factor
