"""How well the planner predicts runs that were measured: step time, memory, what fits, and which
layout is the fastest. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import correlation, median
from typing import Any

from stepwell.hardware import GIB
from stepwell.plan.calibration.memory import has_room, predicted_bytes
from stepwell.plan.calibration.published import Published
from stepwell.plan.calibration.table import (
    measurement,
    read_table,
    shipped_measurements,
    unquoted,
)
from stepwell.plan.steptime.coefficients import SHIPPED, Coefficients
from stepwell.plan.steptime.step import predict_step
from stepwell.types import ConfigError

TOP = 3
MOST_IDS = 5  # of rows with the same reason, by name
NUM_WORST = 5  # rows that the text names; --json has all


@dataclass(frozen=True)
class Prediction:
    """A run, what was measured (None: not printed) and what is predicted."""

    run: Published
    step_s: float
    mfu: float
    peak_bytes: float
    fits: bool

    @property
    def step_error(self) -> float | None:
        """Predicted over measured, less 1."""
        return self.step_s / self.run.step_s - 1 if self.run.step_s else None

    @property
    def memory_error(self) -> float | None:
        return self.peak_bytes / self.run.peak_bytes - 1 if self.run.peak_bytes else None


@dataclass(frozen=True)
class Errors:
    """Of num rows: the median of the absolute errors, the median error, and what nine in ten rows
    stay below."""

    num: int
    median_error: float
    bias: float
    ninth_decile: float


@dataclass(frozen=True)
class Sweep:
    """Layouts of one model on the same GPUs with the same batch, by one source: rank correlation of
    predicted and measured step times (Spearman), and which place the prediction gives the layout
    that was measured as the fastest (the best of those that tie)."""

    name: str
    num_layouts: int
    correlation: float
    place_of_best: int


@dataclass(frozen=True)
class Validation:
    """skipped: row -> why it could not be used; reasons: why -> how many. unread: columns that
    nothing looks at."""

    predictions: tuple[Prediction, ...]
    skipped: dict[str, str]
    reasons: dict[str, int]
    unread: tuple[str, ...] = ()

    def step_errors(self, by: Callable[[Published], str] = lambda run: "all") -> dict[str, Errors]:
        return _grouped(self.predictions, by, lambda p: p.step_error)

    def memory_errors(
        self, by: Callable[[Published], str] = lambda run: "all"
    ) -> dict[str, Errors]:
        return _grouped(self.predictions, by, lambda p: p.memory_error)

    def sweeps(self) -> list[Sweep]:
        return sweeps([(p.run, p.step_s) for p in self.predictions])

    def assumed(self) -> dict[str, int]:
        """What was taken where rows say nothing, values left out -> in how many."""
        return dict(Counter(unquoted(what) for p in self.predictions for what in p.run.assumed))

    def said_wrong(self) -> list[Prediction]:
        """Of those that are asked whether they fit."""
        return [p for p in self.predictions if _is_asked(p.run) and p.fits != p.run.fits]

    def fit_table(self) -> dict[str, int]:
        """Of runs that fitted and of those that ran out of memory, how many were predicted so; not
        of those that fitted with a recomputation that is not printed."""
        table = {"fits, right": 0, "fits, wrong": 0, "OOM, right": 0, "OOM, wrong": 0}
        for p in self.predictions:
            if not _is_asked(p.run):
                continue
            kind = "fits" if p.run.fits else "OOM"
            table[f"{kind}, {'right' if p.fits == p.run.fits else 'wrong'}"] += 1
        return table

    def as_json(self) -> dict[str, Any]:
        return {
            "num_rows": len(self.predictions) + len(self.skipped),
            "skipped": self.skipped,
            "reasons": self.reasons,
            "assumed": self.assumed(),
            "unread_columns": list(self.unread),
            "step_time": _plain(self.step_errors()),
            "step_time_by_source": _plain(self.step_errors(lambda r: r.source_key)),
            "step_time_by_gpu": _plain(self.step_errors(lambda r: r.job.cluster.name)),
            "step_time_by_family": _plain(self.step_errors(lambda r: r.family)),
            "memory": _plain(self.memory_errors()),
            "memory_by_kind": _plain(self.memory_errors(lambda r: r.mem_kind)),
            "fits": self.fit_table(),
            "sweeps": [vars(sweep) for sweep in self.sweeps()],
            "rank_correlation": mean_correlation(self.sweeps()),
            "rows": [_row(p) for p in self.predictions],
        }

    def lines(self) -> list[str]:
        found = [f"{_rows(len(self.predictions))} used, {len(self.skipped)} not"]
        found += _skipped_lines(self.skipped)
        found += [f"  assumed: {what}: {_rows(n)}" for what, n in sorted(self.assumed().items())]
        if self.unread:
            found.append(f"  columns that nothing reads: {', '.join(self.unread)}")
        if not self.predictions:
            return found
        shipped = shipped_measurements()
        if known := sum(measurement(p.run) in shipped for p in self.predictions):
            found.append(
                f"{known} of them are rows that the coefficients were fitted to: their errors "
                "are those of a fit, not of a prediction (docs/planner-calibration.md has the "
                "errors of rows left out)"
            )
        if timed := self.step_errors():
            found += error_lines("step time", timed)
            for name, by in GROUPS:
                found += error_lines(f"step time by {name}", self.step_errors(by))
            found += worst_lines(self.predictions)
        if held := self.memory_errors(lambda r: r.mem_kind):
            found += error_lines("peak memory by what was measured", held)
            found += worst_memory_lines(self.predictions)
        found += [f"fits / OOM: {', '.join(f'{k} {n}' for k, n in self.fit_table().items())}"]
        if wrong := self.said_wrong():
            found.append(f"  wrong: {_named([p.run.row_id for p in wrong])}")
        return found + sweep_lines(self.sweeps())


def _is_asked(run: Published) -> bool:
    return run.recompute_known or not run.fits


GROUPS: tuple[tuple[str, Callable[[Published], str]], ...] = (
    ("source", lambda run: run.source_key),
    ("GPU", lambda run: run.job.cluster.name),
    ("family", lambda run: run.family),
)


def validate(path: str | Path, coefficients: Coefficients = SHIPPED) -> Validation:
    """Scores the planner on a table of measured runs (`plan/calibration/table` says in what
    form). Raises DataError for a table that cannot be read or lacks columns."""
    table = read_table(path)
    found = score(table.runs, coefficients, table.skipped, table.reasons())
    return replace(found, unread=table.unread)


def score(
    runs: Iterable[Published],
    coefficients: Coefficients = SHIPPED,
    skipped: dict[str, str] | None = None,
    reasons: dict[str, int] | None = None,
) -> Validation:
    """Rows that no prediction can be made for join the skipped ones."""
    found, left_out, why = [], dict(skipped or {}), dict(reasons or {})
    for run in runs:
        try:
            found.append(_predict(run, coefficients))
        except ConfigError as error:
            left_out[run.row_id] = str(error)
            why["no prediction can be made"] = why.get("no prediction can be made", 0) + 1
    return Validation(tuple(found), left_out, why)


def _predict(run: Published, coefficients: Coefficients) -> Prediction:
    step = predict_step(run.job, coefficients)
    return Prediction(
        run=run,
        step_s=step.total_s,
        mfu=step.mfu,
        peak_bytes=predicted_bytes(run),
        fits=has_room(run),
    )


# --- errors ----------------------------------------------------------------------------------


def errors(values: Sequence[float]) -> Errors:
    """values: predicted over measured, less 1."""
    sizes = sorted(abs(value) for value in values)
    ninth = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return Errors(len(sizes), median(sizes), median(values), ninth)


def _grouped(
    predictions: Iterable[Prediction],
    by: Callable[[Published], str],
    error: Callable[[Prediction], float | None],
) -> dict[str, Errors]:
    groups: dict[str, list[float]] = defaultdict(list)
    for p in predictions:
        if (value := error(p)) is not None:
            groups[by(p.run)].append(value)
    return {name: errors(groups[name]) for name in sorted(groups)}


# --- sweeps ----------------------------------------------------------------------------------


def sweeps(rows: Iterable[tuple[Published, float]]) -> list[Sweep]:
    """rows: run, predicted seconds. Sweeps have at least three layouts that were measured to
    differ; of repeats of one layout the median counts."""
    groups: dict[tuple[Any, ...], dict[Any, list[tuple[float, float]]]] = {}
    for run, predicted in rows:
        if run.step_s is not None:
            layouts = groups.setdefault(sweep_of(run), {})
            layouts.setdefault(run.job.layout, []).append((run.step_s, predicted))
    found = [_sweep(key, layouts) for key, layouts in groups.items() if len(layouts) >= 3]
    return [sweep for sweep in found if sweep is not None]


def sweep_of(run: Published) -> tuple[Any, ...]:
    layout = run.job.layout
    batch = (layout.seq_len, layout.global_batch_rows)
    kind = (run.precision, run.workload)
    return run.source_key, run.job.dims.name, run.job.cluster.name, layout.num_gpus, *batch, *kind


def _sweep(key: tuple[Any, ...], layouts: dict[Any, list[tuple[float, float]]]) -> Sweep | None:
    measured = [median(step for step, _ in repeats) for repeats in layouts.values()]
    predicted = [repeats[0][1] for repeats in layouts.values()]
    if min(measured) == max(measured) or min(predicted) == max(predicted):
        return None
    rank_correlation = correlation(_ranks(measured), _ranks(predicted))
    best = min(measured)
    places = sorted(range(len(predicted)), key=lambda i: predicted[i])
    place = min(place for place, i in enumerate(places, 1) if measured[i] == best)
    source, model, gpu, num_gpus, seq_len, batch, precision, _ = key
    name = f"{source}: {model} on {num_gpus} {gpu}, {batch} x {seq_len}, {precision}"
    return Sweep(name, len(layouts), rank_correlation, place)


def _ranks(values: Sequence[float]) -> list[float]:
    """Equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(x) + (ordered.count(x) + 1) / 2 for x in values]


