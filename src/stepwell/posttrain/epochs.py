"""How many steps a number of passes over the data takes."""

from __future__ import annotations

import math

from stepwell.config import Run
from stepwell.parallel.rules import step_units


def with_epochs(run: Run, num_items: int) -> Run:
    """The run with train.steps cut to what method.epochs take of so many items, a step taking as
    many as `step_units` says; as it is where epochs are none."""
    epochs, units = getattr(run.method, "epochs", None), step_units(run)
    if epochs is None or units is None:
        return run
    steps = max(1, math.ceil(epochs * num_items / units[1]))
    return run if steps >= run.train.steps else Run.parse(run.model_dump(), {"train.steps": steps})
