"""Proxy runs: small pretrainings on the mixtures of a design, each scored on every held-out store.

A sweep's folder: `sweep.json` (what it is), `runs.jsonl` and `runs.csv` (a line for each finished
run), `runs/NNNN/` (their logs). Whatever is finished is kept; what was stopped goes on.
"""

from __future__ import annotations

import csv
import io
import json
import math
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from stepwell.config import Run
from stepwell.data.store import TokenStore
from stepwell.files import write_text
from stepwell.launch.local import LAUNCHER, end_with_launcher
from stepwell.mix.design import POWER, dirichlet_design, maximin_design, proportions
from stepwell.mix.files import check_plan, read_json, read_lines
from stepwell.mix.fit import fewest_mixtures
from stepwell.sections.data import SourceConfig
from stepwell.train.lock import folder_lock
from stepwell.types import (
    CheckpointError,
    ConfigError,
    DataError,
    Interrupted,
    StepwellError,
    TrainingError,
)

Design = Literal["auto", "dirichlet", "maximin"]
SWEEP, RUNS, TABLE = "sweep.json", "runs.jsonl", "runs.csv"
NUM_NATURAL = 2
Result = TypeVar("Result")
# Up to here, "auto" spreads the design over all mixtures.
FEW_DOMAINS = 4


@dataclass(frozen=True)
class Domain:
    """A token store that a mixture may take from, or that is held out. weight: in the recipe.
    fingerprint: of what it holds."""

    name: str
    path: str
    tokens: int
    weight: float
    max_epochs: float | None = None
    fingerprint: str = ""


@dataclass(frozen=True)
class Measured:
    """A finished run: its mixture, and its mean loss (nats a token) on each held-out store."""

    run: int
    seed: int
    weights: dict[str, float]
    losses: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Sweep:
    """What is in a sweep's folder."""

    domains: tuple[Domain, ...]
    targets: tuple[Domain, ...]
    recipe: Run
    runs: tuple[Measured, ...]

    @property
    def mixtures(self) -> np.ndarray:
        """(R, D)."""
        return np.array([[run.weights[d.name] for d in self.domains] for run in self.runs])

    @property
    def losses(self) -> np.ndarray:
        """(R, O)."""
        return np.array([[run.losses[t.name] for t in self.targets] for run in self.runs])


