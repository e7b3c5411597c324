"""Training a reward model: scores that tell better answers from worse ones, or right steps from
wrong ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from stepwell.config import Run
from stepwell.data.sft_data import Drops
from stepwell.parallel.mesh import Mesh, on_main
from stepwell.posttrain.epochs import with_epochs
from stepwell.posttrain.first_model import check_first_model
from stepwell.posttrain.reward_model.heldout import evaluate
from stepwell.posttrain.reward_model.losses import reward_loss
from stepwell.posttrain.reward_model.rows import Rows, load_rows, pack, rows_of_step, rows_origin
from stepwell.sections.methods import RewardModel
from stepwell.tokenizer import Tokenizer
from stepwell.train.start import hold_folder, join, open_session
from stepwell.types import ConfigError


def reward(
    run: Run,
    tokenizer: Tokenizer,
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> int:
    """Trains on the rows of `data.path` to `train.steps` or `method.epochs`, whichever ends first;
    goes on where a stopped run was. Returns the number of steps done.

    Raises ConfigError without data or a model, with another tokenizer than the model's, and where
    the folder was trained on other rows; DataError for unusable rows.
    """
    if run.data.path is None:
        raise ConfigError("data.path is not set; reward needs a JSONL or Parquet file of rows")
    check_first_model(run, tokenizer, weights)
    mesh = join(run)
    with hold_folder(run.dir, mesh):
        return _train(run, run.data.path, tokenizer, weights, mesh)


def _train(
    run: Run,
    path: str,
    tokenizer: Tokenizer,
    weights: Iterable[tuple[str, Tensor]] | None,
    mesh: Mesh,
) -> int:
    method = run.method
    assert isinstance(method, RewardModel)
    origin = on_main(lambda: rows_origin(run, path, tokenizer), mesh)
    rows, drops = load_rows(run, path, tokenizer)
    events = [data_event(path, rows, drops)]
    run = with_epochs(run, len(rows))
    heldout: Rows = ()
    if run.train.eval_every and run.data.heldout_path is not None:
        found, dropped = load_rows(run, run.data.heldout_path, tokenizer)
        heldout = found[: run.train.eval_rows]
        events.append(data_event(run.data.heldout_path, found, dropped))
    loss = reward_loss(method, run.model.num_labels)
    fingerprint, pad_id = tokenizer.fingerprint, tokenizer.pad_id
    with open_session(run, weights, mesh=mesh, tokenizer=fingerprint, held=True) as session:
        for event in events if session.extra is None else ():
            session.log.event("data", **event)
        start, position = session.engine.step, place_of(session.extra, origin, run)
        session.pause()
        while not session.finished:
            step_rows = rows_of_step(run, len(rows), position)
            position += len(step_rows)
            mine = step_rows[mesh.data_rank :: mesh.data_world]
            if session.is_jumped("rows", position // len(step_rows), mine):
                continue
            batch = pack([rows[i] for i in mine], run, pad_id, mine)
            info = session.step(batch, loss)
            if info.verdict.action == "rewind":
                position = place_of(session.rewind(), origin, run)
                continue
            if heldout and session.evaluation_due:
                session.record_evaluation(evaluate(session.engine, heldout, pad_id))
            session.after_step({"position": position, "rows": origin})
        return session.engine.step - start


def place_of(extra: dict[str, Any] | None, origin: dict[str, Any], run: Run) -> int:
    """How many rows were taken when the checkpoint was saved. Raises ConfigError where these were
    other rows than those at hand."""
    if not extra:
        return 0
    changed = [key for key in origin if extra["rows"].get(key) != origin[key]]
    if changed:
        raise ConfigError(
            f"{run.dir} was trained on rows of another {' and '.join(changed)}; choose another "
            "dir, or --fresh to start over"
        )
    return extra["position"]


def data_event(path: str, rows: Rows, drops: Drops) -> dict[str, Any]:
    """What became of a file's rows."""
    return {
        "path": path,
        "rows": len(rows) + drops.total,
        "kept": len(rows),
        "dropped": dict(drops.by_reason),
        "examples": drops.examples,
        "truncated": sum(row.truncated for row in rows),
    }
