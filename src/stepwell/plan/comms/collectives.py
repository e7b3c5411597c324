"""What a rank sends in one step, collective by collective, before it runs. No torch.

N tokens of a micro-batch on a context rank, D d_model, m micro-batches. Ours is counted as the
engine issues it (`plan/dryrun` counts the same from the program itself); of other programs, what
their published designs send: Megatron-LM's tensor parallelism with sequence parallelism
(2205.05198), its distributed optimiser and expert parallelism, PyTorch's FSDP (2304.11277).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod
from typing import Literal, NamedTuple

from stepwell.parallel.remat import chosen_blocks, square_root_groups
from stepwell.parallel.schedules import next_micro_batches
from stepwell.parallel.wire import wire_bytes
from stepwell.plan.cluster import Cluster, Link
from stepwell.plan.comms.weights import (
    Weight,
    block_weights,
    expert_elements,
    gathered,
    parts_of,
    rank_of_stage,
    reduced,
    root_weights,
)
from stepwell.plan.footprint.pieces import stages_of
from stepwell.plan.job import Arrangement, Dims, Job
from stepwell.plan.memory.shards import Part
from stepwell.sections.layout import LayoutConfig
from stepwell.types import ConfigError

Phase = Literal["forward", "backward", "optimizer", "pipeline"]
# What of a layout decides which stages a pipeline rank has, and what they compute again.
_OF_STAGES = (
    *("pp", "stages_per_rank", "schedule", "stage_blocks", "program"),
    *("recompute", "recompute_every"),
)
PRECISION_BYTES = {"bf16": 2, "fp16": 2, "fp8": 2, "fp32": 4, "fp64": 8}  # as sent


@dataclass(frozen=True)
class Sent:
    """`calls` equal collectives of a rank and step. kind: as in parallel.traffic. axis: dp_shard
    (with its context ranks), dp_replicate, tp, cp, pp, ep, edp (ranks of the same experts) or
    world; num_ranks of it, `stride` ranks apart, among `world` ranks. num_bytes: the whole tensor
    of one call. phase: when it is issued; recomputation is backward's."""

    kind: str
    axis: str
    purpose: str
    phase: Phase
    num_ranks: int
    stride: int
    num_bytes: int
    calls: int
    world: int

    @property
    def wire_bytes(self) -> float:
        """What this rank puts on the wire in one call, by the ring algorithms."""
        return wire_bytes(self.kind, self.num_bytes, self.num_ranks)

    @property
    def num_messages(self) -> int:
        """Of one call, by the ring algorithms."""
        if self.kind in ("send", "recv"):
            return int(self.kind == "send")
        return (self.num_ranks - 1) * (2 if self.kind == "all-reduce" else 1)

    def link(self, cluster: Cluster) -> Link:
        """The slowest link that a group of the axis crosses, also where a pipeline's last stage
        sends to its first."""
        return cluster.link(self.num_ranks, self.stride, self.world)


class Total(NamedTuple):
    """Of one rank and step."""

    calls: int
    wire_bytes: float
    num_messages: int


def collectives(job: Job, pp_rank: int | None = None) -> list[Sent]:
    """A step's collectives on one rank of the pipeline, by default the one that sends the most.

    Raises ConfigError for a pp_rank that is not there.
    """
    layout = job.layout
    if pp_rank is not None and not 0 <= pp_rank < layout.pp:
        raise ConfigError(
            f"pp_rank={pp_rank} is not among the {layout.pp} ranks of the pipeline; the nearest "
            f"is {min(max(pp_rank, 0), layout.pp - 1)}"
        )
    if pp_rank is not None:
        return _of_rank(job, pp_rank)
    ranks = _distinct_ranks(job)
    found = [_of_rank(job, rank) for rank in ranks]
    if len(ranks) == 1:
        return found[0]
    return max(found, key=lambda sent: sum(one.calls * one.wire_bytes for one in sent))


def totals(
    sent: Iterable[Sent], cluster: Cluster, by: tuple[str, ...] = ("axis", "link")
) -> dict[tuple[str, ...], Total]:
    """Sums by any of axis, link, kind, purpose and phase."""
    table: dict[tuple[str, ...], Total] = {}
    for one in sent:
        key = tuple(one.link(cluster) if name == "link" else getattr(one, name) for name in by)
        calls, num_bytes, messages = table.get(key, Total(0, 0.0, 0))
        table[key] = Total(
            calls + one.calls,
            num_bytes + one.calls * one.wire_bytes,
            messages + one.calls * one.num_messages,
        )
    return table


