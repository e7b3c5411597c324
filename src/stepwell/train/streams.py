"""The streams that a run's steps read, opened with the run's settings for this rank's share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.curriculum import Supply, check_supply, rows_given, spans, streams_of
from stepwell.data.loader import (
    State,
    epoch_rows,
    num_windows,
    packed_stream,
    pretrain_stream,
    windows_origin,
)
from stepwell.data.store import TokenStore
from stepwell.parallel.mesh import Mesh
from stepwell.sections.data import SourceConfig
from stepwell.types import ConfigError

Stream = Iterator[tuple[Batch, State]]
Stores = Sequence[tuple[TokenStore, float]]
# A stream of a branch's trunk that the branch has not: it only counts what was read.
TRUNK = "trunk."
# An ascending epoch that ends within so much of its end, or has just begun, is as good as whole.
NEARLY = 0.05


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
) -> dict[str, float]:
    """Rows of each store (by its fingerprint) that will have been read when the run ends, which
    goes on from `states` at `step`. stores: of every stream, by its name. Raises ConfigError if
    `max_epochs` ends the data before."""
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
    return check_supply(found, supplies, seq_len, rows, states, step)


def check_paths(stores: Mapping[str, Stores]) -> None:
    """Raises ConfigError for one store under two paths (a link, a copy): its rows would be read in
    lockstep, in the same order, and its cap count twice."""
    paths: dict[str, str] = {}
    for name, mixture in stores.items():
        mine = set()
        for store, _ in mixture:
            path = os.path.abspath(store.folder)
            other = paths.setdefault(store.fingerprint, path)
            if other != path or store.fingerprint in mine:
                raise ConfigError(
                    f"data.{name}: the stores {other} and {path} hold the same tokens (fingerprint "
                    f"{store.fingerprint}); name the store by one path, in a mixture once, with "
                    "the sum of the weights"
                )
            mine.add(store.fingerprint)


def branch_states(
    run: Run, stores: Mapping[str, Stores], states: Mapping[str, State]
) -> dict[str, State]:
    """The states that a branch goes on from: those of its trunk's stages that are none of its own
    keep counting what was read, under names of their own."""
    found: dict[str, State] = {}
    for name, state in states.items():
        if name.startswith("stages.") and not _goes_on(run, stores.get(name), state):
            name = TRUNK + name
            while name in states or name in found:
                name = TRUNK + name
        found[name] = state
    return found


def _goes_on(run: Run, stores: Stores | None, state: State) -> bool:
    if stores is None:
        return False
    origin = windows_origin(stores, run.data.seq_len, run.train.seed, run.data.order)
    return all(state.get(key) == value for key, value in origin.items())


def ascending_warnings(
    run: Run, stores: Mapping[str, Stores], rows_read: Mapping[str, float]
) -> list[str]:
    """One for each store that order="quality-ascending" is read of, but not to the end of an epoch,
    where its best rows are. rows_read: by fingerprint, in the whole run."""
    if run.data.order != "quality-ascending":
        return []
    sizes = {
        store.fingerprint: (store, num_windows(store, run.data.seq_len))
        for mixture in stores.values()
        for store, _ in mixture
    }
    found = []
    for fingerprint, (store, num_rows) in sizes.items():
        epochs = rows_read.get(fingerprint, 0) / num_rows
        share = epochs % 1
        if epochs == 0 or share > 1 - NEARLY or (epochs >= 1 and share < NEARLY):
            continue
        read = f"the worst {share:.0%} of its rows"
        what = f"only {read} are read" if epochs < 1 else f"its last epoch reads only {read}"
        found.append(
            f"data.order='quality-ascending': the run reads {epochs:.2f} epochs of the store "
            f"{store.folder} ({rows_read[fingerprint]:,.0f} of {num_rows:,} rows), so {what} and "
            f"the best are not read last; choose train.steps so that an epoch ends with the run, "
            "or data.order='shuffled'"
        )
    return found


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
