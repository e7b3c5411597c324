"""A step as its messages see it: what is sent, by which axis, and what all parts of the ledger look
at. No torch.

N tokens of a micro-batch on a context rank, D d_model, m micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from stepwell.parallel.remat import chosen_blocks, square_root_groups
from stepwell.parallel.schedules import next_micro_batches
from stepwell.parallel.wire import wire_bytes
from stepwell.plan.cluster import Cluster, Link
from stepwell.plan.comms.weights import parts_of
from stepwell.plan.job import Arrangement, Dims, Job
from stepwell.plan.memory.shards import Part
from stepwell.sections.layout import LayoutConfig

Phase = Literal["forward", "backward", "optimizer", "pipeline"]
# What of a layout decides which stages a pipeline rank has, and what they compute again.
_OF_STAGES = (
    *("pp", "stages_per_rank", "schedule", "stage_blocks", "program"),
    *("recompute", "recompute_every"),
)
PRECISION_BYTES = {"bf16": 2, "fp16": 2, "fp8": 2, "fp32": 4, "fp64": 8}  # as sent


@dataclass(frozen=True)
class Sent:
    """`calls` equal collectives of a rank and step. kind: as in parallel.traffic. axis: dp_shard
    (with its context ranks), dp_replicate, tp, cp, pp, ep, edp (ranks of the same experts) or
    world; num_ranks of it, `stride` ranks apart, among `world` ranks. num_bytes: the whole tensor
    of one call. phase: when it is issued; recomputation is backward's."""

    kind: str
    axis: str
    purpose: str
    phase: Phase
    num_ranks: int
    stride: int
    num_bytes: int
    calls: int
    world: int

    @property
    def wire_bytes(self) -> float:
        """What this rank puts on the wire in one call, by the ring algorithms."""
        return wire_bytes(self.kind, self.num_bytes, self.num_ranks)

    @property
    def num_messages(self) -> int:
        """Of one call, by the ring algorithms."""
        if self.kind in ("send", "recv"):
            return int(self.kind == "send")
        return (self.num_ranks - 1) * (2 if self.kind == "all-reduce" else 1)

    def link(self, cluster: Cluster) -> Link:
        """The slowest link that a group of the axis crosses, also where a pipeline's last stage
        sends to its first."""
        return cluster.link(self.num_ranks, self.stride, self.world)


class Again(NamedTuple):
    """What is computed again. blocks: all of a block; products: of blocks that keep their products;
    groups: within which the last product is not."""

    blocks: int = 0
    products: int = 0
    groups: int = 0


@dataclass(frozen=True)
class Step:
    """What all parts of the ledger look at. parts: this rank's stages. m, N as above; a: bytes of
    an activation, g: of a gradient as it is summed up. world: ranks of all axes together."""

    job: Job
    pp_rank: int
    parts: list[Part]
    m: int
    N: int
    a: int
    g: int
    world: int
    axes: Mapping[str, tuple[int, int]]

    @staticmethod
    def of(job: Job, pp_rank: int) -> Step:
        layout = job.layout
        return Step(
            job=job,
            pp_rank=pp_rank,
            parts=parts_of(layout, job.dims.num_layers, pp_rank),
            m=num_micro_batches(layout),
            N=layout.tokens_of_rank,
            a=PRECISION_BYTES[layout.precision],
            g=PRECISION_BYTES[layout.gradient_precision],
            world=layout.num_gpus,
            axes=axes_of(layout),
        )

    @property
    def dims(self) -> Dims:
        return self.job.dims

    @property
    def layout(self) -> Arrangement:
        return self.job.layout

    @property
    def num_blocks(self) -> int:
        return sum(len(part.blocks) for part in self.parts)

    @property
    def num_expert_blocks(self) -> int:
        return _expert_blocks(self.dims, self.parts)

    @property
    def again(self) -> Again:
        return _recomputed(self.layout, self.parts)

    @property
    def first(self) -> bool:
        return any(part.first for part in self.parts)

    @property
    def last(self) -> bool:
        return any(part.last for part in self.parts)

    def one(
        self,
        kind: str,
        axis: str,
        purpose: str,
        phase: Phase,
        num_bytes: float,
        calls: int,
        ranks: tuple[int, int] | None = None,
    ) -> Sent | None:
        """ranks: (how many, stride) where the axis does not say it. None if nothing is sent."""
        num_ranks, stride = ranks or self.axes[axis]
        size = int(num_bytes)
        if num_ranks == 1 or not calls or not size:
            return None
        return Sent(kind, axis, purpose, phase, num_ranks, stride, size, calls, self.world)


