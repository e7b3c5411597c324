"""When each rank of a pipeline works and when it waits: a simulation of any order of actions. No
torch.

An action begins as soon as its rank is done with the one before and what it needs is there: a
forward pass the activations of the stage before, a backward pass the gradient of the stage behind,
the weights' half of a backward pass the other half. `plan/pipeline/actions` has the orders that the
engine carries out.

p pipeline ranks, v stages a rank, m micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

from stepwell.parallel.schedules import ZERO_BUBBLE, bubble_fraction
from stepwell.plan.pipeline.actions import Action, check_schedule, schedule_actions
from stepwell.types import ConfigError


@dataclass(frozen=True)
class Costs:
    """Seconds of one micro-batch in each stage: of its forward pass, of the gradients of its inputs
    and of its weights, and of what is computed again before them. send_s: from the end of an action
    until another rank has its result; sending takes none of the sender's time."""

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    recompute_s: tuple[float, ...] = ()
    send_s: float = 0

    def __post_init__(self) -> None:
        lengths = {len(self.forward_s), len(self.input_s), len(self.weight_s)}
        lengths |= {len(self.recompute_s)} if self.recompute_s else set()
        if len(lengths) != 1:
            raise ConfigError(f"costs are of {sorted(lengths)} stages; each needs one per stage")
        for name in ("forward_s", "input_s", "weight_s", "recompute_s"):
            for stage, cost in enumerate(getattr(self, name)):
                _check_cost(f"{name}[{stage}]", cost)
        _check_cost("send_s", self.send_s)

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    def of(self, action: Action) -> float:
        kind, stage = action.kind, action.stage
        if kind == "F":
            return self.forward_s[stage]
        if kind == "W":
            return self.weight_s[stage]
        again = self.recompute_s[stage] if self.recompute_s else 0
        return again + self.input_s[stage] + (self.weight_s[stage] if kind == "B" else 0)


def _check_cost(name: str, cost: float) -> None:
    """Raises ConfigError."""
    if not 0 <= cost < inf:
        near = "; the nearest legal value is 0" if cost < 0 else ""
        raise ConfigError(f"{name}={cost} must be seconds, a finite number of at least 0{near}")


def even_costs(
    num_stages: int,
    forward_s: float = 1,
    input_s: float = 1,
    weight_s: float = 1,
    recompute_s: float = 0,
    send_s: float = 0,
) -> Costs:
    """The same for each stage; a backward pass is twice a forward pass unless told otherwise."""
    return Costs(
        (forward_s,) * num_stages,
        (input_s,) * num_stages,
        (weight_s,) * num_stages,
        (recompute_s,) * num_stages,
        send_s,
    )


class Event(NamedTuple):
    """cause: number of the event whose end it waited for, which the rank's own last one is if the
    rank never stood still; None at the start of a step."""

    action: Action
    rank: int
    start_s: float
    end_s: float
    cause: int | None


@dataclass(frozen=True)
class Timeline:
    """events: in an order in which they can have happened."""

    events: tuple[Event, ...]
    num_ranks: int
    num_stages: int

    @property
    def total_s(self) -> float:
        return max((event.end_s for event in self.events), default=0)

    def of_rank(self, rank: int) -> list[Event]:
        return [event for event in self.events if event.rank == rank]

    @property
    def busy_s(self) -> list[float]:
        """Of each rank."""
        busy: list[float] = [0] * self.num_ranks
        for event in self.events:
            busy[event.rank] += event.end_s - event.start_s
        return busy

    @property
    def idle_s(self) -> list[float]:
        """Of each rank, from the step's start to its end."""
        return [self.total_s - busy for busy in self.busy_s]

    @property
    def bubble_share(self) -> float:
        """Idle time of all ranks over their time of work, which is the ideal time: (p-1)/m of it
        with even stages under 1F1B. Stages of different costs count as bubble, too."""
        return sum(self.idle_s) / sum(self.busy_s)

    @property
    def peak_in_flight(self) -> list[int]:
        """Of each stage: the most micro-batches whose activations it has, from their forward pass
        until their weights' gradients are done."""
        return _peaks(self.events, [event.action.stage for event in self.events], self.num_stages)

    @property
    def peak_in_flight_of_ranks(self) -> list[int]:
        """Of each rank: the most (stage, micro-batch) pairs."""
        return _peaks(self.events, [event.rank for event in self.events], self.num_ranks)

    def critical_path(self) -> list[Event]:
        """Events without a pause but sending between them, from the step's start to its end: a
        second less in one of them is a second less of the step, as long as no other path is as
        long."""
        if not self.events:
            return []
        number: int | None = max(range(len(self.events)), key=lambda i: self.events[i].end_s)
        path = []
        while number is not None:
            path.append(self.events[number])
            number = self.events[number].cause
        return path[::-1]


