"""Which runs may have prompts that documents share, how long their rows are, and what attention
must know of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.shared_prompts import layout
from stepwell.models.layers import Firsts, SharedPrompts
from stepwell.types import TrainingError

LENGTH_STEP = 32


def shares_prompts(run: Run) -> bool:
    """Not where context ranks divide the rows, code is compiled for the number of tokens, or
    dropout draws for each document by what all of it says: rows then hold whole documents."""
    dropout = run.lora.rank > 0 and run.lora.dropout > 0
    return run.layout.cp == 1 and not run.layout.compile and not dropout


def length_step(run: Run) -> int:
    """Rows that are shorter than data.seq_len are so in steps of so many tokens, which tensor ranks
    can divide."""
    return math.lcm(LENGTH_STEP, run.layout.tp)


def sharing_step(run: Run) -> int:
    """`length_step` of rows in which prompts are shared; 0 where rows hold whole documents."""
    return length_step(run) if shares_prompts(run) else 0


def shared_prompts(
    micro: Batch, borders: Tensor, run: Run, device: torch.device
) -> tuple[Tensor, SharedPrompts | None]:
    """Borders of the documents, whole, and what is shared; the same borders and None where nothing
    is. Raises TrainingError where the run cannot have it (`shares_prompts`)."""
    found = layout(micro, borders)
    if found is None:
        return borders, None
    if not shares_prompts(run):
        raise TrainingError(
            "documents of the batch share their prompts, which needs layout.cp=1, "
            "layout.compile=false and no lora.dropout; pack them whole"
        )
    copies = tuple((which.to(device), places.to(device)) for which, places in found.copies)
    expand_M, kept_N, shared_S = (
        x.to(device) for x in (found.expand_M, found.kept_N, found.shared_S)
    )
    return found.borders, SharedPrompts(expand_M, kept_N, shared_S, copies)


def first_queries(
    borders: Tensor, real_BT: Tensor, active_M: Tensor, shared: SharedPrompts | None
) -> Firsts:
    """What attention need not compute: padding, copies of what documents share, and in the last
    block what comes before a document's first active token. borders: of whole documents. All are on
    the CPU."""
    real_N = real_BT.flatten()
    kept_N = torch.arange(len(real_N)) if shared is None else shared.kept_N
    whole = shared is None and bool(real_N.all())
    every = None if whole else first_places(borders, kept_N[real_N])
    if len(active_M) == len(real_N):
        return Firsts(every, every)
    return Firsts(every, first_places(borders, kept_N[active_M]))


def first_places(borders: Tensor, places: Tensor) -> Tensor:
    """int64 (documents,): the least of `places` in each, counted from its start; its length where
    it has none."""
    borders = borders.long()
    document = torch.searchsorted(borders, places, right=True) - 1
    return borders.diff().scatter_reduce(0, document, places - borders[document], "amin")
