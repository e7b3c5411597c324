"""Activation checkpointing: which blocks are computed again (1604.06174; selective: 2205.05198).
No torch; `models/recompute.py` carries it out.

A block keeps everything, its products, or its input. `segments_of` turns the configuration into
that for the blocks of a pipeline piece; the planner asks the same function.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from stepwell.config import Run
from stepwell.models.activations import BlockBytes, Keep, Segment, block_bytes, peak, root_bytes
from stepwell.models.flops import flops_per_token
from stepwell.models.lora_shapes import target_shapes
from stepwell.parallel.fp8_layers import local_shape, saved_in_8_bits
from stepwell.parallel.remedies import Complaint, only, values_of
from stepwell.parallel.schedules import ZERO_BUBBLE, split_blocks
from stepwell.sections.layout import PrecisionConfig
from stepwell.types import ConfigError

if TYPE_CHECKING:
    from stepwell.parallel.rules import AxisSizes

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


def segments_of(run: Run, sizes: AxisSizes, start: int, stop: int) -> tuple[Segment, ...]:
    """What blocks start..stop-1 keep, in their order.

    Raises ConfigError if no choice fits into remat.budget_bytes.
    """
    mode, numbers = run.remat.mode, range(start, stop)
    if mode == "sqrt":
        return square_root_groups(start, stop)
    if mode == "budget":
        return within_budget(run, sizes, start, stop)
    keep: dict[str, Keep] = {"none": "all", "full": "input", "selective": "products"}
    if mode == "every":
        chosen = chosen_blocks(numbers, run.remat.every)
        return tuple(Segment(i, i + 1, "input" if i in chosen else "all") for i in numbers)
    return tuple(Segment(i, i + 1, keep[mode]) for i in numbers)


def chosen_blocks(blocks: range, every: int) -> range:
    """Of a stage's blocks, numbered through the whole model, those that mode "every" computes
    again. A stage of few blocks may have all of them, or none."""
    return range(blocks.start + -blocks.start % every, blocks.stop, every)


def square_root_groups(start: int, stop: int) -> tuple[Segment, ...]:
    """About sqrt(n) groups of about sqrt(n) blocks each, of sizes that differ by one at most."""
    n = stop - start
    num_groups = max(1, round(math.sqrt(n)))
    borders = [start + n * g // num_groups for g in range(num_groups + 1)]
    return tuple(Segment(a, b, "input") for a, b in pairwise(borders) if b > a)


def within_budget(run: Run, sizes: AxisSizes, start: int, stop: int) -> tuple[Segment, ...]:
    """The fewest blocks that keep only their input, and then the fewest that keep only their
    products, with which the activations of a micro-batch fit into remat.budget_bytes.

    Raises ConfigError with the smallest budget that would do.
    """
    block, root = _block_and_root(run, sizes, stop)
    budget = run.remat.budget_bytes or 0
    for choice in choices(start, stop):
        if peak(choice, block, root) <= budget:
            return choice
    raise ConfigError(
        f"remat.budget_bytes={budget} does not hold the activations of a micro-batch of "
        f"{_tokens(run, sizes)} tokens in blocks {start} to {stop - 1}, however much is computed "
        f"again; the smallest budget that does is {smallest_budget(run, sizes, start, stop)}"
    )


def smallest_budget(run: Run, sizes: AxisSizes, start: int, stop: int) -> int:
    """The least remat.budget_bytes that some choice for these blocks fits into."""
    block, root = _block_and_root(run, sizes, stop)
    return min(peak(choice, block, root) for choice in choices(start, stop))


def bytes_of_block(run: Run, sizes: AxisSizes) -> BlockBytes:
    """What a block of the run keeps on a rank, for one micro-batch."""
    a, w = dtype_bytes(run.precision)
    eight = saved_in_8_bits(run, sizes.tp)
    N, compiled = _tokens(run, sizes), run.layout.compile
    block = block_bytes(run.model, N, a, w, compiled, sizes.tp, eight)
    saved, products = _saved_by_adapters(run, sizes, N, a)
    saved -= _inputs_of_frozen(run, sizes, N, a)
    if sizes.cp > 1 and run.layout.cp_method == "ulysses":  # attention's output, exchanged
        saved += a * N * run.model.num_heads // sizes.tp * run.model.head_dim
    return block._replace(all=block.all + saved, products=block.products + products)


def _saved_by_adapters(run: Run, sizes: AxisSizes, N: int, a: int) -> tuple[int, int]:
    """Of a block (the mean) that keeps everything, and of one that keeps its products: x A^T; with
    a magnitude what it scales, with dropout x as it was dropped and which elements; and, among the
    products, B's."""
    lora, saved, products = run.lora, 0, 0
    for name, shape in target_shapes(run.model, lora, strict=False).items():
        rows, columns = local_shape(run.model, name, shape, sizes.tp)
        hidden = a * N * lora.rank
        saved += hidden + ((a + 1) * N * columns if lora.dropout else 0)
        if lora.dora:
            saved += a * N * rows * (2 if lora.dropout else 1)
        products += hidden + a * N * rows * (2 if lora.dora and lora.dropout else 1)
    return saved // run.model.num_layers, products // run.model.num_layers