def _peaks(events: Sequence[Event], places: Sequence[int], num_places: int) -> list[int]:
    """Events of one place are in the order of time."""
    held, most = [0] * num_places, [0] * num_places
    for event, place in zip(events, places, strict=True):
        held[place] += {"F": 1, "I": 0}.get(event.action.kind, -1)
        most[place] = max(most[place], held[place])
    return most


# --- the simulation --------------------------------------------------------------------------


class _Done(NamedTuple):
    """end_s: when its own rank has the result. sent_s, number: when others may have it, and the
    event that ended then; None: not yet."""

    rank: int
    end_s: float
    sent_s: float | None = None
    number: int = 0


Key = tuple[str, int, int]


class _Simulation:
    def __init__(self, actions: Sequence[Sequence[Action]], costs: Costs):
        self.actions, self.costs = actions, costs
        self.events: list[Event] = []
        self.done: dict[Key, _Done] = {}
        self.waiting: dict[Key, int] = {}
        self.last: list[int | None] = [None] * len(actions)
        self.clock: list[float] = [0] * len(actions)
        self.place = [0] * len(actions)
        self.unsent: list[list[Key]] = [[] for _ in actions]

    def run(self) -> None:
        """Each rank goes on until it has to wait for another, which wakes it up."""
        ready = list(range(len(self.actions)))
        while ready:
            rank = ready.pop()
            row = self.actions[rank]
            while self.place[rank] < len(row):
                begin = self._begin(rank, row[self.place[rank]])
                if begin is None:
                    break
                ready += self._do(rank, row[self.place[rank]], *begin)
                self.place[rank] += 1

    def _begin(self, rank: int, action: Action) -> tuple[float, int | None] | None:
        """(when, after which event) it can begin; None: it waits for another rank."""
        start, cause = self.clock[rank], self.last[rank]
        need = _needed(action, self.costs.num_stages)
        if need is None:
            return start, cause
        found = self.done.get(need)
        if found is not None and found.rank == rank:
            return start, cause
        if found is None or found.sent_s is None:
            self.waiting[need] = rank
            return None
        there = found.sent_s + self.costs.send_s
        return (there, found.number) if there > start or cause is None else (start, cause)

    def _do(self, rank: int, action: Action, start: float, cause: int | None) -> list[int]:
        """Returns the ranks that this wakes up."""
        number, end = len(self.events), start + self.costs.of(action)
        self.events.append(Event(action, rank, start, end, cause))
        self.clock[rank], self.last[rank] = end, number
        kind, stage, micro_batch = action.key
        key = ("I" if kind == "B" else kind, stage, micro_batch)
        self.done[key] = _Done(rank, end)
        self.unsent[rank].append(key)
        if action.with_next:
            return []
        sent, self.unsent[rank] = self.unsent[rank], []
        for key in sent:
            self.done[key] = self.done[key]._replace(sent_s=end, number=number)
        return [self.waiting.pop(key) for key in sent if key in self.waiting]


def simulate(actions: Sequence[Sequence[Action]], costs: Costs) -> Timeline:
    """actions: by rank, in its order.

    Raises ConfigError for lists that are not one pass of each micro-batch through each stage, and
    where ranks wait for each other for ever, naming what waits for what.
    """
    check_actions(actions, costs.num_stages)
    simulation = _Simulation(actions, costs)
    simulation.run()
    place = simulation.place
    stuck = [rank for rank, row in enumerate(actions) if place[rank] < len(row)]
    if stuck:
        raise ConfigError(_deadlock(actions, place, stuck, costs.num_stages))
    return Timeline(tuple(simulation.events), len(actions), costs.num_stages)


