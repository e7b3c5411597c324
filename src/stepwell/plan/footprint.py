"""What a step holds on each GPU at its worst moment, for runs of any program. No torch.

`plan/memory` is the exact ledger of our own runs; this is its closed form on a `Job`, for the
search (which asks thousands of times) and for runs that others have published. Letters as in
`plan/activations`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from stepwell.plan.activations import Block, Modules, block_of, tokens_of
from stepwell.plan.cluster import Cluster
from stepwell.plan.job import Arrangement, Dims, Job
from stepwell.plan.memory_coefficients import SHIPPED, MemoryCoefficients
from stepwell.plan.pieces import Pieces, pieces_of_rank, ranks_to_try, waiting_pairs
from stepwell.plan.state import State, state_of

LOSS_SLICE_BYTES = 2 * 2**20  # of logits that our loss widens at a time (plan/sizes)
KEEP_LOGITS_BYTES = 256 * 2**20  # up to which it keeps them (models/activations)


@dataclass(frozen=True)
class Footprint:
    """items: bytes of tensors on the GPU at the worst moment, which is in `phase`, on pipeline rank
    pp_rank. scattered: cached blocks that this moment can't use. context, communicators: beside the
    allocator. host: bytes of this rank in the host's memory.

    allocated, reserved: what torch's allocator says; nvidia_smi: what the driver says.
    """

    phase: str
    pp_rank: int
    items: dict[str, float]
    fragmentation: float
    context: float
    communicators: float
    host: dict[str, float] = field(default_factory=dict)

    @property
    def allocated(self) -> float:
        return sum(self.items.values())

    @property
    def reserved(self) -> float:
        return self.allocated + self.fragmentation

    @property
    def nvidia_smi(self) -> float:
        return self.reserved + self.context + self.communicators

    @property
    def total(self) -> float:
        """What the GPU must have."""
        return self.nvidia_smi

    def kind(self, name: str) -> float:
        """By the published tables' names of what was measured."""
        if "reserved" in name:
            return self.reserved
        if "allocated" in name or "active" in name:
            return self.allocated
        return self.nvidia_smi


def footprint(
    job: Job, pp_rank: int | None = None, coefficients: MemoryCoefficients = SHIPPED
) -> Footprint:
    """Of the pipeline rank that needs the most, or of the one asked for."""
    dims, layout = job.dims, job.layout
    dense = block_of(dims, layout)
    sparse = block_of(dims, layout, experts=True) if dims.experts else dense
    ranks = ranks_to_try(layout) if pp_rank is None else (pp_rank,)
    found = [_of_rank(job, rank, dense, sparse, coefficients) for rank in ranks]
    return max(found, key=lambda footprint: footprint.allocated)


def headroom(footprint: Footprint, cluster: Cluster, coefficients=SHIPPED) -> float:
    """Bytes that a GPU has left, less the margin; negative if the run does not fit."""
    usable = cluster.accelerator.memory_bytes * (1 - coefficients.margin)
    return usable - footprint.total


def fits(footprint: Footprint, cluster: Cluster, coefficients=SHIPPED) -> bool:
    """Whether the GPU, and the host if it is known, have room."""
    if headroom(footprint, cluster, coefficients) < 0:
        return False
    host = sum(footprint.host.values()) * cluster.gpus_per_node
    return cluster.host_memory_bytes is None or host <= cluster.host_memory_bytes


# --- one rank --------------------------------------------------------------------------------


class _Rank(NamedTuple):
    """What the moments of a rank's step are made of, in bytes."""

    job: Job
    pieces: Pieces
    state: State
    dense: Block
    sparse: Block
    kept: Modules
    waiting: Modules
    buffers: float
    root: float
    workspace: float


