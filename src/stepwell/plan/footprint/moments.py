"""When the pieces of a step are in a GPU's memory: the moments that may be its worst. No torch.

Of our own engine these are the phases of `plan/memory`, on the dimensions alone. Letters as in
`plan/footprint/activations`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import add, mul
from typing import NamedTuple

from stepwell.parallel.remat import chosen_blocks
from stepwell.parallel.schedules import ZERO_BUBBLE, most_in_flight
from stepwell.plan.footprint.activations import (
    Block,
    Modules,
    Tokens,
    between_halves,
    compute_bytes,
    freezes,
    logits_of,
    master_bytes,
    routed_tokens,
    tokens_of,
)
from stepwell.plan.footprint.kept import group_of, kept_before, kept_by, num_groups
from stepwell.plan.footprint.pieces import (
    Phase,
    Pieces,
    fullest,
    moments_of_stages,
    pieces_of_rank,
    target_sizes,
)
from stepwell.plan.footprint.state import State, state_of
from stepwell.plan.job import Arrangement, Dims, Job
from stepwell.plan.memory.host import PROCESS_BYTES, batch_bytes

OFFLOAD_WINDOW = 16  # tensors on their way (plan/memory/ledger)

PHASES: tuple[Phase, ...] = ("backward", "loss", "embedding")

Items = dict[str, float]


class Now(NamedTuple):
    """A backward pass of a pipeline rank, and what to look at there. at_work: the blocks of its
    stage; kept: by it, of this micro-batch. waiting: of other stages and micro-batches meanwhile;
    messages: the pipeline's buffers, and what these have beside their blocks. gradients: bytes of
    the stages that have had one already; fresh: this one has not. halved: it is the second half of
    a pass, for weights' gradients alone, whose micro-batch is in waiting, too; at its end `spent`
    of it is gone."""

    phases: Collection[Phase]
    at_work: range
    kept: Modules
    waiting: Modules
    messages: float
    gradients: float
    fresh: bool
    halved: bool = False
    spent: Modules = Modules()


class Rank(NamedTuple):
    """What the moments of a pipeline rank's step are made of, in bytes. times: of its passes;
    now: the one that is asked about. root: saved around the blocks. workspace: inside a block's
    backward pass. accumulates: over micro-batches. alone: without a process group, which offload of
    parameters has on one rank, too."""

    job: Job
    pieces: Pieces
    state: State
    dense: Block
    sparse: Block
    times: tuple[Now, ...]
    now: Now
    root: float
    workspace: float
    accumulates: bool
    alone: bool


def rank_of(job: Job, pp_rank: int, dense: Block, sparse: Block) -> Rank:
    """dense, sparse: a block with an ordinary MLP, and one of experts (`block_of`)."""
    dims, layout = job.dims, job.layout
    pieces = pieces_of_rank(dims, layout, pp_rank)
    state = state_of(dims, layout, pieces)
    times = _times(dims, layout, pieces, state, pp_rank, dense, sparse)
    return Rank(
        job=job,
        pieces=pieces,
        state=state,
        dense=dense,
        sparse=sparse,
        times=times,
        now=times[0],
        root=_root(dims, layout, pieces.last),
        workspace=_workspace(dims, layout, experts=pieces.sparse > 0),
        accumulates=layout.num_micro_batches > 1,
        alone=layout.num_gpus == 1 and not layout.offload_parameters,
    )


def moments_of(rank: Rank) -> dict[str, Items]:
    """Bytes by kind at each moment of the rank's step."""
    moments = {"optimizer": _step(rank)}
    if not rank.alone and not rank.state.always:
        moments["reduction"] = _reduction(rank)
    for now in rank.times:
        for name, items in _moments(rank._replace(now=now)):
            if sum(items.values()) > sum(moments.get(name, {}).values()):
                moments[name] = items
    return moments


def _moments(rank: Rank) -> Iterator[tuple[str, Items]]:
    if rank.now.halved:
        halves = _second_half(rank)
        yield "backward", max(halves, key=lambda items: sum(items.values()))
        return
    phases, inside = rank.now.phases, []
    if "backward" in phases:
        inside = [_backward(rank, number) for number in _numbers(rank)]
    if inside:
        yield "backward", max(inside, key=lambda items: sum(items.values()))
        yield "end of backward", inside[0]
    if rank.pieces.last and "loss" in phases:
        yield "loss", _loss(rank)
    if rank.pieces.first and "embedding" in phases:
        yield "embedding", _embedding(rank)


