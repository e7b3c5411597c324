"""Packing whole documents into rows of one length.

A document of n tokens takes n - 1 places: token t stands at the place whose target is token t+1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stepwell.data.batch import Batch
from stepwell.types import DataError

Ids = Sequence[int] | np.ndarray


def truncate(ids: Ids, mask: Ids, max_length: int) -> tuple[Ids, Ids] | None:
    """The first `max_length` tokens; None when no trained token would be left to predict.

    The head stays, so a prompt is never cut while any of its completion is kept.
    """
    ids, mask = ids[:max_length], mask[:max_length]
    return (ids, mask) if np.any(np.asarray(mask[1:])) else None


def best_fit(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Rows of indices so that no row's lengths exceed `capacity`: best-fit decreasing, which
    needs at most 11/9 of the fewest rows + 4 (Johnson et al. 1974). Ties keep the given order.

    Raises DataError for a length above the capacity.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and lengths.max() > capacity:
        worst = int(lengths.argmax())
        raise DataError(
            f"document {worst} needs {lengths[worst]} places but a row has {capacity}; "
            "truncate it first"
        )
    rows: list[list[int]] = []
    rows_by_space: dict[int, list[int]] = {}
    open_spaces = 0  # bit s is set while a row has exactly s places left
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        fitting = open_spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                open_spaces ^= 1 << space
            rows[row].append(i)
        else:
            space, row = capacity, len(rows)
            rows.append([i])
        space -= length
        if space > 0:
            rows_by_space.setdefault(space, []).append(row)
            open_spaces |= 1 << space
    return rows


def shortest(lengths: Sequence[int], capacity: int, step: int) -> int:
    """The shortest rows, in multiples of `step`, of which `best_fit` needs no more than of rows of
    `capacity`: so little of a small batch is padding."""
    if not lengths:
        return capacity
    num_rows = len(best_fit(lengths, capacity))
    least = max(max(lengths), -(-sum(lengths) // num_rows))
    steps = range(-(-least // step) * step, capacity, step)
    return next((n for n in steps if len(best_fit(lengths, n)) <= num_rows), capacity)


def pack_rows(
    docs: Sequence[tuple[Ids, Ids]],
    seq_len: int,
    pad_id: int = 0,
    extra: Mapping[str, Sequence[Any]] | None = None,
    rows: Sequence[Sequence[int]] | None = None,
    sample_ids: Sequence[int] | None = None,
    shared: Sequence[int] | None = None,
) -> Batch:
    """A batch of the documents (ids, mask), mask 1 (or a weight) for each token that is trained.

    extra: for each stream, one array a document with a value for each of its tokens; the value
    lands where that token is the *target*. rows: which documents share a row (default: best fit).
    shared: how many of each document's first tokens it has in common with the last document
    before it in its row for which that is 0, and leaves out (`data.shared_prompts`).
    Unused places have pad_id, weight 0 and docs -1. A document of fewer than two tokens has
    nothing to predict and is refused, as is one that does not fit (DataError).
    """
    skips = np.zeros(len(docs), np.int64) if shared is None else np.asarray(shared, np.int64)
    lengths = np.array([len(ids) - 1 for ids, _ in docs], dtype=np.int64) - skips
    if len(lengths) and lengths.min() < 1:
        raise DataError(f"document {int(lengths.argmin())} has fewer than 2 tokens")
    if rows is None:
        rows = best_fit(lengths, seq_len)
    order = np.array([i for row in rows for i in row], dtype=np.int64)
    places = _places(lengths[order], [len(row) for row in rows], seq_len)
    shape = (len(rows), seq_len)

    def scatter(parts: list[Any], dtype: Any, fill: Any) -> torch.Tensor:
        out = np.full(shape[0] * seq_len, fill, dtype=dtype)
        if parts:
            out[places] = np.concatenate(parts)
        return torch.from_numpy(out.reshape(shape))

    ordered = [(docs[i], int(skips[i])) for i in order]
    kept = lengths[order]
    positions = [np.arange(skip, skip + n) for (_, skip), n in zip(ordered, kept, strict=True)]
    numbers = np.concatenate([np.arange(len(row)) for row in rows]) if len(rows) else kept
    return Batch(
        tokens_BT=scatter([np.asarray(d[0])[k:-1] for d, k in ordered], np.int64, pad_id),
        targets_BT=scatter([np.asarray(d[0])[k + 1 :] for d, k in ordered], np.int64, pad_id),
        weights_BT=scatter([np.asarray(d[1])[k + 1 :] for d, k in ordered], np.float32, 0),
        positions_BT=scatter(positions, np.int64, 0),
        docs_BT=scatter([np.repeat(numbers, kept)] if len(kept) else [], np.int32, -1),
        sample_ids=tuple(sample_ids) if sample_ids is not None else tuple(range(len(rows))),
        extra={
            name: scatter(
                [_aligned(name, values[i], len(docs[i][0]))[skips[i] + 1 :] for i in order],
                _dtype(values),
                0,
            )
            for name, values in (extra or {}).items()
        },
    )


def _places(lengths: np.ndarray, docs_per_row: list[int], seq_len: int) -> np.ndarray:
    """The flat place of each token of documents that follow each other within their rows."""
    if not len(lengths):
        return np.zeros(0, np.int64)
    row = np.repeat(np.arange(len(docs_per_row)), docs_per_row)
    ends = np.cumsum(lengths)
    first_doc = np.cumsum([0, *docs_per_row[:-1]])
    row_start = (ends - lengths)[np.minimum(first_doc, len(lengths) - 1)]
    used = np.bincount(row, weights=lengths, minlength=len(docs_per_row))
    if used.max() > seq_len:
        worst = int(used.argmax())
        raise DataError(
            f"row {worst} needs {int(used[worst])} places but has {seq_len}; truncate its documents"
        )
    shift = np.repeat(row * seq_len - row_start[row], lengths)
    return np.arange(ends[-1]) + shift


def _aligned(name: str, values: Any, num_tokens: int) -> np.ndarray:
    values = np.asarray(values)
    if len(values) != num_tokens:
        raise DataError(
            f"stream {name!r} has {len(values)} values for a document of {num_tokens} tokens"
        )
    return values


def _dtype(values: Sequence[Any]) -> Any:
    kinds = {np.asarray(v).dtype.kind for v in values}
    return np.int64 if kinds and kinds <= set("biu") else np.float32
