"""A run, or a whole quickstart, as one self-contained HTML page.

`ReportData` is plain values that any command can fill; whatever is missing is left out of the
page. Every text is escaped: samples may contain HTML.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from stepwell.config import Run
from stepwell.diagnose import charts
from stepwell.diagnose.rollouts import Changes, Line, headline_lines, read_changes, said
from stepwell.files import write_text
from stepwell.hardware import device_kind
from stepwell.metrics import clock_text, read_events, read_lines, read_metrics, series
from stepwell.plan.memory.ledger import predict_memory
from stepwell.types import DataError, StepwellError

MAX_EVENTS = 100
MAX_SAMPLES = 12


@dataclass(frozen=True)
class Stage:
    """tokens: seen in training. settings: shown as name = value. result: one line of text."""

    name: str
    seconds: float | None = None
    tokens: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    result: str = ""


@dataclass(frozen=True)
class Funnel:
    """Documents of curation: how many came in, how many were dropped for each reason, and kept.
    kept_by_source: documents that stayed, by source."""

    documents_in: int
    dropped: Mapping[str, int]
    documents_kept: int
    kept_by_source: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Curve:
    """A quantity over the steps. phases: (name, first step, last step), e.g. of WSD.
    percent: values are fractions. others: further lines (name, steps, values), e.g. held out."""

    title: str
    steps: Sequence[int]
    values: Sequence[float]
    y_label: str = ""
    name: str = "training"
    phases: Sequence[tuple[str, float, float]] = ()
    percent: bool = False
    others: Sequence[tuple[str, Sequence[int], Sequence[float]]] = ()


@dataclass(frozen=True)
class Accuracy:
    """Held-out accuracy after a stage, as fractions; low and high: bootstrap interval."""

    stage: str
    value: float
    low: float | None = None
    high: float | None = None
    num_problems: int | None = None


@dataclass(frozen=True)
class Speed:
    """A stage's throughput over its steps (the median is shown)."""

    stage: str
    steps: Sequence[int]
    tokens_per_s: Sequence[float]
    mfu: Sequence[float] = ()


@dataclass(frozen=True)
class MemoryRow:
    """measured_bytes: None where an item cannot be told apart by measuring."""

    item: str
    predicted_bytes: float
    measured_bytes: float | None = None


@dataclass(frozen=True)
class Answer:
    """correct: None when it was not judged."""

    stage: str
    text: str
    correct: bool | None = None


@dataclass(frozen=True)
class Sample:
    prompt: str
    answers: Sequence[Answer]
    expected: str = ""