def _needed(action: Action, num_stages: int) -> Key | None:
    """What must be done before, anywhere. A backward pass needs its own forward pass, too, which
    what it needs from the stage behind has needed."""
    kind, stage, micro_batch = action.key
    if kind == "F":
        return ("F", stage - 1, micro_batch) if stage else None
    if kind == "W":
        return ("I", stage, micro_batch)
    if stage == num_stages - 1:
        return ("F", stage, micro_batch)
    return ("I", stage + 1, micro_batch)


def _deadlock(
    actions: Sequence[Sequence[Action]], place: list[int], stuck: list[int], num_stages: int
) -> str:
    waits = []
    for rank in stuck:
        action = actions[rank][place[rank]]
        kind, stage, micro_batch = _needed(action, num_stages) or ("", 0, 0)
        name = "B" if kind == "I" else kind  # or its first half
        waits.append(f"rank {rank} at {action} for {stage}{name}{micro_batch}")
    return "these orders of actions never end: " + "; ".join(waits)


def check_actions(actions: Sequence[Sequence[Action]], num_stages: int) -> None:
    """Raises ConfigError unless each micro-batch goes once through each stage, every stage is on
    one rank, and backward passes are whole, or complete in halves, or left out."""
    seen: set[Key] = set()
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(actions):
        for action in row:
            if action.key in seen:
                raise ConfigError(f"{action} is there twice; each action is done once")
            seen.add(action.key)
            if not 0 <= action.stage < num_stages:
                raise ConfigError(f"{action} is of no stage; costs are of {num_stages} stages")
            other = rank_of.setdefault(action.stage, rank)
            if other != rank:
                raise ConfigError(
                    f"stage {action.stage} is on rank {other} and, for {action}, on rank {rank}; "
                    "it can be on one"
                )
    micro_batches = {micro_batch for _, _, micro_batch in seen}
    trains = any(kind != "F" for kind, _, _ in seen)
    for stage in range(num_stages):
        for i in micro_batches:
            kinds = "".join(kind for kind in "FBIW" if (kind, stage, i) in seen)
            if kinds not in (("FB", "FIW") if trains else ("F",)):
                raise ConfigError(
                    f"micro-batch {i} has {kinds or 'nothing'} in stage {stage}; it needs "
                    f"{'F and B, or F, I and W' if trains else 'F'}"
                )


def simulate_schedule(
    schedule: str,
    num_ranks: int,
    num_micro_batches: int,
    stages_per_rank: int = 1,
    costs: Costs | None = None,
) -> Timeline:
    """A schedule by name; costs: even ones by default, forward 1 and backward 2. Raises ConfigError
    for numbers that the schedule cannot have, and for costs of another number of stages."""
    actions = schedule_actions(schedule, num_ranks, num_micro_batches, stages_per_rank)
    num_stages = num_ranks * stages_per_rank
    costs = costs or even_costs(num_stages)
    if costs.num_stages != num_stages:
        raise ConfigError(
            f"costs are of {costs.num_stages} stages, and {num_ranks} ranks of {stages_per_rank} "
            f"have {num_stages}; each stage needs its own"
        )
    return simulate(actions, costs)


# --- closed forms ----------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def bubble_share(
    schedule: str,
    num_ranks: int,
    num_micro_batches: int,
    stages_per_rank: int = 1,
    forward_s: float = 1,
    input_s: float = 1,
    weight_s: float = 1,
    recompute_s: float = 0,
    send_s: float = 0,
) -> float:
    """Idle time over the time of work, with even stages.

    gpipe, 1f1b: (p-1)/m; interleaved: (p-1)/(v m), whatever a backward pass costs (2104.04473,
    2.2). Zero bubble: (p-1)/(6m), or more with few micro-batches (`bubble_fraction`), if the halves
    of a backward pass and a forward pass cost the same and nothing is computed again. Else, and if
    sending takes time, by simulation.
    Raises ConfigError for numbers that the schedule cannot have, and for costs that are no seconds.
    """
    p, m, v = num_ranks, num_micro_batches, stages_per_rank
    check_schedule(schedule, p, m, v)
    costs = even_costs(p * v, forward_s, input_s, weight_s, recompute_s, send_s)
    halves_differ = bool(recompute_s) or not forward_s == input_s == weight_s
    if send_s or (schedule in ZERO_BUBBLE and halves_differ):
        return simulate_schedule(schedule, p, m, v, costs).bubble_share
    return bubble_fraction(schedule, p, m, v)
