"""What `stepwell plan` advises, beside what was measured if anything was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.commands.plan_options import Asked
from stepwell.config import Run
from stepwell.plan.explain.knobs import Knob, knobs, together
from stepwell.plan.job import Job
from stepwell.plan.measured.gap import Gap, gap, measured_step_s
from stepwell.plan.measured.source import measured_at
from stepwell.plan.search.candidates import Candidate
from stepwell.plan.search.prices import Prices
from stepwell.plan.search.search import search
from stepwell.plan.search.space import Pins, Task
from stepwell.sections.model import ModelConfig

if TYPE_CHECKING:
    from stepwell.plan.methods.evaluated import Evaluated


def gap_of(
    asked: Asked, job: Job, config: ModelConfig | None, run: Run | None = None
) -> Gap | None:
    """Of what was measured: a number, a trace, or the folder of a run."""
    given = asked.get("measured")
    if given is None:
        return None
    if isinstance(given, Path):
        return measured_at(given, job, config, run)
    name, value = next(iter(given.items()))
    return gap(job, measured_step_s(given, job), config, f"{name}={value:g}")


def knobs_of(
    found: Gap | None,
    prices: Prices,
    now: Candidate,
    task: Task,
    run: Run | None = None,
    method: Evaluated | None = None,
    in_turn: bool = False,
) -> tuple[Knob, ...]:
    """Each alone, or one after the other: at the rates that a trace shows, if there is one; of all
    models, if there are several."""
    if run is not None and method is not None:
        from stepwell.plan.methods.knobs import method_knobs, method_together

        return tuple((method_together if in_turn else method_knobs)(run, prices.cluster, method))
    if found is not None and found.comparison is not None:
        return tuple(found.comparison.together if in_turn else found.comparison.knobs)
    return tuple((together if in_turn else knobs)(prices, task, now.layout, prices.config, run=run))


def fastest_of(found: Gap | None, prices: Prices, now: Candidate, task: Task) -> Candidate | None:
    """In as many bits, and with such checkpoints, whatever else is held fixed; at the rates that a
    trace shows, if there is one; None where they are another device's."""
    if found is not None and found.comparison is not None:
        if not found.comparison.of_device:
            return None
        prices = found.comparison.fitted.prices(prices)
    pins = Pins(
        precision=now.layout.precision,
        checkpoint="asynchronous" if now.layout.stages_checkpoint else "synchronous",
        headroom_bytes=task.pins.headroom_bytes,
    )
    sizes = (task.num_gpus, task.seq_len, task.rows * task.seq_len)
    ranking = search(task.dims, task.cluster, *sizes, pins, prices.config, 1.0, prices)
    return ranking.found[0] if ranking.found else None
