"""The order in which each rank of a pipeline works, in the schedules that the engine runs. No
torch.

Written out as torch.distributed.pipelining carries them out (`parallel/pipeline`): its lists,
without the places where it expects a rank to wait.

p pipeline ranks, v stages a rank, m micro-batches. Rank r has stages r, r + p, ...; in the V-shaped
schedules r and 2p-1-r, on the way down and back up.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Literal, NamedTuple

from stepwell.parallel.schedules import ZERO_BUBBLE, fewest_micro_batches, next_micro_batches
from stepwell.sections.layout import LayoutConfig
from stepwell.types import ConfigError, nearest

# F forward; B backward; I, W: the gradients of the inputs and of the weights apart.
Kind = Literal["F", "B", "I", "W"]
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev")


class Action(NamedTuple):
    """What a rank does with one micro-batch in one stage; printed as torch does ("2F0").

    with_next: the first of an overlapped pair, whose results torch sends after both. (The engine
    does one after the other, so nothing is gained by that.)"""

    kind: Kind
    stage: int
    micro_batch: int
    with_next: bool = False

    @property
    def key(self) -> tuple[str, int, int]:
        """Which action it is."""
        return self.kind, self.stage, self.micro_batch

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Actions = list[list[Action]]


def schedule_actions(
    schedule: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1
) -> Actions:
    """By rank, what it does in this order.

    Raises ConfigError for an unknown schedule, and for numbers that it cannot have.
    """
    p, m, v = num_ranks, num_micro_batches, stages_per_rank
    check_schedule(schedule, p, m, v)
    return [_of_rank(schedule, p, m, v, rank) for rank in range(p)]


def rank_actions(
    schedule: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int, rank: int
) -> list[Action]:
    """What one rank does. Raises as `schedule_actions`."""
    check_schedule(schedule, num_ranks, num_micro_batches, stages_per_rank)
    return _of_rank(schedule, num_ranks, num_micro_batches, stages_per_rank, rank)


@lru_cache(maxsize=1024)
def times_back(
    schedule: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int, rank: int
) -> tuple[int, ...]:
    """By stage of a rank, in the model's order: how often a backward pass follows a forward pass of
    the same stage. Raises as `schedule_actions`."""
    before: dict[int, str] = {}
    found: dict[int, int] = {}
    for action in rank_actions(schedule, num_ranks, num_micro_batches, stages_per_rank, rank):
        stage = action.stage
        turns = before.get(stage) == "F" and action.kind != "F"
        found[stage] = found.get(stage, 0) + turns
        before[stage] = action.kind
    return tuple(number for _, number in sorted(found.items()))


def _of_rank(schedule: str, p: int, m: int, v: int, rank: int) -> list[Action]:
    if schedule == "interleaved-1f1b":
        return _interleaved(p, m, v, rank)
    one = {"gpipe": _gpipe, "1f1b": _1f1b, "zbv": _zbv, "dualpipev": _dualpipev}[schedule]
    return one(p, m, rank)


def check_schedule(schedule: str, p: int, m: int, v: int) -> None:
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"unknown schedule {schedule!r}{nearest(schedule, SCHEDULES)}; "
            f"known are {', '.join(SCHEDULES)}"
        )
    if p < 1 or m < 1:
        raise ConfigError(f"{p} ranks and {m} micro-batches: a pipeline has at least 1 of each")
    one, two = schedule in ("gpipe", "1f1b"), schedule in ZERO_BUBBLE
    if (one and v != 1) or (two and v != 2) or v < 1:
        legal = "1" if one else "2" if two else "at least 1"
        raise ConfigError(f"{v} stages a rank: {schedule!r} has {legal}")
    layout = LayoutConfig(pp=p, pp_schedule=schedule, pp_stages_per_rank=v)
    least = 1 if schedule == "gpipe" else fewest_micro_batches(layout)
    legal_m = m if schedule == "gpipe" else next_micro_batches(m, layout)
    if legal_m != m:
        rule = f"needs at least {least}" if m < least else "needs rounds of equal length"
        raise ConfigError(
            f"{m} micro-batches: {schedule!r} on {p} ranks {rule}; the nearest is {legal_m}"
        )


def _gpipe(p: int, m: int, rank: int) -> list[Action]:
    return [Action(kind, rank, i) for kind in ("F", "B") for i in range(m)]


def _1f1b(p: int, m: int, rank: int) -> list[Action]:
    """As many forward passes as fill the ranks behind, then a backward pass for each other one."""
    ahead = min(m, p - rank)
    found = [Action("F", rank, i) for i in range(ahead)]
    for i in range(m):
        found.append(Action("B", rank, i))
        if ahead + i < m:
            found.append(Action("F", rank, ahead + i))
    return found


def _interleaved(p: int, m: int, v: int, rank: int) -> list[Action]:
    """Rounds of about p micro-batches, each through all stages of the rank (2104.04473, 2.2)."""
    per_round = m // max(1, m // p)

    def turn(number: int) -> tuple[int, int]:
        """(which of the rank's stages, micro-batch) of the number-th pass."""
        rounds, inside = divmod(number, per_round * v)
        place, micro_batch = divmod(inside, per_round)
        return place, rounds * per_round + micro_batch

    def forward(number: int) -> Action:
        place, micro_batch = turn(number)
        return Action("F", place * p + rank, micro_batch)

    def backward(number: int) -> Action:
        place, micro_batch = turn(number)
        return Action("B", (v - 1 - place) * p + rank, micro_batch)

    ahead = min((v - 1) * per_round + 2 * (p - 1 - rank), v * m)
    found = [forward(number) for number in range(ahead)]
    for number in range(v * m):
        if ahead + number < v * m:
            found.append(forward(ahead + number))
        found.append(backward(number))
    return found


class _List:
    """A rank's actions as they are written down: micro-batches in order, by kind and stage."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.num_forward: dict[int, int] = {}
        self.num_backward: dict[int, int] = {}
        self.waiting: deque[Action] = deque()  # weights' gradients

    def forward(self, stage: int, with_next: bool = False) -> None:
        number = self.num_forward.get(stage, 0)
        self.actions.append(Action("F", stage, number, with_next))
        self.num_forward[stage] = number + 1

    def backward(self, stage: int, whole: bool = True) -> None:
        number = self.num_backward.get(stage, 0)
        self.actions.append(Action("B" if whole else "I", stage, number))
        self.num_backward[stage] = number + 1
        if not whole:
            self.waiting.append(Action("W", stage, number))

    def weights(self, stage: int | None = None) -> None:
        """The one that has waited longest (of a stage), if any waits."""
        for action in self.waiting:
            if stage in (None, action.stage):
                self.waiting.remove(action)
                self.actions.append(action)
                return


def _zbv(p: int, m: int, rank: int) -> list[Action]:
    """2401.10241, section 6. Fewer than 2p-1 micro-batches leave out what the missing would do."""
    down, up, enough = rank, 2 * p - 1 - rank, max(m, 2 * p - 1)
    done = _List()
    for _ in range(2 * (p - rank) - 1):
        done.forward(down)
    for _ in range(rank):
        done.forward(up)
        done.forward(down)
    for _ in range(p - rank):
        _forward_and_halves(done, up)
    while done.num_forward.get(up, 0) < enough:
        if done.num_forward[down] < enough:
            done.forward(down)
        done.backward(down, whole=False)
        done.weights(down)
        _forward_and_halves(done, up)
    for _ in range(rank):
        done.backward(down, whole=False)
        done.backward(up, whole=False)
    for _ in range(p - rank):
        done.backward(down, whole=False)
        done.weights(down)
    for stage in (up, down):
        for _ in range(sum(action.stage == stage for action in done.waiting)):
            done.weights(stage)
    return [action for action in done.actions if action.micro_batch < m]


def _forward_and_halves(done: _List, stage: int) -> None:
    done.forward(stage)
    done.backward(stage, whole=False)
    done.weights(stage)


def _dualpipev(p: int, m: int, rank: int) -> list[Action]:
    """One half of DualPipe (2412.19437, section 3.2.1), whose other half is its mirror image."""
    down, up, behind = rank, 2 * p - 1 - rank, p - 1 - rank
    done = _List()
    for _ in range(2 * behind):
        done.forward(down)
    for _ in range(rank + 1):
        done.forward(down)
        done.forward(up)
    for _ in range(behind):
        done.backward(up, whole=False)
        done.weights()
        done.forward(up)
    for number in range(m - 2 * p + rank + 1):
        done.forward(down, with_next=number > 0 or behind > 0)
        done.backward(up)
        done.forward(up, with_next=True)
        done.backward(down)
    for _ in range(behind):
        done.backward(up)
        done.forward(up, with_next=True)
        done.backward(down)
    # half of what is left goes in halves
    for number, stage in enumerate([up, down] * (rank + 1)):
        done.backward(stage, whole=number <= rank)
    for _ in range(behind):
        done.weights()
        done.backward(down, whole=False)
    for _ in range(rank + 1):
        done.weights()
    return done.actions
