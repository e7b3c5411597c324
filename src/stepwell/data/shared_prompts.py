"""Prompts that stand once in a row for several documents.

A document that is not its row's first and whose positions begin at k > 0 begins with the first k
tokens of the document before it in the row that begins at position 0 (the latest one). What is
shared carries no loss, so the last token of a prompt, whose target differs, each document has.

N tokens of a batch, M of its documents laid out whole, D documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stepwell.data.batch import Batch
from stepwell.types import DataError

Weights = Sequence[float] | np.ndarray


class Layout(NamedTuple):
    """Whole documents: which token stands at each of their places (M,), the first place of each
    token (N,), their borders int32 (D + 1,). shared_S: the tokens that stand at several places;
    copies: for the second place, the third, ... which of the S, and the places. All on the CPU."""

    expand_M: Tensor
    kept_N: Tensor
    borders: Tensor
    shared_S: Tensor
    copies: tuple[tuple[Tensor, Tensor], ...]


def shared_length(
    first: tuple[Sequence[int], Weights], other: tuple[Sequence[int], Weights]
) -> int:
    """How many tokens two documents (ids, mask) begin with that are the same and whose targets
    carry no loss in either; each keeps one of its own at least."""
    limit = max(0, min(len(first[0]), len(other[0])) - 2)
    ids, weights = (np.stack([np.asarray(x[part][: limit + 1]) for x in (first, other)])
                    for part in (0, 1))  # fmt: skip
    differs = (ids[0, :limit] != ids[1, :limit]) | (weights[:, 1:] != 0).any(0)
    return int(differs.argmax()) if differs.any() else limit


def layout(batch: Batch, borders: Tensor | None = None) -> Layout | None:
    """None where no document shares its beginning. borders: the batch's, if they are known.

    Raises DataError for a document that begins later than the one whose beginning it shares ends.
    """
    borders = (batch.cu_seqlens() if borders is None else borders).long()
    if not len(borders) - 1:
        return None
    starts_D, lengths_D = borders[:-1], borders.diff()
    begins_D = batch.positions_BT.flatten().cpu()[starts_D]
    shares_D = (begins_D > 0) & (starts_D % batch.positions_BT.shape[1] != 0)
    if not shares_D.any():
        return None
    numbers_D = torch.arange(len(starts_D))
    owner_D = torch.where(shares_D, 0, numbers_D).cummax(0).values
    more_D = torch.where(shares_D, begins_D, 0)
    if (more_D > lengths_D[owner_D]).any():
        worst = int((more_D - lengths_D[owner_D]).argmax())
        raise DataError(
            f"document {worst} begins at position {int(more_D[worst])}, but the document that it "
            f"shares its beginning with has {int(lengths_D[owner_D[worst]])} tokens"
        )
    whole_D = lengths_D + more_D
    ends_D = whole_D.cumsum(0)
    doc_M = torch.repeat_interleave(numbers_D, whole_D)
    place_M = torch.arange(int(ends_D[-1])) - (ends_D - whole_D)[doc_M]
    copied_M = place_M < more_D[doc_M]
    start_M = torch.where(copied_M, starts_D[owner_D][doc_M], (starts_D - more_D)[doc_M])
    expand_M = start_M + place_M
    own_M = (~copied_M).nonzero().flatten()
    kept_N = torch.empty(len(own_M), dtype=torch.int64)
    kept_N[expand_M[own_M]] = own_M
    shared_S = expand_M[copied_M].unique()
    return Layout(
        expand_M,
        kept_N,
        torch.cat([ends_D.new_zeros(1), ends_D]).int(),
        shared_S,
        tuple(_copies(expand_M, copied_M, shared_S, owner_D[doc_M], doc_M)),
    )


def _copies(expand_M, copied_M, shared_S, owner_M, doc_M):
    """(which of the S, places) for the documents that are the first, second, ... to share."""
    round_M = doc_M - owner_M
    for number in range(1, int(round_M.max()) + 1):
        places = (copied_M & (round_M == number)).nonzero().flatten()
        yield torch.searchsorted(shared_S, expand_M[places]), places


def whole_lengths(batch: Batch) -> list[int]:
    """Tokens of each document in the rows with those that it shares; padding is none."""
    borders = batch.cu_seqlens()
    real = batch.docs_BT.cpu().flatten()[borders[:-1].long()] >= 0
    found = layout(batch, borders)
    return (borders if found is None else found.borders).diff()[real].tolist()
