"""What a run writes down while it goes: `metrics.jsonl`, `events.jsonl` and the console.

Names of the metrics that several rooms share (units are in the names):
`train/loss`, `train/lr`, `train/grad_norm`, `time/step_s`, `speed/tokens_per_s`, `speed/mfu`,
`speed/hfu`, `memory/peak_bytes`, `eval/...`, `reward/...`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from stepwell.config import LogConfig
from stepwell.files import whole_file, write_text
from stepwell.types import ConfigError, DataError, StepwellError

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
PLAIN_LINE_EVERY_S = 10.0
SHOWN_ITEMS = 8

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# A text that reads like one of these has one backslash more in the file.
_LIKE_NON_FINITE = re.compile(r"\\*(NaN|-?Infinity)")


class RunLog:
    """The log of one run. Only rank 0 writes; on other ranks every method does nothing.

    run_dir: the run's folder (made if missing).
    last_step: the step that the run goes on from. Lines of later steps are cut, because these
        steps are about to be done again; -1 starts the log afresh, None keeps every line.
    num_steps: the length of the run, for the progress and the time left.
    console: False prints nothing.
    settings: the resolved run as a plain dict; W&B shows it.

    Raises ConfigError when `config` asks for a package that is not installed, and StepwellError
    when the folder cannot be written.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: LogConfig | None = None,
        *,
        rank: int = 0,
        last_step: int | None = None,
        num_steps: int | None = None,
        name: str = "run",
        console: bool = True,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        config = config or LogConfig()
        check_extras(config)
        self.run_dir = Path(run_dir)
        self.active = rank == 0
        self._last_step, self._last_keys = -1, set[str]()
        self._metrics = self._events = None
        self._progress = self._tensorboard = self._wandb = None
        if not self.active:
            return
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StepwellError(f"cannot make the run folder {run_dir}: {error}") from error
        for file in (METRICS_FILE, EVENTS_FILE):
            cut_lines(self.run_dir / file, last_step)
        rows = _metric_lines(self.run_dir / METRICS_FILE)
        if rows:
            self._last_step = rows[-1]["step"]
            self._last_keys = {k for r in rows if r["step"] == self._last_step for k in r}
        self._metrics = LineFile(self.run_dir / METRICS_FILE)
        self._events = LineFile(self.run_dir / EVENTS_FILE)
        if config.tensorboard:
            self._tensorboard = _open_tensorboard(self.run_dir, last_step)
        if config.wandb_project:
            self._wandb = _open_wandb(self.run_dir, config.wandb_project, name, last_step, settings)
        if console:
            self._progress = _console_for(name, num_steps, max(last_step or 0, 0))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one line: `step`, `time` (Unix seconds) and the metrics (numbers, flat keys).

        A step may have several lines with different keys (training, then evaluation).
        Raises ValueError for a step that goes back, and for a key written twice in one step.
        """
        if self._metrics is None:
            return
        values = {key: _number(key, value) for key, value in metrics.items()}
        self._check_order(step, set(values))
        self._metrics.write({"step": step, "time": time.time(), **values})
        if self._tensorboard is not None:
            for key, value in values.items():
                self._tensorboard.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)
        if self._progress is not None:
            self._progress.update(step, values)

    def event(self, kind: str, step: int | None = None, **details: Any) -> None:
        """Writes one line to `events.jsonl`, e.g. `event("skip", 120, reason="spike")`."""
        if self._events is None:
            return
        where = {} if step is None else {"step": step}
        self._events.write({"event": kind, **where, "time": time.time(), **details})
        if self._progress is not None:
            self._progress.note(kind, step, details)

    def close(self) -> None:
        """Ends the console's progress and closes the files. Safe to call twice."""
        if self._progress is not None:
            self._progress.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        for file in (self._metrics, self._events):
            if file is not None:
                file.close()
        self._metrics = self._events = None
        self._progress = self._tensorboard = self._wandb = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_order(self, step: int, keys: set[str]) -> None:
        if step < self._last_step:
            raise ValueError(
                f"step {step} comes after step {self._last_step} in {METRICS_FILE}; to go back, "
                f"open the log with last_step={step - 1}"
            )
        if step == self._last_step and keys & self._last_keys:
            twice = ", ".join(sorted(keys & self._last_keys))
            raise ValueError(f"step {step} already has {twice} in {METRICS_FILE}")
        self._last_keys = keys | (self._last_keys if step == self._last_step else set())
        self._last_step = step


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The steps of `metrics.jsonl` in order, one dict a step; a half last line is left out.

    Raises DataError for a missing file or a damaged line.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        raise DataError(f"{run_dir} has no {METRICS_FILE}: not a run's folder, or no step done yet")
    rows: list[dict[str, Any]] = []
    for line in _metric_lines(path):
        if rows and rows[-1]["step"] == line["step"]:
            rows[-1].update(line)
        else:
            rows.append(line)
    return rows