def host_of(rank: Rank) -> Items:
    """Bytes of the rank in its machine's memory, by the names of `memory/host.host_memory`."""
    layout, state = rank.job.layout, rank.state
    found: Items = {}
    if state.host:
        kind = "parameters" if layout.offload_parameters else "optimizer"
        found[f"offload.{kind}"] = state.host
    if layout.offload_activations:
        found["offload.activations"] = _on_host(rank)
    if state.staged:
        found["checkpoint"] = state.staged
    rows = layout.global_batch_rows
    found["batches"] = batch_bytes(rows, layout.seq_len, layout.data_ranks)
    found["processes"] = PROCESS_BYTES["cuda"]
    return found


# --- activations -----------------------------------------------------------------------------


def _times(
    dims: Dims,
    layout: Arrangement,
    pieces: Pieces,
    state: State,
    pp_rank: int,
    dense: Block,
    sparse: Block,
) -> tuple[Now, ...]:
    """The fullest of its passes."""
    kept = [kept_by(dense, d, layout).plus(kept_by(sparse, s, layout)) for d, s in pieces.stages]
    stages = [range(d.start, s.stop) for d, s in pieces.stages]
    if layout.pp == 1:
        return (Now(PHASES, stages[0], kept[0], Modules(), 0.0, 0.0, True),)
    restored = [_restored(layout, blocks, sparse if pieces.sparse else dense) for blocks in stages]
    waits = kept
    if layout.offload_activations:
        inputs = [len(blocks) * dense.input.total for blocks in stages]
        shares = [_moved(layout, *of_stage) for of_stage in zip(kept, inputs, strict=True)]
        waits = [modules.times(1 - share) for modules, share in zip(kept, shares, strict=True)]
    around = _around(dims, layout, pieces, dense.input.total)
    sums = _sums(layout, pieces, state)
    totals = [modules.total + beside for modules, beside in zip(waits, around, strict=True)]
    more, read = between_halves(dims, layout)
    between = [more.times(len(blocks)) for blocks in stages]
    passed = [0.0 if first else dense.input.total for first in (pieces.first, *stages[1:])]
    if layout.schedule in ZERO_BUBBLE and pp_rank == layout.pp - 1:
        # The V's turn: what one stage gives is what the other one reads.
        around[0] -= dense.input.total
        passed[0] -= dense.input.total
    beside = [a + b for a, b in zip(around, passed, strict=True)]
    halves = [n + b.total + x for n, b, x in zip(totals, between, passed, strict=True)]
    v, m = layout.stages_per_rank, layout.num_micro_batches
    moments = moments_of_stages(layout.schedule, layout.pp, v, pp_rank, m)
    times, columns, x = [], [*zip(*waits, strict=True)], dense.input.total
    # What is under way: an activation or a gradient at each end of a stage. Elsewhere what comes
    # in, and a gradient.
    ends = 2 * len(kept) - pieces.first - pieces.last if layout.program == "stepwell" else 2
    for moment, phases in fullest(moments, totals, halves, restored, sums).items():
        place, held, summed = moment.place, moment.held, moment.summed
        others = held
        if not moment.halved:
            others = (*held[:place], held[place] - 1, *held[place + 1 :])
        all_others = list(map(add, others, moment.halves or (0,) * len(others)))
        waiting = Modules(*(sum(map(mul, of_stages, all_others)) for of_stages in columns))
        for modules, number in zip(between, moment.halves, strict=False):
            waiting = waiting.plus(modules.times(number))
        messages = x * ends + sum(map(mul, around, others)) + sum(map(mul, beside, moment.halves))
        times.append(
            Now(
                phases,
                stages[place],
                kept[place],
                waiting,
                messages,
                sum(map(mul, sums, summed)),
                not summed[place],
                moment.halved,
                read.times(len(stages[place])),
            )
        )
    return tuple(times)


def _sums(layout: Arrangement, pieces: Pieces, state: State) -> list[float]:
    """Gradients of each stage, as they wait for the last micro-batch: undivided."""
    if state.always or layout.release_gradients:
        return [0.0] * len(pieces.stages)
    found = [(len(d) + len(s)) * state.block_whole for d, s in pieces.stages]
    if pieces.first and pieces.last:
        found[0] += min(state.embedding, state.root_whole)
        found[-1] += max(0.0, state.root_whole - state.embedding)
    elif pieces.first or pieces.last:
        found[0 if pieces.first else -1] += state.root_whole
    return [master_bytes(layout) * elements for elements in found]


