"""Knobs of a recipe whose method has several models: each is priced as the recipe itself is, with
all models and the whole step. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from stepwell.config import Run
from stepwell.parallel.rules import check_run
from stepwell.plan.cluster import Cluster
from stepwell.plan.explain.change import changed
from stepwell.plan.explain.knobs import (
    LEAST_COMBINED_GAIN,
    LEAST_GAIN,
    MOST_COMBINED,
    Knob,
    turned_run,
    turns,
)
from stepwell.plan.methods.evaluated import Evaluated
from stepwell.plan.methods.recipes import as_configured
from stepwell.plan.search.prices import Prices
from stepwell.plan.search.runs import settings_text
from stepwell.plan.search.space import Task
from stepwell.types import ConfigError


class Turned(NamedTuple):
    knob: Knob
    run: Run
    found: Evaluated


def method_knobs(run: Run, machines: Cluster, now: Evaluated) -> list[Knob]:
    """All that have an effect, the largest gain first: seconds are of the whole step, bytes of the
    worst moment of all models. now: the run as it is configured. What the engine's rules refuse has
    no price and is left out, and so is a larger batch, which is another method's work."""
    found = [turned.knob for turned in _turned(run, machines, now)]
    return sorted(found, key=lambda knob: -knob.gain)


def method_together(run: Run, machines: Cluster, now: Evaluated) -> list[Knob]:
    """The knobs that work, one after the other, each time the one that gains most; only those that
    leave the training as it is. Their gains are each of the step before."""
    taken: list[Knob] = []
    while len(taken) < MOST_COMBINED:
        works = [t for t in _turned(run, machines, now) if t.knob.works and not t.knob.alters]
        best = max(works, key=lambda turned: turned.knob.gain, default=None)
        if best is None or best.knob.gain < LEAST_COMBINED_GAIN:
            break
        taken.append(best.knob)
        run, now = best.run, best.found
    return taken


def _turned(run: Run, machines: Cluster, now: Evaluated) -> Iterator[Turned]:
    dims, layout = now.job.dims, now.job.layout
    prices = Prices(dims, machines, run.model)
    task = Task(dims, machines, now.trainers, layout.seq_len, layout.global_batch_rows)
    for name, changes, alters in turns(task, layout):
        if "global_batch_rows" in changes:
            continue
        alone = changed(prices, task, layout, changes)
        if alone.layout is None or alone.layout == layout:
            continue
        try:
            other = turned_run(run, layout, alone.layout)
            check_run(other, now.trainers)
            found = as_configured(other, now.trainers, machines, dims.name)
        except ConfigError:
            continue
        if found is None or abs(1 - found.step_s / now.step_s) < LEAST_GAIN:
            continue
        knob = Knob(
            name=name,
            setting=settings_text(layout, alone.layout),
            gain=1 - found.step_s / now.step_s,
            changed=replace(
                alone, peak_bytes=found.peak, fits=found.fits, shortage=found.host_shortage
            ),
            step_s=found.step_s,
            alters=alters,
            saves=_saved(now.times, found.times),
        )
        yield Turned(knob, other, found)


def _saved(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[str, float]:
    """The part of a step that shrinks most, and by how many seconds."""
    less = {name: seconds - after.get(name, 0.0) for name, seconds in before.items()}
    name = max(sorted(less), key=lambda part: less[part])
    return name, less[name]
