"""What one step asks of a rank's device, before any rate: products by shape, attention, bytes that
only move, kernels. Closed form, no torch.

Counts are of one micro-batch on one rank. A product of M x K by K x N is three of a step: forward
(M, N, K), gradient of the input (M, K, N) and of the weights (K, N, M).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from stepwell.models.activations import KEEP_LOGITS_BYTES
from stepwell.plan.footprint.pieces import (
    blocks_of_stages,
    recomputed_of_ranks,
    stages_of,
    target_sizes,
)
from stepwell.plan.job import Arrangement, Dims, Job
from stepwell.plan.steptime.coefficients import PROCESSORS, generation

# Tiles of an output that one processor computes at a time, and what share of the largest tile's
# rate the smaller ones reach (they read their inputs more often).
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
HALF = 2  # bytes of a 16-bit value
# Bytes that pass through memory for one logit, forward and backward. Fused, in 16 bits: written,
# read for the largest and for the sum, read again, the gradient written, and read by two products.
# Else it is widened to 32 bits, and the log-softmax, the target's choice and their gradients are
# kernels of their own.
LOGIT_BYTES, LOGIT_BYTES_UNFUSED = 14.0, 46.0
# Bytes of one attention score where scores are written: products, mask and softmax, dropout.
SCORE_BYTES_FORWARD, SCORE_BYTES_BACKWARD = 9.0, 11.0
# Elements of a head that cost as much as the exponential of its score; rates are of heads of 128
# (FlashAttention-2's rates at 64 and 128, 2307.08691, figure 4).
EXPONENTIAL = 27.0
# Tokens of a sequence at which causal attention has half its rate (2307.08691 and 2407.08608:
# causal, heads of 128, 512 to 16k tokens).
SHORT_SEQUENCE = 500
# Bytes that a ring of context ranks moves for a value of its output, each time around: partial
# outputs are written, rescaled and added up in 32 bits.
RING_BYTES = 14.0
# Kernels of a block's forward pass, with fused element-wise operations and without.
KERNELS_FUSED, KERNELS_EAGER = 16, 32
# Of routing, sorting and exchanging tokens; for each expert that a rank has, and if its inputs are
# brought to low precision; of experts that see every token; of latent attention's projections.
KERNELS_ROUTING, KERNELS_EXPERT, KERNELS_EXPERT_LOW = 85, 1.5, 4.0
KERNELS_SHARED, KERNELS_LATENT = 10, 60
# Of an adapted matrix: the adapter's two products, its scale, the sum.
KERNELS_ADAPTER = 4
# Restoring a matrix from 4 bits (models/quantize), of an element: codes widened to 32 bits (2.5
# bytes), looked up (6), scaled (8), rounded to 16 (6), and a scale for each 64 (0.5); its kernels.
NF4_MOVED_BYTES, KERNELS_NF4 = 23.0, 9


@dataclass(frozen=True)
class Product:
    """fill: share of the processors' tiles that do useful work, 0 to 1. summed: length of the
    dimension that is summed over. low: computed in the run's low precision. num_bytes: of the three
    matrices, in 16 bits. cast_bytes: moved to bring its inputs to low precision."""

    flops: float
    fill: float
    summed: int
    low: bool
    num_bytes: float
    cast_bytes: float


@dataclass(frozen=True)
class Pass:
    """scores: the products of attention that writes its scores to memory. flash_flops: of attention
    that keeps them on the chip. moved_bytes: through memory by all that is no product;
    fusible_bytes: by what a compiler fuses."""

    products: tuple[Product, ...]
    scores: tuple[Product, ...]
    flash_flops: float
    moved_bytes: float
    fusible_bytes: float
    num_kernels: float

    @property
    def flops(self) -> float:
        return sum(p.flops for p in self.products + self.scores) + self.flash_flops


@dataclass(frozen=True)
class Piece:
    """A block, or the head: its passes, and what is computed again before the backward one."""

    forward: Pass
    backward: Pass
    again: Pass | None


NOTHING = Pass((), (), 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Work:
    """blocks: (piece, number of them on the fullest rank that has no head, on all ranks of a
    pipeline together, on the rank with the head). local_parameters: of the fullest rank, before
    sharding."""

    blocks: tuple[tuple[Piece, float, float, float], ...]
    head: Piece
    embedding: Pass
    local_parameters: float
    trained_parameters: float


def fill(rows: int, columns: int, processors: int) -> float:
    """Of the best tiling: waves of tiles leave processors idle at the end."""
    best = 0.0
    for tall, wide, rate in TILES:
        tiles = ceil(rows / tall) * ceil(columns / wide)
        waves = ceil(tiles / processors)
        best = max(best, rate * rows * columns / (waves * processors * tall * wide))
    return best


def work_of(job: Job) -> Work:
    dims, layout = job.dims, job.layout
    processors = PROCESSORS[generation(job.cluster.accelerator)]
    tokens = layout.tokens_of_rank
    dense = _block(dims, layout, processors, tokens, experts=False)
    kinds = [(dense, dims.num_layers - dims.num_expert_layers)]
    if dims.experts:
        kinds.append(
            (_block(dims, layout, processors, tokens, experts=True), dims.num_expert_layers)
        )
    fullest, last = blocks_of_ranks(dims.num_layers, layout)
    if layout.recompute == "every":
        share = max(recomputed_of_ranks(dims, layout)) / max(fullest, 1)
        kinds = [(_recomputing(piece, share), number) for piece, number in kinds]
    blocks = tuple(
        (piece, number * fullest / dims.num_layers, number, number * last / dims.num_layers)
        for piece, number in kinds
        if number
    )
    head = _head(dims, layout, processors, tokens)
    moved = tokens * dims.d_model * HALF
    embedding = Pass((), (), 0.0, 3 * moved, 0.0, 6)
    if layout.precision == "fp32":
        blocks = tuple((_in_32_bits(piece), a, b, c) for piece, a, b, c in blocks)
        head, embedding = _in_32_bits(head), _twice_as_wide(embedding)
    local = _local_parameters(dims, layout, fullest)
    return Work(blocks, head, embedding, local, local * layout.trained_share)


def _in_32_bits(piece: Piece) -> Piece:
    again = _twice_as_wide(piece.again) if piece.again else None
    return Piece(_twice_as_wide(piece.forward), _twice_as_wide(piece.backward), again)


def _twice_as_wide(one: Pass) -> Pass:
    """What 16-bit values ask of a device, in 32 bits."""
    products, scores = (
        tuple(replace(p, num_bytes=2 * p.num_bytes) for p in found)
        for found in (one.products, one.scores)
    )
    moved, fusible = 2 * one.moved_bytes, 2 * one.fusible_bytes
    return Pass(products, scores, one.flash_flops, moved, fusible, one.num_kernels)


def blocks_of_ranks(num_layers: int, layout: Arrangement) -> tuple[int, int]:
    """Of the fullest pipeline rank without the head, and of the one that has it."""
    blocks = blocks_of_stages(num_layers, layout)
    stages = [stages_of(layout, rank) for rank in range(layout.pp)]
    head = next(rank for rank, mine in enumerate(stages) if len(blocks) - 1 in mine)
    ranks = [sum(len(blocks[stage]) for stage in mine) for mine in stages]
    last = ranks.pop(head)
    return max(ranks, default=last), last


def _local_parameters(dims: Dims, layout: Arrangement, num_blocks: int) -> float:
    """Of a rank with its share of blocks and, with a pipeline, one of the two tables."""
    experts = 0
    if dims.experts:
        one = dims.mlp_parameters(dims.experts.d_ff)
        experts = one * dims.experts.num_experts * dims.num_expert_layers
    tables = dims.embedding_parameters * (1 if dims.tied else 2)
    rest = dims.parameters() - experts - tables
    share = num_blocks / dims.num_layers
    held = tables if layout.pp == 1 else dims.embedding_parameters
    return (rest * share + held) / layout.tp + experts * share / layout.ep


# --- a block ---------------------------------------------------------------------------------


def product(rows: int, columns: int, summed: int, processors: int, low: bool, batch: float = 1):
    """One of `batch` such."""
    operands = rows * summed + columns * summed
    return Product(
        flops=2.0 * batch * rows * columns * summed,
        fill=fill(rows, round(columns * batch), processors),
        summed=summed,
        low=low,
        num_bytes=HALF * batch * (operands + rows * columns),
        cast_bytes=batch * operands if low else 0.0,
    )


def linear(tokens: int, wide_in: int, wide_out: int, processors: int, low: bool, batch: float = 1):
    """The three products of a matrix: forward; gradients of input and weights. batch: of as many
    matrices with as many tokens each."""
    m, k, n = max(1, tokens), max(1, wide_in), max(1, wide_out)
    return (
        product(m, n, k, processors, low, batch),
        product(m, k, n, processors, low, batch),
        product(k, n, m, processors, low, batch),
    )


def _block(dims: Dims, layout: Arrangement, processors: int, tokens: int, experts: bool) -> Piece:
    low, tp = layout.precision == "fp8", layout.tp
    matrices = [
        linear(tokens, dims.d_model, (dims.q_width + 2 * dims.kv_width) // tp, processors, low),
        linear(tokens, dims.q_width // tp, dims.d_model, processors, low),
    ]
    num_kernels = KERNELS_FUSED if layout.compiled else KERNELS_EAGER
    num_kernels += KERNELS_LATENT if dims.score_dim else 0
    if experts and dims.experts:
        matrices += _expert_matrices(dims, layout, processors, tokens, low)
        each = KERNELS_EXPERT_LOW if low else KERNELS_EXPERT
        num_kernels += KERNELS_ROUTING + each * dims.experts.num_experts / layout.ep
        num_kernels += KERNELS_SHARED if dims.experts.num_shared else 0
    else:
        matrices += _mlp(dims, dims.d_ff // tp, tokens, processors, low)
    moved = _moved_bytes(dims, layout, tokens, experts)
    ring = RING_BYTES * layout.cp * tokens * dims.q_width / layout.tp if layout.cp > 1 else 0.0
    flash, scores, num_scores = _attention(dims, layout, processors, tokens)
    forward = Pass(
        tuple(m[0] for m in matrices),
        tuple(s[0] for s in scores),
        flash,
        num_scores * SCORE_BYTES_FORWARD + ring,
        moved[0],
        num_kernels,
    )
    adapted = _adapters(dims, layout, processors, tokens)
    forward = _plus(forward, adapted.forward)
    trained = 1 if layout.trains_base else 0
    backward = Pass(
        tuple(p for m in matrices for p in m[1 : 2 + trained]),
        tuple(p for s in scores for p in s[1:]),
        2.5 * flash,
        num_scores * SCORE_BYTES_BACKWARD + ring,
        moved[1],
        1.5 * num_kernels,
    )
    backward = _plus(backward, adapted.backward)
    return Piece(forward, backward, _again(layout, forward, matrices, num_scores))


def _adapters(dims: Dims, layout: Arrangement, processors: int, tokens: int) -> Piece:
    """Their own products, and the sums with the base's. A matrix in 4 bits is restored each time it
    is used: in either pass, in DoRA once more for the lengths of its rows."""
    if layout.adapters is None:
        return Piece(NOTHING, NOTHING, None)
    adapters, sizes = layout.adapters, target_sizes(dims, layout)
    products, summed, added = [], 0.0, 0.0
    for rows, columns in sizes:
        products.append(linear(tokens, columns, adapters.rank, processors, low=False))
        products.append(linear(tokens, adapters.rank, rows, processors, low=False))
        summed += HALF * tokens * 5 * rows  # scaled, added to the base's product
        added += HALF * tokens * (2 * rows + 3 * columns)  # scaled, gradients of the input added
    restored = sum(rows * columns for rows, columns in sizes) if adapters.quantized else 0
    kernels, fours = KERNELS_ADAPTER * len(sizes), KERNELS_NF4 * len(sizes) if restored else 0
    uses = 2 if adapters.dora else 1
    moved = NF4_MOVED_BYTES * restored
    return Piece(
        Pass(tuple(m[0] for m in products), (), 0.0, uses * moved, summed, kernels + uses * fours),
        Pass(
            tuple(p for m in products for p in m[1:]), (), 0.0, moved, added, 1.5 * kernels + fours
        ),
        None,
    )


def _plus(one: Pass, other: Pass) -> Pass:
    return Pass(
        one.products + other.products,
        one.scores + other.scores,
        one.flash_flops + other.flash_flops,
        one.moved_bytes + other.moved_bytes,
        one.fusible_bytes + other.fusible_bytes,
        one.num_kernels + other.num_kernels,
    )


def _recomputing(piece: Piece, share: float) -> Piece:
    """share: of the blocks which the busiest rank computes again, of its blocks."""
    assert piece.again
    return replace(piece, again=scaled(piece.again, share))


def _mlp(dims: Dims, wide: int, tokens: int, processors: int, low: bool, batch: float = 1):
    ways_in = 2 if dims.mlp == "swiglu" else 1
    return [
        linear(tokens, dims.d_model, ways_in * wide, processors, low, batch),
        linear(tokens, wide, dims.d_model, processors, low, batch),
    ]


def _expert_matrices(dims: Dims, layout: Arrangement, processors: int, tokens: int, low: bool):
    """Experts' ranks exchange tokens, so that each of its experts sees those of all of them; the
    rank whose experts get the most sets the pace."""
    e = dims.experts
    assert e is not None
    own = tokens / layout.tp if layout.sequence_parallel else tokens
    local = e.num_experts / layout.ep
    each = own * layout.ep * e.top_k / e.num_experts
    each *= layout.expert_imbalance
    found = _mlp(dims, e.d_ff, max(1, round(each)), processors, low, local)
    if e.num_shared:
        found += _mlp(dims, e.num_shared * e.d_ff // layout.tp, tokens, processors, low)
    return found


def _moved_bytes(dims: Dims, layout: Arrangement, tokens: int, experts: bool):
    """Forward and backward: norms and residual sums (each reads and writes rows of d_model),
    rotation of queries and keys, the MLP's activation; of experts, sorting tokens and back."""
    d = dims.d_model / (layout.tp if layout.sequence_parallel else 1)
    heads = (dims.q_width + dims.kv_width) / layout.tp
    rotated = 2 * heads if dims.learned_positions == 0 else 0
    wide = dims.d_ff / layout.tp
    if experts and dims.experts:
        e = dims.experts
        own = 1 / layout.tp if layout.sequence_parallel else 1
        wide = e.d_ff * (e.top_k * own + e.num_shared / layout.tp)
        d += 2 * e.top_k * dims.d_model * own / 5
    gated = dims.mlp == "swiglu"
    forward = 10 * d + rotated + (3 if gated else 2) * wide
    backward = 12 * d + rotated + (5 if gated else 3) * wide
    return HALF * tokens * forward, HALF * tokens * backward