def _restored(layout: Arrangement, blocks: range, block: Block) -> float:
    """What recomputation brings back of a stage in which only some blocks are computed again."""
    some = layout.recompute == "every" and chosen_blocks(blocks, layout.recompute_every)
    return block.all.total - block.input.total if some else 0.0


def _around(dims: Dims, layout: Arrangement, pieces: Pieces, x: float) -> list[float]:
    """Of each stage, what a micro-batch that waits holds beside what its blocks keep: what is saved
    around them, and what the stage gave (x) or of the last one the logits. In our engine; of others
    it is not known."""
    if layout.program != "stepwell":
        return [0.0] * len(pieces.stages)
    found = [_root(dims, layout, last=False) + x] * len(pieces.stages)
    if pieces.last:
        found[-1] = _root(dims, layout, last=True) + logits_of(dims, layout)[0]
    return found


def _root(dims: Dims, layout: Arrangement, last: bool) -> float:
    """Saved by the last norm, the hidden states that the head multiplies; and cos and sin."""
    a, at = compute_bytes(layout), tokens_of(dims, layout)
    angles = 4 * at.num_tokens * dims.head_dim if layout.program == "stepwell" else 0.0
    if not last:
        return angles
    return a * at.part + 4 * at.rows + a * at.wide + angles


def _workspace(dims: Dims, layout: Arrangement, experts: bool) -> float:
    """The most that a block's backward pass holds besides what was saved (plan/memory/sizes)."""
    a, at = compute_bytes(layout), tokens_of(dims, layout)
    divides = layout.sequence_parallel or layout.program == "stepwell"
    gathered = 2 * a * at.wide if layout.tp > 1 and divides else 0.0
    mlp = 2 * a * _width_of_mlp(dims, layout, at, experts) + gathered
    attention = a * (at.query + 2 * (at.query + 2 * at.key)) + gathered
    norm = 0.0 if layout.compiled else (4 if a < 4 else 3) * 4 * at.part
    restored = 0.0
    if layout.adapters and layout.adapters.quantized:  # a matrix from 4 bits, in float32 first
        restored = (4 + a) * max(rows * columns for rows, columns in target_sizes(dims, layout))
    return a * at.part + restored + max(mlp, attention, norm)


def _width_of_mlp(dims: Dims, layout: Arrangement, at: Tokens, experts: bool) -> float:
    """Elements between the products of an MLP; of experts, of each that a token goes to."""
    dense = at.num_tokens * dims.d_ff / layout.tp
    if not experts or dims.experts is None:
        return dense
    one = dims.experts
    routed = routed_tokens(dims, layout) + at.num_tokens * one.num_shared / layout.tp
    return max(routed * one.d_ff, dense if one.num_dense_layers else 0.0)


def _waiting(rank: Rank, kept: Modules) -> Modules:
    """Activations before the block at work, as far as they are on the GPU, and of other
    micro-batches."""
    if not rank.job.layout.offload_activations:
        return kept.plus(rank.now.waiting)
    block = rank.sparse if rank.pieces.sparse else rank.dense
    window = max(block.all.total, OFFLOAD_WINDOW * block.input.total)
    if rank.job.layout.bucket_elements:  # DeepSpeed's copies are waited for
        window = 2 * block.input.total
    if not kept.total:
        return rank.now.waiting
    moved = _moved_now(rank) * kept.total / rank.now.kept.total
    share = 1 - (moved - min(moved, window)) / kept.total
    return kept.times(share).plus(rank.now.waiting)


def _moved(layout: Arrangement, kept: Modules, inputs: float) -> float:
    """The share of what blocks keep that activation offload moves: what "selective" keeps inside a
    block stays (`models/activations.seen_outside`). inputs: bytes of the blocks' inputs."""
    if not layout.offload_activations:
        return 0.0
    return inputs / kept.total if layout.recompute == "selective" and kept.total else 1.0