def lines(sent: Iterable[Sent], cluster: Cluster) -> list[str]:
    """A table by axis and link, in the order of first use."""
    rows = [f"{'axis':<14}{'link':<10}{'calls':>8}{'messages':>12}{'GiB sent':>12}"]
    for (axis, link), total in totals(sent, cluster).items():
        sent_gib = total.wire_bytes / 2**30
        rows.append(
            f"{axis:<14}{link:<10}{total.calls:>8}{total.num_messages:>12}{sent_gib:>12.3f}"
        )
    return rows


# --- the parts of a step ------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What all parts of the ledger look at. parts: this rank's stages. m, N as above; a: bytes of
    an activation, g: of a gradient as it is summed up. world: ranks of all axes together."""

    job: Job
    pp_rank: int
    parts: list[Part]
    m: int
    N: int
    a: int
    g: int
    world: int
    axes: Mapping[str, tuple[int, int]]

    @staticmethod
    def of(job: Job, pp_rank: int) -> Step:
        layout = job.layout
        return Step(
            job=job,
            pp_rank=pp_rank,
            parts=parts_of(layout, job.dims.num_layers, pp_rank),
            m=num_micro_batches(layout),
            N=layout.tokens_of_rank,
            a=PRECISION_BYTES[layout.precision],
            g=PRECISION_BYTES[layout.gradient_precision],
            world=layout.num_gpus,
            axes=axes_of(layout),
        )

    @property
    def dims(self) -> Dims:
        return self.job.dims

    @property
    def layout(self) -> Arrangement:
        return self.job.layout

    @property
    def num_blocks(self) -> int:
        return sum(len(part.blocks) for part in self.parts)

    @property
    def num_expert_blocks(self) -> int:
        return _expert_blocks(self.dims, self.parts)

    @property
    def again(self) -> _Again:
        return _recomputed(self.layout, self.parts)

    @property
    def first(self) -> bool:
        return any(part.first for part in self.parts)

    @property
    def last(self) -> bool:
        return any(part.last for part in self.parts)

    def one(
        self,
        kind: str,
        axis: str,
        purpose: str,
        phase: Phase,
        num_bytes: float,
        calls: int,
        ranks: tuple[int, int] | None = None,
    ) -> Sent | None:
        """ranks: (how many, stride) where the axis does not say it. None if nothing is sent."""
        num_ranks, stride = ranks or self.axes[axis]
        size = int(num_bytes)
        if num_ranks == 1 or not calls or not size:
            return None
        return Sent(kind, axis, purpose, phase, num_ranks, stride, size, calls, self.world)


def axes_of(layout: Arrangement) -> dict[str, tuple[int, int]]:
    """How many ranks each axis has, and their stride. ZeRO shards over dp_shard x cp; stage 0 only
    replicates."""
    tp, shard, replicate = layout.tp, layout.dp_shard * layout.cp, layout.dp_replicate
    if layout.zero == 0:
        replicate, shard = replicate * shard, 1
    return {
        "tp": (tp, 1),
        "cp": (layout.cp, tp),
        "ep": (layout.ep, 1),
        "dp_shard": (shard, tp),
        "dp_replicate": (replicate, tp * shard),
        "pp": (layout.pp, tp * shard * replicate),
        "world": (layout.num_gpus, 1),
    }


def num_micro_batches(layout: Arrangement) -> int:
    """Of a step. Our pipelines fill up with empty ones to what their schedule can run."""
    wanted = layout.num_micro_batches
    if layout.program != "stepwell" or layout.pp == 1:
        return wanted
    return _filled_up(wanted, layout.pp, layout.stages_per_rank, layout.schedule)


@lru_cache(maxsize=4096)
def _filled_up(wanted: int, pp: int, v: int, schedule: str) -> int:
    ours = LayoutConfig.model_construct(pp=pp, pp_stages_per_rank=v, pp_schedule=schedule)
    return next_micro_batches(wanted, ours)


def _distinct_ranks(job: Job) -> tuple[int, ...]:
    """Of pipeline ranks that send the same the first, and on from the last of these."""
    if job.layout.pp == 1:
        return (0,)
    asked = {name: getattr(job.layout, name) for name in _OF_STAGES}
    layout = Arrangement(seq_len=1, micro_batch_rows=1, global_batch_rows=1, **asked)
    return _distinct_of_stages(layout, job.dims)


@lru_cache(maxsize=4096)
def _distinct_of_stages(layout: Arrangement, dims: Dims) -> tuple[int, ...]:
    found = {_shape(layout, dims, rank): rank for rank in reversed(range(layout.pp))}
    return tuple(found.values())


def _shape(layout: Arrangement, dims: Dims, rank: int) -> tuple[object, ...]:
    """What of a rank's stages decides over what it sends."""
    parts = parts_of(layout, dims.num_layers, rank)
    shares = _expert_blocks(dims, parts), _recomputed(layout, parts)
    return shares, tuple((len(part.blocks), part.first, part.last) for part in parts)


