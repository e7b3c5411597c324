"""Packing judged answers into rows: a pair's two documents stay neighbours in one row.

Losses on log-probabilities read the answers' tokens; scores are read at a document's last token
(or a step's), which then has a place of its own although nothing follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from stepwell.data.batch import Batch
from stepwell.data.judged import Labelled, Pair, Rendering, Stepwise
from stepwell.data.packing import best_fit, pack_rows
from stepwell.data.shared_prompts import shared_length
from stepwell.types import DataError

Read = Literal["answers", "last"]


def pack_pairs(
    pairs: Sequence[Pair],
    seq_len: int,
    pad_id: int = 0,
    streams: Mapping[str, Any] | None = None,
    index: Sequence[int] | None = None,
    read: Read = "answers",
    shared: bool = False,
) -> Batch:
    """Rows in which pair k of a row is documents 2k (chosen) and 2k + 1 (rejected), by best fit.

    read: weight 1 on the answers' tokens, or on the last token of each document alone (for scores).
    streams: for each name a value a pair (P,), or (P, 2) for chosen and rejected; constant over
    the documents, in Batch.extra with the dtype given. index: the pairs' numbers (default: their
    order), in Batch.extra["index"]; a row's sample id is its first pair's. shared: what both
    documents of a pair begin with, without a weight, is there once (`data.shared_prompts`).
    Raises DataError for a pair that does not fit, and streams of another length.
    """
    docs = [_read_at(d, read, pad_id) for pair in pairs for d in (pair.chosen, pair.rejected)]
    skips = _common(docs) if shared else None
    return _pack(docs, 2, seq_len, pad_id, streams, index, shared=skips)


def num_places(pair: Pair, read: Read = "answers", shared: bool = False) -> int:
    """What `pack_pairs` needs for a pair."""
    docs = [_read_at(document, read, 0) for document in (pair.chosen, pair.rejected)]
    return sum(len(ids) - 1 for ids, _ in docs) - (sum(_common(docs)) if shared else 0)


def _common(docs: Sequence[Rendering]) -> list[int]:
    """Of each of the documents, two a pair, what it shares with the one before it in the pair."""
    pairs = zip(docs[::2], docs[1::2], strict=True)
    return [k for chosen, rejected in pairs for k in (0, shared_length(chosen, rejected))]


def pack_labelled(
    rows: Sequence[Labelled],
    seq_len: int,
    pad_id: int = 0,
    streams: Mapping[str, Any] | None = None,
    index: Sequence[int] | None = None,
    read: Read = "answers",
) -> Batch:
    """One document a row of data, its label in Batch.extra["label"]. Else as `pack_pairs`."""
    docs = [_read_at(row.rendering, read, pad_id) for row in rows]
    labels = np.array([row.label for row in rows])
    return _pack(docs, 1, seq_len, pad_id, {"label": labels, **(streams or {})}, index)


def pack_steps(
    rows: Sequence[Stepwise],
    seq_len: int,
    pad_id: int = 0,
    streams: Mapping[str, Any] | None = None,
    index: Sequence[int] | None = None,
) -> Batch:
    """One document a row of data, with weight 1 at the last token of each labelled step and the
    step's label there in Batch.extra["label"]. Else as `pack_pairs`."""
    docs, labels = [], []
    for row in rows:
        ids = row.ids
        mask, values = [0] * (len(ids) + 1), [0.0] * (len(ids) + 1)
        for end, label in zip(row.step_ends, row.labels, strict=True):
            if label is not None:
                mask[end + 1], values[end + 1] = 1, label
        docs.append(((*ids, pad_id), mask))
        labels.append(values)
    return _pack(docs, 1, seq_len, pad_id, streams, index, {"label": labels})


def _read_at(document: Rendering, read: Read, pad_id: int) -> Rendering:
    """For scores a token that is never looked at follows the document."""
    ids, mask = document
    return (ids, mask) if read == "answers" else ((*ids, pad_id), (*(0,) * len(ids), 1))


def _pack(
    docs: Sequence[Any],
    unit: int,
    seq_len: int,
    pad_id: int,
    streams: Mapping[str, Any] | None,
    index: Sequence[int] | None,
    token_streams: Mapping[str, Sequence[Any]] | None = None,
    shared: Sequence[int] | None = None,
) -> Batch:
    """`unit` documents of `docs` at a time share a row."""
    arrays = [(np.array(ids, np.int64), np.array(mask, np.float32)) for ids, mask in docs]
    skips = [0] * len(arrays) if shared is None else shared
    places = [len(ids) - 1 - skip for (ids, _), skip in zip(arrays, skips, strict=True)]
    lengths = np.array(places, np.int64).reshape(-1, unit).sum(1)
    if len(lengths) and lengths.max() > seq_len:
        worst = int(lengths.argmax())
        what = "pair" if unit == 2 else "answer"
        raise DataError(
            f"{what} {worst} needs {int(lengths[worst])} places but a row has {seq_len}; "
            f"truncate it, or raise data.seq_len to {int(lengths[worst])}"
        )
    units = best_fit(lengths, seq_len)
    rows = [[unit * i + k for i in row for k in range(unit)] for row in units]
    numbers = list(range(len(lengths)) if index is None else index)
    batch = pack_rows(
        arrays,
        seq_len,
        pad_id,
        token_streams,
        rows,
        sample_ids=[numbers[row[0]] for row in units],
        shared=skips,
    )
    values = {"index": np.asarray(numbers, np.int64), **(streams or {})}
    constant = {
        name: _constant(batch, rows, _per_document(name, value, len(lengths), unit))
        for name, value in values.items()
    }
    return replace(batch, extra={**batch.extra, **constant})


def _per_document(name: str, values: Any, num_units: int, unit: int) -> np.ndarray:
    """Values (P,) or (P, unit) as one a document."""
    values = np.asarray(values)
    if values.shape == (num_units,):
        return np.repeat(values, unit)
    if values.shape != (num_units, unit):
        raise DataError(
            f"stream {name!r} has values of shape {values.shape} for {num_units} items; it must "
            f"be ({num_units},)" + (f" or ({num_units}, {unit})" if unit > 1 else "")
        )
    return values.reshape(-1)


def _constant(batch: Batch, rows: list[list[int]], values: np.ndarray) -> torch.Tensor:
    """(B, T): at each place the value of the document that it belongs to, 0 in padding."""
    order = np.array([i for row in rows for i in row], np.int64)
    first = np.cumsum([0, *(len(row) for row in rows)])[:-1]
    docs_BT = batch.docs_BT.numpy()
    held_BT = docs_BT >= 0
    out_BT = np.zeros(docs_BT.shape, values.dtype)
    if len(order):
        out_BT[held_BT] = values[order[(docs_BT + first[:, None])[held_BT]]]
    return torch.from_numpy(out_BT)
