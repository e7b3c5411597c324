"""Computes a step of a run once more and shows what passed through its layers.

The run's folder is only read. A step is reached from the nearest earlier checkpoint by taking every
step in between again, so what comes out can be held against metrics.jsonl, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.store import TokenStore
from stepwell.metrics import read_events, read_metrics
from stepwell.parallel.mesh import all_gather_objects
from stepwell.sections.methods import SampledMethod
from stepwell.tokenizer import Tokenizer
from stepwell.train import run_checkpoints
from stepwell.train.engine import Engine, Stats
from stepwell.train.folder import RECIPE
from stepwell.train.guard import GuardStop, Verdict
from stepwell.train.guard_events import settings_at
from stepwell.train.losses import cross_entropy
from stepwell.train.pretrain import open_stores
from stepwell.train.probe import LayerRow, layer_table, probe_step
from stepwell.train.session import MACHINE, OWN, machine
from stepwell.train.start import join
from stepwell.train.streams import (
    Stream,
    batch_number,
    branch_states,
    mixture,
    open_rows,
    open_windows,
    stream_name,
)
from stepwell.train.weights import base_weights, initial_weights
from stepwell.types import CheckpointError, ConfigError, DataError, TrainingError


@dataclass(frozen=True)
class Difference:
    """The first number that is not that of metrics.jsonl, and what may be the reason."""

    step: int
    metric: str
    logged: float
    computed: float
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Replay:
    """start: the step of the checkpoint that it began from, 0 for the first weights.
    num_compared: steps that were held against metrics.jsonl; is_logged: whether this one was.
    difference: None if all were bit-equal. verdict: what the guard makes of the step.
    layers: what passed through the layers."""

    step: int
    start: int
    sample_ids: list[int]
    loss: float
    grad_norm: float
    verdict: Verdict
    num_compared: int
    is_logged: bool
    difference: Difference | None
    layers: list[LayerRow]


def replay(folder: str | Path, step: int) -> Replay:
    """Takes step `step` of the run in `folder` again. Every rank must call it.

    Raises ConfigError for a step that was not taken and for a method whose batches cannot be made
    again, CheckpointError without a checkpoint before the step or for other data, DataError for
    data that are not there, TrainingError where the run had gone back.
    """
    folder = Path(folder)
    run = load_run(folder)
    logged = {row["step"]: row for row in read_metrics(folder)}
    check_step(folder, step, logged)
    start = starting_point(run, folder, step)
    engine, states = started(run, start)
    made_by = run_checkpoints.read_state(start)["extra"].get(MACHINE, {}) if start else {}
    feed = Feed(run, folder, engine, states)
    loss = cross_entropy(run.loss)
    check = Check(logged, made_by)
    events, first = read_events(folder), engine.step
    since = first if start else -1
    while engine.step + 1 < step:
        settings_at(events, engine.guard, since, engine.step)
        stats = engine.forward_backward(feed.next(), loss)
        norm, verdict = take_step(engine)
        check.see(engine, engine.step, stats, norm)
        if verdict.action in ("rewind", "stop"):
            raise TrainingError(
                f"at step {engine.step} the guard would {verdict.action} ({verdict.reason}), but "
                f"{folder} went on: {'; '.join(check.reasons(engine))}"
            )
    settings_at(events, engine.guard, since, engine.step)
    batch = feed.next()
    stats, probe = probe_step(engine, batch, loss)
    layers = layer_table(engine, probe)
    norm, verdict = take_step(engine)
    check.see(engine, step, stats, norm)
    mine = batch.sample_ids if engine.mesh.counts_rows else ()
    return Replay(
        step=step,
        start=first,
        sample_ids=[i for part in all_gather_objects(mine, engine.mesh) for i in part],
        loss=stats.metrics.get("loss", stats.loss),
        grad_norm=norm,
        verdict=verdict,
        num_compared=check.num_compared,
        is_logged=step in logged,
        difference=check.difference,
        layers=layers,
    )


def take_step(engine: Engine) -> tuple[float, Verdict]:
    """The gradient norm, and what the guard made of the step (also where it gives up)."""
    try:
        info = engine.optim_step()
    except GuardStop as stop:
        return stop.grad_norm, stop.verdict
    return info.grad_norm, info.verdict


@dataclass
class Check:
    """Holds steps against the lines of metrics.jsonl. made_by: where the checkpoint was written."""

    logged: Mapping[int, Mapping[str, float]]
    made_by: Mapping[str, Any]
    num_compared: int = 0
    difference: Difference | None = None

    def see(self, engine: Engine, step: int, stats: Stats, norm: float) -> None:
        row = self.logged.get(step)
        if row is None:
            return
        self.num_compared += 1
        computed = {"train/loss": stats.metrics.get("loss", stats.loss), "train/grad_norm": norm}
        for metric, value in computed.items():
            same = value == row[metric] or (math.isnan(value) and math.isnan(row[metric]))
            if not same and self.difference is None:
                reasons = tuple(self.reasons(engine))
                self.difference = Difference(step, metric, row[metric], value, reasons)

    def reasons(self, engine: Engine) -> list[str]:
        """Why numbers may differ: what is not as it was when the checkpoint was written."""
        here = machine(engine.mesh)
        found = [
            f"the checkpoint was written with {key} {self.made_by[key]!r}, here it is {here[key]!r}"
            for key in here
            if self.made_by.get(key, here[key]) != here[key]
        ]
        if not self.made_by:
            found.append("nothing is known of the machine that the run began on")
        if found:
            return found
        return [
            "machine, ranks, threads and versions are the same: other data or code, a run that was "
            "continued elsewhere after this checkpoint, or (with layout.deterministic=false on a "
            "GPU) kernels whose order of sums varies"
        ]


# --- what can be replayed ------------------------------------------------------------------------


def load_run(folder: Path) -> Run:
    """The run of a folder. Raises ConfigError for a method that cannot be replayed (`why_not`)."""
    if not (folder / RECIPE).is_file():
        raise DataError(f"{folder} has no {RECIPE}: give a run's folder")
    run = Run.load(folder / RECIPE)
    why = why_not(run)
    if why is not None:
        raise ConfigError(
            f"{folder} is a {run.method.kind} run: {why}. pretrain and sft runs can be replayed"
        )
    return run


def why_not(run: Run) -> str | None:
    """Why a run of this method cannot be replayed; None if it can."""
    rows = "events.jsonl numbers a refused step's rows among the usable ones (sample_ids)"
    if isinstance(run.method, SampledMethod):
        return (
            "its batches are answers that were sampled and judged while it ran, and what a "
            "verifier said need not come again; samples.jsonl holds them with their rewards"
        )
    if run.method.kind == "dpo":
        return (
            "its loss compares with what a reference said of each answer, and replay has the "
            f"policy's checkpoints only; {rows}"
        )
    if run.method.kind == "reward":
        return (
            "its loss is on scores at the end of answers, and replay knows the loss of the next "
            f"token only; {rows}"
        )
    return None


def check_step(folder: Path, step: int, logged: Mapping[int, Any]) -> None:
    """Raises ConfigError for a step that the run has not taken."""
    stops = [e["step"] for e in read_events(folder) if e["event"] == "stop"]
    last = max([*logged, *stops], default=0)
    if not 1 <= step <= last:
        raise ConfigError(
            f"--step {step}: {folder} has taken steps 1 to {last}; the nearest legal value is "
            f"{min(max(step, 1), last)}"
        )


def starting_point(run: Run, folder: Path, step: int) -> Path | None:
    """The last checkpoint before `step`; None for the first weights, where these are not further
    away than checkpoints are from each other."""
    steps = run_checkpoints.steps_of(folder)
    earlier = [found for found in steps if found < step]
    if earlier:
        return run_checkpoints.step_folder(folder, max(earlier))
    from_first = run.checkpoint.every_steps if run.checkpoint.branch_from is None else 0
    if step <= from_first:
        return None
    legal = [f"1 to {from_first} from the first weights"] if from_first else []
    legal += [f"those after {min(steps)}"] if steps else []
    raise CheckpointError(
        f"--step {step}: {folder} holds no checkpoint from before it; the legal steps are "
        f"{' and '.join(legal) or 'none'} (a larger checkpoint.keep_last keeps more)"
    )


def started(run: Run, start: Path | None) -> tuple[Engine, dict[str, Any]]:
    """The engine at the starting point, and the positions of its streams by their names."""
    mesh = join(run)
    if start is None:
        return Engine(run, initial_weights(run.model, run.train.seed), mesh), {}
    engine = Engine(run, base_weights(run), mesh)
    extra = engine.load(start)
    states = {key: value for key, value in extra.items() if key not in OWN}
    if run.method.kind == "sft":
        states = {"rows": states} if states else {}
    return engine, states


class Feed:
    """The batches of a run's steps, in their order, from the positions in `states`."""

    def __init__(self, run: Run, folder: Path, engine: Engine, states: dict[str, Any]):
        self.run, self.folder, self.engine, self.states = run, folder, engine, states
        self.stream: Stream | None = None
        self.name = ""

    def next(self) -> Batch:
        """This rank's rows of the next step, without what a rewind has left out."""
        name = stream_name(self.run, self.engine.step)
        if self.stream is None or name != self.name:
            self.stream, self.name = self._open(name), name
        for batch, state in self.stream:
            self.states[name] = state
            if not self.engine.guard.is_jumped(name, batch_number(state, self.run)):
                return batch
        raise DataError(f"the stream {name!r} has ended")

    def _open(self, name: str) -> Stream:
        run, mesh = self.run, self.engine.mesh
        if name == "rows":
            assert run.data.tokenizer is not None, "sft runs have one"
            tokenizer = Tokenizer.load(run.data.tokenizer)
            store = TokenStore.open(self.folder / "data", tokenizer)
            return open_rows(run, mesh, store, self.states.get(name), tokenizer.pad_id)
        stores = open_stores(run, mixture(run, name))
        states = branch_states(run, {name: stores}, self.states)
        return open_windows(run, mesh, name, stores, states)
