"""What waits on a rank of a pipeline whose backward passes are taken in halves (2401.10241), as
torch carries them out (`plan/pipeline/actions`). No torch.

Between its two halves a micro-batch holds all that its stage saved, for torch keeps the whole
graph, and beside it the gradient of what each weight's product gave.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from stepwell.plan.pipeline.actions import rank_actions

Counts = tuple[int, ...]


class State(NamedTuple):
    """Before a pass of the rank's stage `place`. held: of each stage, the micro-batches that wait
    whole, then, of each, those between the halves. halved: the pass is one of weights' gradients,
    or ends with as much as one; its micro-batch is among those between the halves."""

    place: int
    held: Counts
    summed: tuple[bool, ...]
    halved: bool


@lru_cache(maxsize=1024)
def states_of(schedule: str, p: int, rank: int, m: int) -> tuple[State, ...]:
    """The first backward pass, and of all others those which no other of their kind exceeds in
    every number. The first stage takes its whole backward pass in the second half."""
    m = min(m, 4 * p + 2)  # from then on the full pipeline repeats itself
    held, summed, found = [0] * 4, [False] * 2, []
    for action in rank_actions(schedule, p, m, 2, rank):
        place = 0 if action.stage < p else 1
        if action.kind == "F":
            held[place] += 1
            continue
        if action.kind == "I" and action.stage == 0:
            continue
        if action.kind == "I":
            found.append(State(place, tuple(held), tuple(summed), False))
            held[place] -= 1
            held[2 + place] += 1
        halved = action.kind != "B" and action.stage > 0
        found.append(State(place, tuple(held), tuple(summed), halved))
        if action.kind != "I":
            held[place + 2 * halved] -= 1
            summed[place] = True
    return (found[0], *_largest(found))


def _largest(states: list[State]) -> list[State]:
    kinds: dict[tuple[int, tuple[bool, ...], bool], set[Counts]] = {}
    for place, held, summed, halved in states:
        kinds.setdefault((place, summed, halved), set()).add(held)
    return [
        State(kind[0], one, *kind[1:])
        for kind, counts in kinds.items()
        for one in _not_exceeded(counts)
    ]


def _not_exceeded(counts: set[Counts]) -> list[Counts]:
    """What exceeds another in every number comes before it in descending order."""
    found: list[Counts] = []
    for one in sorted(counts, reverse=True):
        if not any(all(a <= b for a, b in zip(one, x, strict=True)) for x in found):
            found.append(one)
    return found[::-1]
