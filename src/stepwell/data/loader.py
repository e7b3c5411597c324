"""Streams of (batch, state): what a training step sees, in an order that no layout changes.

Rows are numbered globally; a step takes the next `rows_per_step` of them and each rank gets its
share. `state` is the position after the batch, the same small JSON value on every rank: a stream
given that state goes on exactly there, at any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from stepwell.data.batch import Batch
from stepwell.data.order import ascending, choose_sources, permute, window_scores
from stepwell.data.packing import best_fit, pack_rows
from stepwell.data.store import TokenStore
from stepwell.types import CheckpointError, ConfigError, DataError

State = dict[str, Any]
Order = Literal["shuffled", "sequential", "quality-ascending"]


def pretrain_stream(
    stores: Sequence[tuple[TokenStore, float]],
    seq_len: int,
    rows_per_step: int,
    rank: int = 0,
    world: int = 1,
    seed: int = 0,
    state: State | None = None,
    document_mask: bool = True,
    order: Order = "shuffled",
    max_epochs: Sequence[float | None] | None = None,
    seen: Sequence[int] | None = None,
) -> Iterator[tuple[Batch, State]]:
    """Endless batches of windows: row w of a store holds its tokens w*seq_len to (w+1)*seq_len,
    and the one after as the last target.

    stores: each with its weight (any positive scale). Every epoch of a store has its own order;
    a store that runs out starts its next epoch while the others go on. With `document_mask`,
    positions count from each document's start, also through windows that it spans, and no target
    lies across a border; without it a row is one text.
    max_epochs: how often each store may be read at most; then its weight goes to the others, in
    proportion. seen: rows of each that other streams of the run have given; this one goes on after
    them. (Other streams don't move while this one does, so the state needs no `seen`.)
    sample_ids: the window's number, counted through the stores in their order.
    Raises ConfigError for impossible shares, DataError for a store shorter than a row, for one
    without scores where the order goes by them, and when max_epochs ends the data; CheckpointError
    for a state of other data. A rank has no rows when there are more ranks than rows.
    """
    _check_share(rows_per_step, rank, world)
    if not stores:
        raise ConfigError("pretrain_stream needs at least one store")
    origin = windows_origin(stores, seq_len, seed, order)
    weights = _normalised([weight for _, weight in stores])
    rows_of = [RowOrder(store, seq_len, order, seed) for store, _ in stores]
    first_id = np.cumsum([0, *(rows.num_rows for rows in rows_of[:-1])])
    seen = list(seen or [0] * len(stores))
    caps = [
        None if most is None else max(epoch_rows(store, seq_len, most) - before, 0)
        for (store, _), most, before in zip(
            stores, max_epochs or [None] * len(stores), seen, strict=True
        )
    ]
    counts = _resume(state, origin, len(stores))
    since = [0] * len(stores)
    if state is not None:
        # What other streams or new caps have changed begins a new count of the shares.
        since = state["since"] if state["caps"] == caps else counts
    mine = rank_rows(rows_per_step, rank, world)
    while True:
        sources, after, since = choose_sources(weights, counts, rows_per_step, caps, since)
        rows = np.empty(rows_per_step, np.int64)
        for k, rows_k in enumerate(rows_of):
            chosen = sources == k
            rows[chosen] = rows_k.at(seen[k] + counts[k] + np.arange(int(chosen.sum())))
        counts = after
        picked = [(int(sources[j]), int(rows[j])) for j in mine]
        batch = _window_batch(
            [(stores[k][0], w * seq_len) for k, w in picked],
            [int(first_id[k]) + w for k, w in picked],
            seq_len,
            document_mask,
        )
        yield batch, {**origin, "counts": list(counts), "since": list(since), "caps": caps}


def windows_origin(
    stores: Sequence[tuple[TokenStore, float]], seq_len: int, seed: int, order: Order
) -> State:
    """What of a `pretrain_stream`'s state must be the same for it to go on."""
    weights = _normalised([weight for _, weight in stores])
    data = [
        [store.fingerprint, store.num_tokens, weight]
        for (store, _), weight in zip(stores, weights, strict=True)
    ]
    return {"kind": "windows", "seq_len": seq_len, "seed": seed, "data": data, "order": order}


class RowOrder:
    """The rows of a store in the order of their epochs. The same store has the same order in every
    stream of a seed."""

    def __init__(self, store: TokenStore, seq_len: int, order: Order, seed: int):
        self.num_rows = num_windows(store, seq_len)
        self.order = order
        self._key = (seed, int(store.fingerprint, 16))
        self._scores = None
        self._sorted: dict[int, np.ndarray] = {}
        if order == "quality-ascending":
            starts = np.append(0, np.cumsum(store.doc_lengths()))
            self._scores = window_scores(starts, store.doc_scores(), self.num_rows, seq_len)

    def at(self, ordinals: np.ndarray) -> np.ndarray:
        """The row that is the store's `ordinal`-th since the first epoch."""
        epochs, rows = np.divmod(ordinals, self.num_rows)
        if self.order == "sequential":
            return rows
        out = np.empty_like(rows)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            out[chosen] = self._within(epoch, rows[chosen])
        return out

    def _within(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        if self._scores is None:
            return permute(rows, self.num_rows, *self._key, epoch)
        if epoch not in self._sorted:
            self._sorted = {epoch: ascending(self._scores, *self._key, epoch)}
        return self._sorted[epoch][rows]


def epoch_rows(store: TokenStore, seq_len: int, max_epochs: float) -> int:
    """How many rows a store gives in so many epochs. Raises ConfigError for none."""
    num_rows = num_windows(store, seq_len)
    most = math.floor(max_epochs * num_rows + 1e-9)
    if most < 1:
        raise ConfigError(
            f"max_epochs={max_epochs} of the store {store.folder} is less than one of its "
            f"{num_rows} rows of {seq_len} tokens; the nearest legal value is {1 / num_rows:.3g}"
        )
    return most


def packed_stream(
    store: TokenStore,
    seq_len: int,
    rows_per_step: int,
    rank: int = 0,
    world: int = 1,
    seed: int = 0,
    state: State | None = None,
    order: Order = "shuffled",
    pad_id: int = 0,
) -> Iterator[tuple[Batch, State]]:
    """Endless batches of whole documents packed best-fit, loss on the store's mask.

    Documents are cut to their first seq_len tokens; those left with nothing to train on are left
    out (`packing_report` counts them). Each epoch packs and orders anew from the seed, unless the
    order is sequential; quality-ascending is refused.
    sample_ids: the row's number since the first epoch. Errors as `pretrain_stream`.
    """
    _check_share(rows_per_step, rank, world)
    if order == "quality-ascending":
        raise ConfigError(f"packed rows have no order {order!r}; the nearest is 'sequential'")
    lengths, usable = _usable_docs(store, seq_len)
    data = [store.fingerprint, store.num_tokens]
    origin = {"kind": "packed", "seq_len": seq_len, "seed": seed, "data": data, "order": order}
    (start,) = _resume(state, origin, 1)
    mine = rank_rows(rows_per_step, rank, world)
    plans: dict[int, list[list[int]]] = {}
    num_rows = len(best_fit(lengths[usable], seq_len))
    while True:
        numbers = [start + j for j in mine]
        epochs = range(start // num_rows, (start + rows_per_step - 1) // num_rows + 1)
        plans = {
            e: plans.get(e) or _epoch_plan(lengths, usable, seq_len, seed, e, order) for e in epochs
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


def _window_batch(
    windows: list[tuple[TokenStore, int]],
    sample_ids: list[int],
    seq_len: int,
    document_mask: bool,
) -> Batch:
    num_rows = len(windows)
    text = np.empty((num_rows, seq_len + 1), np.int64)
    weights = np.ones((num_rows, seq_len), np.float32)
    before = np.zeros(num_rows, np.int64)  # tokens of a row's first document ahead of the row
    border_rows, border_places = [], []
    for row, (store, start) in enumerate(windows):
        stop = start + seq_len + 1
        text[row] = store.read(start, stop)
        if store.with_mask:
            weights[row] = store.read_mask(start + 1, stop)
        if document_mask:
            starts = store.doc_starts(start, stop)
            before[row] = start - starts[0]
            border_places.append(starts[1:] - start)
            border_rows.append(np.full(len(starts) - 1, row))
    docs, positions = _documents(num_rows, seq_len, before, border_rows, border_places, weights)
    return Batch(
        tokens_BT=torch.from_numpy(text[:, :-1].copy()),
        targets_BT=torch.from_numpy(text[:, 1:].copy()),
        weights_BT=torch.from_numpy(weights),
        positions_BT=torch.from_numpy(positions),
        docs_BT=torch.from_numpy(docs),
        sample_ids=tuple(sample_ids),
    )


def _documents(
    num_rows: int,
    seq_len: int,
    before: np.ndarray,
    border_rows: list[np.ndarray],
    border_places: list[np.ndarray],
    weights: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Each token's document within its row (int32) and its position in that (int64).

    border_*: where a row's second and later documents begin, up to the place after its end; the
    target before a border loses its weight."""
    docs = np.zeros((num_rows, seq_len + 1), np.int32)
    places = np.arange(seq_len, dtype=np.int64)
    first = np.empty((num_rows, seq_len + 1), np.int64)  # where the token's document begins
    first[:] = -before[:, None]
    if border_rows:
        rows, columns = np.concatenate(border_rows), np.concatenate(border_places)
        weights[rows, columns - 1] = 0
        docs[rows, columns] = 1
        first[rows, columns] = columns
        np.cumsum(docs, axis=1, out=docs)
        np.maximum.accumulate(first, axis=1, out=first)
    return np.ascontiguousarray(docs[:, :-1]), places - first[:, :-1]


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
    places: np.ndarray, usable: np.ndarray, seq_len: int, seed: int, epoch: int, order: Order
) -> list[list[int]]:
    """The rows of document numbers of one epoch, in order."""
    shuffle = order == "shuffled"
    numbers = np.arange(len(usable))
    docs = usable[permute(numbers, len(usable), seed, epoch, 0)] if shuffle else usable
    rows = best_fit(places[docs], seq_len)
    if shuffle:
        sequence = permute(np.arange(len(rows)), len(rows), seed, epoch, 1).tolist()
        rows = [rows[r] for r in sequence]
    else:
        rows = sorted((sorted(row) for row in rows), key=lambda row: row[0])
    return [[int(docs[i]) for i in row] for row in rows]


def _renumbered(doc_rows: list[list[int]]) -> list[list[int]]:
    """The same rows with documents counted 0, 1, 2, ..."""
    rows, first = [], 0
    for row in doc_rows:
        rows.append(list(range(first, first + len(row))))
        first += len(row)
    return rows
