"""Activations that ranks of a step send each other, by the axis that divides them: tensor, context
and expert ranks, stages of a pipeline. No torch.

N tokens of a micro-batch on a context rank, D d_model, m micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm, prod

from stepwell.plan.comms.gathers import units_of
from stepwell.plan.comms.step import PRECISION_BYTES, Again, Sent, Step
from stepwell.plan.comms.weights import Weight, rank_of_stage
from stepwell.plan.footprint.pieces import stages_of


def activations_sent(step: Step) -> Iterator[Sent | None]:
    yield from _tensor(step)
    yield from _context(step)
    yield from _experts(step)
    yield from _pipeline(step)


def _tensor(step: Step) -> Iterator[Sent | None]:
    """Tokens are gathered before each sublayer and divided after it (2205.05198), the backward pass
    the other way round; without sequence parallelism each sublayer's sum goes to all (1909.08053).
    Megatron-LM gathers a third time, for the weights' gradients, which ours keeps."""
    if step.layout.tp == 1:
        return
    sent = _divided_tokens if step.layout.sequence_parallel else _summed_tokens
    yield from sent(step)
    yield from _vocabulary(step)


def _divided_tokens(step: Step) -> Iterator[Sent | None]:
    x, m, again = step.a * step.N * step.dims.d_model, step.m, step.again
    ours, sublayers = step.layout.program == "stepwell", 2 * step.num_blocks
    trains_all = step.layout.adapters is None
    # Without gradients of the embedding, the first block's input needs none.
    idle = 0 if trains_all or not step.first else 1
    first, last = int(step.first), int(step.last)
    gathers, scatters = sublayers + last, sublayers + first
    yield step.one("all-gather", "tp", "gather tokens", "forward", x, m * gathers)
    yield step.one("reduce-scatter", "tp", "scatter sums", "forward", x, m * scatters)
    back = sublayers + (first if trains_all else 0)
    yield step.one("all-gather", "tp", "gather gradients", "backward", x, m * back)
    scattered = m * (sublayers + last - idle)
    yield step.one("reduce-scatter", "tp", "scatter gradients", "backward", x, scattered)
    twice = 2 * (again.blocks + again.products)
    yield step.one("all-gather", "tp", "recompute", "backward", x, m * twice)
    skipped = 0 if step.layout.program == "megatron" else again.groups
    twice = 2 * again.blocks - skipped
    yield step.one("reduce-scatter", "tp", "recompute", "backward", x, m * twice)
    if step.layout.program == "megatron":
        third = m * (sublayers + last)
        yield step.one("all-gather", "tp", "gather inputs again", "backward", x, third)
    if ours:
        yield from _partial_gradients(step)
        yield from _row_lengths(step, again)


def _partial_gradients(step: Step) -> Iterator[Sent | None]:
    """Weights that each rank uses in its own way, as norms of its tokens: at least in float32."""
    for weights, number, _ in units_of(step):
        for weight in weights:
            if weight.partial and weight.trained:
                num_bytes = 4 * prod(weight.shape)
                calls = step.m * number
                purpose = "sum partial gradients"
                yield step.one("all-reduce", "tp", purpose, "backward", num_bytes, calls)


def _row_lengths(step: Step, again: Again) -> Iterator[Sent | None]:
    """Of adapted matrices whose columns are divided (DoRA), in at least float32."""
    adapters = step.layout.adapters
    if adapters is None or not adapters.dora:
        return
    divided = sum(name in adapters.targets for name in ("wo", "w_down"))
    num_bytes, times = 4 * step.dims.d_model, step.m * divided
    calls, twice = times * step.num_blocks, times * again.blocks
    yield step.one("all-reduce", "tp", "lengths of rows", "forward", num_bytes, calls)
    yield step.one("all-reduce", "tp", "recompute", "backward", num_bytes, twice)


def _summed_tokens(step: Step) -> Iterator[Sent | None]:
    x, m, again = step.a * step.N * step.dims.d_model, step.m, step.again
    sublayers = 2 * step.num_blocks
    forward, backward = m * (sublayers + step.first), m * (sublayers + step.last)
    yield step.one("all-reduce", "tp", "sum tokens", "forward", x, forward)
    yield step.one("all-reduce", "tp", "sum gradients", "backward", x, backward)
    yield step.one("all-reduce", "tp", "recompute", "backward", x, m * 2 * again.blocks)