def _expert_blocks(dims: Dims, parts: Sequence[Part]) -> int:
    dense = dims.num_layers - dims.num_expert_layers
    return sum(max(0, part.blocks.stop - max(dense, part.blocks.start)) for part in parts)


def _of_rank(job: Job, pp_rank: int) -> list[Sent]:
    step = Step.of(job, pp_rank)
    megatron = job.layout.program == "megatron"
    parts = [
        _counts(step),
        _distributed_optimizer(step) if megatron else _sharded_weights(step),
        _whole_updates(step),
        _tensor(step),
        _context(step),
        _experts(step),
        _pipeline(step),
        _norms(step),
    ]
    return [sent for part in parts for sent in part if sent is not None]


def _counts(step: Step) -> Iterator[Sent | None]:
    """Denominators, numbers of micro-batches and the step's sums: a few numbers each."""
    if step.layout.program != "stepwell":
        return
    yield step.one("all-reduce", "world", "count tokens", "forward", 8, 1)
    yield step.one("all-reduce", "world", "count micro-batches", "forward", 8, 1)
    yield step.one("all-reduce", "world", "sum up the loss", "optimizer", 8 * 6, 1)
    yield step.one("all-reduce", "pp", "agree on shapes", "pipeline", 8 * 4, 1)


def _norms(step: Step) -> Iterator[Sent | None]:
    """The gradient norm, and the guard's of the update: one number for each set of axes that
    divides parameters."""
    sets = 2 if step.layout.tp > 1 else 1
    for axis, numbers in (("dp_shard", sets), ("tp", 1), ("pp", 1)):
        yield step.one("all-reduce", axis, "norms", "optimizer", 8, 2 * numbers)


# --- weights and gradients ----------------------------------------------------------------------


def units_of(step: Step) -> list[tuple[Sequence[Weight], int, bool]]:
    """(weights, how many such, whether blocks): blocks, then what each stage has besides."""
    dims, layout, routed = step.dims, step.layout, step.num_expert_blocks
    units = [
        (block_weights(dims, layout), step.num_blocks - routed, True),
        (block_weights(dims, layout, experts=True) if routed else (), routed, True),
        *((root_weights(dims, layout, part), 1, False) for part in step.parts),
    ]
    return [unit for unit in units if unit[0] and unit[1]]


def _sharded_weights(step: Step) -> Iterator[Sent | None]:
    """FSDP2 by units (parallel.fsdp). Gradients wait whole in a pipeline, and are summed once."""
    layout, t, (n, _) = step.layout, step.layout.tp, step.axes["dp_shard"]
    forward, backward, near = gathers_of(step)
    reductions = step.m if layout.reduce_every_micro_batch and layout.pp == 1 else 1
    for weights, number, blocks in units_of(step):
        whole = step.a * gathered(weights, t, n)
        times = forward if blocks else (step.m if layout.zero == 3 and layout.pp == 1 else 1)
        gather = ("all-gather", "dp_shard", "gather weights")
        close = number * near if blocks else 0
        again = number * backward if blocks else 0
        neighbours = _near(step) if layout.reshard == "node" else None
        yield step.one(*gather, "forward", whole, number * times - close)
        yield step.one(*gather, "forward", whole, close, neighbours)
        yield step.one(*gather, "backward", whole, again, neighbours)
        gradient = step.g * reduced(weights, t, n)
        yield from _reduce(step, gradient, n, number * reductions, number)
    yield from _routed_weights(step, forward + backward, reductions)


def _whole_updates(step: Step) -> Iterator[Sent | None]:
    """Ours makes a hidden matrix's update orthogonal on every rank, from the whole matrix
    (train/muon): shards of rows last where tensor ranks divide columns, else first."""
    layout = step.layout
    if layout.program != "stepwell" or layout.optimizer != "muon":
        return
    t, (n, _), p = layout.tp, step.axes["dp_shard"], PRECISION_BYTES["fp32"]
    for weights, number, blocks in units_of(step):
        for weight in weights if blocks else ():
            if len(weight.shape) != 2 or not weight.trained:
                continue
            columns, whole = weight.divided == 1, p * weight.padded(1, n)
            of_shards = whole if columns else p * weight.padded(t, n)
            gather = ("all-gather", "dp_shard", "gather updates", "optimizer")
            yield step.one(*gather, of_shards, number)
            if weight.divided is not None:
                of_ranks = whole // n if columns else p * prod(weight.shape)
                yield step.one("all-gather", "tp", "gather updates", "optimizer", of_ranks, number)