def _attention(dims: Dims, layout: Arrangement, processors: int, tokens: int):
    """FLOPs where scores stay on the chip (of the keys that a token sees: causal, half of them);
    products of all of them where they are written or in 32 bits, and how many are written.

    Flash kernels have 16 bits. In 32 torch's own take a mask, and keep scores on the chip where
    each head has keys of its own; ours masks the rows of a micro-batch as one sequence."""
    wide = layout.precision == "fp32"
    if layout.flash and not wide:
        # A score's exponential costs as much as some products' elements.
        head_dim = dims.score_dim or dims.head_dim
        narrow = (1 + EXPONENTIAL / head_dim) / (1 + EXPONENTIAL / 128)
        seen = 2 * dims.mean_keys(layout.seq_len)
        # Rings of context ranks attend to halves of a rank's keys at a time.
        length = layout.seq_len / (1 if layout.cp == 1 else 2 * layout.cp)
        short = 1 + SHORT_SEQUENCE / min(length, seen)
        return 2.0 * tokens * seen * dims.score_width / layout.tp * narrow * short, (), 0.0
    together = layout.micro_batch_rows if wide and layout.program == "stepwell" else 1
    heads = layout.micro_batch_rows / together * dims.num_heads / layout.tp
    s, e = layout.seq_len * together, dims.head_dim
    own = s // layout.cp
    queries_keys = (
        product(own, s, e, processors, False, heads),
        product(own, e, s, processors, False, heads),
        product(e, s, own, processors, False, heads),
    )
    values = (
        product(own, e, s, processors, False, heads),
        product(own, s, e, processors, False, heads),
        product(s, e, own, processors, False, heads),
    )
    written = not layout.flash or dims.num_kv_heads < dims.num_heads
    return 0.0, (queries_keys, values), heads * own * s if written else 0.0