@dataclass(frozen=True)
class Figure:
    """A number for the top of the page, ready to read: `Figure("bits per byte", "1.234")`."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class ReportData:
    """Everything on the page; each field may be left out.

    summary: a paragraph under the title. figures: numbers for the top, before the ones derived
    here. accuracy_note: what the problems are and how they were kept apart. peak_flops_per_s,
    peak_source, flop_convention: what MFU is measured by. changes: answers to the same prompts
    before and after training on one's own samples. config: name -> text of a resolved configuration
    (TOML). versions: package -> version.
    """

    title: str = "Stepwell report"
    summary: str = ""
    figures: Sequence[Figure] = ()
    stages: Sequence[Stage] = ()
    funnel: Funnel | None = None
    curves: Sequence[Curve] = ()
    rewards: Sequence[Curve] = ()
    accuracy: Sequence[Accuracy] = ()
    accuracy_note: str = ""
    speed: Sequence[Speed] = ()
    peak_flops_per_s: float | None = None
    peak_source: str = ""
    flop_convention: str = ""
    memory: Sequence[MemoryRow] = ()
    memory_note: str = ""
    samples: Sequence[Sample] = ()
    changes: Changes = field(default_factory=Changes)
    events: Sequence[Mapping[str, Any]] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: str = ""


def write_report(source: str | Path | ReportData, path: str | Path) -> Path:
    """Writes the page for a run's folder or for `ReportData`, whole or not at all.

    Raises DataError for a folder without a run, StepwellError when `path` cannot be written.
    """
    data = source if isinstance(source, ReportData) else read_run(source)
    path = Path(path)
    try:
        write_text(path, render(data))
    except OSError as error:
        raise StepwellError(f"cannot write {path}: {error.strerror}") from error
    return path


def render(data: ReportData) -> str:
    """The page as a string."""
    import jinja2

    folder = resources.files("stepwell.diagnose")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        count=count_text,
        seconds=seconds_text,
        percent=percent_text,
        bytes=bytes_text,
        flops=flops_text,
        score=score_text,
    )
    template = environment.from_string(folder.joinpath("report.html.j2").read_text("utf-8"))
    return template.render(
        data=data,
        figures=[*data.figures, *headline(data)],
        funnel=funnel_rows(data.funnel) if data.funnel else [],
        curves=[_curve_svg(curve) for curve in data.curves],
        rewards=[_curve_svg(curve) for curve in data.rewards],
        accuracy_chart=_accuracy_svg(data.accuracy) if data.accuracy else "",
        speed_chart=_speed_svg(data.speed) if any(s.steps for s in data.speed) else "",
        speed=[(s.stage, median(s.tokens_per_s), median(s.mfu)) for s in data.speed],
        memory_chart=_memory_svg(data.memory) if data.memory else "",
        memory=memory_rows(data.memory),
        samples=data.samples[:MAX_SAMPLES],
        changes=data.changes.rows[:MAX_SAMPLES],
        event_counts=Counter(str(e.get("event", "?")) for e in data.events).most_common(),
        events=[event_row(event) for event in data.events[:MAX_EVENTS]],
    )


# --- what is said of the data ----------------------------------------------------------------


def headline(data: ReportData) -> list[Figure]:
    """The numbers for the top that follow from the rest."""
    found = []
    if len(data.accuracy) > 1:
        before, after = data.accuracy[-2:]
        points = 100 * (after.value - before.value)
        note = f"{points:+.1f} points over {before.stage}"
        found.append(Figure(f"accuracy after {after.stage}", percent_text(after.value), note))
    elif data.accuracy:
        only = data.accuracy[0]
        found.append(Figure(f"accuracy after {only.stage}", percent_text(only.value)))
    seconds = [s.seconds for s in data.stages if s.seconds is not None]
    if seconds:
        many = f"{len(seconds)} stages" if len(seconds) > 1 else data.stages[0].name
        found.append(Figure("time", seconds_text(sum(seconds)), many))
    tokens = [s.tokens for s in data.stages if s.tokens is not None]
    if tokens:
        found.append(Figure("tokens trained on", count_text(sum(tokens))))
    if data.speed:
        first = data.speed[0]
        rate, mfu = median(first.tokens_per_s), median(first.mfu)
        if rate is not None:
            note = f"{first.stage}" + (f", MFU {percent_text(mfu)}" if mfu is not None else "")
            found.append(Figure("tokens/s", count_text(round(rate)), note))
    return found


def funnel_rows(funnel: Funnel) -> list[tuple[str, int, float, str]]:
    """(label, documents, share of those that came in, kind), the largest drop first."""
    total = max(funnel.documents_in, 1)
    drops = sorted(funnel.dropped.items(), key=lambda item: -item[1])
    rows = [("came in", funnel.documents_in, "in")]
    rows += [(reason, count, "dropped") for reason, count in drops]
    rows += [("kept", funnel.documents_kept, "kept")]
    rows += [(f"kept: {name}", n, "source") for name, n in funnel.kept_by_source.items()]
    return [(label, count, count / total, kind) for label, count, kind in rows]


def memory_rows(rows: Sequence[MemoryRow]) -> list[tuple[MemoryRow, float | None]]:
    """Each row with its error: predicted / measured - 1."""
    return [
        (row, row.predicted_bytes / row.measured_bytes - 1 if row.measured_bytes else None)
        for row in rows
    ]


def event_row(event: Mapping[str, Any]) -> tuple[str, str, str]:
    """(step, kind, details)"""
    rest = {k: v for k, v in event.items() if k not in ("event", "step", "time")}
    details = ", ".join(f"{name}: {_short(value)}" for name, value in rest.items())
    return str(event.get("step", "")), str(event.get("event", "?")), details


def _short(value: Any, most: int = 300) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= most else text[: most - 1] + "…"


def median(values: Sequence[float]) -> float | None:
    finite = sorted(v for v in values if math.isfinite(v))
    if not finite:
        return None
    middle = len(finite) // 2
    return finite[middle] if len(finite) % 2 else (finite[middle - 1] + finite[middle]) / 2


# --- a run's folder --------------------------------------------------------------------------


def read_run(run_dir: str | Path) -> ReportData:
    """A single run's report from its folder; only `run.toml` and `metrics.jsonl` must be there."""
    from stepwell.hardware import software_versions

    folder = Path(run_dir)
    if not (folder / "run.toml").exists():
        raise DataError(f"{folder} has no run.toml: not a run's folder")
    run = Run.load(folder / "run.toml")
    rows = read_metrics(folder)
    steps, losses = series(rows, "train/loss")
    rate_steps, rates = series(rows, "speed/tokens_per_s")
    held_out = [(key, *series(rows, key)) for key in _keys(rows, "eval/")]
    spent, tokens = (
        over_all_steps(rows, key, run.train.log_every) for key in ("time/step_s", "train/tokens")
    )
    stage = Stage(
        name=run.method.kind,
        seconds=spent,
        tokens=None if tokens is None else round(tokens),
        settings={
            "steps": f"{rows[-1]['step'] if rows else 0} of {run.train.steps}",
            "learning rate": run.optim.lr,
            "schedule": run.optim.schedule.kind,
            "precision": run.precision.compute,
        },
    )
    curve = Curve(
        "Training loss", steps, losses, "loss", phases=wsd_phases(run), others=_losses(held_out)
    )
    changes = read_changes(folder / "samples.jsonl")
    samples = [] if changes.rows else _read_samples(folder / "samples.jsonl", run.method.kind)
    return ReportData(
        title=run.name,
        stages=[stage],
        curves=[curve] if steps else [],
        rewards=[_curve(line) for line in headline_lines(rows)],
        speed=[Speed(run.method.kind, rate_steps, rates, series(rows, "speed/mfu")[1])]
        if rates
        else [],
        memory=[MemoryRow(name, size) for name, size in _predicted(run).items()],
        memory_note=_memory_note(rows),
        samples=samples,
        changes=changes,
        events=read_events(folder),
        config={"run.toml": (folder / "run.toml").read_text("utf-8")},
        versions=software_versions(),
    )


