"""Pretraining, from scratch or continued: next-token prediction over mixed token stores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.curriculum import streams_of
from stepwell.data.loader import num_windows
from stepwell.data.store import TokenStore
from stepwell.sections.data import SourceConfig
from stepwell.tokenizer import Tokenizer
from stepwell.train.heldout import heldout_loss, heldout_windows
from stepwell.train.losses import cross_entropy
from stepwell.train.start import open_session
from stepwell.train.streams import (
    ascending_warnings,
    branch_states,
    check_epochs,
    check_paths,
    open_windows,
    stream_name,
)
from stepwell.train.weights import check_fingerprint
from stepwell.types import ConfigError, DataError


def pretrain(run: Run, weights: Iterable[tuple[str, Tensor]] | None = None) -> int:
    """Trains to `train.steps`; goes on where a stopped run was. Returns the number of steps done.

    Where a stage of `data.stages` applies, its sources replace `data.sources`.
    weights: (global name, full tensor) to start from; None: `model.init`.
    Raises ConfigError without sources and for caps on epochs that end the data too soon, DataError
    for stores that don't fit each other, the tokenizer or the model.
    """
    loss = cross_entropy(run.loss)
    data = open_data(run)
    stores, heldout = data.stores, data.heldout
    with open_session(run, weights, tokenizer=data.fingerprint) as session:
        states, stream, current = branch_states(run, stores, session.extra or {}), None, ""
        start, mesh = session.engine.step, session.engine.mesh
        if run.checkpoint.branch_from is not None:
            check_epochs(run, stores, states, start)
        for warning in data.warnings if start == 0 else []:
            session.log.event("warning", 0, text=warning)
        session.pause()
        while not session.finished:
            name = stream_name(run, session.engine.step)
            if stream is None or name != current:
                stream, current = open_windows(run, mesh, name, stores[name], states), name
            batch, states[name] = session.draw(stream, name)
            info = session.step(batch, loss)
            if info.verdict.action == "rewind":
                states, stream = branch_states(run, stores, session.rewind() or {}), None
                continue
            if heldout is not None and session.evaluation_due:
                session.record_evaluation(heldout_loss(session.engine, heldout))
            session.after_step(states)
        return session.engine.step - start


class Data(NamedTuple):
    """stores: of each stream, by its name. heldout: None where none is scored. fingerprint: of the
    stores' tokenizer."""

    stores: dict[str, list[tuple[TokenStore, float]]]
    heldout: Batch | None
    fingerprint: str
    warnings: list[str]


def open_data(run: Run) -> Data:
    """All that a run reads, checked without starting it.

    Raises ConfigError without sources, for a store under two paths and for caps on epochs that end
    the data too soon (of a branch that is known only with its trunk); DataError for stores that are
    missing, that don't fit each other, the tokenizer or the model, or have not the scores that the
    order goes by.
    """
    if not run.data.sources:
        raise ConfigError("data.sources is empty; pretraining needs at least one token store")
    given = Tokenizer.load(run.data.tokenizer).fingerprint if run.data.tokenizer else None
    stores = {
        name: open_stores(run, sources, given) for name, sources in streams_of(run.data).items()
    }
    check_paths(stores)
    for store, _ in [pair for mixture in stores.values() for pair in mixture]:
        num_windows(store, run.data.seq_len)
        if run.data.order == "quality-ascending":
            store.doc_scores()
    warnings: list[str] = []
    if run.checkpoint.branch_from is None:
        warnings = ascending_warnings(run, stores, check_epochs(run, stores, {}, 0))
    heldout = None
    if run.train.eval_every:
        heldout = heldout_windows(
            open_stores(run, run.data.heldout, given),
            run.data.seq_len,
            run.train.eval_rows,
            run.data.document_mask,
        )
    first = stores["sources"][0][0]
    fingerprint = first.manifest["tokenizer"]
    if run.model.init is not None:
        check_fingerprint(run.model.init, fingerprint, f"the store {first.folder}")
    return Data(stores, heldout, fingerprint, warnings)


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
