"""The learning rate over a run. No torch: the planner and the header ask it too."""

from __future__ import annotations

import math

from stepwell.sections.optim import ScheduleConfig


def lr_fraction(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """The learning rate of step `step` (0 is the first) as a fraction of its peak.

    Warm-up is linear and never 0: (step + 1) / warmup_steps. A decay of D steps that begins at
    step s follows its shape at p = (step - s) / D, so it would reach final_fraction at step s + D,
    the first one that is not taken. 1-sqrt: 1 - sqrt(p) (2405.18392, eq. 3).
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    start, shape = _decay(schedule, total_steps)
    if step < start or shape == "none":
        return 1.0
    p = min((step - start) / max(total_steps - start, 1), 1.0)
    remaining = {
        "1-sqrt": 1.0 - math.sqrt(p),
        "linear": 1.0 - p,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * p)),
    }[shape]
    return schedule.final_fraction + (1.0 - schedule.final_fraction) * remaining


def _decay(schedule: ScheduleConfig, total_steps: int) -> tuple[int, str]:
    """The step at which the decay begins, and its shape ("none" when there is no decay)."""
    if schedule.kind == "wsd" and schedule.decay_steps:
        return total_steps - schedule.decay_steps, schedule.decay_shape
    if schedule.kind in ("linear", "cosine"):
        return schedule.warmup_steps, schedule.kind
    return total_steps, "none"