def _curve(line: Line) -> Curve:
    return Curve(
        line.title, line.steps, line.values, line.y_label, line.name, (), line.percent, line.others
    )


def _predicted(run: Run) -> dict[str, float]:
    """The items of one process's training step at its highest point."""
    items = asdict(predict_memory(run, device=device_kind()).items)
    return {"peak of a step": sum(items.values()), **{k: v for k, v in items.items() if v}}


def _memory_note(rows: list[dict[str, Any]]) -> str:
    note = "Predicted for one process, before the run."
    peaks = series(rows, "memory/peak_bytes")[1]
    if peaks:
        note += f" The process as a whole, with its libraries, came to {bytes_text(max(peaks))}."
    return note


def over_all_steps(rows: list[dict[str, Any]], key: str, log_every: int) -> float | None:
    """The sum over all steps of what is logged of every so many: a line stands for the steps since
    the last one. None without a line."""
    steps, values = series(rows, key)
    # The first line of a branch is not the first step's.
    gaps = [min(step - before, log_every) for before, step in pairwise([0, *steps])]
    return sum(g * v for g, v in zip(gaps, values, strict=True)) if steps else None


def _keys(rows: list[dict[str, Any]], prefix: str) -> list[str]:
    return sorted({key for row in rows for key in row if key.startswith(prefix)})


