"""Which runs with adapters cannot be. No torch. Lines of `rules.RULES`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stepwell.config import Run
from stepwell.models.lora_shapes import linear_shapes, target_shapes, unmatched
from stepwell.parallel.remedies import Complaint, only, other_sizes, values_of
from stepwell.parallel.schedules import split_blocks, stages_of_rank
from stepwell.sections.model import LoraConfig

if TYPE_CHECKING:
    from stepwell.parallel.rules import AxisSizes


def targets(run: Run, sizes: AxisSizes) -> list[Complaint]:
    """Every pattern names a layer."""
    if not run.lora.rank:
        return []
    known = list(linear_shapes(run.model))
    usual = only(lora__targets=list(LoraConfig().targets))
    return [
        Complaint(unmatched(pattern, known), (usual,), pattern)
        for pattern in run.lora.targets
        if not any(re.fullmatch(pattern, name) for name in known)
    ]


def rank(run: Run, sizes: AxisSizes) -> list[Complaint]:
    """A rank above a matrix's own costs more than the matrix and can do no more."""
    if targets(run, sizes) or not run.lora.rank:
        return []
    shapes = target_shapes(run.model, run.lora)
    name, shape = min(shapes.items(), key=lambda item: min(item[1]))
    if run.lora.rank <= min(shape):
        return []
    said = f"lora.rank={run.lora.rank} is above the rank that {name} of {shape} can have"
    return [Complaint(said, (values_of("lora.rank", [min(shape)]),))]


def four_bits(run: Run, sizes: AxisSizes) -> list[Complaint]:
    """A block of 64 has one scale, and no part of a matrix the same blocks as the whole."""
    if run.lora.quantize == "none":
        return []
    found, whole = [], only(lora__quantize="none")
    if sizes.tp > 1:
        said = (
            f"lora.quantize={run.lora.quantize!r} cuts a flattened matrix into blocks of 64, and "
            f"layout.tp={sizes.tp} would cut it elsewhere, so that the numbers would depend on the "
            "layout"
        )
        found.append(Complaint(said, (other_sizes("tp", sizes), whole), "tensor"))
    if run.precision.fp8.recipe != "none":
        said = (
            f"lora.quantize={run.lora.quantize!r} restores a layer's weight for a product in "
            f"{run.precision.compute}, not in 8 bits (precision.fp8.recipe="
            f"{run.precision.fp8.recipe!r})"
        )
        high = {"precision.fp8.recipe": "none"}
        if run.precision.fp8.shadow_every:
            high |= {"precision.fp8.shadow_every": 0}
        found.append(Complaint(said, ((high,), whole), "fp8"))
    return found


def stages(run: Run, sizes: AxisSizes) -> list[Complaint]:
    """The first stage must have a gradient to compute, and every rank something to step."""
    if sizes.pp == 1 or not run.lora.rank or targets(run, sizes):
        return []
    adapted = {int(name.split(".")[1]) for name in target_shapes(run.model, run.lora)}
    blocks = split_blocks(run.model.num_layers, run.layout)
    parts = {"the first stage": list(blocks[0])}
    for number in range(sizes.pp):
        mine = [i for stage in stages_of_rank(number, run.layout) for i in blocks[stage]]
        parts[f"rank {number}"] = mine
    for part, numbers in parts.items():
        if adapted.isdisjoint(numbers):
            said = (
                f"{part} of the pipeline has blocks {numbers}, of which lora.targets="
                f"{list(run.lora.targets)} adapts none, so it would have nothing to train"
            )
            usual = only(lora__targets=list(LoraConfig().targets))
            alone = {"pp": 1, "pp_schedule": "1f1b", "pp_stages_per_rank": 1, "pp_layers": None}
            other = {f"layout.{k}": v for k, v in alone.items() if getattr(run.layout, k) != v}
            return [Complaint(said, (usual, (other,)))]
    return []
