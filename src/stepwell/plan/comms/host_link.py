"""What a rank's offload moves between its GPU and its machine's memory in one step. No torch.

As the engine moves it: what blocks save for the backward pass goes once each way for each
micro-batch (`parallel/offload`); FSDP2 fetches a rank's shards for each gather, in the precision
they are kept in, and brings down what each reduction of gradients leaves of them (`parallel/fsdp`);
the optimiser on the host takes gradients down and gives weights back (`train/host_optim`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from stepwell.plan.comms.collectives import Total, collectives, totals
from stepwell.plan.comms.gathers import gathers_of, routed_of, units_of
from stepwell.plan.comms.step import PRECISION_BYTES, Phase, Step, num_micro_batches
from stepwell.plan.footprint.activations import block_of
from stepwell.plan.footprint.kept import kept_by
from stepwell.plan.footprint.pieces import pieces_of_rank
from stepwell.plan.job import Arrangement, Dims, Job

Way = Literal["to host", "from host"]


@dataclass(frozen=True)
class Moved:
    """`calls` times num_bytes of a rank and step over its GPU's link to the host; of blocks whose
    stages differ the mean."""

    what: Literal["activations", "parameters", "gradients"]
    way: Way
    phase: Phase
    num_bytes: float
    calls: float

    @property
    def total_bytes(self) -> float:
        return self.calls * self.num_bytes


def moved(job: Job, pp_rank: int | None = None) -> list[Moved]:
    """Of one rank of the pipeline, by default the one that moves most. Empty without offload."""
    layout = job.layout
    if not (layout.offload_activations or layout.offload_parameters or layout.offload_optimizer):
        return []
    ranks = range(layout.pp) if pp_rank is None else (pp_rank,)
    found = [[*_activations(job, rank), *_state(job, rank)] for rank in ranks]
    most = max(found, key=lambda rows: sum(one.total_bytes for one in rows))
    return [one for one in most if one.total_bytes]


def traffic(job: Job) -> dict[tuple[str, ...], Total]:
    """All that leaves or enters a GPU in a step, by axis and link: its messages, and what offload
    moves over PCIe, each way by itself."""
    found = totals(collectives(job), job.cluster)
    for one in moved(job):
        key = (f"{one.what} {one.way}", "pcie")
        calls, num_bytes, _ = found.get(key, Total(0, 0.0, 0))
        found[key] = Total(calls + round(one.calls), num_bytes + one.total_bytes, 0)
    return found


def busiest_way(rows: Iterable[Moved], phase: Phase) -> float:
    """Bytes of a phase in the direction that has more of them; a link has both at once."""
    ways = {"to host": 0.0, "from host": 0.0}
    for one in rows:
        if one.phase == phase:
            ways[one.way] += one.total_bytes
    return max(ways.values())


def _activations(job: Job, pp_rank: int) -> Iterator[Moved]:
    if not job.layout.offload_activations:
        return
    saved, m = _saved_bytes(job.dims, job.layout, pp_rank), num_micro_batches(job.layout)
    yield Moved("activations", "to host", "forward", saved, m)
    yield Moved("activations", "from host", "backward", saved, m)


@lru_cache(maxsize=4096)
def _saved_bytes(dims: Dims, layout: Arrangement, pp_rank: int) -> float:
    """Of a micro-batch, by a rank's blocks: what "selective" keeps inside a block stays there."""
    seen = layout.having(recompute="full") if layout.recompute == "selective" else layout
    dense, sparse = block_of(dims, layout), block_of(dims, layout, experts=bool(dims.experts))
    stages = pieces_of_rank(dims, layout, pp_rank).stages
    return sum(kept_by(dense, d, seen).total + kept_by(sparse, s, seen).total for d, s in stages)


def _state(job: Job, pp_rank: int) -> Iterator[Moved]:
    step = Step.of(job, pp_rank)
    layout, held = job.layout, _held(step)
    # Of adapters only what is trained is counted as such.
    gradients = held.trained * (1.0 if layout.adapters else layout.trained_share)
    if layout.offload_optimizer:
        yield Moved("gradients", "to host", "optimizer", gradients, 1)
        yield Moved("parameters", "from host", "optimizer", gradients, 1)
    if not layout.offload_parameters:
        return
    gathers = gathers_of(step)
    # Where neighbours have kept a copy, it is on their GPUs.
    again = 0 if layout.reshard == "node" else gathers.backward
    of_root = step.m if layout.zero == 3 and layout.pp == 1 else 1
    yield Moved("parameters", "from host", "forward", held.blocks, gathers.forward - gathers.near)
    yield Moved("parameters", "from host", "forward", held.root, of_root)
    yield Moved("parameters", "from host", "backward", held.blocks, again)
    waits = layout.pp > 1 or step.axes["dp_replicate"][0] > 1
    each = layout.reduce_every_micro_batch and not waits
    yield Moved("gradients", "to host", "backward", gradients, step.m if each else 1)


class _Held(NamedTuple):
    """Bytes of a rank's part of the weights: of its blocks, of the rest; trained: of both."""

    blocks: float
    root: float
    trained: float


def _held(step: Step) -> _Held:
    """Frozen ones are kept in the precision that they compute in."""
    layout, (n, _) = step.layout, step.axes["dp_shard"]
    state, sizes, trained = PRECISION_BYTES[layout.state_precision], [0.0, 0.0], 0.0
    for weights, number, blocks in units_of(step):
        for weight in weights:
            part = number * weight.padded(layout.tp, n) / n
            sizes[not blocks] += part * (state if weight.trained else step.a)
            trained += part * state * weight.trained
    elements, (ranks, _) = routed_of(step)
    experts = state * step.num_expert_blocks * elements / (ranks if layout.zero else 1)
    return _Held(sizes[0] + experts, sizes[1], trained + experts)
