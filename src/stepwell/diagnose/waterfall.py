"""Where a step's time goes between the hardware's peak and the achieved MFU.

The kernels of one profiled step are sorted into matrix products, attention, the optimiser,
collectives and everything else (which moves memory). What products and attention need at the peak
rate is useful; the rest of their time, and all of the others', is lost, each under its own name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from stepwell.plan.measured.parts import COMPUTING, OTHER, category, covered_once, length


class Kernel(NamedTuple):
    """start_s, end_s: on one clock."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Waterfall:
    """Seconds of one step; they add up to step_s. ideal: the model's FLOPs at the peak. recomputed:
    further FLOPs at the peak. below_peak: what products and attention take beyond that."""

    step_s: float
    ideal_s: float
    recomputed_s: float
    below_peak_s: float
    memory_bound_s: float
    optimizer_s: float
    collectives_s: float
    idle_s: float

    @property
    def mfu(self) -> float:
        return self.ideal_s / self.step_s

    def lines(self) -> list[str]:
        """From the peak down to the MFU, in percent of the step."""
        parts = {
            "recomputation": self.recomputed_s,
            "products and attention below the peak rate": self.below_peak_s,
            "memory-bound kernels": self.memory_bound_s,
            "optimizer": self.optimizer_s,
            "exposed collectives": self.collectives_s,
            "idle (launches, host)": self.idle_s,
        }
        left, lines = 1.0, ["100.0 %  peak"]
        for name, seconds in parts.items():
            left -= seconds / self.step_s
            lines.append(f"{100 * left:5.1f} %  after {name} (-{100 * seconds / self.step_s:.1f})")
        return lines


def waterfall(
    kernels: Iterable[Kernel],
    step_s: float,
    model_flops: float,
    recomputed_flops: float,
    peak_flops_per_s: float,
) -> Waterfall:
    """One step of `step_s` seconds. Where kernels overlap, the time is counted once: products and
    attention first, collectives last, so that only exposed collectives count.

    Raises ValueError when the kernels take longer than the step.
    """
    by_category: dict[str, list[tuple[float, float]]] = {}
    for kernel in kernels:
        found = by_category.setdefault(category(kernel.name), [])
        found.append((kernel.start_s, kernel.end_s))
    seconds, taken = covered_once(by_category, (*COMPUTING, "collectives"))
    covered, spent = length(taken), defaultdict(float, seconds)
    if covered > step_s * 1.001:
        raise ValueError(f"kernels take {covered:.4f} s of a step of {step_s:.4f} s")
    ideal, recomputed = (flops / peak_flops_per_s for flops in (model_flops, recomputed_flops))
    return Waterfall(
        step_s=step_s,
        ideal_s=ideal,
        recomputed_s=recomputed,
        below_peak_s=spent["products"] + spent["attention"] - ideal - recomputed,
        memory_bound_s=spent[OTHER],
        optimizer_s=spent["optimizer"],
        collectives_s=spent["collectives"],
        idle_s=step_s - covered,
    )


def profiled_kernels(profiler: Any, device_type: str) -> list[Kernel]:
    """Kernels of a finished torch profiler; on a CPU, operators' own time laid end to end."""
    if device_type == "cpu":
        kernels, now = [], 0.0
        for event in profiler.key_averages():
            seconds = event.self_cpu_time_total * 1e-6
            kernels.append(Kernel(event.key, now, now + seconds))
            now += seconds
        return kernels
    return [
        Kernel(event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in profiler.events()
        if str(event.device_type).endswith("CUDA")
    ]