def _again(layout: Arrangement, forward: Pass, matrices, num_scores: float):
    """What recomputation runs again, by mode and program. Selective: Megatron's recomputes what
    attention writes (nothing, where it writes nothing, unless modules are named); FSDP programs
    keep every second product (torchtitan's default); ours keeps all of them. A block's last
    product is needed for nothing of the block's own: recomputation stops before it, except in
    Megatron's and others' of 2021 (torch.utils.checkpoint: early stop; XLA leaves it out)."""
    mode = layout.recompute
    if mode == "none":
        return None
    if mode in ("full", "every") and layout.program != "megatron" and layout.flash:
        forward = replace(forward, products=forward.products[:-1])
    if mode != "selective":
        return scaled(forward, 0.5) if mode == "budget" else forward
    if layout.program == "megatron":
        written = num_scores * SCORE_BYTES_FORWARD
        return Pass((), forward.scores, 0.0, written, 0.0, 6 if num_scores else 0)
    kept = matrices[1::2] if layout.program == "fsdp" else ()
    products = tuple(m[0] for m in kept)
    moved = forward.moved_bytes, forward.fusible_bytes
    return Pass(products, forward.scores, 0.0, *moved, forward.num_kernels / 2)


def scaled(one: Pass, share: float) -> Pass:
    """As many blocks' pass."""

    def part(p: Product) -> Product:
        flops, num_bytes, cast_bytes = (share * x for x in (p.flops, p.num_bytes, p.cast_bytes))
        return Product(flops, p.fill, p.summed, p.low, num_bytes, cast_bytes)

    return Pass(
        tuple(part(p) for p in one.products),
        tuple(part(p) for p in one.scores),
        one.flash_flops * share,
        one.moved_bytes * share,
        one.fusible_bytes * share,
        one.num_kernels * share,
    )