def mean_correlation(found: Sequence[Sweep]) -> float | None:
    """Weighted by the number of layouts; None without a sweep."""
    total = sum(sweep.num_layouts for sweep in found)
    if not total:
        return None
    return sum(sweep.num_layouts * sweep.correlation for sweep in found) / total


# --- as text ---------------------------------------------------------------------------------


def _plain(groups: dict[str, Errors]) -> dict[str, dict[str, float]]:
    return {name: vars(one) for name, one in groups.items()}


def _row(p: Prediction) -> dict[str, Any]:
    run = p.run
    return {
        "id": run.row_id,
        "step_time_s": p.step_s,
        "measured_step_time_s": run.step_s,
        "step_error": p.step_error,
        "mfu": p.mfu,
        "peak_mem_gib": p.peak_bytes / GIB,
        "measured_peak_mem_gib": run.peak_bytes / GIB if run.peak_bytes else None,
        "memory_error": p.memory_error,
        "fits": p.fits,
        "measured_fits": run.fits,
        "assumed": list(run.assumed),
    }


def _skipped_lines(skipped: dict[str, str]) -> list[str]:
    """By reason, with its values, and the rows that have it."""
    rows: dict[str, list[str]] = defaultdict(list)
    for row_id, why in skipped.items():
        rows[why].append(row_id)
    return [f"  not used: {why}: {_named(ids)}" for why, ids in sorted(rows.items())]


