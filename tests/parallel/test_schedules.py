"""Placement and split of stages, and what the schedules' own orders of actions cost."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from stepwell.parallel.pipeline import SCHEDULES
from stepwell.parallel.schedules import (
    bubble_fraction,
    fewest_micro_batches,
    most_in_flight,
    next_micro_batches,
    rank_of_stage,
    split_blocks,
    stages_of_rank,
)
from stepwell.sections.layout import LayoutConfig


class Action(NamedTuple):
    """kind: F, B (gradients of the inputs), W (of the weights), BW (both). with_next: what others
    need of it is sent after the rank's next action."""

    kind: str
    stage: int
    micro_batch: int
    with_next: bool = False


KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "BW"}
LENGTH = {"F": 1, "B": 1, "W": 1, "BW": 2}


def simulate(order: dict[int, list[Action]], stages: int) -> int:
    """The idle units of the rank that has most of them: each action begins as soon as its rank is
    free and its inputs are there."""
    done: dict[Action, int] = {}
    mine: dict[int, dict[Action, int]] = {rank: {} for rank in order}
    clock = dict.fromkeys(order, 0)
    left = {rank: list(actions) for rank, actions in order.items()}
    while any(left.values()):
        before = sum(len(found) for found in mine.values())
        for rank, actions in left.items():
            known = done | mine[rank]
            while actions and (ready := when_ready(actions[0], known, stages)) is not None:
                first = actions.pop(0)
                action = first._replace(with_next=False)
                clock[rank] = max(clock[rank], ready) + LENGTH[action.kind]
                mine[rank][action] = known[action] = clock[rank]
                if not first.with_next:
                    done |= {
                        a: max(end, clock[rank]) for a, end in mine[rank].items() if a not in done
                    }
        assert sum(len(found) for found in mine.values()) > before, (
            f"never ends: {[a[0] for a in left.values() if a]}"
        )
    end = max(clock.values())
    return max(end - sum(LENGTH[a.kind] for a in actions) for actions in order.values())


def when_ready(action: Action, done: dict[Action, int], stages: int) -> int | None:
    kind, s, i, _ = action
    if kind == "F":
        return 0 if s == 0 else done.get(Action("F", s - 1, i))
    if kind == "W":
        return done.get(Action("B", s, i))
    if s == stages - 1:
        return done.get(Action("F", s, i))
    return done.get(Action("B", s + 1, i), done.get(Action("BW", s + 1, i)))


