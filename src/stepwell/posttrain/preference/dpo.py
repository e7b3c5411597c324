"""Learning from preferences: DPO and its relatives on pairs of answers, KTO on labelled ones.

A flat loop: take pairs, add what the reference says of them, make a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from stepwell.config import Run
from stepwell.data.loader import rank_rows
from stepwell.parallel.mesh import Mesh, on_main
from stepwell.posttrain.epochs import with_epochs
from stepwell.posttrain.first_model import check_first_model
from stepwell.posttrain.preference.displacement import (
    CHES_FILE,
    ches_scores,
    kept_pairs,
    open_monitor,
    read_kept,
    watch,
    write_ches,
)
from stepwell.posttrain.preference.evaluation import heldout_metrics
from stepwell.posttrain.preference.losses import preference_loss
from stepwell.posttrain.preference.reference import open_reference, with_reference
from stepwell.posttrain.preference.rows import Rows, load_rows, num_kept, step_numbers
from stepwell.posttrain.preference.scored_references import (
    check_adapter_off,
    documents_hash,
    first_engine,
)
from stepwell.sections.methods import DPO
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.train.session import Session
from stepwell.train.start import hold_folder, join, open_session
from stepwell.types import ConfigError

Weights = Iterable[tuple[str, Tensor]]


def dpo(run: Run, tokenizer: Tokenizer, weights: Weights | None = None) -> int:
    """Trains on the pairs (kto: labelled answers) of `data.path` to `train.steps` or
    `method.epochs`, whichever ends first; goes on where a stopped run was. Returns the number of
    steps done.

    Raises ConfigError without data or a model, with another tokenizer than the model's, and when
    there are fewer pairs than a step takes; DataError for a file without usable rows; TrainingError
    when method.displacement='stop' sees displacement.
    """
    method = run.method
    assert isinstance(method, DPO)
    check(run)
    check_first_model(run, tokenizer, weights)
    rows, event = load_rows(run, tokenizer)
    run = with_epochs(run, num_kept(rows, method))
    mesh = join(run)
    with hold_folder(run.dir, mesh):
        return _train(run, rows, event, tokenizer, weights, mesh)


def check(run: Run) -> None:
    """What can be said before any data are read. Raises ConfigError."""
    method = run.method
    assert isinstance(method, DPO)
    if run.data.path is None:
        raise ConfigError("data.path is not set; dpo needs a JSONL or Parquet file of pairs")
    if method.reference == "adapter-off":
        check_adapter_off(run)
    if run.train.eval_every and run.data.heldout_path is None:
        raise ConfigError(
            f"train.eval_every={run.train.eval_every} scores held-out pairs, and dpo reads them "
            "from data.heldout_path, which is not set; set it, or train.eval_every=0"
        )


def _train(
    run: Run,
    rows: Rows,
    event: dict[str, Any],
    tokenizer: Tokenizer,
    weights: Weights | None,
    mesh: Mesh,
) -> int:
    method, pad_id = run.method, tokenizer.pad_id
    assert isinstance(method, DPO)
    loss = preference_loss(method.loss, run.precision.compute)
    fingerprint = tokenizer.fingerprint
    with open_session(run, weights, mesh=mesh, tokenizer=fingerprint, held=True) as session:
        saved, start = session.extra or {}, session.engine.step
        if session.extra is None:
            session.log.event("data", **event)
        first = partial(_first, run, weights, session, not saved)
        rows = without_guilty(rows, first, session, tokenizer)
        trained = check_same_rows(run, rows, saved)
        numbers_of = partial(step_numbers, rows.num_trained, method.pairs_per_step, run.train.seed)
        known = saved.get("reference")
        reference = open_reference(run, rows, numbers_of, first, session.engine, pad_id, known)
        monitor = open_monitor(method, saved.get("monitor", {}))
        num_batches = saved.get("batches", 0)
        session.pause()
        while not session.finished:
            numbers = numbers_of(num_batches)
            share = rank_rows(len(numbers), mesh.data_rank, mesh.data_world)
            mine = numbers[share.start : share.stop]
            num_batches += 1
            if session.is_jumped("pairs", num_batches, mine):
                continue
            batch = rows.batch(mine, run, pad_id)
            batch = with_reference(batch, numbers, rows, reference, session.engine, pad_id)
            info = session.step(batch, loss)
            if info.verdict.action == "rewind":
                found = session.rewind() or {}
                num_batches = found.get("batches", 0)
                monitor = open_monitor(method, found.get("monitor", {}))
                continue
            watch(session, monitor)
            if session.evaluation_due:
                session.record_evaluation(heldout_metrics(session.engine, rows, reference, pad_id))
            session.after_step(
                {
                    "batches": num_batches,
                    "monitor": monitor.state(),
                    "rows": trained,
                    "reference": reference.weights,
                }
            )
        return session.engine.step - start


def _first(run: Run, weights: Weights | None, session: Session, fresh: bool, copy: bool) -> Engine:
    """An engine with the weights that training began with: the policy itself before its first
    step, unless a copy is wanted."""
    if fresh and not copy:
        return session.engine
    return first_engine(run, weights, session.engine.mesh, session.engine if fresh else None)


def without_guilty(
    rows: Rows, first: Callable[[bool], Engine], session: Session, tokenizer: Tokenizer
) -> Rows:
    """Scores the pairs by CHES if that is asked for, writes the scores into the run's folder, and
    leaves out the worst."""
    method, mesh = session.run.method, session.engine.mesh
    assert isinstance(method, DPO)
    if not (method.ches or method.drop_ches):
        return rows
    path, pairs = session.dir / CHES_FILE, rows.items[: rows.num_trained]
    goes_on = session.extra is not None
    kept = on_main(lambda: read_kept(path, len(pairs)) if goes_on else None, mesh)
    if kept is None or len(kept) != num_kept(rows, method):
        scores = ches_scores(first(False), pairs, tokenizer.pad_id)
        kept = kept_pairs(scores, method.drop_ches)
        on_main(lambda: write_ches(path, scores, pairs, kept, tokenizer), mesh)
        dropped = len(pairs) - len(kept)
        session.log.event("ches", session.engine.step, scores=str(path), dropped=dropped)
    return rows.without(kept)


def check_same_rows(run: Run, rows: Rows, saved: dict[str, Any]) -> str:
    """The hash of the rows that are trained on. Raises ConfigError if a checkpoint knows
    others."""
    found = documents_hash(rows.documents(rows.num_trained))
    if saved.get("rows", found) != found:
        raise ConfigError(
            f"{run.dir} was trained on other rows than {run.data.path} holds now (or they are "
            "rendered, cut or left out otherwise); give back the former, choose another dir, or "
            "--fresh to start over"
        )
    return found