def _head(dims: Dims, layout: Arrangement, processors: int, tokens: int) -> Piece:
    """The head's products are never in 8 bits in any program here."""
    wide = dims.vocab_size // layout.tp
    forward, of_input, of_weights = linear(tokens, dims.d_model, wide, processors, low=False)
    moved = tokens * wide * (LOGIT_BYTES if fused_loss(layout) else LOGIT_BYTES_UNFUSED) / 2
    trained = (of_weights,) if layout.trains_base else ()
    again = (forward,) if logits_twice(dims, layout) else ()
    return Piece(
        Pass((forward,), (), 0.0, moved, 0.0, 10),
        Pass((*again, of_input, *trained), (), 0.0, moved, 0.0, 10),
        None,
    )


def logits_twice(dims: Dims, layout: Arrangement) -> bool:
    """Whether logits are too many to keep, and ours computes them once more (models.logits)."""
    size = 2 * HALF if layout.precision == "fp32" else HALF
    num_bytes = size * layout.tokens_of_rank * (dims.vocab_size // layout.tp)
    return layout.program == "stepwell" and num_bytes > KEEP_LOGITS_BYTES


def fused_loss(layout: Arrangement) -> bool:
    """Whether the logits stay in 16 bits between the head's products: ours are compiled with the
    blocks, those of a chunk with it."""
    if layout.program == "stepwell":
        return layout.compiled
    return layout.compiled_loss or (layout.compiled and layout.loss_chunk_tokens is not None)
