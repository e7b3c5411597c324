"""What a step holds on each GPU at its worst moment, for runs of any program. No torch.

`plan/memory` has the exact ledger of our own runs; this is its closed form on a `Job`, for the
search (which asks thousands of times) and for runs that others have published.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepwell.plan.cluster import Cluster
from stepwell.plan.footprint.activations import Block, block_of
from stepwell.plan.footprint.coefficients import SHIPPED, MemoryCoefficients
from stepwell.plan.footprint.moments import host_of, moments_of, rank_of
from stepwell.plan.footprint.pieces import ranks_to_try
from stepwell.plan.job import Arrangement, Job
from stepwell.plan.memory.host import HostMemory, of_machine


@dataclass(frozen=True)
class Footprint:
    """items: bytes of tensors on the GPU at the worst moment, which is in `phase`, on pipeline rank
    pp_rank. fragmentation: blocks that other moments have freed and this one cannot use. context,
    communicators: beside the allocator. host: what the fullest machine's own memory holds.
    """

    phase: str
    pp_rank: int
    items: dict[str, float]
    fragmentation: float
    context: float
    communicators: float
    host: HostMemory

    @property
    def allocated(self) -> float:
        """As torch.cuda.max_memory_allocated."""
        return sum(self.items.values())

    @property
    def reserved(self) -> float:
        """As torch.cuda.max_memory_reserved."""
        return self.allocated + self.fragmentation

    @property
    def nvidia_smi(self) -> float:
        """What the driver says is used: all that the GPU must have."""
        return self.reserved + self.context + self.communicators

    total = nvidia_smi

    def measured_as(self, kind: str) -> float:
        """By the published tables' words for what was measured."""
        if "reserved" in kind:
            return self.reserved
        if "allocated" in kind or "active" in kind:
            return self.allocated
        return self.nvidia_smi


def footprint(
    job: Job, pp_rank: int | None = None, coefficients: MemoryCoefficients = SHIPPED
) -> Footprint:
    """Of the pipeline rank that needs the most, or of the one asked for."""
    dense = block_of(job.dims, job.layout)
    sparse = block_of(job.dims, job.layout, experts=True) if job.dims.experts else dense
    ranks = ranks_to_try(job.dims, job.layout) if pp_rank is None else (pp_rank,)
    found = [_of_rank(job, rank, dense, sparse, coefficients) for rank in ranks]
    most = max(found, key=lambda footprint: footprint.total)
    host = max((one.host for one in found), key=lambda host: host.total)
    return most if most.host is host else replace(most, host=host)


def headroom(
    footprint: Footprint, cluster: Cluster, coefficients: MemoryCoefficients = SHIPPED
) -> float:
    """Bytes that a GPU has left beyond the margin; negative if the run does not fit."""
    usable = cluster.accelerator.memory_bytes * (1 - coefficients.margin)
    return usable - footprint.total


def fits(
    footprint: Footprint, cluster: Cluster, coefficients: MemoryCoefficients = SHIPPED
) -> bool:
    """Whether the GPU has room, and its machine."""
    if headroom(footprint, cluster, coefficients) < 0:
        return False
    return footprint.host.total <= cluster.host_room_bytes(footprint.host.ranks_per_machine)


def _of_rank(
    job: Job, pp_rank: int, dense: Block, sparse: Block, coefficients: MemoryCoefficients
) -> Footprint:
    rank = rank_of(job, pp_rank, dense, sparse)
    moments = moments_of(rank)
    totals = {name: sum(items.values()) for name, items in moments.items()}
    phase = max(totals, key=lambda name: totals[name])
    # Each kind of tensor keeps blocks of its own sizes.
    kinds = {kind for items in moments.values() for kind in items}
    largest = sum(max(items.get(kind, 0.0) for items in moments.values()) for kind in kinds)
    return Footprint(
        phase=phase,
        pp_rank=pp_rank,
        items={kind: size for kind, size in moments[phase].items() if size},
        fragmentation=coefficients.fragmentation * (largest - totals[phase]),
        context=coefficients.context_bytes,
        communicators=coefficients.group_bytes * _num_groups(job.layout),
        host=of_machine(host_of(rank), job.layout.num_gpus, job.cluster),
    )


def _num_groups(layout: Arrangement) -> int:
    """Communicators of a rank: one of all ranks, one for each axis that has several. Megatron has
    two more, of the ranks of a model and of its ends."""
    if layout.num_gpus == 1:
        return 0
    axes = (layout.tp, layout.cp, layout.pp, layout.dp_shard, layout.dp_replicate, layout.ep)
    num = 1 + sum(size > 1 for size in axes)
    if layout.program == "megatron":
        num += (layout.tp * layout.pp > 1) + (layout.pp > 1)
    return num
