"""One layout with one thing changed, and what that does: the counterfactuals that explanations and
knobs are made of. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from stepwell.parallel.schedules import ZERO_BUBBLE, fewest_micro_batches
from stepwell.plan.footprint.footprint import headroom
from stepwell.plan.job import Arrangement
from stepwell.plan.search.prices import Prices
from stepwell.plan.search.space import REASONS, Pins, Task, context_problem, tensor_problem
from stepwell.plan.steptime.step import StepTime
from stepwell.sections.layout import LayoutConfig
from stepwell.types import ConfigError


@dataclass(frozen=True)
class Changed:
    """layout: None where the change leaves no layout. broken: the rule that forbids it, in words.
    Memory and time are of the layout even where a rule forbids it. also: what had to change with
    it, besides the data ranks. shortage: of the machine's own memory, where the accelerator's is
    enough."""

    layout: Arrangement | None
    peak_bytes: float = 0.0
    step: StepTime | None = None
    fits: bool = False
    broken: str = ""
    also: tuple[str, ...] = ()
    shortage: str = ""

    @property
    def step_s(self) -> float:
        return self.step.total_s if self.step else 0.0

    @property
    def works(self) -> bool:
        return self.fits and not self.broken


def changed(prices: Prices, task: Task, before: Arrangement, changes: Mapping[str, Any]) -> Changed:
    """The layout with `changes`; data ranks take up, or give, the accelerators that other axes
    leave or need."""
    layout = refilled(before.having(**changes), before.num_gpus, changes)
    if layout is not None and "stages_per_rank" not in changes:
        layout = _with_stages(layout, task.dims.num_layers)
    if layout is None:
        return Changed(None, broken=_does_not_divide(before.having(**changes), before.num_gpus))
    undone = _undone(layout, changes)
    if undone:
        return Changed(None, broken=undone)
    same = {axis: getattr(layout, axis) for axis in ("tp", "cp") if axis not in changes}
    broken = problem(replace(task, pins=Pins(**same)), layout)  # what is there is not judged
    try:
        held, step = prices.memory(layout), prices.time(layout)
    except (ConfigError, ValueError, ZeroDivisionError):
        if broken:
            return Changed(None, broken=broken)
        raise
    also = _also(before, layout, changes)
    short_of = "" if headroom(held, task.cluster) < 0 else held.host.shortage or ""
    return Changed(layout, held.total, step, prices.fits(layout), broken, also, short_of)


def _with_stages(layout: Arrangement, num_blocks: int) -> Arrangement:
    """With the most stages a rank that the blocks are enough for, up to those that it has."""
    pp, v = layout.pp, layout.stages_per_rank
    if layout.schedule != "interleaved-1f1b" or pp * v <= num_blocks + 2:
        return layout
    even = [n for n in range(2, v) if not (num_blocks + 2) % (pp * n) or not num_blocks % (pp * n)]
    fewer = [n for n in even if pp * n <= num_blocks + 2] or [2] * (2 * pp <= num_blocks + 2)
    if fewer:
        return layout.having(stages_per_rank=fewer[-1])
    return layout.having(stages_per_rank=1, schedule="1f1b")


def _does_not_divide(layout: Arrangement, num_gpus: int) -> str:
    sizes = {"TP": layout.tp, "CP": layout.cp, "PP": layout.pp}
    product = " x ".join(f"{name} {n}" for name, n in sizes.items() if n > 1)
    ranks = layout.tp * layout.cp * layout.pp
    if ranks > num_gpus:
        there = f"there are {num_gpus:,}" if num_gpus > 1 else "there is 1"
        return f"{product} needs {ranks:,} accelerators, and {there}"
    together = f" = {ranks:,}" if " x " in product else ""
    return f"{product}{together} does not divide {num_gpus:,} accelerators"


def _undone(layout: Arrangement, changes: Mapping[str, Any]) -> str:
    """What the schedule does not let stand of the change alone; empty if all of it stands."""
    if layout.schedule not in ZERO_BUBBLE:
        return ""
    for key, kept in (("recompute", "keeps all activations"), ("compiled", "is not compiled")):
        if key in changes and getattr(layout, key) != changes[key]:
            return f"not possible alone: {layout.schedule} {kept}"
    return ""


def _also(before: Arrangement, after: Arrangement, changes: Mapping[str, Any]) -> tuple[str, ...]:
    """Where a pipeline or its schedule takes something else with it."""
    found = []
    if "recompute" not in changes and after.recompute != before.recompute:
        found.append(f"recompute {after.recompute}")
    if "compiled" not in changes and after.compiled != before.compiled:
        found.append("compiled blocks" if after.compiled else "blocks not compiled")
    if "zero" not in changes and after.zero != before.zero:
        found.append(f"ZeRO-{after.zero}")
    if "schedule" not in changes and min(after.pp, before.pp) > 1:
        if after.schedule != before.schedule:
            found.append(after.schedule)
        elif after.stages_per_rank != before.stages_per_rank:
            found.append(f"{after.stages_per_rank} stages a rank")
    return tuple(found)


def refilled(layout: Arrangement, num_gpus: int, changes: Mapping[str, Any]) -> Arrangement | None:
    """The layout on all accelerators, with what its pipeline allows; None if they don't divide."""
    rest = layout.tp * layout.cp * layout.pp
    if num_gpus % rest:
        return None
    ranks = num_gpus // rest
    replicas, shard = layout.dp_replicate, layout.dp_shard
    if replicas * shard != ranks:
        if "dp_shard" in changes and ranks % shard == 0:
            replicas = ranks // shard
        else:
            replicas = gcd(replicas, ranks)
            shard = ranks // replicas
    layout = layout.having(dp_replicate=replicas, dp_shard=shard)
    if layout.pp == 1:
        return layout.having(schedule="1f1b", stages_per_rank=1, stage_blocks=None)
    zero = 1 if layout.zero == 2 else layout.zero
    halves = layout.schedule in ZERO_BUBBLE
    v = 2 if halves else layout.stages_per_rank
    if layout.schedule in ("1f1b", "gpipe"):
        v = 1
    return layout.having(
        zero=zero,
        reshard="never",
        reduce_every_micro_batch=False,
        stages_per_rank=v,
        compiled=layout.compiled and not halves,
        recompute="none" if halves else layout.recompute,
    )


