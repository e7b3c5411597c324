"""Fits the coefficients of the step time to published runs, and says how well they predict runs
that they were not fitted to. No torch.

The residual is the logarithm of predicted over measured. Rows that repeat one configuration share
one row's weight; rows whose layout is not printed whole (quality B) count half, rows whose authors
state that runs vary by tens of percent a tenth; a loss that is linear in the tails keeps odd rows
from deciding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np
from scipy.optimize import least_squares

from stepwell.plan.calibration.published import Published
from stepwell.plan.calibration.validation import (
    Errors,
    Sweep,
    error_lines,
    errors,
    sweep_lines,
    sweeps,
)
from stepwell.plan.steptime.coefficients import SHIPPED, Coefficients
from stepwell.plan.steptime.step import Ledger, ledger, price
from stepwell.types import DataError

# Error, in logarithms, from which on a row counts linearly.
TAIL = 0.1
# What is known before any run: value, and the spread (in logarithms) that a coefficient is given.
PRIORS: dict[str, tuple[float, float]] = {
    "matmul_16": (0.9, 0.1),  # of the fastest product ever measured
    "matmul_8": (0.85, 0.15),
    "matmul_4": (0.75, 0.2),
    "sustained": (0.95, 0.1),
    "attention": (0.6, 0.2),  # FlashAttention-2 on A100, 2307.08691; -3 on H100, 2407.08608
    "attention_older": (0.6, 0.2),  # 2407.08608: FlashAttention-2 on H100
    "attention_triton": (0.75, 0.2),
    "memory": (0.85, 0.1),  # STREAM-like copies
    "eager": (2.0, 0.3),
    "scaleup": (0.75, 0.15),  # nccl-tests: bus rates of NVLink
    "network": (0.8, 0.2),  # nccl-tests: InfiniBand, RoCE
    "hop_s": (2e-5, 0.7),
    "launch_s": (1.5e-5, 0.3),
    "contention": (0.3, 0.5),
    "straggling": (3e-3, 0.7),
}
# A prior's weight, in rows.
PRIOR_ROWS = 2.0
FARTHEST = 2.0  # spreads from the prior that a coefficient may go

Row = tuple[Published, Ledger]


def ledgers(runs: Iterable[Published]) -> list[Row]:
    """Of the runs with a measured step time. Equal jobs share a ledger."""
    known: dict[Hashable, Ledger] = {}
    found = []
    for run in runs:
        if run.step_s is not None:
            if run.job not in known:
                known[run.job] = ledger(run.job)
            found.append((run, known[run.job]))
    return found


def weights(runs: Sequence[Published]) -> np.ndarray:
    repeats = Counter(run.config_key for run in runs)
    return np.array([_trust(run) / repeats[run.config_key] for run in runs])


def _trust(run: Published) -> float:
    if re.search(r"\+/-\d+% run-to-run", run.notes):
        return 0.1
    return 1.0 if run.quality == "A" else 0.5


def log_ratios(rows: Sequence[Row], coefficients: Coefficients) -> np.ndarray:
    """log(predicted / measured) of each row."""
    seconds: dict[int, float] = {}
    out = []
    for run, counted in rows:
        key = id(counted)
        if key not in seconds:
            seconds[key] = price(counted, coefficients).total_s
        out.append(log(seconds[key] / run.step_s))  # type: ignore[operator]
    return np.array(out)


def prior() -> Coefficients:
    """What one would say without a measured run."""
    return Coefficients(**{name: value for name, (value, _) in PRIORS.items()})


def fit(
    rows: Sequence[Row],
    start: Coefficients | None = None,
    free: Sequence[str] = tuple(PRIORS),
    max_evaluations: int = 40,
) -> Coefficients:
    """The coefficients named in `free` that predict `rows` best; the others stay as in `start`
    (None: the priors).

    Raises DataError for fewer rows than coefficients.
    """
    start = start or prior()
    if len(rows) < len(free):
        raise DataError(f"{len(rows)} runs cannot decide {len(free)} coefficients; give more runs")
    center = np.log([PRIORS[name][0] for name in free])
    spread = np.array([PRIORS[name][1] for name in free])
    low, high = center - FARTHEST * spread, center + FARTHEST * spread
    given = start.as_dict()
    x0 = np.clip(np.log([given[name] for name in free]), low + 1e-6, high - 1e-6)
    root = np.sqrt(weights([run for run, _ in rows]))

    def with_values(x: np.ndarray) -> Coefficients:
        return start.changed(**{name: exp(value) for name, value in zip(free, x, strict=True)})

    def residuals(x: np.ndarray) -> np.ndarray:
        # The loss bends on the unweighted error; the weight scales what it gives.
        e = log_ratios(rows, with_values(x)) / TAIL
        data = root * np.sign(e) * np.sqrt(2 * (np.sqrt(1 + e * e) - 1))
        return np.concatenate([data, np.sqrt(PRIOR_ROWS) * (x - center) / spread])

    found = least_squares(
        residuals, x0, bounds=(low, high), x_scale=0.2, diff_step=1e-3, max_nfev=max_evaluations
    )
    return with_values(found.x)


@dataclass(frozen=True)
class LeftOut:
    """Predictions of every group by coefficients that were fitted to the other groups."""

    groups: dict[str, Errors]
    all: Errors
    sweeps: list[Sweep]

    def lines(self, title: str) -> list[str]:
        return [
            *error_lines(f"left out whole: {title}", self.groups),
            *error_lines("all rows, each predicted while its group was left out", {"": self.all}),
            *sweep_lines(self.sweeps),
        ]


def leave_out(rows: Sequence[Row], group: Callable[[Published], str], start: Coefficients):
    """Cross-validation by whole groups: of sources, or of model families. start: near the answer,
    so that each fit takes few steps."""
    seconds = [0.0] * len(rows)
    for name in sorted({group(run) for run, _ in rows}):
        others = [row for row in rows if group(row[0]) != name]
        found = fit(others, start, max_evaluations=8)
        for i, (run, counted) in enumerate(rows):
            if group(run) == name:
                seconds[i] = price(counted, found).total_s
    runs = [run for run, _ in rows]
    off = [s / run.step_s - 1 for s, run in zip(seconds, runs, strict=True)]  # type: ignore[operator]
    by_group: dict[str, list[float]] = {}
    for run, error in zip(runs, off, strict=True):
        by_group.setdefault(group(run), []).append(error)
    groups = {name: errors(by_group[name]) for name in sorted(by_group)}
    return LeftOut(groups, errors(off), sweeps(zip(runs, seconds, strict=True)))


def report(runs: Iterable[Published]) -> list[str]:
    """A fit, and both cross-validations, as text."""
    rows = ledgers(runs)
    found = fit(rows)
    lines = ["coefficients fitted to all rows (shipped)"]
    shipped = SHIPPED.as_dict()
    lines += [f"  {k:<18}{v:>10.3g}{shipped[k]:>12.3g}" for k, v in found.as_dict().items()]
    lines += leave_out(rows, lambda run: run.source_key, found).lines("a source")
    return lines + leave_out(rows, lambda run: run.family, found).lines("a family of models")
