"""FLOPs of a step on the rows at hand, from the closed forms of `models/flops`."""

from __future__ import annotations

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.models.flops import attended_seq_len, flops_per_token
from stepwell.models.lora_shapes import target_shapes
from stepwell.parallel.remat import recomputed
from stepwell.parallel.rules import AxisSizes


def step_flops(run: Run, batch: Batch) -> float:
    """Model FLOPs of one step on these rows: attention within documents, the head only where a
    loss is taken, backward twice the forward, no recomputation. A frozen matrix has no gradient to
    compute, so its backward pass costs as much as its forward."""
    lengths = document_lengths(batch)
    num_tokens = sum(lengths)
    if num_tokens == 0:
        return 0.0
    per_token = flops_per_token(run.model, attended_seq_len(lengths))
    loss_tokens = int((batch.weights_BT != 0).sum())
    matrices = num_tokens * per_token.blocks + loss_tokens * per_token.head
    adapters = num_tokens * adapter_flops(run)
    passes = 2 if run.lora.rank else 3
    return passes * matrices + 3 * (num_tokens * per_token.attention + adapters)


def adapter_flops(run: Run) -> int:
    """Of the adapters' products, forward and per token."""
    shapes = target_shapes(run.model, run.lora).values()
    return sum(2 * run.lora.rank * (rows + columns) for rows, columns in shapes)


def recomputed_flops(run: Run, sizes: AxisSizes, batch: Batch) -> float:
    """What `remat` adds to `step_flops`: blocks that are computed again."""
    lengths = document_lengths(batch)
    if not lengths:
        return 0.0
    blocks, attention = recomputed(run, sizes)
    per_token = flops_per_token(run.model, attended_seq_len(lengths))
    return sum(lengths) * per_token.recomputed(blocks=blocks, attention=attention)


def document_lengths(batch: Batch) -> list[int]:
    """Tokens of each document in the rows; padding is none."""
    borders = batch.cu_seqlens()
    starts, ends = borders[:-1].long(), borders[1:].long()
    real = batch.docs_BT.cpu().flatten()[starts] >= 0
    return (ends - starts)[real].tolist()