def _of_rank(
    job: Job, pp_rank: int, dense: Block, sparse: Block, coefficients: MemoryCoefficients
) -> Footprint:
    layout = job.layout
    pieces = pieces_of_rank(job.dims, layout, pp_rank)
    kept, waiting, buffers = _activations(job, pieces, pp_rank, dense, sparse)
    state = state_of(job.dims, layout, pieces)
    rank = _Rank(
        job, pieces, state, dense, sparse, kept, waiting, buffers,
        _root(job, pieces), _workspace(job.dims, layout),
    )  # fmt: skip
    moments = {"backward": _backward(rank, last=True), "first block": _backward(rank, last=False)}
    if pieces.last:
        moments["loss"] = _loss(rank)
    if pieces.first:
        moments["embedding"] = _embedding(rank)
    phase = max(moments, key=lambda name: sum(moments[name].values()))
    items = moments[phase]
    return Footprint(
        phase=phase.replace("first block", "backward"),
        pp_rank=pp_rank,
        items=items,
        fragmentation=coefficients.fragmentation * sum(items.values()),
        context=coefficients.context_bytes,
        communicators=coefficients.group_bytes * _num_groups(layout),
        host=_host(rank),
    )


def _scaled(modules: Modules, times: float) -> Modules:
    return Modules(*(times * value for value in modules))


def _plus(one: Modules, other: Modules) -> Modules:
    return Modules(*(x + y for x, y in zip(one, other, strict=True)))