def _losses(found: list[tuple[str, list[int], list[float]]]):
    return [item for item in found if item[0].endswith("loss")]


def wsd_phases(run: Run) -> list[tuple[str, float, float]]:
    """The phases of a WSD schedule for `Curve.phases`; none for other schedules."""
    schedule, last = run.optim.schedule, run.train.steps
    if schedule.kind != "wsd":
        return []
    decay = last - schedule.decay_steps
    spans = [
        ("warm-up", 0, schedule.warmup_steps),
        ("stable", schedule.warmup_steps, decay),
        ("decay", decay, last),
    ]
    return [span for span in spans if span[2] > span[1]]


def _read_samples(path: Path, stage: str) -> list[Sample]:
    """The last samples of a file of {prompt, completion (or text), expected?, correct? or
    reward?} lines, one for each prompt; a reward of 1 is right. A half last line is left out."""
    latest: dict[str, Sample] = {}
    for row in read_lines(path):
        correct = row.get("correct", None if row.get("reward") is None else row["reward"] >= 1)
        answer = Answer(str(row.get("stage", stage)), said(row), correct)
        prompt = str(row.get("prompt", ""))
        latest.pop(prompt, None)
        expected = row.get("expected", row.get("answer", ""))
        latest[prompt] = Sample(prompt, [answer], str(expected))
    return list(latest.values())[-MAX_SAMPLES:]


# --- text ------------------------------------------------------------------------------------


def count_text(value: float | None) -> str:
    """`12,345`; from ten million on `12.3 M`; `–` for None."""
    if value is None:
        return "–"
    if abs(value) >= 1e9:
        return f"{value / 1e9:.2f} B"
    return f"{value / 1e6:.1f} M" if abs(value) >= 1e7 else f"{value:,.0f}"


def score_text(value: float | None) -> str:
    """A reward, or `–` where there is none."""
    return "–" if value is None else f"{value:.3g}"


def seconds_text(value: float | None) -> str:
    """`4.2 s` under a minute, else `1:05` or `2:01:05`."""
    if value is None:
        return "–"
    return f"{value:.1f} s" if value < 59.95 else clock_text(value)


def percent_text(value: float | None) -> str:
    return "–" if value is None else f"{round(100 * value, 1) + 0.0:.1f} %"


def bytes_text(value: float | None) -> str:
    """`155.0 MiB`, from 1 GiB on `1.50 GiB`."""
    if value is None:
        return "–"
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def flops_text(value: float | None) -> str:
    """`989.4 TFLOP/s`, `412 GFLOP/s`."""
    if value is None:
        return "–"
    return f"{value / 1e12:,.1f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:,.0f} GFLOP/s"


# --- charts ----------------------------------------------------------------------------------


def _curve_svg(curve: Curve) -> tuple[Curve, str]:
    lines = [(curve.name, curve.steps, curve.values), *curve.others]
    svg = charts.line_chart(
        curve.title,
        lines,
        y_label=curve.y_label,
        phases=curve.phases,
        percent=curve.percent,
        y_from_zero=curve.percent,
    )
    return curve, svg


def _accuracy_svg(rows: Sequence[Accuracy]) -> str:
    bars = [(r.stage, r.value, r.low, r.high, percent_text(r.value)) for r in rows]
    return charts.bar_chart("Held-out accuracy by stage", bars, y_label="accuracy", percent=True)


def _speed_svg(rows: Sequence[Speed]) -> str:
    lines = [(row.stage, row.steps, row.tokens_per_s) for row in rows if row.steps]
    return charts.line_chart("Throughput", lines, y_label="tokens/s", y_from_zero=True)


def _memory_svg(rows: Sequence[MemoryRow]) -> str:
    scaled = [
        (r.item, r.predicted_bytes / 2**20, r.measured_bytes and r.measured_bytes / 2**20)
        for r in rows
    ]
    return charts.paired_bar_chart("Memory by item", scaled, x_label="MiB")
