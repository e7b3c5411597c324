"""From a device's peak to the MFU of a step: what each loss costs. No torch."""

from __future__ import annotations

from typing import NamedTuple

from stepwell.plan.steptime.step import StepTime

CONVENTION = "causal attention counted by half, nothing recomputed counted"
LEAST_SHARE = 5e-4  # of a step, below which a loss is not worth a line


class Loss(NamedTuple):
    """share: of the step."""

    name: str
    seconds: float
    share: float


def waterfall(step: StepTime) -> list[Loss]:
    """The useful FLOPs at the datasheet's peak, then what is lost, largest part of the machine
    first; the seconds add up to the step's, the first share is its MFU (CONVENTION)."""
    parts = dict(step.parts)
    products, attention = parts.pop("products"), parts.pop("attention")
    found = [
        ("useful FLOPs at peak", step.product_peak_s + step.attention_peak_s),
        ("products below peak", products - step.product_peak_s),
        ("attention below peak", attention - step.attention_peak_s),
        *parts.items(),
    ]
    total = step.total_s
    return [Loss(name, seconds, seconds / total) for name, seconds in found if seconds]


def lines(step: StepTime) -> list[str]:
    """A table with the share of the peak that is left after each loss."""
    left, rows = 1.0, []
    losses = waterfall(step)
    for name, seconds, share in losses[1:]:
        left -= share
        rows.append(f"{name:<24}{seconds:>10.3f} s{-100 * share:>8.1f} %{100 * left:>8.1f} %")
    return [
        f"{'step':<24}{step.total_s:>10.3f} s{'':>10}{100.0:>8.1f} %",
        *rows,
        f"MFU {100 * step.mfu:.1f} % of {step.peak_flops_per_s / 1e12:.0f} TFLOP/s ({CONVENTION})",
    ]
