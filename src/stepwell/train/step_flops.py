"""FLOPs of a step on the rows at hand, from the closed forms of `models/flops`."""

from __future__ import annotations

import math
from collections.abc import Collection
from math import prod

import torch

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.shared_prompts import layout
from stepwell.models.activations import Keep
from stepwell.models.flops import flops_per_token, parameter_shapes
from stepwell.models.lora_shapes import target_shapes
from stepwell.parallel.remat import recomputed, segments_of
from stepwell.parallel.rules import AxisSizes
from stepwell.parallel.schedules import split_blocks
from stepwell.parallel.shared_prompts import first_places


def step_flops(run: Run, batch: Batch) -> float:
    """Model FLOPs of one step on these rows: what their numbers need. Attention within whole
    documents, and everything else, once for tokens that documents share; the head, and what follows
    the last block's keys and values, only where a loss is taken (its attention: from there on);
    backward twice the forward, no recomputation. A frozen matrix has no gradient to compute, so its
    backward pass costs as much as its forward."""
    num_tokens = num_computed(batch)
    if num_tokens == 0:
        return 0.0
    per_token = flops_per_token(run.model, 1)
    loss_tokens = int((batch.weights_BT != 0).sum())
    matrices = num_tokens * per_token.blocks + loss_tokens * per_token.head
    adapters = num_tokens * adapter_flops(run)
    if narrows(run):
        left_out, last = num_tokens - loss_tokens, _narrowed(run)
        matrices -= left_out * sum(2 * prod(parameter_shapes(run.model)[name]) for name in last)
        adapters -= left_out * adapter_flops(run, last)
    passes = 2 if run.lora.rank else 3
    block, last = attention_flops(run, batch)
    attention = (run.model.num_layers - 1) * block + last
    return passes * matrices + 3 * (attention + adapters)


def narrows(run: Run) -> bool:
    """Whether the last block computes what follows its attention for tokens with a loss alone, as
    `ForwardOptions.narrows` has it."""
    scaled = run.precision.fp8.recipe != "none"
    return run.layout.tp == 1 and not run.layout.compile and not scaled


def _narrowed(run: Run) -> list[str]:
    last = f"blocks.{run.model.num_layers - 1}."
    after = ("attn.wo", "mlp.w_gate", "mlp.w_up", "mlp.w_down")
    return [f"{last}{name}.weight" for name in after]


def num_computed(batch: Batch) -> int:
    """Tokens of the rows; padding is none."""
    return int((batch.docs_BT >= 0).sum())


def adapter_flops(run: Run, weights: Collection[str] | None = None) -> int:
    """Of the adapters' products (over these weights), forward and per token."""
    shapes = target_shapes(run.model, run.lora).items()
    chosen = [shape for name, shape in shapes if weights is None or f"{name}.weight" in weights]
    return sum(2 * run.lora.rank * (rows + columns) for rows, columns in chosen)


def recomputed_flops(run: Run, sizes: AxisSizes, batch: Batch) -> float:
    """What `remat` adds to `step_flops`: blocks that are computed again."""
    num_tokens = num_computed(batch)
    if not num_tokens:
        return 0.0
    blocks, attention = recomputed(run, sizes)
    matrices = num_tokens * flops_per_token(run.model, 1).recomputed(blocks=blocks)
    again, (block, last) = round(attention * run.model.num_layers), attention_flops(run, batch)
    if last_keep(run, sizes) != "input":
        return matrices + again * block
    if narrows(run):
        # Recomputation ends before the block's last product.
        shapes = parameter_shapes(run.model)
        left_out = num_tokens - int((batch.weights_BT != 0).sum())
        matrices -= left_out * sum(2 * prod(shapes[name]) for name in _narrowed(run)[:-1])
    return matrices + (again - 1) * block + last


def attention_flops(run: Run, batch: Batch) -> tuple[float, float]:
    """Of a block and of the last block, forward: two products of all heads for each (query, key),
    a token's own key counted half (`models/flops`)."""
    borders, real_N = batch.cu_seqlens(), batch.docs_BT.flatten().cpu() >= 0
    found = layout(batch, borders)
    kept_N = torch.arange(len(real_N))
    if found is not None:
        borders, kept_N = found.borders, found.kept_N
    document_N = torch.searchsorted(borders.long(), kept_N, right=True) - 1
    place_N = kept_N - borders.long()[document_N]
    keys_N = (place_N + 0.5).clamp(max=float(run.model.sliding_window or math.inf))
    needed_N = real_N
    if narrows(run):
        active_N = batch.weights_BT.flatten().cpu() != 0
        needed_N = real_N & (place_N >= first_places(borders, kept_N[active_N])[document_N])
    factor = 4 * run.model.num_heads * run.model.head_dim
    return factor * keys_N[real_N].sum().item(), factor * keys_N[needed_N].sum().item()


def last_keep(run: Run, sizes: AxisSizes) -> Keep:
    """What the model's last block keeps for the backward pass."""
    blocks = [part for part in split_blocks(run.model.num_layers, run.layout) if part][-1]
    return segments_of(run, sizes, blocks.start, blocks.stop)[-1].keep
