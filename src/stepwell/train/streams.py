"""The streams that a run's steps read, opened with the run's settings for this rank's share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from stepwell.config import Run, SourceConfig
from stepwell.data.batch import Batch
from stepwell.data.curriculum import Supply, check_supply, rows_given, spans, streams_of
from stepwell.data.loader import State, epoch_rows, packed_stream, pretrain_stream
from stepwell.data.store import TokenStore
from stepwell.parallel.mesh import Mesh

Stream = Iterator[tuple[Batch, State]]
Stores = Sequence[tuple[TokenStore, float]]


def stream_name(run: Run, step: int) -> str:
    """What this step (0 is the first) reads: "rows" in sft, else "sources" or the stage that
    applies, e.g. "stages.0"."""
    if run.method.kind == "sft":
        return "rows"
    found = spans(run.data, run.optim.schedule, run.train.steps)
    return next((s.name for s in found if s.first <= step < s.stop), found[-1].name)


def mixture(run: Run, name: str) -> tuple[SourceConfig, ...]:
    """The sources of the stream `name`."""
    return streams_of(run.data)[name]


def open_windows(
    run: Run, mesh: Mesh, name: str, stores: Stores, states: Mapping[str, State]
) -> Stream:
    """Windows of weighted stores, as pretraining reads them: the stream `name`, from its place in
    `states`, each store after what the run's other streams have read of it. It must be opened anew
    whenever another one has been read."""
    given = rows_given(states, but=name)
    return pretrain_stream(
        stores,
        state=states.get(name),
        document_mask=run.data.document_mask,
        max_epochs=[source.max_epochs for source in mixture(run, name)],
        seen=[given.get(store.fingerprint, 0) for store, _ in stores],
        **_shared(run, mesh),
    )


def check_epochs(
    run: Run, stores: Mapping[str, Stores], states: Mapping[str, State], step: int
) -> None:
    """Raises ConfigError if `max_epochs` ends the data before the run ends, which goes on from
    `states` at `step`. stores: of every stream, by its name."""
    seq_len, rows = run.data.seq_len, run.train.global_batch_rows
    supplies = {
        name: [
            Supply(
                store.fingerprint,
                source.weight,
                inf if source.max_epochs is None else epoch_rows(store, seq_len, source.max_epochs),
            )
            for (store, _), source in zip(stores[name], sources, strict=True)
        ]
        for name, sources in streams_of(run.data).items()
    }
    found = spans(run.data, run.optim.schedule, run.train.steps)
    check_supply(found, supplies, seq_len, rows, states, step)


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
        "order": run.data.order,
    }
