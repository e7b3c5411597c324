"""Streams of (batch, state): what a training step sees, in an order that no layout changes.

Rows are numbered globally; a step takes the next `rows_per_step` of them and each rank gets its
share. `state` is the position after the batch, the same small JSON value on every rank: a stream
given that state goes on exactly there, at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from stepwell.data.batch import Batch
from stepwell.data.order import choose_sources, permute
from stepwell.data.packing import best_fit, pack_rows
from stepwell.data.store import TokenStore
from stepwell.types import CheckpointError, ConfigError, DataError

State = dict[str, Any]


def pretrain_stream(
    stores: Sequence[tuple[TokenStore, float]],
    seq_len: int,
    rows_per_step: int,
    rank: int = 0,
    world: int = 1,
    seed: int = 0,
    state: State | None = None,
    document_mask: bool = True,
    shuffle: bool = True,
) -> Iterator[tuple[Batch, State]]:
    """Endless batches of windows: row w of a store holds its tokens w*seq_len to (w+1)*seq_len,
    and the one after as the last target.

    stores: each with its weight (any positive scale). Every epoch of a store has its own order;
    a store that runs out starts its next epoch while the others go on. With `document_mask`,
    positions count from each document's start, also through windows that it spans, and no target
    lies across a border; without it a row is one text.
    sample_ids: the window's number, counted through the stores in their order.
    Raises ConfigError for impossible shares, DataError for a store shorter than a row,
    CheckpointError for a state of other data. A rank has no rows when there are more ranks than
    rows.
    """
    _check_share(rows_per_step, rank, world)
    if not stores:
        raise ConfigError("pretrain_stream needs at least one store")
    weights = _normalised([weight for _, weight in stores])
    num_rows = [num_windows(store, seq_len) for store, _ in stores]
    first_id = np.cumsum([0, *num_rows[:-1]])
    data = [
        [store.manifest["tokenizer"][:12], store.num_tokens, weight]
        for (store, _), weight in zip(stores, weights, strict=True)
    ]
    origin = {"kind": "windows", "seq_len": seq_len, "seed": seed, "data": data, "shuffle": shuffle}
    counts = _resume(state, origin, len(stores))
    mine = rank_rows(rows_per_step, rank, world)
    while True:
        sources, after = choose_sources(weights, counts, rows_per_step)
        rows = np.empty(rows_per_step, np.int64)
        for k, count in enumerate(counts):
            chosen = sources == k
            ordinals = count + np.arange(int(chosen.sum()))
            rows[chosen] = _rows_at(ordinals, num_rows[k], shuffle, (seed, k))
        counts = after
        picked = [(int(sources[j]), int(rows[j])) for j in mine]
        batch = _window_batch(
            [(stores[k][0], w * seq_len) for k, w in picked],
            [int(first_id[k]) + w for k, w in picked],
            seq_len,
            document_mask,
        )
        yield batch, {**origin, "counts": list(counts)}


def packed_stream(
    store: TokenStore,
    seq_len: int,
    rows_per_step: int,
    rank: int = 0,
    world: int = 1,
    seed: int = 0,
    state: State | None = None,
    shuffle: bool = True,
    pad_id: int = 0,
) -> Iterator[tuple[Batch, State]]:
    """Endless batches of whole documents packed best-fit, loss on the store's mask.

    Documents are cut to their first seq_len tokens; those left with nothing to train on are left
    out (`packing_report` counts them). Each epoch packs and orders anew from the seed.
    sample_ids: the row's number since the first epoch. Errors as `pretrain_stream`.
    """
    _check_share(rows_per_step, rank, world)
    lengths, usable = _usable_docs(store, seq_len)
    data = [store.manifest["tokenizer"][:12], store.num_tokens]
    origin = {"kind": "packed", "seq_len": seq_len, "seed": seed, "data": data, "shuffle": shuffle}
    (start,) = _resume(state, origin, 1)
    mine = rank_rows(rows_per_step, rank, world)
    plans: dict[int, list[list[int]]] = {}
    num_rows = len(best_fit(lengths[usable], seq_len))
    while True:
        numbers = [start + j for j in mine]
        epochs = range(start // num_rows, (start + rows_per_step - 1) // num_rows + 1)
        plans = {
            e: plans.get(e) or _epoch_plan(lengths, usable, seq_len, seed, e, shuffle)
            for e in epochs
        }
        doc_rows = [plans[n // num_rows][n % num_rows] for n in numbers]
        docs = [
            (store.doc(i)[:seq_len], store.doc_mask(i)[:seq_len]) for row in doc_rows for i in row
        ]
        batch = pack_rows(docs, seq_len, pad_id, rows=_renumbered(doc_rows), sample_ids=numbers)
        start += rows_per_step
        yield batch, {**origin, "counts": [start]}


def num_windows(store: TokenStore, seq_len: int) -> int:
    """Rows that a store gives in an epoch; the last tokens that fill no row are left out."""
    num_rows = (store.num_tokens - 1) // seq_len
    if num_rows < 1:
        raise DataError(
            f"the store {store.folder} has {store.num_tokens} tokens, too few for one row of "
            f"seq_len={seq_len} and its last target; the longest that fits is "
            f"{store.num_tokens - 1}"
        )
    return num_rows


def packing_report(store: TokenStore, seq_len: int) -> dict[str, int]:
    """Rows of an epoch and what became of the documents: `rows`, `docs`, `truncated`,
    `no_trained_tokens` (left out), and `trained_tokens` that are reached."""
    lengths, usable = _usable_docs(store, seq_len)
    return {
        "rows": len(best_fit(lengths[usable], seq_len)),
        "docs": len(usable),
        "truncated": int((store.doc_lengths()[usable] > seq_len).sum()),
        "no_trained_tokens": store.num_docs - len(usable),
        "trained_tokens": int(store.trained_tokens(seq_len).sum()),
    }


def rank_rows(rows_per_step: int, rank: int, world: int) -> range:
    """The rows j of a step with j * world // rows_per_step == rank: contiguous, as even as can be,
    and in rank order the step's order."""
    return range(-(-rank * rows_per_step // world), -(-(rank + 1) * rows_per_step // world))


def _check_share(rows_per_step: int, rank: int, world: int) -> None:
    if rows_per_step < 1:
        raise ConfigError(f"rows_per_step={rows_per_step} must be at least 1")
    if not 0 <= rank < world:
        raise ConfigError(f"rank={rank} must lie in 0..{world - 1} (world={world})")


def _normalised(weights: Sequence[float]) -> list[float]:
    for weight in weights:
        if not (weight > 0 and np.isfinite(weight)):
            raise ConfigError(f"a source's weight must be a positive number, not {weight}")
    total = sum(weights)
    return [weight / total for weight in weights]


def _resume(state: State | None, origin: State, num_sources: int) -> list[int]:
    if state is None:
        return [0] * num_sources
    differing = [key for key in origin if state.get(key) != origin[key]]
    if differing:
        key = differing[0]
        raise CheckpointError(
            f"the data position was saved for another stream: {key} was {state.get(key)!r} and is "
            f"now {origin[key]!r}; continue with the former, or start the data anew"
        )
    return [int(count) for count in state["counts"]]


def _rows_at(
    ordinals: np.ndarray, num_rows: int, shuffle: bool, key: tuple[int, ...]
) -> np.ndarray:
    """The row of a store that is its `ordinal`-th sample since the first epoch."""
    epochs, rows = np.divmod(ordinals, num_rows)
    if not shuffle:
        return rows
    out = np.empty_like(rows)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        out[chosen] = permute(rows[chosen], num_rows, *key, epoch)
    return out


def _window_batch(
    windows: list[tuple[TokenStore, int]],
    sample_ids: list[int],
    seq_len: int,
    document_mask: bool,
) -> Batch:
    shape = (len(windows), seq_len)
    text = np.empty((len(windows), seq_len + 1), np.int64)
    weights = np.ones(shape, np.float32)
    positions = np.empty(shape, np.int64)
    docs = np.zeros(shape, np.int32)
    positions[:] = np.arange(seq_len)
    for row, (store, start) in enumerate(windows):
        stop = start + seq_len + 1
        text[row] = store.read(start, stop)
        if store.with_mask:
            weights[row] = store.read_mask(start + 1, stop)
        if document_mask:
            starts = store.doc_starts(start, stop) - start
            positions[row, :] -= starts[0]
            for begin, previous in zip(starts[1:].tolist(), starts[:-1].tolist(), strict=True):
                weights[row, begin - 1] = 0
                positions[row, begin:] -= begin - previous
                docs[row, begin:] += 1
    return Batch(
        tokens_BT=torch.from_numpy(text[:, :-1].copy()),
        targets_BT=torch.from_numpy(text[:, 1:].copy()),
        weights_BT=torch.from_numpy(weights),
        positions_BT=torch.from_numpy(positions),
        docs_BT=torch.from_numpy(docs),
        sample_ids=tuple(sample_ids),
    )


def _usable_docs(store: TokenStore, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Places that each document takes, and which of them have a trained token in reach."""
    places = np.minimum(store.doc_lengths(), seq_len) - 1
    usable = np.flatnonzero(store.trained_tokens(seq_len))
    if not len(usable):
        raise DataError(
            f"no document of {store.folder} has a trained token among its first {seq_len}"
        )
    return places, usable


def _epoch_plan(
    places: np.ndarray, usable: np.ndarray, seq_len: int, seed: int, epoch: int, shuffle: bool
) -> list[list[int]]:
    """The rows of document numbers of one epoch, in order."""
    numbers = np.arange(len(usable))
    order = usable[permute(numbers, len(usable), seed, epoch, 0)] if shuffle else usable
    rows = best_fit(places[order], seq_len)
    if shuffle:
        sequence = permute(np.arange(len(rows)), len(rows), seed, epoch, 1).tolist()
        rows = [rows[r] for r in sequence]
    else:
        rows = sorted((sorted(row) for row in rows), key=lambda row: row[0])
    return [[int(order[i]) for i in row] for row in rows]


def _renumbered(doc_rows: list[list[int]]) -> list[list[int]]:
    """The same rows with documents counted 0, 1, 2, ..."""
    rows, first = [], 0
    for row in doc_rows:
        rows.append(list(range(first, first + len(row))))
        first += len(row)
    return rows