def axes_of(layout: Arrangement) -> dict[str, tuple[int, int]]:
    """How many ranks each axis has, and their stride. ZeRO shards over dp_shard x cp; stage 0 only
    replicates."""
    tp, shard, replicate = layout.tp, layout.dp_shard * layout.cp, layout.dp_replicate
    if layout.zero == 0:
        replicate, shard = replicate * shard, 1
    return {
        "tp": (tp, 1),
        "cp": (layout.cp, tp),
        "ep": (layout.ep, 1),
        "dp_shard": (shard, tp),
        "dp_replicate": (replicate, tp * shard),
        "pp": (layout.pp, tp * shard * replicate),
        "world": (layout.num_gpus, 1),
    }


def num_micro_batches(layout: Arrangement) -> int:
    """Of a step. Our pipelines fill up with empty ones to what their schedule can run."""
    wanted = layout.num_micro_batches
    if layout.program != "stepwell" or layout.pp == 1:
        return wanted
    return _filled_up(wanted, layout.pp, layout.stages_per_rank, layout.schedule)


@lru_cache(maxsize=4096)
def _filled_up(wanted: int, pp: int, v: int, schedule: str) -> int:
    ours = LayoutConfig.model_construct(pp=pp, pp_stages_per_rank=v, pp_schedule=schedule)
    return next_micro_batches(wanted, ours)


def distinct_ranks(job: Job) -> tuple[int, ...]:
    """Of pipeline ranks that send the same the first, and on from the last of these."""
    if job.layout.pp == 1:
        return (0,)
    asked = {name: getattr(job.layout, name) for name in _OF_STAGES}
    layout = Arrangement(seq_len=1, micro_batch_rows=1, global_batch_rows=1, **asked)
    return _distinct_of_stages(layout, job.dims)


@lru_cache(maxsize=4096)
def _distinct_of_stages(layout: Arrangement, dims: Dims) -> tuple[int, ...]:
    found = {_shape(layout, dims, rank): rank for rank in reversed(range(layout.pp))}
    return tuple(found.values())


def _shape(layout: Arrangement, dims: Dims, rank: int) -> tuple[object, ...]:
    """What of a rank's stages decides over what it sends."""
    parts = parts_of(layout, dims.num_layers, rank)
    shares = _expert_blocks(dims, parts), _recomputed(layout, parts)
    return shares, tuple((len(part.blocks), part.first, part.last) for part in parts)


def _expert_blocks(dims: Dims, parts: Sequence[Part]) -> int:
    dense = dims.num_layers - dims.num_expert_layers
    return sum(max(0, part.blocks.stop - max(dense, part.blocks.start)) for part in parts)


def _recomputed(layout: Arrangement, parts: Sequence[Part]) -> Again:
    """Of a rank's blocks. A budget's choice is not known here: as if it were "full"."""
    mode, number = layout.recompute, sum(len(part.blocks) for part in parts)
    if mode == "none" or (mode == "selective" and layout.program != "stepwell"):
        return Again()
    if mode == "selective":
        return Again(products=number)
    if mode == "every":
        every = layout.recompute_every
        chosen = sum(len(chosen_blocks(part.blocks, every)) for part in parts)
        return Again(chosen, groups=chosen)
    if mode == "sqrt":
        of_parts = (square_root_groups(p.blocks.start, p.blocks.stop) for p in parts)
        return Again(number, groups=sum(len(groups) for groups in of_parts))
    return Again(number, groups=number)