def _metric_lines(path: Path) -> list[dict[str, Any]]:
    rows = read_lines(path)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            raise DataError(f"{path}, line {number} is damaged: it has no step")
    return rows


def read_events(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of `events.jsonl`; none when the file is missing."""
    return read_lines(Path(run_dir) / EVENTS_FILE)


def series(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """The steps at which `key` was written, and its values."""
    found = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in found], [value for _, value in found]


# --- lines of JSON ---------------------------------------------------------------------------


class LineFile:
    """An append-only file of JSON lines: each line reaches the system whole or is taken back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise StepwellError(f"cannot write {path}: {error.strerror}") from error

    def write(self, values: Mapping[str, Any]) -> None:
        """Raises StepwellError when the disk is full; the file then ends with its last line."""
        line = (json.dumps(encode(values), allow_nan=False) + "\n").encode()
        size = os.fstat(self._fd).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError as error:
            os.ftruncate(self._fd, size)
            raise StepwellError(f"cannot write {self.path}: {error.strerror}") from error

    def close(self) -> None:
        os.close(self._fd)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file, as `encode` was given them; its NaN, Infinity and -Infinity
    become floats."""
    rows = []
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is damaged: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number} is damaged: not an object")
        rows.append(decode(row))
    return rows


def cut_lines(path: Path, last_step: int | None, key: str = "step") -> None:
    """Drops a half last line and, unless last_step is None, the lines of later steps (or of a
    higher `key`)."""
    if not path.exists():
        return
    keep = _whole_lines(path)
    if last_step is not None:
        steps = [row.get(key, 0) for row in read_lines(path)]
        keep = [line for line, step in zip(keep, steps, strict=True) if step <= last_step]
    content = b"".join(line + b"\n" for line in keep)
    if len(content) != path.stat().st_size:
        with whole_file(path) as temporary:
            temporary.write_bytes(content)


def _whole_lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    return path.read_bytes().split(b"\n")[:-1]


def encode(value: Any) -> Any:
    """JSON has no NaN: non-finite numbers become the strings NaN, Infinity and -Infinity, and a
    text that is one of these (after any number of backslashes) gets a backslash before it."""
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, str):
        return f"\\{value}" if _LIKE_NON_FINITE.fullmatch(value) else value
    if value is None or isinstance(value, bool | int | float):
        return value
    return encode(value.item() if hasattr(value, "item") else str(value))


def decode(value: Any) -> Any:
    """What `encode` was given, of plain values."""
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, str) or not _LIKE_NON_FINITE.fullmatch(value):
        return value
    return _NON_FINITE[value] if value in _NON_FINITE else value[1:]


def _number(key: str, value: Any) -> float | int:
    """A plain number from a number, a numpy scalar or a tensor with one element."""
    if key in ("step", "time"):
        raise ValueError(f"a metric cannot be called {key!r}: the line has it already")
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, int | float):
        raise TypeError(f"metric {key!r} must be a number, not {type(value).__name__}")
    return value


# --- console ---------------------------------------------------------------------------------


def _console_for(name: str, num_steps: int | None, first_step: int):
    from rich.console import Console

    console = Console(stderr=True)
    kind = _RichProgress if console.is_terminal else _PlainProgress
    return kind(console, name, num_steps, first_step)


class _TimeLeft:
    """Seconds left, from the pace of the last `window` updates (the first step compiles)."""

    def __init__(self, num_steps: int | None, window: int = 50) -> None:
        self.num_steps = num_steps
        self._marks: deque[tuple[int, float]] = deque(maxlen=window)

    def update(self, step: int, now: float) -> float | None:
        self._marks.append((step, now))
        (first_step, first), (last_step, last) = self._marks[0], self._marks[-1]
        if self.num_steps is None or last_step == first_step:
            return None
        return (self.num_steps - last_step) * (last - first) / (last_step - first_step)


class _RichProgress:
    def __init__(self, console, name: str, num_steps: int | None, first_step: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._time_left = _TimeLeft(num_steps)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(name, total=num_steps, completed=first_step, text="")
        self._progress.start()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        left = self._time_left.update(step, time.monotonic())
        text = status_text(step, self._time_left.num_steps, values, left)
        if "eval/loss" in values:
            self._progress.console.print(text, markup=False, highlight=False)
        self._progress.update(self._task, completed=step, text=text)

    def note(self, kind: str, step: int | None, details: Mapping[str, Any]) -> None:
        self._progress.console.print(event_text(kind, step, details), markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class _PlainProgress:
    """One line at the first and last step, every PLAIN_LINE_EVERY_S seconds between, and for each
    evaluation."""

    def __init__(self, console, name: str, num_steps: int | None, first_step: int) -> None:
        self._file: TextIO = console.file
        self._name, self._num_steps = name, num_steps
        self._time_left = _TimeLeft(num_steps)
        self._next = 0.0

    def update(self, step: int, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        left = self._time_left.update(step, now)
        if "eval/loss" not in values:
            if now < self._next and step != self._num_steps:
                return
            self._next = now + PLAIN_LINE_EVERY_S
        self._line(f"{self._name}: {status_text(step, self._num_steps, values, left)}")

    def note(self, kind: str, step: int | None, details: Mapping[str, Any]) -> None:
        self._line(f"{self._name}: {event_text(kind, step, details)}")

    def close(self) -> None:
        self._file.flush()

    def _line(self, text: str) -> None:
        self._file.write(text + "\n")
        self._file.flush()


def status_text(
    step: int, num_steps: int | None, values: Mapping[str, float], left_s: float | None
) -> str:
    """E.g. `step 20/100  loss 2.345  reward 0.50  12,345 tok/s  MFU 31.2 %  1:05 left`."""
    parts = [f"step {step}" if num_steps is None else f"step {step}/{num_steps}"]
    if "train/loss" in values:
        parts.append(f"loss {values['train/loss']:.4g}")
    if values.get("train/skipped"):
        parts.append("skipped")
    if "eval/loss" in values:
        parts.append(f"held-out loss {values['eval/loss']:.4g}")
    if "eval/bits_per_token" in values:
        parts.append(f"{values['eval/bits_per_token']:.4g} bits/token")
    if "reward/mean" in values:
        parts.append(f"reward {values['reward/mean']:.3f}")
    if "reward/accuracy" in values:
        parts.append(f"right {100 * values['reward/accuracy']:.0f} %")
    if "train/kl" in values:
        parts.append(f"KL {values['train/kl']:.2g}")
    if "reward/mean" in values and "train/entropy" in values:
        parts.append(f"entropy {values['train/entropy']:.2g}")
    if "rollout/length" in values:
        turns = " over all turns" if "rollout/environment_failures" in values else ""
        parts.append(f"{values['rollout/length']:.0f} tokens an answer{turns}")
    if "reward/dead_groups" in values:
        parts.append(f"dead groups {100 * values['reward/dead_groups']:.0f} %")
    if "speed/tokens_per_s" in values:
        parts.append(f"{values['speed/tokens_per_s']:,.0f} tok/s")
    if "speed/mfu" in values:
        parts.append(f"MFU {100 * values['speed/mfu']:.1f} %")
    if left_s is not None:
        parts.append(f"{clock_text(left_s)} left")
    return "  ".join(parts)


def event_text(kind: str, step: int | None, details: Mapping[str, Any]) -> str:
    """Without lists and tables that are empty."""
    where = "" if step is None else f" at step {step}"
    shown = {key: v for key, v in details.items() if v not in ({}, [], ())}
    return f"[{kind}{where}] " + ", ".join(f"{key}={_short(v)}" for key, v in shown.items())


def _short(value: Any) -> str:
    """Long lists (the rows of a batch) by their first few and their number."""
    if isinstance(value, list | tuple) and len(value) > SHOWN_ITEMS:
        shown = ", ".join(str(item) for item in value[:SHOWN_ITEMS])
        return f"[{shown}, ... {len(value)} in all]"
    return str(value)


def clock_text(seconds: float) -> str:
    """`1:05`, or `2:01:05` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --- TensorBoard and W&B ---------------------------------------------------------------------


def check_extras(config: LogConfig) -> None:
    """Raises ConfigError when a chosen logger's package is missing, naming the extra."""
    wanted = [("tensorboard", "log.tensorboard=true")] if config.tensorboard else []
    if config.wandb_project:
        wanted.append(("wandb", f"log.wandb_project={config.wandb_project!r}"))
    for package, setting in wanted:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{setting} needs the package {package}, which is not installed: "
                f"pip install 'stepwell[{package}]', or leave the setting out"
            )


def _open_tensorboard(run_dir: Path, last_step: int | None):
    from torch.utils.tensorboard import SummaryWriter

    purge = None if last_step is None else last_step + 1
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)


def _open_wandb(
    run_dir: Path,
    project: str,
    name: str,
    last_step: int | None,
    settings: Mapping[str, Any] | None,
):
    wandb = importlib.import_module("wandb")
    id_file = run_dir / "wandb_id"
    if last_step in (None, -1) or not id_file.exists():
        slug = re.sub(r"[^a-zA-Z0-9]+", "-", name)[:40]
        write_text(id_file, f"{slug}-{os.urandom(4).hex()}")
    return wandb.init(
        project=project,
        name=name,
        id=id_file.read_text().strip(),
        resume="allow",
        dir=str(run_dir),
        config=dict(settings or {}),
    )