def _on_host(rank: Rank) -> float:
    """Bytes of what blocks keep, of all micro-batches that a pipeline's first rank has at once."""
    layout, once = rank.job.layout, 0.0
    for d, s in rank.pieces.stages:
        kept = kept_by(rank.dense, d, layout).plus(kept_by(rank.sparse, s, layout))
        once += kept.total * _moved(layout, kept, (s.stop - d.start) * rank.dense.input.total)
    if layout.pp == 1:
        return once
    m, v = layout.num_micro_batches, layout.stages_per_rank
    return once * most_in_flight(layout.schedule, layout.pp, m, v) / v


def _moved_now(rank: Rank) -> float:
    """Bytes of what the stage at work keeps."""
    inputs = len(rank.now.at_work) * rank.dense.input.total
    return rank.now.kept.total * _moved(rank.job.layout, rank.now.kept, inputs)


# --- weights and gradients -------------------------------------------------------------------


def _resting(rank: Rank) -> Items:
    state = rank.state
    found = {"parameters": state.parameters, "masters": state.masters, "optimizer": state.moments}
    layout = rank.job.layout
    if layout.program == "fsdp" and not layout.zero and layout.data_ranks > 1:
        found["buckets"] = state.gradients  # DistributedDataParallel's, beside the gradients
    return found


def _gradients(rank: Rank, share_done: float, root: bool = False) -> float:
    """Once the backward pass is through a share of the blocks; root: and through the ends."""
    state, layout = rank.state, rank.job.layout
    if state.always:
        return state.gradients
    if layout.release_gradients:
        return 0.0
    if layout.pp > 1:
        return rank.now.gradients + (share_done * _own(rank) if rank.now.fresh else 0.0)
    if rank.accumulates:
        if not rank.alone and not layout.reduce_every_micro_batch:
            blocks = rank.pieces.num_blocks * state.block_whole
            return master_bytes(layout) * (blocks + state.root_whole)
        between = state.gradients if layout.dp_replicate > 1 else 0.0
        return between + (0.0 if layout.offload_parameters else state.gradients)
    if layout.offload_parameters:
        return 0.0
    of_blocks = share_done * rank.pieces.num_blocks * state.block_gradient
    return of_blocks + (state.root_gradient if root else 0.0)


def _own(rank: Rank) -> float:
    """Gradients of the blocks of the stage at work."""
    return master_bytes(rank.job.layout) * len(rank.now.at_work) * rank.state.block_whole