def _kept_by(block: Block, number: int, layout: Arrangement) -> Modules:
    """What `number` blocks of a stage keep of one micro-batch. budget: as "full"."""
    mode = layout.recompute
    if mode == "none":
        return _scaled(block.all, number)
    if mode == "selective":
        return _scaled(block.products, number)
    if mode == "every":
        inputs = -(-number // layout.recompute_every)
        return _plus(_scaled(block.input, inputs), _scaled(block.all, number - inputs))
    return _scaled(block.input, _groups(number) if mode == "sqrt" else number)


def _groups(number: int) -> int:
    return max(1, round(number**0.5)) if number else 0


def _computed_again(layout: Arrangement, number: int) -> int:
    """Blocks that are held whole while one is in its backward pass."""
    return -(-number // _groups(number)) if layout.recompute == "sqrt" and number else 1


def _activations(
    job: Job, pieces: Pieces, pp_rank: int, dense: Block, sparse: Block
) -> tuple[Modules, Modules, float]:
    """Of the stage at work, of what waits meanwhile, and the pipeline's buffers."""
    layout = job.layout
    kept = [
        _plus(_kept_by(dense, d, layout), _kept_by(sparse, s, layout)) for d, s in pieces.stages
    ]
    most = max(kept, key=lambda modules: modules.total)
    if layout.pp == 1:
        return most, Modules(), 0.0
    x = dense.input.total
    total = Modules()
    for modules in kept:
        total = _plus(total, modules)
    pairs = waiting_pairs(layout, pp_rank) - 1
    waiting = _scaled(total, pairs / len(kept))
    inputs = sum((s > 0) or not pieces.first for s in range(len(kept)))
    if layout.program != "stepwell":
        # The input of the stage is what its first block keeps; its output's data is freed.
        return most, waiting, 2 * x
    outputs = sum((s < len(kept) - 1) or not pieces.last for s in range(len(kept)))
    # Every stage has a buffer for each micro-batch that it gets, and each gradient.
    buffers = layout.num_micro_batches * x * (inputs + outputs) + pairs * x
    return most, waiting, buffers


def _root(job: Job, pieces: Pieces) -> float:
    """Saved around the blocks: by the last norm, the hidden states that the head multiplies, and
    cos and sin."""
    dims, layout = job.dims, job.layout
    a, at = (4 if layout.precision == "fp32" else 2), tokens_of(job.dims, layout)
    angles = 4 * at.num_tokens * dims.head_dim if layout.program == "stepwell" else 0.0
    if not pieces.last:
        return angles
    return a * at.part + 4 * at.rows + a * at.wide + angles


def _workspace(dims: Dims, layout: Arrangement) -> float:
    """The most that a block's backward pass holds besides what was saved (plan/sizes)."""
    a, at = (4 if layout.precision == "fp32" else 2), tokens_of(dims, layout)
    gathered = 2 * a * at.wide if layout.tp > 1 else 0.0
    inner = at.num_tokens * dims.d_ff / layout.tp
    mlp = 2 * a * inner + gathered
    attention = a * (at.query + 2 * (at.query + 2 * at.key)) + gathered
    norm = 0.0 if layout.compiled else (4 if a < 4 else 3) * 4 * at.part
    return a * at.part + max(mlp, attention, norm)


def _resting(rank: _Rank) -> dict[str, float]:
    state = rank.state
    return {"parameters": state.parameters, "masters": state.masters, "optimizer": state.moments}


def _accumulates(rank: _Rank) -> bool:
    return rank.job.layout.num_micro_batches > 1


def _gradients(rank: _Rank, share_done: float) -> float:
    """Once the backward pass is through a share of the blocks."""
    state, layout = rank.state, rank.job.layout
    if state.always:
        return state.gradients
    if layout.release_gradients:
        return 0.0
    p = 2 if layout.state_precision == "bf16" else 4
    if _accumulates(rank):
        if layout.num_gpus > 1 and (layout.pp > 1 or not layout.reduce_every_micro_batch):
            blocks = rank.pieces.num_blocks * state.block_whole
            return p * (blocks + state.root_gathered * layout.trained_share)
        return (0.0 if layout.offload_parameters else state.gradients) + (
            state.gradients if layout.dp_replicate > 1 else 0.0
        )
    if layout.offload_parameters:
        return 0.0
    return share_done * rank.pieces.num_blocks * state.block_gradient


def _copies(rank: _Rank, in_use: float, share_casts: float, head: bool) -> float:
    """Weights in the compute dtype, besides the parameters."""
    state, layout, n = rank.state, rank.job.layout, rank.pieces.num_blocks
    if state.always:
        return 0.0
    a = 4 if layout.precision == "fp32" else 2
    p = 2 if layout.state_precision == "bf16" else 4
    if layout.num_gpus == 1:
        casts = share_casts * n * state.block_gathered if layout.recompute == "none" else 0.0
        if a == p or layout.trained_share < 1:
            return 0.0
        return a * (casts + (state.head if head else 0.0))
    gathers = layout.zero == 3 and layout.reshard != "never" and layout.pp == 1
    blocks = min(in_use, n) if gathers else n
    copies = a * (blocks * state.block_gathered + state.root_gathered)
    if gathers and layout.reshard == "node":
        on_node = max(1, rank.job.cluster.gpus_per_node // layout.tp)
        copies += a * n * state.block_gathered / min(on_node, layout.dp_shard * layout.cp)
    return copies


def _named(modules: Modules) -> dict[str, float]:
    return {"norms": modules.norms, "attention": modules.attention, "mlp": modules.mlp}


def _loss(rank: _Rank) -> dict[str, float]:
    """Between the forward and the backward pass of the last stage."""
    layout, state = rank.job.layout, rank.state
    kept, head = _logits(rank.job.dims, layout)
    a = 4 if layout.precision == "fp32" else 2
    extra = a * rank.job.layout.tokens_of_rank * rank.job.dims.d_model
    p = 2 if layout.state_precision == "bf16" else 4
    gradient = 0.0 if state.always else p * state.head * layout.trained_share
    return {
        **_resting(rank),
        "gradients": _gradients(rank, 0.0) + gradient,
        "gathered": _copies(rank, 1 + layout.prefetch, 1.0, head=True),
        **_named(_plus(rank.kept, rank.waiting)),
        "residual": rank.root + rank.buffers + extra,
        "logits": kept + head,
    }


def _logits(dims: Dims, layout: Arrangement) -> tuple[float, float]:
    """Kept logits, and the most that the loss holds beside them."""
    num, a = layout.tokens_of_rank, (4 if layout.precision == "fp32" else 2)
    vocab = dims.vocab_size / layout.tp
    if layout.program == "megatron":
        # float32 logits, which become their softmax and its gradient; and in the compute dtype
        return 0.0, (4 + a) * num * vocab
    if layout.program == "fsdp":
        chunk = min(layout.loss_chunk_tokens or num, num)
        # log-softmax, its gradient and the logits' in float32; compiled: logits, their gradient
        return 0.0, chunk * vocab * (2 * a if layout.compiled else 12)
    chunk = min(layout.loss_chunk_tokens or num, num)
    keep = num * dims.vocab_size * a <= KEEP_LOGITS_BYTES
    logits = 0.0 if keep else a * chunk * vocab * (2 if chunk < num else 1)
    piece = min(LOSS_SLICE_BYTES // 4, chunk * vocab)
    p = 2 if layout.state_precision == "bf16" else 4
    gradient = vocab * dims.d_model * (a + (p if a != p and chunk < num else 0))
    if layout.trained_share < 1:
        gradient = 0.0
    work = logits + max((2 if keep else 4) * 4 * piece, gradient)
    return (num * vocab * a if keep else 0.0), work


def _backward(rank: _Rank, last: bool) -> dict[str, float]:
    """Inside the backward pass of the stage's last block (which comes first), or its first."""
    layout = rank.job.layout
    block = rank.sparse if rank.pieces.sparse else rank.dense
    stage = max(sum(stage) for stage in rank.pieces.stages)
    again = _computed_again(layout, stage)
    own = _plus(
        _scaled(block.all, again),
        Modules(mlp=block.unneeded if layout.recompute == "selective" else 0.0),
    )
    done = 0.0 if last else (stage - 1) / max(stage, 1)
    before = _scaled(rank.kept, max(1 - again / max(stage, 1), 0.0)) if last else Modules()
    a = 4 if layout.precision == "fp32" else 2
    p = 2 if layout.state_precision == "bf16" else 4
    casts = _casts(rank, a, p)
    in_use = again + 1
    return {
        **_resting(rank),
        "gradients": _gradients(rank, done) + _head_gradient(rank, p),
        "gathered": _copies(rank, in_use, 1 - done, head=False) + casts,
        **_named(_plus(_plus(before, own), rank.waiting)),
        "residual": rank.buffers + rank.workspace,
    }


def _head_gradient(rank: _Rank, p: int) -> float:
    if rank.state.always or (_accumulates(rank) and not rank.job.dims.tied):
        return 0.0
    return p * rank.state.head * (rank.job.layout.trained_share == 1)


def _casts(rank: _Rank, a: int, p: int) -> float:
    """Weights' gradients of the block at work, as they appear."""
    layout, state, dims = rank.job.layout, rank.state, rank.job.dims
    if state.always:
        return 0.0
    largest = dims.d_model * dims.d_ff / layout.tp
    if layout.compiled:
        casts = p * state.block_whole
    else:
        casts = largest * (a + (p if _accumulates(rank) else 0))
    if layout.num_gpus > 1:
        divided = layout.zero and layout.dp_shard * layout.cp > 1
        casts += a * state.block_gathered + (p * state.block_whole if divided else 0.0)
    return casts


def _embedding(rank: _Rank) -> dict[str, float]:
    """The end of the backward pass: the embedding's gradient, beside the head's when tied."""
    layout, state, dims = rank.job.layout, rank.state, rank.job.dims
    a = 4 if layout.precision == "fp32" else 2
    p = 2 if layout.state_precision == "bf16" else 4
    at = tokens_of(dims, layout)
    dense = 0.0 if state.always else p * state.embedding * (layout.trained_share == 1)
    tied = dims.tied and state.head > 0
    return {
        **_resting(rank),
        "gradients": _gradients(rank, 1.0) + dense * (2 if tied else 1),
        "gathered": _copies(rank, 0, 0.0, head=False),
        **_named(rank.waiting),
        "residual": rank.buffers + (a + 4) * at.wide,
    }


def _num_groups(layout: Arrangement) -> int:
    """Communicators of a rank: one an axis that has several ranks, and all."""
    axes = (layout.tp, layout.cp, layout.pp, layout.dp_shard, layout.dp_replicate, layout.ep)
    return sum(size > 1 for size in axes) + 1 if layout.num_gpus > 1 else 0


def _host(rank: _Rank) -> dict[str, float]:
    layout, found = rank.job.layout, {}
    if rank.state.host:
        found["optimizer"] = rank.state.host
    if layout.offload_activations:
        found["activations"] = rank.kept.total
    return found