class Gathers(NamedTuple):
    """Of a block in a step: in forward passes (`near` of them among neighbours that have kept a
    copy), and in backward passes."""

    forward: int
    backward: int
    near: int = 0


def gathers_of(step: Step) -> Gathers:
    """Stage 3 gathers for each pass of each micro-batch what it does not keep, the others once a
    step. A pipeline's backward pass keeps what it has gathered until the next forward pass lets it
    go: in any order of passes that is one gather for each forward pass, and one more."""
    layout, m = step.layout, step.m
    if layout.zero < 3:
        return Gathers(1, 0)
    if layout.reshard == "never":
        return Gathers(m if layout.pp == 1 else 1, 0)
    if layout.pp == 1:
        return Gathers(m, m)
    return Gathers(m, 1, m - 1 if layout.reshard == "node" else 0)


def _reduce(step: Step, num_bytes: int, n: int, scatters: int, sums: int) -> Iterator[Sent | None]:
    scatter = ("reduce-scatter", "dp_shard", "reduce gradients", "backward", num_bytes, scatters)
    yield step.one(*scatter)
    sum_up = ("all-reduce", "dp_replicate", "reduce gradients", "backward", num_bytes // n, sums)
    yield step.one(*sum_up)


def _near(step: Step) -> tuple[int, int]:
    """The neighbours that keep a copy among them (parallel.fsdp)."""
    n, stride = step.axes["dp_shard"]
    on_node = max(1, step.job.cluster.gpus_per_node // step.layout.tp)
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= on_node), stride


def routed_of(step: Step) -> tuple[int, tuple[int, int]]:
    """Elements of all routed experts of a layer on one rank, and the ranks that have the same."""
    layout = step.layout
    ranks = layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp
    return expert_elements(step.dims) // layout.ep, (max(1, ranks // layout.ep), layout.ep)


def _routed_weights(step: Step, gathers: int, reductions: int) -> Iterator[Sent | None]:
    """Experts are sharded over the ranks that have the same ones."""
    elements, ranks = routed_of(step)
    number, kind = step.num_expert_blocks, "reduce-scatter" if step.layout.zero else "all-reduce"
    gathers = number * gathers if step.layout.zero else 0
    purpose, whole = "gather weights", step.a * elements
    yield step.one("all-gather", "edp", purpose, "forward", whole, gathers, ranks)
    gradient, calls = step.g * elements, number * reductions
    yield step.one(kind, "edp", "reduce gradients", "backward", gradient, calls, ranks)


def _distributed_optimizer(step: Step) -> Iterator[Sent | None]:
    """Megatron-LM sums gradients once a step, in a bucket; with its distributed optimiser (stage 1)
    each data rank steps a part and hands the weights out again. Data and context ranks together."""
    layout, routed = step.layout, step.num_expert_blocks
    ranks = (layout.dp_replicate * layout.dp_shard * layout.cp, layout.tp)
    dense = sum(number * reduced(weights, layout.tp, 1) for weights, number, _ in units_of(step))
    elements, same = routed_of(step)
    for axis, size, group in (("dp_shard", dense, ranks), ("edp", routed * elements, same)):
        kind = "reduce-scatter" if layout.zero else "all-reduce"
        yield step.one(kind, axis, "reduce gradients", "backward", step.g * size, 1, group)
        if layout.zero:
            whole = step.a * size
            yield step.one("all-gather", axis, "gather weights", "optimizer", whole, 1, group)


# --- activations --------------------------------------------------------------------------------


class _Again(NamedTuple):
    """What is computed again. blocks: all of a block; products: of blocks that keep their products;
    groups: within which the last product is not."""

    blocks: int = 0
    products: int = 0
    groups: int = 0


def _recomputed(layout: Arrangement, parts: Sequence[Part]) -> _Again:
    """Of a rank's blocks. A budget's choice is not known here: as if it were "full"."""
    mode, number = layout.recompute, sum(len(part.blocks) for part in parts)
    if mode == "none" or (mode == "selective" and layout.program != "stepwell"):
        return _Again()
    if mode == "selective":
        return _Again(products=number)
    if mode == "every":
        every = layout.recompute_every
        chosen = sum(len(chosen_blocks(part.blocks, every)) for part in parts)
        return _Again(chosen, groups=chosen)
    if mode == "sqrt":
        of_parts = (square_root_groups(p.blocks.start, p.blocks.stop) for p in parts)
        return _Again(number, groups=sum(len(groups) for groups in of_parts))
    return _Again(number, groups=number)


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


def _row_lengths(step: Step, again: _Again) -> Iterator[Sent | None]:
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