def _copies(rank: Rank, in_use: float, share_cast: float, head: bool) -> float:
    """Weights in the compute dtype besides the parameters: of the blocks in use, gathered, or cast
    by autograd where there is one process."""
    state, layout, n = rank.state, rank.job.layout, rank.pieces.num_blocks
    a = compute_bytes(layout)
    if state.always:
        return 0.0
    if rank.alone:
        if a == master_bytes(layout) or freezes(layout):
            return 0.0
        cast = share_cast * n * state.block_gathered if layout.recompute == "none" else 0.0
        eight = layout.precision == "fp8"
        return a * ((0.0 if eight else cast) + (state.head if head else 0.0))
    gathers = layout.zero == 3 and layout.reshard != "never" and layout.pp == 1
    blocks = min(in_use, n) if gathers else n
    if layout.bucket_elements:  # DeepSpeed gathers matrix by matrix, and one bucket ahead
        bucket = layout.bucket_elements
        matrix = rank.job.dims.d_model * rank.job.dims.d_ff / layout.tp
        return a * min(bucket + max(bucket, matrix), blocks * state.block_gathered)
    copies = a * (blocks * state.block_gathered + state.root_gathered)
    if gathers and layout.reshard == "node":
        on_node = max(1, rank.job.cluster.gpus_per_node // layout.tp)
        copies += a * n * state.block_gathered / min(on_node, layout.dp_shard * layout.cp)
    return copies


def _buckets(rank: Rank) -> float:
    """Gradients copied together to be summed, and what they are summed into."""
    layout, state = rank.job.layout, rank.state
    if not layout.bucket_elements or layout.dp_shard * layout.dp_replicate == 1:
        return 0.0
    return state.gradient_bytes * min(layout.bucket_elements, state.elements)


# --- moments ---------------------------------------------------------------------------------


def _at(rank: Rank, gradients: float, buffers: float, modules: Modules, residual: float) -> Items:
    """residual: activations between blocks and at the ends, and what an operation holds."""
    return {
        **_resting(rank),
        "gradients": gradients,
        "buffers": buffers,
        "norms": modules.norms,
        "attention": modules.attention,
        "mlp": modules.mlp,
        "residual": residual + rank.now.messages,
    }


def _loss(rank: Rank) -> Items:
    """Between the forward and the backward pass of the last stage; the head's gradient is there
    where it is summed chunk by chunk."""
    layout, dims = rank.job.layout, rank.job.dims
    kept, work = logits_of(dims, layout)
    hidden = compute_bytes(layout) * layout.tokens_of_rank * dims.d_model
    chunked = layout.program == "stepwell" or layout.loss_chunk_tokens is not None
    gradient = _head_gradient(rank) if chunked else 0.0
    in_use = 0 if layout.program == "stepwell" else 1 + layout.prefetch
    items = _at(
        rank,
        _gradients(rank, 0.0) + gradient,
        _copies(rank, in_use, 1.0, head=True),
        _waiting(rank, rank.now.kept),
        rank.root + hidden,
    )
    if layout.pp > 1 and layout.schedule in ZERO_BUBBLE:
        # A chunk of kept logits is copied, and the head's gradient from the last second half is
        # summed only after this pass (plan/memory/ledger).
        chunk = min(layout.loss_chunk_tokens or layout.tokens_of_rank, layout.tokens_of_rank)
        work += compute_bytes(layout) * chunk * dims.vocab_size / layout.tp if kept else 0.0
        remains = layout.schedule == "zbv" and not rank.now.fresh
        items["gradients"] += gradient if remains else 0.0
    return {**items, "logits": kept + work}


def _fresh(rank: Rank) -> int:
    """Size of a gradient's element as the backward pass makes it: of the weight that was used."""
    layout = rank.job.layout
    return master_bytes(layout) if rank.alone else compute_bytes(layout)


def _head_gradient(rank: Rank) -> float:
    if rank.state.always or freezes(rank.job.layout):
        return 0.0
    return _fresh(rank) * rank.state.head


def _numbers(rank: Rank) -> list[int]:
    """The blocks of a stage that the backward pass may be at when the most is held: between the
    second and the last but one it grows or shrinks evenly, and shrinks where gradients are there
    all the time. The first comes first."""
    n, layout = len(rank.now.at_work), rank.job.layout
    ends = {0, 1, n - 2, n - 1}
    if rank.state.always or (layout.pp > 1 and not rank.now.fresh):
        ends = {0, n - 1}
    if layout.recompute == "sqrt":
        groups = num_groups(n)
        ends |= {n * g // groups - 1 for g in range(1, groups + 1)}
    return sorted(number for number in ends if 0 <= number < n)


def _backward(rank: Rank, number: int) -> Items:
    """Inside the backward pass of a stage's block."""
    layout, n = rank.job.layout, len(rank.now.at_work)
    block = rank.sparse if rank.pieces.sparse else rank.dense
    group = group_of(layout, number, n)
    own = block.all.times(number - group.start + 1)
    if layout.recompute == "selective":
        own = own.plus(Modules(mlp=block.unneeded))
    before = rank.now.kept.times(group.start / n)
    if layout.recompute in ("every", "sqrt") and not (rank.pieces.sparse and rank.pieces.dense):
        before = kept_before(block, rank.now.at_work, group.start, layout)
    adds_up = rank.alone and rank.accumulates and not rank.job.dims.tied
    head = 0.0 if adds_up else _head_gradient(rank)
    # Blocks that are computed again together are gathered one by one meanwhile.
    ahead = min(1, group.start) if len(group) == 1 else 0
    copies = _copies(rank, len(group) + ahead, (number + 1) / n, head=False)
    return _at(
        rank,
        _gradients(rank, (n - 1 - number) / n) + head,
        copies + _appearing(rank, summing=number < n - 1, ahead=ahead > 0),
        _waiting(rank, before).plus(own),
        rank.workspace,
    )


def _second_half(rank: Rank) -> list[Items]:
    """The beginning and the end of a pass for weights' gradients alone, which wait in compute dtype
    for all of the stage's."""
    now, copies = rank.now, _copies(rank, rank.pieces.num_blocks, 0.0, head=False)
    made = 0.0
    if not rank.state.always:
        made = compute_bytes(rank.job.layout) * len(now.at_work) * rank.state.block_whole
    left = now.waiting.plus(now.spent.times(-1))
    return [
        _at(rank, now.gradients, copies, now.waiting, rank.workspace),
        _at(rank, now.gradients + made, copies, left, 0.0),
    ]


def _appearing(rank: Rank, summing: bool, ahead: bool) -> float:
    """Weights' gradients of the block at work; summing: beside those of the one before; ahead:
    beside a block that is being gathered."""
    layout, state, dims = rank.job.layout, rank.state, rank.job.dims
    if state.always:
        return 0.0
    a, p = compute_bytes(layout), master_bytes(layout)
    if layout.bucket_elements:
        return a * min(layout.bucket_elements, state.block_whole)
    largest = dims.d_model * dims.d_ff / layout.tp
    if dims.experts and rank.pieces.sparse:  # of all experts of the rank together
        each = dims.d_model * dims.experts.d_ff
        largest = max(largest, each * dims.experts.num_experts / layout.ep)
    if layout.adapters:
        largest = layout.adapters.rank * max(dims.d_model, dims.d_ff / layout.tp)
    if layout.compiled:
        found = p * state.block_whole
    else:
        found = largest * (a + (p if rank.accumulates and rank.alone else 0))
    if not rank.alone and layout.pp == 1:
        divided = layout.zero and layout.dp_shard * layout.cp > 1
        found += p * state.block_whole if divided and summing else 0.0
        found += a * state.block_gathered if ahead else 0.0
    if layout.release_gradients:
        found += p * largest if rank.alone else state.block_gradient
    return found


def _embedding(rank: Rank) -> Items:
    """The end of the backward pass: the embedding's gradient, beside the head's when tied. Untied,
    in the first micro-batch, it becomes the parameter's gradient as it is. Under FSDP2 both wait
    for their reduction."""
    layout, state, dims = rank.job.layout, rank.state, rank.job.dims
    a, at = compute_bytes(layout), tokens_of(dims, layout)
    tied = dims.tied and state.head > 0
    fresh = 0.0 if state.always or freezes(layout) else _fresh(rank)
    if not rank.alone:
        ends = state.embedding + (0.0 if tied else state.head)
        gradients, workspace = _gradients(rank, 1.0) + fresh * ends, 0.0
    else:
        dense = fresh * state.embedding
        gradients = _gradients(rank, 1.0, root=not tied) + (dense if tied else 0.0)
        workspace = 0.0 if not tied and not rank.accumulates else dense
    return _at(
        rank,
        gradients,
        _copies(rank, 0, 0.0, head=False) + _buckets(rank),
        rank.now.waiting,
        (a + 4) * at.wide + workspace,
    )


def _reduction(rank: Rank) -> Items:
    """FSDP2 sums the gradients of what is no block, all of them in one piece. Where they have added
    up, they wait in the dtype of the sum already. Gathered weights are gone by then, but for those
    that wait for the next micro-batch, or in a pipeline for their own reduction."""
    layout, state, a = rank.job.layout, rank.state, compute_bytes(rank.job.layout)
    waits = layout.pp > 1 or not layout.reduce_every_micro_batch
    fresh = 0.0 if waits and rank.accumulates else a * state.root_whole
    copies = a * rank.pieces.num_blocks * state.block_gathered if layout.pp > 1 else 0.0
    whole = fresh + master_bytes(layout) * state.root_whole + state.root_gradient
    if layout.bucket_elements:
        whole = _buckets(rank)
    if layout.pp > 1:
        every = sum(_sums(layout, rank.pieces, state))
        rank = rank._replace(now=rank.now._replace(gradients=every, fresh=False))
    last = _reduced(rank, copies + whole)
    if layout.zero == 3 or not rank.accumulates or waits:
        return last
    # Before the last one weights stay; in the first of two no gradients have added up.
    first = rank._replace(accumulates=layout.num_micro_batches > 2)
    before = _reduced(first, _copies(rank, 0, 0.0, head=False) + whole)
    return max(last, before, key=lambda items: sum(items.values()))


def _reduced(rank: Rank, buffers: float) -> Items:
    return {**_resting(rank), "gradients": _gradients(rank, 1.0), "buffers": buffers}


def _step(rank: Rank) -> Items:
    """All gradients, and what the optimiser computes with."""
    layout, state = rank.job.layout, rank.state
    released = layout.release_gradients or layout.offload_parameters
    gradients = 0.0 if released and not state.always else state.gradients
    return {
        **_resting(rank),
        "gradients": gradients,
        "step": layout.step_bytes * state.shard,
    }
