"""What a run with adapters trains, holds frozen and gathers. No torch.

Of a block the mean is meant, where `lora.targets` adapts some more than others. A base in 4 bits is
whole on every rank, and nothing of it is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

from stepwell.config import Run
from stepwell.models.flops import parameter_shapes
from stepwell.models.lora_shapes import adapter_shapes, is_trained, nf4_bytes, target_shapes
from stepwell.parallel.remat import DTYPE_BYTES
from stepwell.parallel.rules import AxisSizes
from stepwell.plan.memory.shards import Held, Part, held, held_by_block, held_by_root

Shapes = Mapping[str, tuple[int, ...]]


class Share(NamedTuple):
    """Of a block, or of the rest of a rank's model. trained: what has gradients and optimiser
    state. frozen_bytes: of what has not. gathered: elements that FSDP2 hands out."""

    trained: Held
    frozen_bytes: int
    gathered: int


def share_of_block(run: Run, sizes: AxisSizes) -> Share:
    if not run.lora.rank:
        block = held_by_block(run, sizes)
        return Share(block, 0, block.whole)
    shapes = parameter_shapes(run.model)
    blocks = {name: shape for name, shape in shapes.items() if name.startswith("blocks.")}
    targets = target_shapes(run.model, run.lora)
    four = run.lora.quantize == "nf4"
    held_apart = {f"{name}.weight" for name in targets} if four else set()
    frozen = {name: shape for name, shape in blocks.items() if name not in held_apart}
    trained = held(run, sizes, adapter_shapes(run.model, run.lora))
    in_4_bits = sum(nf4_bytes(prod(s), run.lora.double_quantize) for s in targets.values())
    num_bytes = _frozen_bytes(run, sizes, frozen) + (in_4_bits if four else 0)
    whole = trained.whole + held(run, sizes, frozen).whole
    layers = run.model.num_layers
    return Share(Held(*(n // layers for n in trained)), num_bytes // layers, whole // layers)


def share_of_root(run: Run, sizes: AxisSizes, parts: Iterable[Part]) -> Share:
    parts = list(parts)
    root = held_by_root(run, sizes, parts)
    if not run.lora.rank:
        return Share(root, 0, root.whole)
    shapes = parameter_shapes(run.model)
    last = any(part.last for part in parts)
    trained = {n: s for n, s in shapes.items() if last and is_trained(n, run.lora)}
    norm = held(run, sizes, {"norm.weight": shapes["norm.weight"]} if last else {})
    matrices = root.shard - held(run, sizes, trained).shard - norm.shard
    a, p = DTYPE_BYTES[run.precision.compute], DTYPE_BYTES[run.precision.param]
    return Share(held(run, sizes, trained), a * matrices + p * norm.shard, root.whole)


def _frozen_bytes(run: Run, sizes: AxisSizes, shapes: Shapes) -> int:
    """Matrices are in compute precision, vectors in that of the weights."""
    a, p = DTYPE_BYTES[run.precision.compute], DTYPE_BYTES[run.precision.param]
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    vectors = {name: shape for name, shape in shapes.items() if len(shape) == 1}
    return a * held(run, sizes, matrices).shard + p * held(run, sizes, vectors).shard


def largest_target(run: Run) -> int:
    """Elements of the largest matrix that is restored from 4 bits."""
    if run.lora.quantize == "none":
        return 0
    return max(prod(shape) for shape in target_shapes(run.model, run.lora).values())