def sweep(
    recipe: Run,
    out: str | Path,
    num_runs: int,
    design: Design = "auto",
    power: float = POWER,
    num_natural: int = NUM_NATURAL,
    seed: int = 0,
    num_procs: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Sweep:
    """Runs `num_natural` proxies on the natural mixture (seeds of their own: their spread is the
    noise), then the design, num_runs in all.

    recipe: a pretraining run; its data.sources are the domains and data.heldout the targets, whose
    weights are what `propose` minimises. design: "auto" is maximin for up to FEW_DOMAINS domains,
    dirichlet for more. power: the design is drawn around size**power. num_procs:
    so many runs at once. say: is told each result.
    Raises ConfigError for a recipe that cannot be swept, or a folder with another sweep in it.
    """
    domains, targets = domains_of(recipe)
    if design == "auto":
        design = "maximin" if len(domains) <= FEW_DOMAINS else "dirichlet"
    mixtures = mixtures_of(domains, num_runs, design, power, num_natural, seed)
    seeds = [recipe.train.seed + (i if i < num_natural else 0) for i in range(num_runs)]
    plan = {
        "recipe": recipe.model_dump(mode="json", exclude_none=True, exclude={"dir", "name"}),
        "design": {"kind": design, "power": power, "num_natural": num_natural, "seed": seed},
        "domains": [asdict(domain) for domain in domains],
        "targets": [asdict(target) for target in targets],
    }
    out = Path(out)
    with folder_lock(out):
        check_plan(out / SWEEP, plan, f"the sweep in {out}")
        done = {run.run: run for run in read_runs(out / RUNS)}
        jobs = [
            (proxy_run(recipe, domains, mixtures[i], seeds[i], out / "runs" / f"{i:04d}"), targets)
            for i in range(num_runs)
            if i not in done
        ]
        todo = [i for i in range(num_runs) if i not in done]
        tokens = recipe.train.steps * recipe.train.global_batch_rows * recipe.data.seq_len
        for i in todo:
            for line in overread(domains, mixtures[i], tokens):
                say(f"warning: run {i + 1}/{num_runs} {line}")
        for place, (losses, seconds) in finished(jobs, num_procs):
            i = todo[place]
            weights = {d.name: float(w) for d, w in zip(domains, mixtures[i], strict=True)}
            done[i] = Measured(i, seeds[i], weights, losses, seconds)
            write_runs(out, list(done.values()), domains, targets)
            say(line_of(done[i], num_runs))
    return load_sweep(out)


def load_sweep(folder: str | Path) -> Sweep:
    """Raises DataError for a folder without a sweep, or with no finished run."""
    path = Path(folder) / SWEEP
    if not path.is_file():
        raise DataError(f"{folder} holds no sweep ({SWEEP} is missing); `stepwell mix sweep` first")
    plan = read_json(path)
    try:
        domains = tuple(Domain(**domain) for domain in plan["domains"])
        targets = tuple(Domain(**target) for target in plan["targets"])
        recipe = Run.parse(plan["recipe"], where=str(path))
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is no sweep's plan: {error}") from error
    runs = read_runs(Path(folder) / RUNS)
    if not runs:
        raise DataError(f"the sweep in {folder} has no finished run yet")
    for run in runs:
        wanted = ({d.name for d in domains}, {t.name for t in targets})
        if (set(run.weights), set(run.losses)) != wanted:
            raise DataError(f"{Path(folder) / RUNS}: run {run.run} is of another sweep than {path}")
    return Sweep(domains, targets, recipe, tuple(runs))


# --- what is run ---------------------------------------------------------------------------------


def domains_of(recipe: Run) -> tuple[tuple[Domain, ...], tuple[Domain, ...]]:
    """The recipe's domains and targets. Raises ConfigError where there are too few, or a sweep
    would not be what the recipe says."""
    if recipe.method.kind != "pretrain":
        raise ConfigError(f"a mixture is swept by pretraining, not method={recipe.method.kind!r}")
    if len(recipe.data.sources) < 2:
        raise ConfigError(
            f"data.sources has {len(recipe.data.sources)} domains to mix; the fewest is 2"
        )
    if not recipe.data.heldout:
        raise ConfigError("data.heldout is empty: a mixture is judged by held-out stores; name one")
    if recipe.data.stages:
        raise ConfigError(
            f"data.stages ({len(recipe.data.stages)} given) would hide what data.sources do; leave "
            "them out of a sweep's recipe"
        )
    if recipe.model.init is not None or recipe.checkpoint.branch_from is not None:
        raise ConfigError(
            "proxy runs start from the seed; leave out model.init and checkpoint.branch_from "
            "(`stepwell mix validate` is what branches from a checkpoint)"
        )
    return named(recipe.data.sources, "data.sources"), named(recipe.data.heldout, "data.heldout")


def named(sources: Sequence[SourceConfig], key: str) -> tuple[Domain, ...]:
    """The stores by the last part of their path that tells them apart."""
    parts = [Path(source.path).absolute().parts for source in sources]
    depth = 1
    while len({p[-depth:] for p in parts}) < len(parts):
        depth += 1
        if depth > max(map(len, parts)):
            raise ConfigError(f"{key} names a store twice: {[s.path for s in sources]}")
    stores = [TokenStore.open(source.path) for source in sources]
    paths: dict[str, str] = {}
    for store, source in zip(stores, sources, strict=True):
        other = paths.setdefault(store.fingerprint, source.path)
        if other != source.path:
            raise ConfigError(
                f"{key}: {other} and {source.path} hold the same tokens (fingerprint "
                f"{store.fingerprint}); name one of them"
            )
    return tuple(
        Domain(
            name="/".join(part[-depth:]),
            path=source.path,
            tokens=store.num_tokens,
            weight=source.weight,
            max_epochs=source.max_epochs,
            fingerprint=store.fingerprint,
        )
        for source, part, store in zip(sources, parts, stores, strict=True)
    )


def mixtures_of(
    domains: Sequence[Domain],
    num_runs: int,
    design: Design,
    power: float = POWER,
    num_natural: int = NUM_NATURAL,
    seed: int = 0,
) -> np.ndarray:
    """(R, D): the natural mixture num_natural times, then the design."""
    if num_runs < 2:
        raise ConfigError(
            f"num_runs={num_runs} must leave a run for the natural mixture and one for the design; "
            "the nearest legal value is 2"
        )
    if not 1 <= num_natural < num_runs:
        raise ConfigError(
            f"num_natural={num_natural} of num_runs={num_runs} must be at least 1 and leave a run "
            f"for the design; the nearest legal value is {min(max(num_natural, 1), num_runs - 1)}"
        )
    if seed < 0:
        raise ConfigError(f"seed={seed} of the design must be at least 0, the nearest legal value")
    if not math.isfinite(power):
        raise ConfigError(f"power={power} must be a finite number; 1 is natural, 0 uniform")
    sizes = [domain.tokens for domain in domains]
    natural_D = proportions(sizes)
    if design == "maximin":
        rest = maximin_design(natural_D, num_runs - num_natural, seed)
    else:
        rest = dirichlet_design(proportions(sizes, power), num_runs - num_natural, seed)
    return np.vstack([np.tile(natural_D, (num_natural, 1)), rest])


def check_design(
    recipe: Run, num_runs: int, design: Design, power: float, num_natural: int, seed: int
) -> None:
    """Raises ConfigError for a design with too few different mixtures for a law that is checked by
    runs left out of it."""
    domains, _ = domains_of(recipe)
    if design == "auto":
        design = "maximin" if len(domains) <= FEW_DOMAINS else "dirichlet"
    mixtures = mixtures_of(domains, num_runs, design, power, num_natural, seed)
    distinct, fewest = len(np.unique(mixtures.round(6), axis=0)), fewest_mixtures(len(domains))
    if distinct < fewest:
        raise ConfigError(
            f"--runs {num_runs} with --natural {num_natural} are {distinct} different mixtures, "
            f"and a law of {len(domains)} domains, checked by runs left out of it, needs {fewest}; "
            f"the nearest legal value is --runs {num_runs + fewest - distinct}"
        )


def overread(domains: Sequence[Domain], mixture: Sequence[float], tokens: int) -> list[str]:
    """A line for each domain that `tokens` of a mixture read more often than the recipe's cap."""
    return [
        f"reads {domain.name} {weight * tokens / domain.tokens:.1f} times, its cap is "
        f"max_epochs={domain.max_epochs:g}: what repetition does is in its losses"
        for domain, weight in zip(domains, mixture, strict=True)
        if domain.max_epochs is not None
        and weight * tokens > domain.max_epochs * domain.tokens * (1 + 1e-6)
    ]


def sources_of(domains: Sequence[Domain], mixture: Sequence[float]) -> list[dict[str, Any]]:
    """`data.sources` of a mixture; domains of no weight are left out. Without caps, which would
    turn it into another mixture on the way (see `overread`)."""
    return [
        {"path": domain.path, "weight": float(weight)}
        for domain, weight in zip(domains, mixture, strict=True)
        if weight > 0
    ]


def proxy_run(
    recipe: Run, domains: Sequence[Domain], mixture: Sequence[float], seed: int, folder: Path
) -> Run:
    values = recipe.model_dump(mode="json", exclude_none=True)
    return Run.parse(
        values,
        {
            "dir": str(folder),
            "name": f"proxy {folder.name}",
            "train.seed": seed,
            "train.eval_every": 0,
            "checkpoint.keep_best": 0,
            "data.sources": sources_of(domains, mixture),
        },
        where=f"the proxy run {folder}",
    )


# --- running -------------------------------------------------------------------------------------

Job = tuple[Run, Sequence[Domain]]


def finished(jobs: Sequence[Job], num_procs: int) -> Iterator[tuple[int, tuple[dict, float]]]:
    """(place in `jobs`, (losses, seconds)) of each as it ends; num_procs at once."""
    if num_procs <= 1:
        for place, job in enumerate(jobs):
            yield place, trained(job)
        return
    # Each has a core's share of threads; they spin against each other otherwise.
    threads = max(1, (os.cpu_count() or 1) // num_procs)
    context = multiprocessing.get_context("spawn")
    environ = {LAUNCHER: str(os.getpid())}
    with ProcessPoolExecutor(num_procs, context, _begin, (threads, environ)) as pool:
        places = {pool.submit(_trained_apart, job): place for place, job in enumerate(jobs)}
        try:
            yield from ended(places)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def ended(places: Mapping[Future[Result], int]) -> Iterator[tuple[int, Result]]:
    """(place, result) of each as it ends. Where one fails, those that have not begun are cancelled
    and its error is raised when the others have ended: what they have done is not lost."""
    waiting = set(places)
    errors: list[BaseException] = []
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in sorted(done, key=places.__getitem__):
            error = future.exception()
            if error is None:
                yield places[future], future.result()
            else:
                errors.append(error)
        if errors:
            waiting = {future for future in waiting if not future.cancel()}
    if errors:
        raise errors[0]


def _begin(num_threads: int, environ: dict[str, str]) -> None:
    """In a worker. It is killed with its parent, not asked to end: a run that is asked ends its
    step first, and would hold its folder against the sweep that is started again."""
    end_with_launcher(environ, signal.SIGKILL)
    import torch

    torch.set_num_threads(num_threads)


def _trained_apart(job: Job) -> tuple[dict[str, float], float]:
    """`trained` in a process of its own, whose errors must survive the way back: those with more
    than a message do not."""
    try:
        return trained(job)
    except StepwellError as error:
        kinds = (Interrupted, ConfigError, DataError, CheckpointError, TrainingError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), StepwellError)
        raise kind(f"{job[0].name}: {error}") from None


def trained(job: Job) -> tuple[dict[str, float], float]:
    """Pretrains (or goes on), scores, and removes the checkpoints. Returns losses and seconds."""
    from stepwell.train.pretrain import pretrain

    run, targets = job
    start = time.perf_counter()
    pretrain(run)
    losses = score(run, targets)
    shutil.rmtree(Path(run.dir) / "checkpoints")
    return losses, time.perf_counter() - start


def score(run: Run, targets: Sequence[Domain]) -> dict[str, float]:
    """Mean held-out loss (nats a token) of the run's last checkpoint on each target, on the same
    train.eval_rows rows for every run."""
    from stepwell.train.engine import Engine
    from stepwell.train.heldout import heldout_loss, heldout_windows
    from stepwell.train.run_checkpoints import latest

    engine, last = Engine(run), latest(run.dir)
    assert last is not None
    engine.load(last)
    data, rows = run.data, run.train.eval_rows
    losses = {}
    for target in targets:
        stores = [(TokenStore.open(target.path), 1.0)]
        windows = heldout_windows(stores, data.seq_len, rows, data.document_mask)
        losses[target.name] = heldout_loss(engine, windows)["eval/loss"]
    return losses


# --- files ---------------------------------------------------------------------------------------


def read_runs(path: Path) -> list[Measured]:
    if not path.is_file():
        return []
    return read_lines(path, Measured)


def write_runs(
    out: Path, runs: Sequence[Measured], domains: Sequence[Domain], targets: Sequence[Domain]
) -> None:
    """runs.jsonl and runs.csv, each whole."""
    runs = sorted(runs, key=lambda run: run.run)
    write_text(out / RUNS, "".join(json.dumps(asdict(run)) + "\n" for run in runs))
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(
        [
            "run",
            "seed",
            *(f"weight {d.name}" for d in domains),
            *(f"loss {t.name}" for t in targets),
        ]
    )
    for run in runs:
        weights = [round(run.weights[d.name], 6) for d in domains]
        losses = [round(run.losses[t.name], 6) for t in targets]
        writer.writerow([run.run, run.seed, *weights, *losses])
    write_text(out / TABLE, table.getvalue())


def line_of(run: Measured, num_runs: int) -> str:
    weights = "  ".join(f"{name} {weight:.3f}" for name, weight in run.weights.items())
    losses = "  ".join(f"{name} {loss:.4f}" for name, loss in run.losses.items())
    return f"run {run.run + 1}/{num_runs}: {weights} | loss {losses} ({run.seconds:.0f} s)"