def planned_order(schedule: str, p: int, v: int, m: int) -> dict[int, list[Action]]:
    """Torch's own plan for all ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=p, store=FakeStore())
    try:
        nothing = torch.zeros(1)
        stages = [
            PipelineStage(
                torch.nn.Identity(),
                index,
                p * v,
                torch.device("cpu"),
                input_args=(nothing,),
                output_args=(nothing,),
            )
            for index in stages_of_rank(0, layout(schedule, p, v))
        ]
        plan = SCHEDULES[schedule](stages if v > 1 else stages[0], m, loss_fn=max).pipeline_order
    finally:
        dist.destroy_process_group()
    return {
        rank: [
            Action(
                KINDS[part.computation_type.name],
                part.stage_index,
                part.microbatch_index,
                with_next=part is not (action.sub_actions or [action])[-1],
            )
            for action in actions
            if action is not None
            for part in action.sub_actions or [action]
            if part.computation_type.name in KINDS
        ]
        for rank, actions in plan.items()
    }


def layout(schedule: str, p: int, v: int, **settings: Any) -> LayoutConfig:
    values = {"pp": p, "pp_schedule": schedule, "pp_stages_per_rank": v}
    return LayoutConfig.model_validate({**values, **settings})


# 1F1B as it is carried out is in test_pipeline.py: torch's plan of it, for display, is not that.
@pytest.mark.parametrize(
    ("schedule", "v"),
    [("gpipe", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("zbv", 2), ("dualpipev", 2)],
)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_bubble_is_that_of_the_schedules_own_order(schedule, v, p):
    for wanted in (1, p, p + 1, 2 * p - 1, 2 * p, 4 * p + 1, 8 * p):
        m = next_micro_batches(wanted, layout(schedule, p, v))
        assert m >= wanted
        order = planned_order(schedule, p, v, m)
        assert all(sum(a.kind == "F" for a in actions) == v * m for actions in order.values())
        assert simulate(order, p * v) / (3 * v * m) == pytest.approx(
            bubble_fraction(schedule, p, m, v)
        ), (schedule, p, m, v)


def most_held(actions: list[Action], v: int) -> float:
    """Micro-batches whose activations a rank has at once; a stage's are 1/v of a rank's."""
    held, most = 0, 0
    for action in actions:
        held += {"F": 1, "B": 0}.get(action.kind, -1)
        most = max(most, held)
    return most / v


@pytest.mark.parametrize(
    ("schedule", "v"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("zbv", 2),
     ("dualpipev", 2)],
)  # fmt: skip
@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 9), (3, 12), (4, 8), (4, 17)])
def test_most_in_flight_is_what_the_schedules_own_order_holds(schedule, v, p, m):
    m = next_micro_batches(m, layout(schedule, p, v))
    order = planned_order(schedule, p, v, m)
    found = [most_held(order[rank], v) for rank in range(p)]
    told = [most_in_flight(schedule, p, m, v, rank) / v for rank in range(p)]
    assert told == pytest.approx(found)


def test_activations_held_are_those_of_the_documentation():
    p, m = 4, 16
    for schedule, v, wanted in (
        ("gpipe", 1, m),
        ("interleaved-1f1b", 2, p + (p - 1) / 2),
        ("interleaved-1f1b", 3, p + (p - 1) / 3),
        ("zbv", 2, p),
        ("dualpipev", 2, p + 1 / 2),
    ):
        order = planned_order(schedule, p, v, m)
        found = max(most_held(actions, v) for actions in order.values())
        assert found == pytest.approx(wanted), (schedule, v)


def test_known_bubbles():
    assert bubble_fraction("1f1b", 4, 8) == 3 / 8
    assert bubble_fraction("gpipe", 4, 8) == 3 / 8
    assert bubble_fraction("interleaved-1f1b", 4, 8, 2) == 3 / 16
    assert bubble_fraction("zbv", 4, 8) == 3 / 48
    assert bubble_fraction("dualpipev", 4, 8) == 6 / 48


def test_the_simulation_sees_worse_orders():
    """1F1B without its warm-up runs one micro-batch at a time."""
    worse = {r: [Action(kind, r, i) for i in range(4) for kind in ("F", "BW")] for r in range(2)}
    assert simulate(worse, 2) > 3
    with pytest.raises(AssertionError, match="never ends"):
        simulate({0: [Action("BW", 0, 0), Action("F", 0, 0)]}, 1)


def test_v_schedules_have_both_ends_on_the_first_rank():
    assert [rank_of_stage(s, layout("zbv", 4, 2)) for s in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert stages_of_rank(0, layout("dualpipev", 4, 2)) == [0, 7]
    assert stages_of_rank(1, layout("interleaved-1f1b", 4, 2)) == [1, 5]
    assert stages_of_rank(3, layout("1f1b", 4, 1)) == [3]


@pytest.mark.parametrize(
    ("layers", "p", "v", "counts"),
    [
        (6, 2, 1, [3, 3]),
        (6, 4, 1, [1, 2, 2, 1]),
        (5, 2, 1, [3, 2]),
        (6, 4, 2, [0, 1, 1, 1, 1, 1, 1, 0]),
        (30, 4, 1, [7, 8, 8, 7]),
    ],
)
def test_even_split_counts_both_ends_as_blocks(layers, p, v, counts):
    split = split_blocks(layers, layout("interleaved-1f1b", p, v))
    assert [len(blocks) for blocks in split] == counts
    assert [i for blocks in split for i in blocks] == list(range(layers))


def test_given_split():
    split = split_blocks(6, layout("1f1b", 2, 1, pp_layers=(0, 6)))
    assert split == [range(0), range(6)]


def test_numbers_of_micro_batches():
    assert fewest_micro_batches(layout("1f1b", 4, 1)) == 4
    assert fewest_micro_batches(layout("dualpipev", 4, 2)) == 8
    assert next_micro_batches(3, layout("1f1b", 4, 1)) == 4
    assert next_micro_batches(9, layout("1f1b", 4, 1)) == 9
    assert next_micro_batches(9, layout("interleaved-1f1b", 4, 2)) == 10  # two rounds of five
    assert next_micro_batches(1, layout("zbv", 2, 2)) == 2
