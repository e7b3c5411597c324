"""Pretraining, from scratch or continued: next-token prediction over mixed token stores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from stepwell.config import Run, SourceConfig
from stepwell.data.curriculum import streams_of
from stepwell.data.store import TokenStore
from stepwell.tokenizer import Tokenizer
from stepwell.train.heldout import heldout_loss, heldout_windows
from stepwell.train.losses import cross_entropy
from stepwell.train.session import open_session
from stepwell.train.streams import check_epochs, open_windows, stream_name
from stepwell.train.weights import check_fingerprint
from stepwell.types import ConfigError, DataError


def pretrain(run: Run, weights: Iterable[tuple[str, Tensor]] | None = None) -> int:
    """Trains to `train.steps`; goes on where a stopped run was. Returns the number of steps done.

    Where a stage of `data.stages` applies, its sources replace `data.sources`.
    weights: (global name, full tensor) to start from; None: `model.init`.
    Raises ConfigError without sources and for caps on epochs that end the data too soon, DataError
    for stores that don't fit each other, the tokenizer or the model.
    """
    if not run.data.sources:
        raise ConfigError("data.sources is empty; pretraining needs at least one token store")
    loss = cross_entropy(run.loss)
    given = Tokenizer.load(run.data.tokenizer).fingerprint if run.data.tokenizer else None
    stores = {
        name: open_stores(run, sources, given) for name, sources in streams_of(run.data).items()
    }
    if run.checkpoint.branch_from is None:
        check_epochs(run, stores, {}, 0)
    heldout = None
    if run.train.eval_every:
        data = run.data
        heldout = heldout_windows(
            open_stores(run, data.heldout, given),
            data.seq_len,
            run.train.eval_rows,
            data.document_mask,
        )
    first = stores["sources"][0][0]
    fingerprint = first.manifest["tokenizer"]
    if run.model.init is not None:
        check_fingerprint(run.model.init, fingerprint, f"the store {first.folder}")
    with open_session(run, weights, tokenizer=fingerprint) as session:
        states, stream, current = dict(session.extra or {}), None, ""
        start, mesh = session.engine.step, session.engine.mesh
        if run.checkpoint.branch_from is not None:
            check_epochs(run, stores, states, start)
        session.pause()
        while not session.finished:
            name = stream_name(run, session.engine.step)
            if stream is None or name != current:
                stream, current = open_windows(run, mesh, name, stores[name], states), name
            batch, states[name] = session.draw(stream, name)
            info = session.step(batch, loss)
            if info.verdict.action == "rewind":
                states, stream = dict(session.rewind() or {}), None
                continue
            if heldout is not None and session.evaluation_due:
                session.record_evaluation(heldout_loss(session.engine, heldout))
            session.after_step(states)
        return session.engine.step - start


def open_stores(
    run: Run, sources: Sequence[SourceConfig], fingerprint: str | None = None
) -> list[tuple[TokenStore, float]]:
    """Stores with their weights. fingerprint: of `data.tokenizer`; None: that of the run's first
    store.

    Raises DataError for a store of another tokenizer, or with ids that the model has not.
    """
    stores = [(TokenStore.open(source.path), source.weight) for source in sources]
    for store, _ in stores:
        if store.vocab_size > run.model.vocab_size:
            raise DataError(
                f"the store {store.folder} has {store.vocab_size} ids, but model.vocab_size="
                f"{run.model.vocab_size}; the nearest legal value is {store.vocab_size}"
            )
        first = fingerprint or TokenStore.open(run.data.sources[0].path).manifest["tokenizer"]
        if store.manifest["tokenizer"] != first:
            wanted = f"data.tokenizer={run.data.tokenizer!r}" if fingerprint else "the rest"
            raise DataError(
                f"the store {store.folder} was made with another tokenizer (fingerprint "
                f"{store.manifest['tokenizer'][:12]}) than {wanted} ({first[:12]}); tokenise its "
                f"text again{', or name the tokenizer that made it' if fingerprint else ''}"
            )
    return stores
