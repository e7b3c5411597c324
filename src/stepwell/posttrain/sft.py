"""Supervised fine-tuning: cross-entropy on the answers only, documents packed without seeing each
other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from stepwell.config import SFT, Run
from stepwell.data.loader import packed_stream, packing_report
from stepwell.data.sft_data import build_sft_store
from stepwell.data.store import TokenStore
from stepwell.parallel.mesh import Mesh, barrier
from stepwell.tokenizer import Tokenizer
from stepwell.train.losses import cross_entropy
from stepwell.train.session import join, open_session
from stepwell.train.weights import initial_weights
from stepwell.types import ConfigError


def sft(
    run: Run,
    tokenizer: Tokenizer,
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> int:
    """Trains on the rows of `data.path` to `train.steps` or `method.epochs`, whichever ends first;
    goes on where a stopped run was. Returns the number of steps done.

    Raises ConfigError without data or with a tokenizer larger than the model's vocabulary,
    DataError for unusable rows.
    """
    if run.data.path is None:
        raise ConfigError("data.path is not set; sft needs a JSONL or Parquet file of chat rows")
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids but model.vocab_size="
            f"{run.model.vocab_size}; take the tokenizer that the model was trained with"
        )
    mesh = join(run)
    store, events = chat_store(run, tokenizer, mesh)
    run = with_steps(run, store)
    loss = cross_entropy(run.loss)
    with open_session(run, weights or initial_weights(run.model), mesh=mesh) as session:
        for event in events:
            session.log.event("data", **event)
        start = session.engine.step
        stream = packed_stream(
            store,
            seq_len=run.data.seq_len,
            rows_per_step=run.train.global_batch_rows,
            rank=mesh.data_rank,
            world=mesh.data_world,
            seed=run.train.seed,
            state=session.extra,
            shuffle=run.data.shuffle,
            pad_id=tokenizer.pad_id,
        )
        session.pause()
        while not session.finished:
            batch, state = next(stream)
            stats = session.engine.forward_backward(batch, loss)
            info = session.engine.optim_step()
            session.record(batch, stats, info)
            session.after_step(state)
        return session.engine.step - start


def chat_store(
    run: Run, tokenizer: Tokenizer, mesh: Mesh
) -> tuple[TokenStore, list[dict[str, Any]]]:
    """The rows of `data.path`, rendered once into the run's folder; and what to log about it."""
    method = run.method
    assert isinstance(method, SFT)
    assert run.data.path is not None
    folder, events = Path(run.dir) / "data", []
    if mesh.is_main and not (folder / "manifest.json").exists():
        _, report = build_sft_store(Path(run.data.path), tokenizer, folder, method.max_rows)
        events.append(
            {
                "rows": report.rows,
                "kept": report.kept,
                "dropped": report.drops.by_reason,
                "trained_tokens": report.trained_tokens,
            }
        )
    barrier(mesh)
    return TokenStore.open(folder, tokenizer), events


def with_steps(run: Run, store: TokenStore) -> Run:
    """The run with train.steps cut to what method.epochs take."""
    method = run.method
    assert isinstance(method, SFT)
    if method.epochs is None:
        return run
    rows = packing_report(store, run.data.seq_len)["rows"]
    steps = math.ceil(method.epochs * rows / run.train.global_batch_rows)
    if steps >= run.train.steps:
        return run
    return Run.parse(run.model_dump(), {"train.steps": steps})
