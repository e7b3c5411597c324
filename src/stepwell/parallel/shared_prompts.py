"""Which runs may have prompts that documents share, and what attention must know of them."""

from __future__ import annotations

import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.shared_prompts import layout
from stepwell.models.layers import SharedPrompts
from stepwell.types import TrainingError


def shares_prompts(run: Run) -> bool:
    """Not where context ranks divide the rows, code is compiled for the number of tokens, or
    dropout draws for each document by what all of it says: rows then hold whole documents."""
    dropout = run.lora.rank > 0 and run.lora.dropout > 0
    return run.layout.cp == 1 and not run.layout.compile and not dropout


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
