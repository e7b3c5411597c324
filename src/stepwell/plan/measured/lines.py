"""The lines in which a traced step and a predicted one are compared. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from stepwell.plan.measured.parts import COPIES, IDLE
from stepwell.plan.steptime.step import StepTime

# Lines of the comparison, as they are shown.
NAMES = {
    "products": "matrix products",
    "attention": "attention",
    "memory-bound": "operations that only move memory",
    "optimizer": "optimiser step",
    COPIES: COPIES,
    "exposed tp": "tensor ranks' messages, exposed",
    "exposed cp": "context ranks' messages, exposed",
    "exposed ep": "expert ranks' messages, exposed",
    "exposed data": "data ranks' messages, exposed",
    "exposed world": "sums over all ranks, exposed",
    "exposed other": "other messages, exposed",
    "exposed pp": "stages' messages and bubble",
    IDLE: "idle (launches, host)",
}
# The line that each part of a predicted step belongs to.
LINES = {
    "products": "products",
    "attention": "attention",
    "memory": "memory-bound",
    "quantisation": "memory-bound",
    "gradient accumulation": "memory-bound",
    "optimizer": "optimizer",
    "exposed offload": COPIES,
    "bubble": "exposed pp",
    "host": IDLE,
}
COMPUTING = {"products": "products", "attention": "attention", "memory": "memory-bound"}


class Line(NamedTuple):
    """Seconds of a step; name: a key of NAMES."""

    name: str
    measured_s: float
    predicted_s: float

    @property
    def more_s(self) -> float:
        return self.measured_s - self.predicted_s


def predicted_parts(step: StepTime) -> dict[str, float]:
    """A predicted step by NAMES; they add up to it. What a kernel recomputes, or takes longer
    beside messages, is its own time in a trace; what waits for the slowest rank waits in the
    messages of the widest axis."""
    found: dict[str, float] = dict.fromkeys(NAMES, 0.0)
    for part, seconds in step.parts.items():
        if part in LINES or part.startswith("exposed "):
            found[LINES.get(part, part)] += seconds
    for part, seconds in step.recomputed.items():
        found[LINES[part]] += seconds
    computing = {name: found[name] for name in COMPUTING.values()}
    slowed = step.parts.get("contention", 0.0) / (sum(computing.values()) or 1.0)
    for name, seconds in computing.items():
        found[name] += slowed * seconds
    found[_widest(step)] += step.parts.get("straggling", 0.0)
    return found


def _widest(step: StepTime) -> str:
    axes = (f"exposed {axis}" for axis in ("data", "pp", "tp"))
    return next((name for name in axes if name in step.parts), IDLE)


def slower_memory(step: StepTime, factor: float) -> StepTime:
    """Operations of a pass that only move memory take `factor` times as long; adding up gradients
    and the optimiser, which are other kernels, as long as before."""
    parts, recomputed = dict(step.parts), dict(step.recomputed)
    for name in ("memory", "quantisation"):
        parts[name] *= factor
    recomputed["memory"] *= factor
    parts["recomputation"] = sum(recomputed.values())
    return replace(step, parts=parts, recomputed=recomputed)


def scaled(step: StepTime, factors: Mapping[str, float]) -> StepTime:
    """A step whose `predicted_parts` are `factors` times as long; 1 for a line that has none."""
    recomputed = {k: s * factors.get(LINES[k], 1.0) for k, s in step.recomputed.items()}
    parts = {k: s * factors.get(LINES.get(k, k), 1.0) for k, s in step.parts.items()}
    parts["recomputation"] = sum(recomputed.values())
    names = ("products", "attention", "memory", "quantisation", "gradient accumulation")
    before, after = (
        sum(one[name] for name in (*names, "recomputation")) for one in (step.parts, parts)
    )
    parts["contention"] = step.parts["contention"] * (after / before if before else 1.0)
    parts["straggling"] = step.parts["straggling"] * factors.get(_widest(step), 1.0)
    return replace(step, parts=parts, recomputed=recomputed)
