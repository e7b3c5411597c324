"""How to divide a model's blocks among the stages of a pipeline. No torch.

The slowest stage sets the pace of all: a step of m micro-batches takes m times its slowest rank's
work and once everybody else's. So the slowest rank is made as fast as it can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stepwell.parallel.schedules import num_stages, split_blocks
from stepwell.plan.pipeline.actions import schedule_actions
from stepwell.plan.pipeline.bubble import Costs, Timeline, simulate
from stepwell.sections.layout import LayoutConfig
from stepwell.types import ConfigError

MAX_ROUNDS = 20  # of moving borders
FEW_STAGES = 8  # up to which every move is tried


@dataclass(frozen=True)
class PartCosts:
    """Seconds of a micro-batch: of each block in the model's order, of the embedding and of the
    head. forward_s alone; the backward pass is backward_ratio times that, in equal halves of inputs
    and weights, and again_ratio times are computed again before it (the head's are not)."""

    blocks_s: Sequence[float]
    embedding_s: float = 0.0
    head_s: float = 0.0
    backward_ratio: float = 2.0
    again_ratio: float = 0.0
    send_s: float = 0.0


@dataclass(frozen=True)
class Split:
    """counts: blocks of each stage (layout.pp_layers)."""

    counts: tuple[int, ...]
    timeline: Timeline

    @property
    def total_s(self) -> float:
        return self.timeline.total_s


def costs_of_split(counts: Sequence[int], parts: PartCosts) -> Costs:
    """Raises ConfigError if counts do not add up to the blocks."""
    if sum(counts) != len(parts.blocks_s):
        raise ConfigError(
            f"stages of {list(counts)} blocks are {sum(counts)}, not the model's "
            f"{len(parts.blocks_s)}"
        )
    starts = [sum(counts[:s]) for s in range(len(counts) + 1)]
    blocks = [sum(parts.blocks_s[a:b]) for a, b in pairwise(starts)]
    last = len(counts) - 1
    forward = [
        cost + (parts.embedding_s if s == 0 else 0) + (parts.head_s if s == last else 0)
        for s, cost in enumerate(blocks)
    ]
    half = tuple(parts.backward_ratio / 2 * cost for cost in forward)
    again = tuple(parts.again_ratio * cost for cost in blocks)
    return Costs(tuple(forward), half, half, again, parts.send_s)


def compare_splits(
    layout: LayoutConfig, num_micro_batches: int, parts: PartCosts
) -> tuple[Split, Split]:
    """(the layout's own split, the best one found), each as it would run."""
    own = tuple(len(blocks) for blocks in split_blocks(len(parts.blocks_s), layout))
    return (
        _timed(own, layout, num_micro_batches, parts),
        best_split(layout, num_micro_batches, parts),
    )


def best_split(layout: LayoutConfig, num_micro_batches: int, parts: PartCosts) -> Split:
    """With one stage a rank, the split whose slowest stage is fastest, exactly. With several, that
    of the stages is where a search begins that moves blocks for as long as the step gets shorter
    (with many stages only from the rank that works most to those that work least).

    Raises ConfigError for fewer blocks than stages between the first and the last.
    """
    counts = fastest_slowest(num_stages(layout), parts)
    best = _timed(counts, layout, num_micro_batches, parts)
    own = tuple(len(blocks) for blocks in split_blocks(len(parts.blocks_s), layout))
    best = min(_timed(own, layout, num_micro_batches, parts), best, key=lambda x: x.total_s)
    for _ in range(MAX_ROUNDS):
        tried = [_timed(c, layout, num_micro_batches, parts) for c in _neighbours(best)]
        better = min(tried, key=lambda split: split.total_s, default=best)
        if better.total_s >= best.total_s:
            break
        best = better
    return best


def _timed(
    counts: Sequence[int], layout: LayoutConfig, num_micro_batches: int, parts: PartCosts
) -> Split:
    actions = schedule_actions(
        layout.pp_schedule, layout.pp, num_micro_batches, layout.pp_stages_per_rank
    )
    return Split(tuple(counts), simulate(actions, costs_of_split(counts, parts)))


def _neighbours(split: Split) -> list[tuple[int, ...]]:
    """With one block moved from a stage to another; the blocks between move on by one. Stages
    between the first and the last keep one."""
    counts, found = split.counts, []
    sources, targets = _moves(split)
    for source in sources:
        least = 0 if source in (0, len(counts) - 1) else 1
        for target in targets:
            if source != target and counts[source] > least:
                moved = list(counts)
                moved[source] -= 1
                moved[target] += 1
                found.append(tuple(moved))
    return found


def _moves(split: Split) -> tuple[list[int], list[int]]:
    """From which stages to which."""
    timeline, every = split.timeline, list(range(len(split.counts)))
    if len(every) <= FEW_STAGES:
        return every, every
    rank_of = {event.action.stage: event.rank for event in timeline.events}
    busy = timeline.busy_s
    order = sorted(range(timeline.num_ranks), key=lambda rank: busy[rank])
    return (
        [s for s in every if rank_of[s] == order[-1]],
        [s for s in every if rank_of[s] in order[:2]],
    )


def fastest_slowest(stages: int, parts: PartCosts) -> tuple[int, ...]:
    """Blocks of each stage such that the slowest stage is as fast as can be and, among such splits,
    the sum of squares is least: by dynamic programming over (stages, blocks)."""
    n = len(parts.blocks_s)
    if n < stages - 2:
        raise ConfigError(
            f"{n} blocks are too few for {stages} stages, of which only the first and the last can "
            f"be without; the most is {n + 2}"
        )
    before = [0.0]
    for block_s in parts.blocks_s:
        before.append(before[-1] + block_s)

    def cost(stage: int, start: int, stop: int) -> float:
        found = (1 + parts.backward_ratio + parts.again_ratio) * (before[stop] - before[start])
        ends = parts.embedding_s * (stage == 0) + parts.head_s * (stage == stages - 1)
        return found + (1 + parts.backward_ratio) * ends

    # best[k]: (slowest, sum of squares, counts) of the stages so far with k blocks
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        least = 0 if stage in (0, stages - 1) else 1
        after: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (slowest, squares, counts) in best.items():
            for stop in range(start + least, n + 1):
                one = cost(stage, start, stop)
                row = (max(slowest, one), squares + one * one, (*counts, stop - start))
                if stop not in after or row < after[stop]:
                    after[stop] = row
        best = after
    return best[n][2]
