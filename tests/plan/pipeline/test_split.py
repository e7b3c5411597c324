"""The best split of blocks, against all of them."""

from itertools import product

import pytest

from stepwell.parallel.schedules import split_blocks
from stepwell.plan.pipeline.bubble import simulate_schedule
from stepwell.plan.pipeline.split import (
    PartCosts,
    best_split,
    compare_splits,
    costs_of_split,
    fastest_slowest,
)
from stepwell.sections.layout import LayoutConfig
from stepwell.types import ConfigError


def layout_of(schedule: str, p: int, v: int = 1) -> LayoutConfig:
    return LayoutConfig(pp=p, pp_schedule=schedule, pp_stages_per_rank=v)  # type: ignore[arg-type]


def every_split(num_blocks: int, stages: int) -> list[tuple[int, ...]]:
    splits = product(range(num_blocks + 1), repeat=stages)
    return [s for s in splits if sum(s) == num_blocks and 0 not in s[1:-1]]


PARTS = [
    PartCosts([1.0] * 7),
    PartCosts([1.0] * 7, embedding_s=0.2, head_s=2.5),
    PartCosts([1.0] * 7, head_s=9.0, again_ratio=1.0),
    PartCosts([3.0, 1, 1, 1, 1, 2, 2], embedding_s=0.5, head_s=1.0),
    PartCosts([1.0, 1, 4, 4], head_s=0.5, backward_ratio=1.5, send_s=0.25),
]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_the_slowest_stage_is_as_fast_as_can_be(parts, p):
    def slowest(counts):
        costs = costs_of_split(counts, parts)
        rows = zip(costs.forward_s, costs.input_s, costs.weight_s, costs.recompute_s, strict=True)
        return max(sum(row) for row in rows)

    found = fastest_slowest(p, parts)
    every = every_split(len(parts.blocks_s), p)
    assert found in every
    assert slowest(found) == pytest.approx(min(slowest(counts) for counts in every))


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("schedule", "p", "v"), [("1f1b", 3, 1), ("interleaved-1f1b", 2, 2)])
def test_no_split_makes_the_step_shorter(parts, schedule, p, v):
    layout, m = layout_of(schedule, p, v), 4
    times = [
        simulate_schedule(schedule, p, m, v, costs_of_split(counts, parts)).total_s
        for counts in every_split(len(parts.blocks_s), p * v)
    ]
    assert best_split(layout, m, parts).total_s == pytest.approx(min(times))


def test_a_heavy_head_moves_blocks_away_from_it():
    """A vocabulary of 128,256 costs an 8B model's last stage two and a half blocks; the default
    counts it as one."""
    parts = PartCosts([1.0] * 32, head_s=2.5)
    own, best = compare_splits(layout_of("1f1b", 4), 16, parts)
    assert own.counts == (8, 9, 8, 7)  # the slowest: 9.5 blocks' time
    assert best.counts[-1] == 6
    assert max(best.counts) == 9
    assert best.total_s < own.total_s * 0.96


def test_the_default_split_is_the_best_when_both_ends_cost_a_block():
    for p, blocks in [(2, 6), (4, 6), (4, 30)]:
        layout = layout_of("1f1b", p)
        own, best = compare_splits(layout, 8, PartCosts([1.0] * blocks, 1.0, 1.0))
        assert best.total_s == own.total_s
        assert own.counts == tuple(len(part) for part in split_blocks(blocks, layout))


def test_too_few_blocks():
    assert fastest_slowest(4, PartCosts([1.0] * 2)) == (0, 1, 1, 0)
    with pytest.raises(ConfigError, match="1 blocks are too few for 4 stages.*the most is 3"):
        fastest_slowest(4, PartCosts([1.0]))
    with pytest.raises(ConfigError, match=r"\[1, 1\] blocks are 2, not the model's 3"):
        costs_of_split([1, 1], PartCosts([1.0] * 3))
