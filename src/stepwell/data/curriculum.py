"""Which sources a step reads, and whether they last: stages of a run, caps on epochs. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from stepwell.sections.data import DataConfig, SourceConfig, first_step
from stepwell.sections.optim import ScheduleConfig
from stepwell.types import ConfigError

BASE = "sources"


class Span(NamedTuple):
    """Steps first to stop - 1 (0 is a run's first) read the stream `name`."""

    name: str
    first: int
    stop: int


class Supply(NamedTuple):
    """One source of a mixture. store: its fingerprint. rows: how many it may give in the whole run
    (inf: no cap)."""

    store: str
    weight: float
    rows: float


def streams_of(data: DataConfig) -> dict[str, tuple[SourceConfig, ...]]:
    """The mixtures of a run by the names of their streams: "sources", "stages.0", ..."""
    stages = {f"stages.{i}": stage.sources for i, stage in enumerate(data.stages)}
    return {BASE: data.sources, **stages}


def spans(data: DataConfig, schedule: ScheduleConfig, num_steps: int) -> list[Span]:
    """What the steps read, in their order; neighbours have different names."""
    starts = [first_step(s.start, num_steps) for s in data.stages if s.start is not None]
    bounds = phase_bounds(schedule, num_steps)
    pieces = [Span(BASE, 0, num_steps)]
    for i, stage in enumerate(data.stages):
        if stage.phase is not None:
            first, stop = bounds[stage.phase]
        else:
            first = first_step(stage.start or 0.0, num_steps)
            stop = min((step for step in starts if step > first), default=num_steps)
        pieces.append(Span(f"stages.{i}", first, stop))
    borders = sorted({step for piece in pieces for step in piece[1:]})
    found = []
    for first, stop in pairwise(borders):
        name = [p.name for p in pieces if p.first <= first < p.stop][-1]
        found.append(Span(name, first, stop))
    return found


def phase_bounds(schedule: ScheduleConfig, num_steps: int) -> dict[str, tuple[int, int]]:
    """First step and the one after the last, of each phase that a stage can be tied to."""
    warmup, decay = schedule.warmup_steps, num_steps - schedule.decay_steps
    return {"warmup": (0, warmup), "stable": (warmup, decay), "decay": (decay, num_steps)}


def rows_given(states: Mapping[str, Any], but: str | None = None) -> dict[str, Any]:
    """Rows of each store (by its fingerprint) that a run's streams have given, by their states."""
    given: dict[str, float] = {}
    for name, state in states.items():
        if name != but:
            for (store, *_), count in zip(state["data"], state["counts"], strict=True):
                given[store] = given.get(store, 0) + count
    return given


def check_supply(
    found: Sequence[Span],
    supplies: Mapping[str, Sequence[Supply]],
    seq_len: int,
    rows_per_step: int,
    states: Mapping[str, Any],
    step: int,
) -> dict[str, float]:
    """Rows of each store (by its fingerprint) that will have been read when the run ends, to within
    a row a source; its steps from `step` on go on from the streams' `states`.

    Raises ConfigError if the caps on epochs end the data before.
    """
    given = rows_given(states)
    for span in found:
        num_steps = span.stop - max(span.first, step)
        if num_steps <= 0:
            continue
        needed = num_steps * rows_per_step
        available = sum(left(source, given) for source in supplies[span.name])
        # What earlier stages take of a source is known to a row.
        if available + (len(given) or 1e-6) < needed:
            whole = sum(source.rows for source in supplies[span.name])
            missing = needed - int(available)
            raise ConfigError(
                f"data.{span.name} runs dry: steps {max(span.first, step) + 1:,} to {span.stop:,} "
                f"need {needed * seq_len:,} tokens, and max_epochs leaves them "
                f"{int(available) * seq_len:,}; multiply its sources' max_epochs by "
                f"{1 + missing / whole:.3f}, lift it for one of them, or lower train.steps by "
                f"{-(-missing // rows_per_step):,}"
            )
        take(supplies[span.name], given, needed)
    return given


def left(source: Supply, given: Mapping[str, float]) -> float:
    return max(source.rows - given.get(source.store, 0), 0)


def take(supplies: Sequence[Supply], given: dict[str, float], num_rows: float) -> None:
    """Adds to `given` what each source gives of num_rows, as `order.choose_sources` deals them, to
    within a row a source."""
    while num_rows > 1e-9:
        active = [source for source in supplies if left(source, given) > 1e-9]
        total = sum(source.weight for source in active)
        if not active:
            return
        most = min(left(source, given) * total / source.weight for source in active)
        dealt = min(num_rows, most)
        for source in active:
            given[source.store] = given.get(source.store, 0) + dealt * source.weight / total
        num_rows -= dealt
