"""Weights that a step hands out and gradients that it sums up. No torch.

Ours and FSDP programs shard units (`plan/comms/weights`) and gather each before its passes;
Megatron-LM sums a bucket once a step, and its distributed optimiser hands weights out again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from stepwell.plan.comms.step import PRECISION_BYTES, Sent, Step
from stepwell.plan.comms.weights import (
    Weight,
    block_weights,
    expert_elements,
    gathered,
    reduced,
    root_weights,
)
from stepwell.plan.pipeline.actions import times_back


def state_sent(step: Step) -> Iterator[Sent | None]:
    """In the program's own way."""
    megatron = step.layout.program == "megatron"
    yield from _distributed_optimizer(step) if megatron else _sharded_weights(step)
    yield from _whole_updates(step)


def units_of(step: Step) -> list[tuple[Sequence[Weight], int, bool]]:
    """(weights, how many such, whether blocks): blocks, then what each stage has besides."""
    dims, layout, routed = step.dims, step.layout, step.num_expert_blocks
    units = [
        (block_weights(dims, layout), step.num_blocks - routed, True),
        (block_weights(dims, layout, experts=True) if routed else (), routed, True),
        *((root_weights(dims, layout, part), 1, False) for part in step.parts),
    ]
    return [unit for unit in units if unit[0] and unit[1]]


def _sharded_weights(step: Step) -> Iterator[Sent | None]:
    """FSDP2 by units (parallel.fsdp). Gradients wait whole in a pipeline, and are summed once."""
    layout, t, (n, _) = step.layout, step.layout.tp, step.axes["dp_shard"]
    forward, backward, near = gathers_of(step)
    reductions = step.m if layout.reduce_every_micro_batch and layout.pp == 1 else 1
    for weights, number, blocks in units_of(step):
        whole = step.a * gathered(weights, t, n)
        times = forward if blocks else (step.m if layout.zero == 3 and layout.pp == 1 else 1)
        gather = ("all-gather", "dp_shard", "gather weights")
        close = round(number * near) if blocks else 0
        again = round(number * backward) if blocks else 0
        neighbours = _near(step) if layout.reshard == "node" else None
        yield step.one(*gather, "forward", whole, round(number * times) - close)
        yield step.one(*gather, "forward", whole, close, neighbours)
        yield step.one(*gather, "backward", whole, again, neighbours)
        gradient = step.g * reduced(weights, t, n)
        yield from _reduce(step, gradient, n, number * reductions, number)
    yield from _routed_weights(step, forward + backward, reductions)


def _whole_updates(step: Step) -> Iterator[Sent | None]:
    """Ours makes a hidden matrix's update orthogonal on every rank, from the whole matrix
    (train/muon): shards of rows last where tensor ranks divide columns, else first."""
    layout = step.layout
    if layout.program != "stepwell" or layout.optimizer != "muon":
        return
    t, (n, _), p = layout.tp, step.axes["dp_shard"], PRECISION_BYTES["fp32"]
    for weights, number, blocks in units_of(step):
        for weight in weights if blocks else ():
            if len(weight.shape) != 2 or not weight.trained:
                continue
            columns, whole = weight.divided == 1, p * weight.padded(1, n)
            of_shards = whole if columns else p * weight.padded(t, n)
            gather = ("all-gather", "dp_shard", "gather updates", "optimizer")
            yield step.one(*gather, of_shards, number)
            if weight.divided is not None:
                of_ranks = whole // n if columns else p * prod(weight.shape)
                yield step.one("all-gather", "tp", "gather updates", "optimizer", of_ranks, number)


class Gathers(NamedTuple):
    """Of a rank's mean block in a step: in forward passes (`near` of them among neighbours that
    have kept a copy), and in backward passes."""

    forward: float
    backward: float
    near: float = 0


def gathers_of(step: Step) -> Gathers:
    """Stage 3 gathers for each pass of each micro-batch what it does not keep, the others once a
    step. A pipeline's backward pass keeps what it has gathered until the next forward pass lets it
    go: in any order of passes that is one gather for each forward pass, and one more. Backward
    passes gather where a forward pass came before."""
    layout, m = step.layout, step.m
    if layout.zero < 3:
        return Gathers(1, 0)
    if layout.reshard == "never":
        return Gathers(m if layout.pp == 1 else 1, 0)
    if layout.pp == 1:
        return Gathers(m, m)
    back = _times_back(step)
    return Gathers(m + 1 - back, back, m - back if layout.reshard == "node" else 0)


def _times_back(step: Step) -> float:
    """How often a backward pass follows a forward pass of the same block, on average."""
    layout, blocks = step.layout, [len(part.blocks) for part in step.parts]
    if layout.program != "stepwell" or not sum(blocks):
        return 1
    pp, v = layout.pp, layout.stages_per_rank
    times = times_back(layout.schedule, pp, step.m, v, step.pp_rank)
    return sum(n * number for n, number in zip(blocks, times, strict=True)) / sum(blocks)


def _reduce(step: Step, num_bytes: int, n: int, scatters: int, sums: int) -> Iterator[Sent | None]:
    scatter = ("reduce-scatter", "dp_shard", "reduce gradients", "backward", num_bytes, scatters)
    yield step.one(*scatter)
    sum_up = ("all-reduce", "dp_replicate", "reduce gradients", "backward", num_bytes // n, sums)
    yield step.one(*sum_up)


def _near(step: Step) -> tuple[int, int]:
    """The neighbours that keep a copy among them (parallel.fsdp)."""
    n, stride = step.axes["dp_shard"]
    on_node = max(1, step.job.cluster.gpus_per_node // step.layout.tp)
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= on_node), stride


def routed_of(step: Step) -> tuple[int, tuple[int, int]]:
    """Elements of all routed experts of a layer on one rank, and the ranks that have the same."""
    layout = step.layout
    ranks = layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp
    return expert_elements(step.dims) // layout.ep, (max(1, ranks // layout.ep), layout.ep)


def _routed_weights(step: Step, gathers: float, reductions: int) -> Iterator[Sent | None]:
    """Experts are sharded over the ranks that have the same ones."""
    elements, ranks = routed_of(step)
    number, kind = step.num_expert_blocks, "reduce-scatter" if step.layout.zero else "all-reduce"
    calls = round(number * gathers) if step.layout.zero else 0
    purpose, whole = "gather weights", step.a * elements
    yield step.one("all-gather", "edp", purpose, "forward", whole, calls, ranks)
    gradient, calls = step.g * elements, number * reductions
    yield step.one(kind, "edp", "reduce gradients", "backward", gradient, calls, ranks)


def _distributed_optimizer(step: Step) -> Iterator[Sent | None]:
    """Megatron-LM sums gradients once a step, in a bucket; with its distributed optimiser (stage 1)
    each data rank steps a part and hands the weights out again. Data and context ranks together."""
    layout, routed = step.layout, step.num_expert_blocks
    ranks = (layout.dp_replicate * layout.dp_shard * layout.cp, layout.tp)
    dense = sum(number * reduced(weights, layout.tp, 1) for weights, number, _ in units_of(step))
    elements, same = routed_of(step)
    for axis, size, group in (("dp_shard", dense, ranks), ("edp", routed * elements, same)):
        kind = "reduce-scatter" if layout.zero else "all-reduce"
        yield step.one(kind, axis, "reduce gradients", "backward", step.g * size, 1, group)
        if layout.zero:
            whole = step.a * size
            yield step.one("all-gather", axis, "gather weights", "optimizer", whole, 1, group)
