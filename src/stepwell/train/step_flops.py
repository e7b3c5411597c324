"""FLOPs of a step on the rows at hand, from the closed forms of `models/flops`."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.shared_prompts import whole_lengths
from stepwell.models.activations import Keep
from stepwell.models.flops import attended_seq_len, flops_per_token, parameter_shapes
from stepwell.models.lora_shapes import target_shapes
from stepwell.parallel.remat import recomputed, segments_of
from stepwell.parallel.rules import AxisSizes
from stepwell.parallel.schedules import split_blocks


def step_flops(run: Run, batch: Batch) -> float:
    """Model FLOPs of one step on these rows: what is computed of them. Attention within whole
    documents, matrices once for tokens that documents share; the head, and what follows the last
    attention, only where a loss is taken; backward twice the forward, no recomputation. A frozen
    matrix has no gradient to compute, so its backward pass costs as much as its forward."""
    lengths = whole_lengths(batch)
    num_tokens, num_attending = num_computed(batch), sum(lengths)
    if num_tokens == 0:
        return 0.0
    per_token = flops_per_token(run.model, attended_seq_len(lengths))
    loss_tokens = int((batch.weights_BT != 0).sum())
    matrices = num_tokens * per_token.blocks + loss_tokens * per_token.head
    adapters = num_tokens * adapter_flops(run)
    if narrows(run):
        left_out, last = num_tokens - loss_tokens, _narrowed(run)
        matrices -= left_out * sum(2 * prod(parameter_shapes(run.model)[name]) for name in last)
        adapters -= left_out * adapter_flops(run, last)
    passes = 2 if run.lora.rank else 3
    return passes * matrices + 3 * (num_attending * per_token.attention + adapters)


def narrows(run: Run) -> bool:
    """Whether the last block computes what follows its attention for tokens with a loss alone, as
    `ForwardOptions.narrows` has it."""
    return run.layout.tp == 1 and not run.layout.compile


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
    lengths, num_tokens = whole_lengths(batch), num_computed(batch)
    if not lengths:
        return 0.0
    blocks, attention = recomputed(run, sizes)
    per_token = flops_per_token(run.model, attended_seq_len(lengths))
    matrices = num_tokens * per_token.recomputed(blocks=blocks)
    if narrows(run) and last_keep(run, sizes) == "input":
        # Recomputation ends before the block's last product.
        again, shapes = _narrowed(run)[:-1], parameter_shapes(run.model)
        left_out = num_tokens - int((batch.weights_BT != 0).sum())
        matrices -= left_out * sum(2 * prod(shapes[name]) for name in again)
    return matrices + sum(lengths) * per_token.recomputed(attention=attention)


def last_keep(run: Run, sizes: AxisSizes) -> Keep:
    """What the model's last block keeps for the backward pass."""
    blocks = [part for part in split_blocks(run.model.num_layers, run.layout) if part][-1]
    return segments_of(run, sizes, blocks.start, blocks.stop)[-1].keep
