"""Pretraining, from scratch or continued: next-token prediction over mixed token stores."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from stepwell.config import Run, SourceConfig
from stepwell.data.loader import pretrain_stream
from stepwell.data.store import TokenStore
from stepwell.train.losses import cross_entropy
from stepwell.train.optim import phase
from stepwell.train.session import Session, open_session
from stepwell.train.weights import initial_weights
from stepwell.types import ConfigError


def pretrain(run: Run, weights: Iterable[tuple[str, Tensor]] | None = None) -> int:
    """Trains to `train.steps`; goes on where a stopped run was. Returns the number of steps done.

    In the decay phase of a WSD schedule `data.decay_sources` replaces `data.sources`.
    Raises ConfigError without sources, DataError for stores of another tokenizer.
    """
    if not run.data.sources:
        raise ConfigError("data.sources is empty; pretraining needs at least one token store")
    loss = cross_entropy(run.loss)
    with open_session(run, weights or initial_weights(run.model)) as session:
        states = dict(session.extra or {})
        name = stream_name(run, session.engine.step)
        stream = open_stream(session, name, states.get(name))
        start = session.engine.step
        session.pause()
        while not session.finished:
            wanted = stream_name(run, session.engine.step)
            if wanted != name:
                name = wanted
                stream = open_stream(session, name, states.get(name))
            batch, states[name] = next(stream)
            stats = session.engine.forward_backward(batch, loss)
            info = session.engine.optim_step()
            session.record(batch, stats, info)
            session.after_step(states)
        return session.engine.step - start


def stream_name(run: Run, step: int) -> str:
    """Which of the run's two mixtures this step reads: "sources" or "decay_sources"."""
    in_decay = phase(run.optim.schedule, step, run.train.steps) == "decay"
    return "decay_sources" if in_decay and run.data.decay_sources else "sources"


def open_stream(session: Session, name: str, state: dict | None):
    run, mesh = session.run, session.engine.mesh
    sources: tuple[SourceConfig, ...] = getattr(run.data, name)
    return pretrain_stream(
        [(TokenStore.open(source.path), source.weight) for source in sources],
        seq_len=run.data.seq_len,
        rows_per_step=run.train.global_batch_rows,
        rank=mesh.data_rank,
        world=mesh.data_world,
        seed=run.train.seed,
        state=state,
        document_mask=run.data.document_mask,
        shuffle=run.data.shuffle,
    )
