"""What was measured, from a trace or from a run's folder. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

from stepwell.config import Run
from stepwell.metrics import METRICS_FILE, read_metrics
from stepwell.plan.job import Job
from stepwell.plan.measured.compare import compare
from stepwell.plan.measured.gap import Gap, check_explained, check_possible, gap
from stepwell.plan.measured.likeness import sent_like
from stepwell.plan.measured.parts import parts_of
from stepwell.plan.measured.trace import Trace, read_trace
from stepwell.plan.search.runs import short
from stepwell.plan.steptime.step import predict_step
from stepwell.sections.methods import SampledMethod
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError, DataError

TRACES = "traces"
TRACE_NAME = re.compile(r"step-(\d+)-rank-(\d+)\.json(\.gz)?$")
WARM_UP = 0.2  # of a run's steps, which its time is not judged by
# What a step's time depends on, of a recipe.
SECTIONS = ("model", "lora", "layout", "remat", "offload", "precision", "optim.kind")
KEYS = ("data.seq_len", "train.global_batch_rows", "train.micro_batch_rows", "method.kind")


def measured_at(
    path: Path, job: Job, config: ModelConfig | None, run: Run | None = None, deep: bool = True
) -> Gap:
    """The gap of the job's step to that of a trace or a run's folder. run: the recipe that is
    planned, None for a model. deep: as in `compare`. Raises ConfigError for a trace or a run of
    something else, DataError for one that holds no step."""
    if not path.is_dir():
        trace = read_trace(path)
        like = job if run is not None else _like(trace, job)
        told = "" if like is job else f"; compared with {short(like.layout)}, which sends as much"
        return _of_trace(path, trace, like, config, run, deep, told)
    if run is None:
        raise ConfigError(
            f"--measured {path}: a run's folder is of a recipe; plan that one: stepwell plan "
            f"{path / 'run.toml'} --measured {path}"
        )
    _check_same(path, run)
    trace = newest_trace(path)
    if trace is None and isinstance(run.method, SampledMethod):
        raise ConfigError(
            f"--measured {path}: a step of {run.method.kind} samples and scores, too, so its time "
            "does not say how long the training pass took that is planned; give that one's seconds "
            "(--measured step_s=), or a trace"
        )
    if trace is None:
        seconds, num_steps = step_seconds(path)
        text = f"{path}, the median of {num_steps:,} steps"
        step = predict_step(job)
        check_explained(check_possible(seconds, str(path), job, step), str(path), job, step)
        return gap(job, seconds, config, text)
    beside = ""
    if (path / METRICS_FILE).is_file():  # a folder may have been copied without it
        seconds, num_steps = step_seconds(path)
        beside = f"; the median of {num_steps:,} steps in {METRICS_FILE} is {seconds:.4g} s"
    return _of_trace(trace, read_trace(trace), job, config, run, deep, beside)


def _like(trace: Trace, job: Job) -> Job:
    data = parts_of(trace, job.layout).messages.get("data")
    return job if data is None else sent_like(data.wire_bytes, job)


def _of_trace(
    path: Path,
    trace: Trace,
    job: Job,
    config: ModelConfig | None,
    run: Run | None,
    deep: bool,
    beside: str,
) -> Gap:
    found = compare(trace, job, config, deep, run)
    measured = found.measured
    step = predict_step(job)
    check_possible(measured.step_s, str(path), job, step)
    many = "one whole step" if measured.num_steps == 1 else f"{measured.num_steps} whole steps"
    rank = "" if trace.rank is None else f" of rank {trace.rank}"
    text = f"{path}, {many}{rank}{beside}"
    return Gap(measured.step_s, step.total_s, (), text, found)


def newest_trace(folder: Path) -> Path | None:
    """That of the last step, and of its lowest rank."""
    found = [(path, TRACE_NAME.match(path.name)) for path in (folder / TRACES).glob("*.json*")]
    numbers = {path: (int(m[1]), -int(m[2])) for path, m in found if m is not None}
    return max(numbers, key=numbers.__getitem__, default=None)


def step_seconds(folder: Path) -> tuple[float, int]:
    """The median of a run's steps after its first fifth (compiling, warming up), and how many they
    are. Raises DataError for a folder without any."""
    rows = [row for row in read_metrics(folder) if "time/step_s" in row]
    if not rows:
        raise DataError(
            f"{folder} holds no step: it needs {METRICS_FILE} with time/step_s, as a run writes it"
        )
    times = [float(row["time/step_s"]) for row in rows[int(WARM_UP * len(rows)) :]]
    return median(times), len(times)


def _check_same(folder: Path, run: Run) -> None:
    """Raises ConfigError where the run in the folder had another step."""
    path = folder / "run.toml"
    if not path.is_file():
        raise ConfigError(f"--measured {folder} has no run.toml; give a run's folder, or a trace")
    old = Run.load(path)
    keys = [key for key in (*SECTIONS, *KEYS) if _at(old, key) != _at(run, key)]
    if keys:
        raise ConfigError(
            f"--measured {folder}: that run differs from what is planned in {', '.join(keys)}; "
            f"plan its own recipe: stepwell plan {path} --measured {folder}"
        )


def _at(run: Run, key: str) -> Any:
    value: Any = run
    for name in key.split("."):
        value = getattr(value, name)
    return value