def _rows(num: int) -> str:
    return f"{num:,} row" if num == 1 else f"{num:,} rows"


def _named(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - MOST_IDS} more" if len(ids) > MOST_IDS else ""
    return ", ".join(ids[:MOST_IDS]) + more


def worst_lines(predictions: Iterable[Prediction]) -> list[str]:
    """The rows whose step time is furthest off."""
    errors = [(p.step_error, p) for p in predictions if p.step_error is not None]
    return [
        f"{'furthest off in step time':<44}{'predicted':>10}{'measured':>11}",
        *(
            f"  {p.run.row_id + ' ' + p.run.job.dims.name:<42}{p.step_s:>8.3g} s"
            f"{p.run.step_s:>9.3g} s{100 * error:>+7.0f} %"
            for error, p in sorted(errors, key=lambda pair: -abs(pair[0]))[:NUM_WORST]
        ),
    ]


def worst_memory_lines(predictions: Iterable[Prediction]) -> list[str]:
    errors = [
        (p.memory_error, p, p.run.peak_bytes)
        for p in predictions
        if p.memory_error is not None and p.run.peak_bytes is not None
    ]
    return [
        f"{'furthest off in memory, GiB':<44}{'predicted':>10}{'measured':>11}",
        *(
            f"  {p.run.row_id + ' ' + p.run.job.dims.name:<42}{p.peak_bytes / GIB:>10.1f}"
            f"{measured / GIB:>11.1f}{100 * error:>+7.0f} %"
            for error, p, measured in sorted(errors, key=lambda one: -abs(one[0]))[:NUM_WORST]
        ),
    ]


def error_lines(title: str, groups: dict[str, Errors]) -> list[str]:
    """A table of errors by group."""
    rows = [f"{title:<44}{'rows':>6}{'median error':>14}{'bias':>9}{'9 in 10':>9}"]
    for name, one in groups.items():
        percent = f"{100 * one.median_error:>12.1f} %{100 * one.bias:>+7.1f} %"
        rows.append(
            f"  {name or 'unnamed':<42}{one.num:>6}{percent}{100 * one.ninth_decile:>7.0f} %"
        )
    return rows


def sweep_lines(found: list[Sweep]) -> list[str]:
    mean = mean_correlation(found)
    if mean is None:
        return ["no sweep of at least three layouts"]
    top = sum(sweep.place_of_best <= TOP for sweep in found)
    rows = [
        f"  {s.name:<66}{s.num_layouts:>3} layouts{s.correlation:>6.2f}, best: {s.place_of_best}."
        for s in found
    ]
    middle = median(sweep.correlation for sweep in found)
    head = (
        f"{len(found)} sweeps: rank correlation {mean:.2f} (mean by layouts), {middle:.2f} (median)"
    )
    return [f"{head}; the fastest is among our first {TOP} in {top}", *rows]
