"""How many steps a number of passes over the data takes."""

from __future__ import annotations

import math

from stepwell.config import Run


def with_epochs(run: Run, epochs: float | None, num_items: int, a_step: int) -> Run:
    """The run with train.steps cut to what `epochs` passes over the items take, `a_step` of them a
    step; None: as it is."""
    if epochs is None:
        return run
    steps = max(1, math.ceil(epochs * num_items / a_step))
    return run if steps >= run.train.steps else Run.parse(run.model_dump(), {"train.steps": steps})
