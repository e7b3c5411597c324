"""Supervised fine-tuning: cross-entropy on the answers only, documents packed without seeing each
other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.chat_formats import chat_rules
from stepwell.data.files import file_sha256
from stepwell.data.loader import packing_report
from stepwell.data.sft_data import build_sft_store
from stepwell.data.store import TokenStore
from stepwell.files import write_text
from stepwell.parallel.mesh import Mesh, on_main
from stepwell.posttrain.epochs import with_epochs
from stepwell.posttrain.first_model import check_first_model
from stepwell.sections.methods import SFT
from stepwell.tokenizer import Tokenizer
from stepwell.train import run_checkpoints
from stepwell.train.heldout import heldout_conversations, heldout_loss, heldout_windows
from stepwell.train.losses import cross_entropy
from stepwell.train.pretrain import open_stores
from stepwell.train.start import hold_folder, join, open_session
from stepwell.train.streams import open_rows
from stepwell.types import ConfigError, DataError


def sft(
    run: Run,
    tokenizer: Tokenizer,
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> int:
    """Trains on the rows of `data.path` to `train.steps` or `method.epochs`, whichever ends first;
    goes on where a stopped run was. Returns the number of steps done.

    Raises ConfigError without data or a model, and with another tokenizer than the model's,
    DataError for unusable rows.
    """
    if run.data.path is None:
        raise ConfigError("data.path is not set; sft needs a JSONL or Parquet file of chat rows")
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids but model.vocab_size="
            f"{run.model.vocab_size}; take the tokenizer that the model was trained with"
        )
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
    store, events = chat_store(run, path, "data", tokenizer, mesh)
    method = run.method
    assert isinstance(method, SFT)
    if method.epochs is not None:  # else all rows would be packed for nothing
        run = with_epochs(run, packing_report(store, run.data.seq_len)["rows"])
    heldout = heldout_rows(run, tokenizer, mesh, events) if run.train.eval_every else None
    loss = cross_entropy(run.loss)
    fingerprint = tokenizer.fingerprint
    with open_session(run, weights, mesh=mesh, tokenizer=fingerprint, held=True) as session:
        for event in events if session.extra is None else ():
            session.log.event("data", **event)
        start = session.engine.step
        stream = open_rows(run, mesh, store, session.extra or None, tokenizer.pad_id)
        session.pause()
        while not session.finished:
            batch, state = session.draw(stream, "rows")
            info = session.step(batch, loss)
            if info.verdict.action == "rewind":
                stream = open_rows(run, mesh, store, session.rewind(), tokenizer.pad_id)
                continue
            if heldout is not None and session.evaluation_due:
                session.record_evaluation(heldout_loss(session.engine, heldout))
            session.after_step(state)
        return session.engine.step - start


def chat_store(
    run: Run, path: str, name: str, tokenizer: Tokenizer, mesh: Mesh
) -> tuple[TokenStore, list[dict[str, Any]]]:
    """The rows of `path`, rendered once into folder `name` of the run; and what to log about it
    when the run starts.

    Rendered anew when the file or the tokenizer has changed since. Raises ConfigError if
    checkpoints were trained on what was rendered before, DataError if data.seq_len cuts every row
    before its answer.
    """
    events = on_main(lambda: render(run, path, name, tokenizer), mesh)
    return TokenStore.open(Path(run.dir) / name, tokenizer), events


def render(run: Run, path: str, name: str, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """`chat_store` on the one rank that writes."""
    method = run.method
    assert isinstance(method, SFT)
    folder = Path(run.dir) / name
    origin = rows_origin(path, tokenizer, method)
    note = folder.with_name(f"{name}.origin.json")
    known = json.loads(note.read_text("utf-8")) if note.exists() else None
    counts = known.pop("counts", None) if known is not None else None
    if known != origin and known is not None and run_checkpoints.latest(run.dir) is not None:
        changed = [key for key in origin if known.get(key) != origin[key]]
        raise ConfigError(
            f"{run.dir} was trained on rows of another {' and '.join(changed)}; choose another "
            "dir, or --fresh to start over"
        )
    if known not in (None, origin):
        shutil.rmtree(folder, ignore_errors=True)
    if known == origin and (folder / "manifest.json").exists():
        store = TokenStore.open(folder, tokenizer)
        check_lengths(store, path, run.data.seq_len)
        return [rows_event(path, counts, store, run.data.seq_len)] if counts else []
    # The note comes first: after a kill the folder is known to be ours.
    write_text(note, json.dumps(origin))
    try:
        store, report = build_sft_store(
            Path(path), tokenizer, folder, method.max_rows, chat_rules(method)
        )
    except DataError:
        note.unlink()
        raise
    try:
        check_lengths(store, path, run.data.seq_len)
    except DataError:
        shutil.rmtree(folder)
        note.unlink()
        raise
    counts = {"rows": report.rows, "dropped": dict(report.drops.by_reason)}
    write_text(note, json.dumps({**origin, "counts": counts}))
    return [rows_event(path, counts, store, run.data.seq_len)]


def rows_event(
    path: str, counts: dict[str, Any], store: TokenStore, seq_len: int
) -> dict[str, Any]:
    """What became of the rows. counts: those that were read, and what rendering dropped."""
    cut = packing_report(store, seq_len)
    too_long = {"too_long": cut["no_trained_tokens"]} if cut["no_trained_tokens"] else {}
    return {
        "path": path,
        "rows": counts["rows"],
        "kept": cut["docs"],
        "dropped": {**counts["dropped"], **too_long},
        "truncated": cut["truncated"],
        "trained_tokens": cut["trained_tokens"],
    }


def check_lengths(store: TokenStore, path: str, seq_len: int) -> None:
    """Raises DataError if no row has a trained token among its first seq_len."""
    if store.trained_tokens(seq_len).any():
        return
    masks = (store.doc_mask(i)[1:] for i in range(store.num_docs))
    least = min(int(mask.argmax()) + 2 for mask in masks if mask.any())
    longest = int(store.doc_lengths().max())
    raise DataError(
        f"all {store.num_docs} usable rows of {path} are too long: within data.seq_len={seq_len} "
        f"tokens none reaches its answer; raise data.seq_len to {longest}, which the longest row "
        f"needs (the first answer begins to be trained at {least})"
    )


def rows_origin(path: str, tokenizer: Tokenizer, method: SFT) -> dict[str, Any]:
    """What rendered rows depend on. Raises DataError for a file that cannot be read."""
    try:
        digest = file_sha256(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return {
        "file": digest,
        "tokenizer": tokenizer.fingerprint,
        "chat template": tokenizer.chat_template,
        "max_rows": method.max_rows,
        "format": method.format,
        "columns": method.columns.named(),
        "roles": method.roles.named(),
        "train_on": list(method.train_on),
        "last_turn_only": method.last_turn_only,
    }


def heldout_rows(run: Run, tokenizer: Tokenizer, mesh: Mesh, events: list[dict[str, Any]]) -> Batch:
    """Rows of `data.heldout_path`, or windows of `data.heldout`; adds to `events`."""
    data, num_rows = run.data, run.train.eval_rows
    if data.heldout_path is None:
        stores = open_stores(run, data.heldout, tokenizer.fingerprint)
        return heldout_windows(stores, data.seq_len, num_rows, data.document_mask)
    store, more = chat_store(run, data.heldout_path, "heldout", tokenizer, mesh)
    events += more
    return heldout_conversations(store, data.seq_len, num_rows, tokenizer.pad_id)