def _vocabulary(step: Step) -> Iterator[Sent | None]:
    """The loss over a divided vocabulary: ours gathers four numbers a token (models.logits),
    Megatron-LM sums three (the maximum, the target's logit, the sum of exponentials)."""
    if not step.last:
        return
    t, m = step.layout.tp, step.m
    if step.layout.program == "stepwell":
        chunk = step.layout.loss_chunk_tokens
        rows = min(64, chunk) if chunk else 64
        tokens = -(-step.N // rows) * rows
        num_bytes = 4 * 4 * t * tokens
        yield step.one("all-gather", "tp", "loss", "forward", num_bytes, m)
    else:
        yield step.one("all-reduce", "tp", "loss", "forward", 4 * step.N, 3 * m)


def _context(step: Step) -> Iterator[Sent | None]:
    """Ring: keys and values go round once in each pass, their gradients (in float32) behind them.
    All-to-all: queries, keys and values for heads, and the output back."""
    layout, dims = step.layout, step.dims
    R, t = layout.cp, layout.tp
    if R == 1:
        return
    m, n, again = step.m, step.N, step.again
    passes = m * step.num_blocks
    heads, kv_heads = dims.num_heads // t, max(1, dims.num_kv_heads // t)
    if layout.cp_method == "ring":
        block = 2 * n * kv_heads * dims.head_dim
        hops, again = passes * (R - 1), m * again.blocks * (R - 1)
        for kind in ("send", "recv"):
            there, back = "keys and values", "their gradients"
            yield step.one(kind, "cp", there, "forward", step.a * block, hops)
            yield step.one(kind, "cp", "recompute", "backward", step.a * block, again)
            yield step.one(kind, "cp", there, "backward", step.a * block, hops)
            yield step.one(kind, "cp", back, "backward", 4 * block, hops)
        return
    repeated = lcm(kv_heads, R)
    away = step.a * n * (heads + 2 * repeated) * dims.head_dim
    home = step.a * n * heads * dims.head_dim
    for purpose, num_bytes in (("tokens for heads", away), ("heads for tokens", home)):
        yield step.one("all-to-all", "cp", purpose, "forward", num_bytes, passes)
        yield step.one("all-to-all", "cp", purpose, "backward", num_bytes, passes)
        yield step.one("all-to-all", "cp", "recompute", "backward", num_bytes, m * again.blocks)


def _experts(step: Step) -> Iterator[Sent | None]:
    """Tokens go to their experts and come back, their gradients too."""
    layout, experts = step.layout, step.dims.experts
    if experts is None or layout.ep == 1:
        return
    tokens = step.N // (layout.tp if layout.sequence_parallel else 1)
    x = step.a * tokens * experts.top_k * step.dims.d_model
    calls = step.m * step.num_expert_blocks
    again = calls * step.again.blocks // max(step.num_blocks, 1)
    for purpose in ("dispatch", "combine"):
        yield step.one("all-to-all", "ep", purpose, "forward", x, calls)
        yield step.one("all-to-all", "ep", purpose, "backward", x, calls)
        yield step.one("all-to-all", "ep", "recompute", "backward", x, again)


def _pipeline(step: Step) -> Iterator[Sent | None]:
    """Activations to the next stage, their gradients back; of a tied embedding, the last stage's
    gradient to the first, and the weights back."""
    layout, dims = step.layout, step.dims
    if layout.pp == 1:
        return
    divided = layout.tp if layout.sequence_parallel or layout.program == "megatron" else 1
    x, num_stages = step.a * step.N * dims.d_model // divided, layout.pp * layout.stages_per_rank
    ahead = behind = 0
    for stage in stages_of(layout, step.pp_rank):
        following, before = stage + 1, stage - 1
        ahead += following < num_stages and rank_of_stage(layout, following) != step.pp_rank
        behind += before >= 0 and rank_of_stage(layout, before) != step.pp_rank
    for kind, activations, gradients in (("send", ahead, behind), ("recv", behind, ahead)):
        yield step.one(kind, "pp", "activations", "pipeline", x, step.m * activations)
        yield step.one(kind, "pp", "gradients", "pipeline", x, step.m * gradients)
    yield from _tied_embedding(step)


def _tied_embedding(step: Step) -> Iterator[Sent | None]:
    if not step.dims.tied or step.first == step.last or step.layout.adapters is not None:
        return
    words = Weight((step.dims.vocab_size, step.dims.d_model), 0)
    if step.layout.program == "megatron":
        num_stages, stride = step.axes["pp"]
        num_bytes, pair = step.g * words.padded(step.layout.tp, 1), (2, (num_stages - 1) * stride)
        entry = ("all-reduce", "pp", "tied embedding", "optimizer", num_bytes, 1, pair)
        yield step.one(*entry)
        return
    n, _ = step.axes["dp_shard"]
    num_bytes = PRECISION_BYTES[step.layout.state_precision] * words.padded(step.layout.tp, n) // n
    there, back = ("send", "recv") if step.last else ("recv", "send")
    yield step.one(there, "pp", "tied embedding", "optimizer", num_bytes, 1)
    yield step.one(back, "pp", "tied embedding", "optimizer", num_bytes, 1)
