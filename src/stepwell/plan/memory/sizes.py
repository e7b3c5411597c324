"""The bytes that one rank's training step is made of. No torch.

N tokens of a micro-batch on this rank, D d_model, F d_ff, V vocabulary (of a tensor rank).
`a` is the size of the compute dtype, `w` of the wide one (at least float32) that norms and the loss
are computed in, `p` of the masters, `r` of gradients as they are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from operator import add, mul

from stepwell.config import Run
from stepwell.hardware import DeviceKind
from stepwell.models.activations import (
    KEEP_LOGITS_BYTES,
    BlockBytes,
    Segment,
    held,
    local_heads,
    peak,
    root_bytes,
    seen_outside,
)
from stepwell.parallel.fp8_layers import (
    block_linears,
    fp8_linears,
    local_shape,
    usual_kinds,
)
from stepwell.parallel.remat import DTYPE_BYTES, bytes_of_block, dtype_bytes, segments_of
from stepwell.parallel.rules import AxisSizes
from stepwell.parallel.schedules import ZERO_BUBBLE, micro_batches_of
from stepwell.plan.footprint.pieces import Phase, fullest, moments_of_stages
from stepwell.plan.memory.adapters import Share, largest_target, share_of_block, share_of_root
from stepwell.plan.memory.shards import Held, Part, held_by_block, parts_of_rank
from stepwell.sections.methods import GRPO, PPO
from stepwell.sections.model import ModelConfig

LOSS_SLICE_BYTES = 2 * 2**20  # of logits, widened, at a time (models.logits)


@dataclass(frozen=True)
class Now:
    """A backward pass of a pipeline rank, of the stage with these segments, and what to look at
    there. waiting: activations of the other micro-batches, and other stages, that are under way
    meanwhile. root: what this stage saved around its blocks; logits: what it kept of them. summed:
    elements of gradients of the stages that have had one; fresh: this one has not. halved: it is
    the second half of a pass, for weights' gradients alone, whose micro-batch is in waiting, too;
    at its end `spent` bytes of that are gone and `made` elements of gradients are there."""

    phases: Collection[Phase]
    segments: tuple[Segment, ...]
    waiting: int = 0
    root: int = 0
    logits: int = 0
    summed: int = 0
    fresh: bool = True
    halved: bool = False
    spent: int = 0
    made: int = 0


@dataclass(frozen=True)
class Sizes:
    """times: the first backward pass and those that may be the fullest; now: the one that is asked
    about. num_blocks: of all this rank's stages. embedding, head: elements of a tensor rank, 0
    where this rank has none."""

    run: Run
    axes: AxisSizes
    grouped: bool
    num_tokens: int
    num_micro_batches: int
    a: int
    w: int
    p: int
    r: int
    num_blocks: int
    block: Share
    root: Share
    embedding: int
    head: int
    times: tuple[Now, ...]
    now: Now
    saved: BlockBytes
    block_workspace: int
    cast_elements: int
    loss_forward: int
    loss_backward: int

    @property
    def trained(self) -> Held:
        return self.root.trained.plus(self.block.trained, self.num_blocks)

    @property
    def frozen_bytes(self) -> int:
        return self.root.frozen_bytes + self.num_blocks * self.block.frozen_bytes

    @staticmethod
    def of(run: Run, axes: AxisSizes, pp_rank: int, grouped: bool, device: DeviceKind) -> Sizes:
        cfg, tp = run.model, axes.tp
        a, w = dtype_bytes(run.precision)
        p, r = DTYPE_BYTES[run.precision.param], DTYPE_BYTES[run.precision.reduce]
        N = run.train.micro_batch_rows * run.data.seq_len // axes.cp
        parts = parts_of_rank(run, pp_rank)
        saved = bytes_of_block(run, axes)
        m = _micro_batches(run, axes)
        last = any(part.last for part in parts)
        vocab = cfg.vocab_size // tp
        forward, backward, logits = (
            _loss(run, N, vocab, a, w, a if grouped else p, device != "cpu")
            if last and cfg.has_lm_head
            else (0, 0, 0)
        )
        angles, x = 4 * N * cfg.head_dim, a * N * cfg.d_model // tp
        around = [root_bytes(cfg, N, a, w, tp) if part.last else angles for part in parts]
        more, read = between_halves(run, N, a, w, tp)
        between = [len(part.blocks) * more + (0 if part.first else x) for part in parts]
        times = _times(run, axes, pp_rank, m, parts, saved, x, around, logits, between, read)
        return Sizes(
            run=run,
            axes=axes,
            grouped=grouped,
            num_tokens=N,
            num_micro_batches=m,
            a=a,
            w=w,
            p=p,
            r=r,
            num_blocks=sum(len(part.blocks) for part in parts),
            block=share_of_block(run, axes),
            root=share_of_root(run, axes, parts),
            embedding=vocab * cfg.d_model if any(part.first for part in parts) else 0,
            head=_head_elements(cfg, tp) if last else 0,
            times=times,
            now=times[0],
            saved=saved,
            block_workspace=_block_workspace(run, N, a, w, tp),
            cast_elements=_cast_elements(run, axes),
            loss_forward=forward,
            loss_backward=backward,
        )


def _micro_batches(run: Run, axes: AxisSizes) -> int:
    train, shares = run.train, axes.dp_replicate * axes.dp_shard
    return micro_batches_of(train.global_batch_rows, train.micro_batch_rows, shares, run.layout)


def _times(
    run: Run,
    axes: AxisSizes,
    pp_rank: int,
    m: int,
    parts: Sequence[Part],
    saved: BlockBytes,
    x: int,
    around: Sequence[int],
    logits: int,
    between: Sequence[int],
    read: int,
) -> tuple[Now, ...]:
    """x: bytes of what stages pass on, which waits beside what they keep. around: of each
    stage, what is saved around its blocks; logits: what the last stage keeps of them. between: what
    each has more between the halves of its backward pass; read: of a block, what is gone after
    them. The first is when the first backward pass begins."""
    segments = [segments_of(run, axes, part.blocks.start, part.blocks.stop) for part in parts]
    if axes.pp == 1:
        return (Now(("backward", "loss", "embedding"), segments[0], 0, around[0], logits),)
    kept = [held(chosen, saved) for chosen in segments]
    restored = [peak(chosen, saved) - there for chosen, there in zip(segments, kept, strict=True)]
    block, roots = share_of_block(run, axes), [share_of_root(run, axes, [part]) for part in parts]
    sums = [
        root.trained.whole + len(part.blocks) * block.trained.whole
        for root, part in zip(roots, parts, strict=True)
    ]
    layout, v, r = run.layout, run.layout.pp_stages_per_rank, DTYPE_BYTES[run.precision.reduce]
    moments = moments_of_stages(layout.pp_schedule, axes.pp, v, pp_rank, m)
    logits_of = [logits if part.last else 0 for part in parts]
    # The last stage gives no activation.
    waits = [
        there + beside + (logits if part.last else x)
        for there, beside, part in zip(kept, around, parts, strict=True)
    ]
    if run.offload.activations:
        waits = [n - seen_outside(chosen, saved) for n, chosen in zip(waits, segments, strict=True)]
    # What is under way: an activation or a gradient at each end of a stage.
    ends = x * sum((not part.first) + (not part.last) for part in parts)
    if layout.pp_schedule in ZERO_BUBBLE and pp_rank == axes.pp - 1:
        # The V's turn: what one stage gives is what the other one reads.
        waits[0] -= x
        between = (between[0] - x, *between[1:])
    halves = list(map(add, waits, between))
    chosen = fullest(moments, waits, halves, restored, [r * n for n in sums])
    first = moments[0]
    times = []
    for moment, phases in {first: chosen.pop(first, set[Phase]()), **chosen}.items():
        place, summed, halved = moment.place, moment.summed, moment.halved
        waiting = round(moment.weigh(waits, halves) + ends) - (0 if halved else waits[place])
        there = sum(map(mul, sums, summed))
        times.append(
            Now(
                phases,
                segments[place],
                max(0, waiting),
                around[place],
                logits_of[place],
                there,
                not summed[place],
                halved,
                len(parts[place].blocks) * read,
                sums[place],
            )
        )
    return tuple(times)


def between_halves(run: Run, N: int, a: int, w: int, tp: int) -> tuple[int, int]:
    """What a block has more between the halves of its backward pass (`footprint/zero_bubble`): the
    gradients of what norms and products give; and what of all its own is gone at the end of the
    second half, these and what norms and products read. Nothing else is let go until then."""
    cfg = run.model
    heads, kv_heads = local_heads(cfg, tp)
    query, keyvalue = N * heads * cfg.head_dim, N * kv_heads * cfg.head_dim
    part, wide, inner = N * cfg.d_model // tp, N * cfg.d_model, N * cfg.d_ff // tp
    products = a * (query + 2 * keyvalue + 2 * inner + 2 * wide)
    norms = 2 * a * part + (a * (query + keyvalue) if cfg.qk_norm else 0)
    more = products + (0 if run.lora.rank else norms)
    return more, more + 2 * (a * part + w * N // tp) + 2 * a * wide + a * inner


def _loss(
    run: Run, N: int, vocab: int, a: int, w: int, p: int, whole: bool
) -> tuple[int, int, int]:
    """Workspace of the loss's forward pass, of its backward pass, and logits that are kept. p: of
    the head as it is used. whole: a chunk's logits at a time."""
    chunk = min(run.loss.chunk_tokens, N)
    keep = {"always": True, "never": False}.get(
        run.loss.keep_logits, N * vocab * a <= KEEP_LOGITS_BYTES
    )
    chunk_logits, D = chunk * vocab, run.model.d_model
    # logits that are not kept: the chunk before, too, until its name is taken
    logits = 0 if keep else a * chunk_logits * (2 if chunk < N else 1)
    piece = chunk_logits if whole else min(LOSS_SLICE_BYTES // 4, chunk_logits)
    # a slice widened and its gradient (from logits, log-probabilities and probabilities too); or
    # the head's gradient from one chunk, and widened where a CPU adds it up
    head_gradient = vocab * D * (a + (p if a != p and chunk < N and not whole else 0))
    if run.lora.rank:  # the head is frozen
        head_gradient = 0
    # whose entropy is asked for, too: log-probabilities in the forward pass; not kept as such
    entropy = isinstance(run.method, GRPO | PPO)
    backward = logits + max((2 if keep and not entropy else 4) * w * piece, head_gradient)
    # forward: a slice widened, and its probabilities
    return logits + (3 if entropy else 2) * w * piece, backward, N * vocab * a if keep else 0


def _cast_elements(run: Run, axes: AxisSizes) -> int:
    """Of the matrices of a block (the mean, where blocks differ) that autograd keeps in compute
    dtype without a process group: those in 8 bits save the weight as it was given."""
    if run.lora.rank:  # frozen matrices are in compute dtype
        return share_of_block(run, axes).trained.matrices
    shapes = block_linears(run.model)
    eight = sum(prod(shapes[name]) for name in fp8_linears(run, axes.tp))
    return held_by_block(run, axes).matrices - eight // run.model.num_layers // axes.tp


def _quantising(run: Run, N: int, w: int, tp: int, kinds: Collection[str]) -> int:
    """The most that quantisation of an operand holds: the operand widened, scaled and clamped (in
    compiled code in one go, and its values in 8 bits and, without a scaled kernel, back again)."""
    if not kinds:
        return 0
    rowwise, largest = run.precision.fp8.recipe == "rowwise", 0
    for name, shape in block_linears(run.model).items():
        if name.startswith("blocks.0.") and name.rsplit(".", 1)[-1] in kinds:
            rows, columns = local_shape(run.model, name, shape, tp)
            width = max(rows, columns) if rowwise else rows
            largest = max(largest, N * width, rows * columns)
    return largest * (w if run.layout.compile else 3 * w)


def _block_workspace(run: Run, N: int, a: int, w: int, tp: int) -> int:
    """The most that a block's backward pass holds besides what was saved: the gradient of the
    residual stream, and either SwiGLU's gradients (three, but the product is gone by then),
    attention's twice (whole, and the stretch of documents at hand), or a norm's wide ones, which
    compiled code does not hold. Tensor ranks gather a gradient, and hold that of what they had
    gathered. Layers in 8 bits quantise their gradient meanwhile."""
    cfg, kinds = run.model, usual_kinds(run, tp)
    mlp = _quantising(run, N, w, tp, kinds & {"w_gate", "w_up", "w_down"})
    projections = _quantising(run, N, w, tp, kinds & {"wq", "wk", "wv", "wo"})
    heads, kv_heads = local_heads(cfg, tp)
    query, keyvalue = N * heads * cfg.head_dim, N * kv_heads * cfg.head_dim
    gathered = 2 * a * N * cfg.d_model if tp > 1 else 0
    residual = a * N * cfg.d_model // tp
    swiglu = 2 * a * N * cfg.d_ff // tp + gathered + mlp
    attention = a * (query + 2 * (query + 2 * keyvalue)) + gathered
    projected = a * (query + 2 * keyvalue) + gathered + projections
    norm = 0 if run.layout.compile else (4 if a < w else 3) * w * N * cfg.d_model // tp
    # A matrix from 4 bits: its levels in float32, then as they are multiplied.
    restored = (4 + max(a, 2)) * largest_target(run)
    return residual + restored + max(swiglu, attention, projected, norm)


def _head_elements(cfg: ModelConfig, tp: int) -> int:
    """Weights that the last stage multiplies its output with, on one tensor rank."""
    words = cfg.vocab_size // tp * cfg.d_model if cfg.has_lm_head else 0
    return words + (cfg.num_labels * cfg.d_model if cfg.has_score else 0)