def _inputs_of_frozen(run: Run, sizes: AxisSizes, N: int, a: int) -> int:
    """Of a block (the mean): inputs that only products of frozen weights read, none of them with an
    adapter, or each of whose adapters reads a copy with dropout. Autograd keeps an input for its
    weight's gradient. Attention keeps its output, which wo reads, itself."""
    if not run.lora.rank:
        return 0
    cfg, adapted = run.model, target_shapes(run.model, run.lora, strict=False)
    inputs = (
        (("attn.wq", "attn.wk", "attn.wv"), cfg.d_model),
        (("mlp.w_gate", "mlp.w_up"), cfg.d_model),
        (("mlp.w_down",), cfg.d_ff // sizes.tp),
    )
    width = sum(
        columns
        for number in range(cfg.num_layers)
        for names, columns in inputs
        if run.lora.dropout or not any(f"blocks.{number}.{name}" in adapted for name in names)
    )
    return a * N * width // cfg.num_layers


def _block_and_root(run: Run, sizes: AxisSizes, stop: int) -> tuple[BlockBytes, int]:
    a, w = dtype_bytes(run.precision)
    N, block = _tokens(run, sizes), bytes_of_block(run, sizes)
    last = stop == run.model.num_layers
    return block, root_bytes(run.model, N, a, w, sizes.tp) if last else 0


def _tokens(run: Run, sizes: AxisSizes) -> int:
    """Of a micro-batch on a rank."""
    return run.train.micro_batch_rows * run.data.seq_len // sizes.cp


def choices(start: int, stop: int) -> list[tuple[Segment, ...]]:
    """All ways to give the first blocks to "input" and the next to "products", from no to all
    recomputation. The last blocks keep the most: the backward pass frees them before it computes
    the others again."""
    n = stop - start
    return [
        _assign(start, n, num_input, num_products)
        for num_input in range(n + 1)
        for num_products in range(n - num_input + 1)
    ]


def _assign(start: int, n: int, num_input: int, num_products: int) -> tuple[Segment, ...]:
    def keep(i: int) -> Keep:
        return "input" if i < num_input else "products" if i < num_input + num_products else "all"

    return tuple(Segment(start + i, start + i + 1, keep(i)) for i in range(n))


def recomputed(run: Run, sizes: AxisSizes) -> tuple[float, float]:
    """The fractions of all blocks' products, and of all attention, that a step computes twice:
    arguments of `models.flops.TokenFlops.recomputed`.

    Recomputation ends before a segment's last product, whose result nothing saves.
    """
    model = run.model
    pieces = [b for b in split_blocks(model.num_layers, run.layout) if b]
    twice = [
        segment
        for blocks in pieces
        for segment in segments_of(run, sizes, blocks.start, blocks.stop)
        if segment.keep == "input"
    ]
    num_blocks = sum(stop - start for start, stop, _ in twice)
    products = flops_per_token(model, 1).blocks
    last = 2 * model.d_model * model.d_ff
    done = products * num_blocks / model.num_layers - last * len(twice)
    return done / products, num_blocks / model.num_layers


def dtype_bytes(precision: PrecisionConfig) -> tuple[int, int]:
    """Of the compute dtype, and of the wide one that norms and the loss are computed in."""
    a = DTYPE_BYTES[precision.compute]
    return a, max(a, 4)


# --- rules -----------------------------------------------------------------------------------


def broken_budget(run: Run, sizes: AxisSizes) -> list[Complaint]:
    """For parallel/rules.py: a budget that some pipeline stage's blocks cannot keep."""
    if run.remat.mode != "budget":
        return []
    parts = [b for b in split_blocks(run.model.num_layers, run.layout) if b]
    short = {b: smallest_budget(run, sizes, b.start, b.stop) for b in parts}
    budget, blocks = run.remat.budget_bytes or 0, max(parts, key=lambda b: short[b])
    if short[blocks] <= budget:
        return []
    said = (
        f"remat.budget_bytes={budget} does not hold the activations of a micro-batch of "
        f"{_tokens(run, sizes)} tokens in blocks {blocks.start} to {blocks.stop - 1}, however much "
        "is computed again"
    )
    rows = values_of("train.micro_batch_rows", range(run.train.micro_batch_rows - 1, 0, -1))
    return [Complaint(said, (only(remat__budget_bytes=short[blocks]), rows[:32]))]


def broken_by_compiler(run: Run, sizes: AxisSizes) -> list[Complaint]:
    """For parallel/rules.py."""
    if not run.layout.compile or run.remat.mode != "sqrt":
        return []
    said = (
        "remat.mode='sqrt' computes several blocks again together, but they are compiled one by "
        "one under layout.compile=true"
    )
    return [Complaint(said, (only(remat__mode="full"), only(layout__compile=False)))]


def broken_by_zero_bubble(run: Run, sizes: AxisSizes) -> list[Complaint]:
    """For parallel/rules.py."""
    if sizes.pp == 1 or run.layout.pp_schedule not in ZERO_BUBBLE or run.remat.mode == "none":
        return []
    said = (
        f"layout.pp_schedule={run.layout.pp_schedule!r} takes the weights' gradients one by one, "
        f"after those of the inputs, and would compute a block again for each of them under "
        f"remat.mode={run.remat.mode!r}"
    )
    none = {"remat.mode": "none"}
    if run.remat.budget_bytes is not None:
        none |= {"remat.budget_bytes": None}
    return [Complaint(said, ((none,), only(layout__pp_schedule="interleaved-1f1b")))]
