"""Groups that teach something: those of equal rewards are replaced by others (DAPO, 2503.14476,
section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepwell.posttrain.policy.advantages import is_dead
from stepwell.posttrain.rollout import Group


@dataclass(frozen=True)
class Drawn:
    """kept: trained on. thrown: dead groups that were replaced. refills: further rollouts, of
    num_refilled groups in all."""

    kept: tuple[Group, ...]
    thrown: tuple[Group, ...] = ()
    refills: int = 0
    num_refilled: int = 0

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.kept + self.thrown


def draw_alive(draw: Callable[[int, int], Sequence[Group]], wanted: int, max_refills: int) -> Drawn:
    """`wanted` groups whose rewards differ, or as many as max_refills further rollouts found; where
    all are dead the first rollout is kept, which teaches nothing but what other terms of the loss
    say. draw: (how many, number of the refill, 0 for the first rollout) -> groups."""
    kept: list[Group] = []
    dead: list[Group] = []
    refills = num_refilled = 0
    for attempt in range(max_refills + 1):
        missing = wanted - len(kept)
        if attempt:
            refills, num_refilled = attempt, num_refilled + missing
        for group in draw(missing, attempt):
            (dead if is_dead(group.rewards) else kept).append(group)
        if len(kept) == wanted:
            break
    if not kept:
        kept, dead = dead[:wanted], dead[wanted:]
    return Drawn(tuple(kept), tuple(dead), refills, num_refilled)
