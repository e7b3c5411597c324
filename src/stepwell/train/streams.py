"""The streams that a run's steps read, opened with the run's settings for this rank's share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.loader import State, packed_stream, pretrain_stream
from stepwell.data.store import TokenStore
from stepwell.parallel.mesh import Mesh
from stepwell.train.optim import phase

Stream = Iterator[tuple[Batch, State]]


def stream_name(run: Run, step: int) -> str:
    """What this step reads: "rows" in sft, else "sources" or "decay_sources" of the mixtures."""
    if run.method.kind == "sft":
        return "rows"
    in_decay = phase(run.optim.schedule, step, run.train.steps) == "decay"
    return "decay_sources" if in_decay and run.data.decay_sources else "sources"


def open_windows(
    run: Run, mesh: Mesh, stores: Sequence[tuple[TokenStore, float]], state: State | None
) -> Stream:
    """Windows of weighted stores, as pretraining reads them."""
    return pretrain_stream(
        stores, state=state, document_mask=run.data.document_mask, **_shared(run, mesh)
    )


def open_rows(run: Run, mesh: Mesh, store: TokenStore, state: State | None, pad_id: int) -> Stream:
    """Packed conversations, as sft reads them."""
    return packed_stream(store, state=state, pad_id=pad_id, **_shared(run, mesh))


def batch_number(state: State, run: Run) -> int:
    """How many batches the stream has given, by the state that came with the last one."""
    return sum(state["counts"]) // run.train.global_batch_rows


def _shared(run: Run, mesh: Mesh) -> dict[str, Any]:
    return {
        "seq_len": run.data.seq_len,
        "rows_per_step": run.train.global_batch_rows,
        "rank": mesh.data_rank,
        "world": mesh.data_world,
        "seed": run.train.seed,
        "shuffle": run.data.shuffle,
    }
