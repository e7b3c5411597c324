"""How a training loop begins: its ranks, its folder, and its session from first weights or the last
checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.launch.stopping import SIGNALS
from stepwell.metrics import EVENTS_FILE, METRICS_FILE, read_events
from stepwell.parallel.mesh import (
    Mesh,
    init_distributed,
    on_main,
)
from stepwell.train import run_checkpoints
from stepwell.train.engine import Engine
from stepwell.train.folder import RECIPE, check_folder
from stepwell.train.guard import Guard
from stepwell.train.guard_events import (
    FORGOTTEN,
    drop_undone_rewinds,
    stopped_after,
)
from stepwell.train.lock import folder_lock
from stepwell.train.probe import non_finite_state
from stepwell.train.session import (
    MACHINE,
    METHOD,
    METRICS,
    Session,
    Trained,
    beside,
    open_log,
    some_names,
)
from stepwell.train.weights import TOKENIZER, base_weights, initial_weights
from stepwell.types import CheckpointError, ConfigError, DataError


@contextmanager
def open_session(
    run: Run,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    console: bool = True,
    mesh: Mesh | None = None,
    tokenizer: str | None = None,
    held: bool = False,
    others: Mapping[str, Trained] | None = None,
) -> Iterator[Session]:
    """Starts the run, or goes on from its last checkpoint. The first of `SIGNALS` lets the
    step end and saves; a second SIGINT or SIGTERM, a second or more later, stops at once.

    weights: (global name, full tensor) to start from, by default those of `model.init` or drawn
    from the seed; a run that goes on does not read them.
    tokenizer: the fingerprint of the one that made the data.
    held: the caller holds the folder already (`hold_folder`).
    others: the runs of engines that are trained along, and their first weights; those of a run that
    goes on are its own.

    Raises ConfigError if the folder holds a different run or another process runs there; a start
    that fails leaves no run behind.
    """
    mesh = mesh or join(run)
    with nullcontext() if held else hold_folder(run.dir, mesh):
        latest = on_main(lambda: check_folder(run, others or ()), mesh)
        engine, extra, start = _started(run, weights, mesh, latest, tokenizer)
        told = (
            {}
            if latest is None
            else on_main(lambda: _taken_up(run, engine.guard, engine.step), mesh)
        )
        if FORGOTTEN in told:
            engine.guard.skips_in_a_row = 0
        along = {
            name: _along(name, trained, mesh, start) for name, trained in (others or {}).items()
        }
        log = open_log(run, engine, console, fresh=start is None)
        session = Session(run, engine, log, extra, tokenizer, console, along)
        session.remove_after(engine.step)
        if run.guard.action == "rewind" and latest is None:
            session.save(extra or {})  # there is always something to go back to
            session.wait()
        first = engine.step
        if latest is None and start is not None:
            log.event("branch", engine.step, checkpoint=str(start), **_taken_over(engine.guard))
        elif extra is not None and not session.finished:
            log.event("resume", engine.step, checkpoint=str(start), **told)

        def on_signal(number: int, _frame: Any) -> None:
            session.requests.take(number)
            if session.requests.at_once:
                raise KeyboardInterrupt

        before = {n: signal.signal(n, on_signal) for n in SIGNALS}
        failed = False
        try:
            yield session
            session.wait()
        except (ConfigError, DataError, CheckpointError):
            failed = True
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            session.log.close()
            session.trace.close()
            if failed and latest is None and engine.step == first:
                session.remove_after(first - 1)
                for name in (RECIPE, METRICS_FILE, EVENTS_FILE) if mesh.is_main else ():
                    (session.dir / name).unlink(missing_ok=True)


def _along(name: str, trained: Trained, mesh: Mesh, start: Path | None) -> Engine:
    run, weights = trained
    if start is not None:
        engine = Engine(run, base_weights(run, weights), mesh)
        engine.load(beside(start, name))
        return engine
    if weights is None:
        weights = initial_weights(run.model, run.train.seed)
    return Engine(run, weights, mesh)


def _started(
    run: Run,
    weights: Iterable[tuple[str, Tensor]] | None,
    mesh: Mesh,
    latest: Path | None,
    tokenizer: str | None,
) -> tuple[Engine, dict[str, Any] | None, Path | None]:
    """The engine, what the loop had saved, and the checkpoint that both came from."""
    branch = run.checkpoint.branch_from
    start = latest
    if start is None and branch is not None:
        start = run_checkpoints.of_run_or_itself(branch, "checkpoint.branch_from")
    if start is None and weights is None:
        weights = initial_weights(run.model, run.train.seed)
    engine = Engine(run, base_weights(run, weights) if start else weights, mesh)
    if start is None:
        return engine, None, None
    extra = engine.load(start, branch=latest is None)
    if latest is None and (names := non_finite_state(engine)):
        raise CheckpointError(
            f"checkpoint.branch_from={branch!r}: in {start} {some_names(names)} hold values that "
            "are not finite, so every step would be lost; branch from an earlier checkpoint"
        )
    for key in (METRICS, MACHINE):
        extra.pop(key, None)
    found = extra.pop(METHOD, run.method.kind)
    if found != run.method.kind:
        raise ConfigError(
            f"checkpoint.branch_from={branch!r} is of a {found} run, and a "
            "branch takes up its place in the data too; to start from its weights alone, set "
            "model.init to it"
        )
    known = extra.pop(TOKENIZER, tokenizer)
    if None not in (known, tokenizer) and known != tokenizer:
        raise ConfigError(
            f"the tokenizer (fingerprint {str(tokenizer)[:12]}) is not the one that the run was "
            f"trained with up to {start} (fingerprint {str(known)[:12]}); give that one back, or "
            "choose another dir"
        )
    return engine, extra, start


def _taken_up(run: Run, guard: Guard, step: int) -> dict[str, Any]:
    """Makes the events fit the checkpoint that the run goes on from; what a restart after a stop
    changes, for the resume's event. One rank calls it, before the log is opened."""
    drop_undone_rewinds(run.dir, guard)
    if guard.skips_in_a_row and stopped_after(read_events(run.dir), step):
        return {FORGOTTEN: guard.skips_in_a_row}
    return {}


def _taken_over(guard: Guard) -> dict[str, Any]:
    """What of the guard a branch begins with, for its event."""
    return {
        "guard": "counts, rewinds and the learning rate's factor begin anew",
        "good_steps": len(guard.good["loss"]),
        "jumped": guard.jumped,
    }


@contextmanager
def hold_folder(folder: str | Path, mesh: Mesh) -> Iterator[None]:
    """`folder_lock` by rank 0, for all ranks; all raise its errors."""
    with ExitStack() as stack:
        on_main(lambda: stack.enter_context(folder_lock(folder)), mesh)
        yield


def join(run: Run) -> Mesh:
    """Joins the ranks on the device that training uses here."""
    return init_distributed(run.layout, "cuda" if torch.cuda.is_available() else "cpu")