def problem(task: Task, layout: Arrangement) -> str:
    """The first rule that the layout breaks, in words; empty if none."""
    broken = tensor_problem(task, layout.tp) or context_problem(task, layout.tp, layout.cp)
    stages = layout.pp * layout.stages_per_rank
    if not broken and layout.pp > 1 and stages > task.dims.num_layers + 2:
        broken = "stages"
    if not broken and layout.data_ranks > task.rows:
        broken = "rows"
    if not broken and task.rows % layout.dp_replicate:
        broken = "replicas"
    if not broken and layout.pp > 1 and layout.num_micro_batches < fewest(layout):
        broken = "micro-batches"
    experts = task.dims.experts
    if not broken and layout.ep > 1:
        ranks = layout.data_ranks * layout.cp * layout.tp
        if experts is None or experts.num_experts % layout.ep or ranks % layout.ep:
            broken = "experts"
    return REASONS[broken] if broken else ""


def fewest(layout: Arrangement) -> int:
    section = LayoutConfig.model_construct(
        pp=layout.pp, pp_schedule=layout.schedule, pp_stages_per_rank=layout.stages_per_rank
    )
    return fewest_micro_batches(section)


def grown(after: StepTime, before: StepTime) -> tuple[str, float]:
    """The part of a step that grew most, and by how many seconds."""
    names = {*after.parts, *before.parts}
    more = {name: after.parts.get(name, 0.0) - before.parts.get(name, 0.0) for name in names}
    name = max(sorted(more), key=lambda part: more[part])
    return name, more[name]
