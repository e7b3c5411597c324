"""A layout with its prediction, and what a search answers. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepwell.plan.footprint.footprint import Footprint, footprint, headroom
from stepwell.plan.job import Arrangement, Job
from stepwell.plan.memory.host import HostMemory
from stepwell.plan.memory.ledger import MemoryLedger
from stepwell.plan.search.checks import pins_text
from stepwell.plan.search.runs import offloaded, short
from stepwell.plan.search.space import REASONS, Refused, Task
from stepwell.plan.steptime.step import StepTime
from stepwell.plan.units import count_of, size_text
from stepwell.types import ConfigError


@dataclass(frozen=True)
class Candidate:
    """exact: the ledger of our engine, where it was asked. not_in_engine: why it cannot be run, if
    so."""

    job: Job
    memory: Footprint
    step: StepTime
    exact: MemoryLedger | None = None
    not_in_engine: str = ""

    def with_ledger(self, ledger: MemoryLedger, host: HostMemory | None = None) -> Candidate:
        """With the engine's own, and what lies beside its tensors on the same pipeline rank. host:
        by default as it is."""
        memory = replace(footprint(self.job, ledger.pp_rank), host=host or self.memory.host)
        return replace(self, exact=ledger, memory=memory)

    @property
    def fits(self) -> bool:
        """Into the accelerators, and into their machines' own memory."""
        return self.headroom_bytes >= 0 and self.memory.host.fits

    @property
    def layout(self) -> Arrangement:
        return self.job.layout

    @property
    def runnable(self) -> bool | None:
        """None: the engine has not been asked."""
        return False if self.not_in_engine else True if self.exact else None

    @property
    def step_s(self) -> float:
        return self.step.total_s

    @property
    def peak_bytes(self) -> float:
        """What a GPU must have, with the driver's and the communicators' share."""
        if self.exact is None:
            return self.memory.total
        return self.memory.total + self.exact.peak_bytes - self.memory.allocated

    @property
    def headroom_bytes(self) -> float:
        return self.job.cluster.accelerator.memory_bytes - self.peak_bytes

    @property
    def room_bytes(self) -> float:
        """What is left of a GPU: beyond the margin where only the closed form says so."""
        if self.exact is None:
            return headroom(self.memory, self.job.cluster)
        return self.headroom_bytes

    @property
    def tokens_per_s(self) -> float:
        """Of all accelerators together."""
        return self.layout.global_batch_tokens / self.step_s


@dataclass(frozen=True)
class Ranking:
    """found: layouts that fit, the fastest first; all within `SLACK` of the best are there.
    refused_meshes, refused: how many meshes, and layouts of the others, by rule (`space.REASONS`).
    closest: where nothing fits, what needs the least memory. offload: what goes to the host of
    those found, if no kind of it was asked for. resident_s: the fastest step without; inf where
    nothing fits so."""

    task: Task
    found: tuple[Candidate, ...]
    refused_meshes: Refused
    refused: Refused
    num_meshes: int
    num_layouts: int
    num_timed: int
    seconds: float
    closest: Candidate | None = None
    offload: tuple[str, ...] = ()
    resident_s: float = math.inf
    complaints: tuple[str, ...] = ()

    @property
    def number_text(self) -> str:
        """`3,056 layouts of 40 meshes`."""
        meshes = "1 mesh" if self.num_meshes == 1 else f"{self.num_meshes:,} meshes"
        return f"{count_of(self.num_layouts, 'layout')} of {meshes}"

    @property
    def lacks_memory(self) -> bool:
        """Whether not even what needs the least fits into an accelerator."""
        spare = self.task.pins.headroom_bytes
        return self.closest is not None and self.closest.room_bytes < spare

    @property
    def best(self) -> Candidate:
        """Raises ConfigError where nothing fits, with what the closest layout lacks."""
        if self.found:
            return self.found[0]
        raise ConfigError(nothing_fits(self))


def nothing_fits(ranking: Ranking) -> str:
    task, closest = ranking.task, ranking.closest
    gpus, name = task.num_gpus, task.cluster.name
    what = f"no layout of {task.dims.name} on {gpus:,} x {name} "
    pins = task.pins
    held = f" with {pins_text(pins)}" if pins.given() else ""
    if closest is None:
        return f"{what}obeys the rules{held}: {rules_text(ranking)}"
    if not ranking.lacks_memory:
        if closest.memory.host.shortage:
            lean = f"the leanest is {short(closest.layout)}, and {closest.memory.host.shortage}"
            return f"{what}fits{held}: {lean}"
        return f"{what}runs{held}: {rules_text(ranking)}"
    has, needs = task.cluster.accelerator.memory_bytes, closest.peak_bytes
    said = f"the leanest, {short(closest.layout)}, needs {size_text(needs)}"
    said += f" of {has / 2**30:.1f} GiB on each{held}"
    if needs + pins.headroom_bytes > has >= needs:
        said += f", and {pins.headroom_bytes / 2**30:g} must stay free"
    if pins.offload in (None, "any") and not offloaded(closest.layout):
        said += ", and does not fit with offload to the host either"
    freed = ", or free what is held fixed" if held else ""
    return f"{what}fits: {said}; give more accelerators{freed}"


def rules_text(ranking: Ranking) -> str:
    """What stands against each layout, the most frequent first."""
    meshes = [f"{REASONS[k]} ({n:,} meshes)" for k, n in ranking.refused_meshes.most_common()]
    layouts = [f"{REASONS[k]} ({n:,} layouts)" for k, n in ranking.refused.most_common() if n]
    found = list(ranking.complaints[:2]) + meshes + layouts
    return "; ".join(found) or "what is held fixed leaves nothing to look at; free some of it"


def mesh_of(layout: Arrangement) -> tuple[int, ...]:
    return layout.tp, layout.cp, layout.pp, layout.ep


def complexity(layout: Arrangement) -> tuple[int, ...]:
    """Between layouts of equal speed: fewer axes, less that is moved or computed again, smaller
    axes, the lower stage."""
    axes = (layout.tp, layout.cp, layout.pp, layout.ep, layout.dp_replicate)
    extras = len(offloaded(layout)) + (layout.recompute != "none")
    return (sum(size > 1 for size in axes), layout.stages_per_rank, extras, *axes, layout.zero)


def pareto(candidates: Sequence[Candidate], step_bytes: float = 2**30) -> list[Candidate]:
    """Those that none beats in both speed and memory left, the fastest first; `step_bytes`: how
    much more must be left to be worth a line."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: c.step_s):
        if not front or candidate.headroom_bytes >= front[-1].headroom_bytes + step_bytes:
            front.append(candidate)
    return front
