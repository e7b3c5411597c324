"""Where the stages of a pipeline are, what each holds, and what a schedule costs. No torch.

p pipeline ranks, v stages a rank, S = p*v stages, m micro-batches. Stage s is on rank s % p, or,
for the V-shaped schedules, on rank s going down and back up: both ends are then on rank 0.

gpipe: 1811.06965. 1f1b: PipeDream-Flush, 2006.09503. interleaved-1f1b: 2104.04473. zbv: zero bubble,
V-shaped, 2401.10241. dualpipev: the V-shaped half of DualPipe (DeepSeek-V3, 2412.19437).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepwell.config import LayoutConfig

# Their backward pass is in two halves: gradients of the inputs (B), of the weights (W) later.
ZERO_BUBBLE = ("zbv", "dualpipev")


def num_stages(layout: LayoutConfig) -> int:
    return layout.pp * layout.pp_stages_per_rank


def rank_of_stage(stage: int, layout: LayoutConfig) -> int:
    """The pipeline rank that a stage is on."""
    turn, place = divmod(stage, layout.pp)
    back = layout.pp_schedule in ZERO_BUBBLE and turn % 2
    return layout.pp - 1 - place if back else place


def stages_of_rank(rank: int, layout: LayoutConfig) -> list[int]:
    """The stages of a pipeline rank, in the model's order."""
    return [s for s in range(num_stages(layout)) if rank_of_stage(s, layout) == rank]


def split_blocks(num_layers: int, layout: LayoutConfig) -> list[range]:
    """The blocks of each stage: layout.pp_layers, or an even split in which the embedding and the
    head count as a block each; what is left over goes to the first stages."""
    counts = layout.pp_layers
    if counts is None:
        stages = num_stages(layout)
        each, over = divmod(num_layers + 2, stages)
        units = [each + (s < over) for s in range(stages)]
        counts = [n - (s == 0) - (s == stages - 1) for s, n in enumerate(units)]
    starts = [sum(counts[:s]) for s in range(len(counts))]
    return [range(start, start + n) for start, n in zip(starts, counts, strict=True)]


def fewest_micro_batches(layout: LayoutConfig) -> int:
    """What keeps every rank busy at least once, and what the schedule's own order demands."""
    return num_stages(layout) if layout.pp_schedule == "dualpipev" else layout.pp


def next_micro_batches(wanted: int, layout: LayoutConfig) -> int:
    """The smallest number of micro-batches, at least `wanted`, that the schedule can run."""
    m = max(wanted, fewest_micro_batches(layout))
    if layout.pp_schedule == "interleaved-1f1b":
        while m % (m // layout.pp):  # rounds of equal length
            m += 1
    return m


def bubble_fraction(schedule: str, p: int, m: int, v: int = 1) -> float:
    """Idle time of a rank over the time of its work, when a backward pass takes twice a forward
    pass and its halves the same: (p-1)/m, interleaved (p-1)/(v m) (2104.04473, 2.2).

    A zero-bubble schedule with m >= 2p-1 idles only while the pipeline fills and drains, p-1 of
    its 6 m slots (a slot is a stage's F, B or W), and not between its steps (2401.10241).
    """
    if schedule in ZERO_BUBBLE:
        return (p - 1) / (6 * m)
    return (p - 1) / ((v if schedule == "interleaved-1f1b" else 1) * m)


class Action(NamedTuple):
    """kind: F, B (inputs only), W (weights) or BW (both)."""

    kind: str
    stage: int
    micro_batch: int


SLOTS = {"F": 1, "B": 1, "W": 1, "BW": 2}


def simulate(order: Mapping[int, Sequence[Action]], stages: int) -> tuple[int, int]:
    """(time of the whole step, largest idle time of a rank) in slots of an order of actions, each
    begun as soon as its rank is free and its input is there; messages take no time.

    order: rank -> actions. Raises ValueError if it can never end.
    """
    done: dict[Action, int] = {}
    clock = dict.fromkeys(order, 0)
    busy = {rank: sum(SLOTS[a.kind] for a in actions) for rank, actions in order.items()}
    left = {rank: list(actions) for rank, actions in order.items()}
    while any(left.values()):
        moved = False
        for rank, actions in left.items():
            while actions and (ready := _ready(actions[0], done, stages)) is not None:
                action = actions.pop(0)
                clock[rank] = max(clock[rank], ready) + SLOTS[action.kind]
                done[action] = clock[rank]
                moved = True
        if not moved:
            stuck = {rank: actions[0] for rank, actions in left.items() if actions}
            raise ValueError(f"the order can never end; waiting: {stuck}")
    end = max(clock.values())
    return end, max(end - busy[rank] for rank in order)


def _ready(action: Action, done: Mapping[Action, int], stages: int) -> int | None:
    """When the action's inputs are there; None while one of them has not been computed."""
    kind, s, i = action
    if kind == "F":
        return 0 if s == 0 else done.get(Action("F", s - 1, i))
    if kind == "W":
        return done.get(Action("B", s, i))
    if s == stages - 1:
        return done.get(Action("F", s, i))
    return done.get(Action("B", s + 1, i), done.get(Action("BW", s + 1, i)))
