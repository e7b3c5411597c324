"""Which layouts a search looks at, and by which rule the others are refused. No torch.

The decision tree's order (Megatron-LM, 2104.04473; PyTorch FSDP, 2304.11277; the Llama 3 herd,
2407.21783, section 3.3): tensor ranks within the scale-up domain, context ranks for long rows,
pipeline stages across machines, expert ranks, and data parallelism for the rest. Every refusal is
counted by its rule; `parallel/rules.check_run` has the last word over what the engine can run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil
from typing import Any, Literal, NamedTuple

from stepwell.parallel.schedules import ZERO_BUBBLE, fewest_micro_batches, next_micro_batches
from stepwell.plan.cluster import Cluster
from stepwell.plan.job import Arrangement, Dims, Recompute
from stepwell.sections.layout import LayoutConfig
from stepwell.sections.optim import LossConfig

Precision = Literal["bf16", "fp16", "fp32", "fp8"]
# Recomputation: mode, and every how many blocks it is of.
Level = tuple[Recompute, int]
# By what it holds and costs.
RECOMPUTE: tuple[Level, ...] = (
    ("none", 2),
    ("selective", 2),
    ("every", 4),
    ("every", 2),
    ("full", 2),
)
# Of these each holds less than those before it, and takes longer. "selective" is only known to hold
# more than "full", and to take less: what products write may be more than all that is kept.
WHOLE_BLOCKS: tuple[Level, ...] = tuple(level for level in RECOMPUTE if level[0] != "selective")
# Fewer tokens of a row on a rank than this leave its products too small to be worth it.
FEWEST_CONTEXT_TOKENS = 1024
MOST_MICRO_BATCH_TOKENS = 1 << 17
CHUNK_TOKENS = LossConfig().chunk_tokens
VIRTUAL_STAGES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
KINDS = ("optimizer", "parameters", "activations")
# Kinds of offload together, from little to much that leans on the machine's memory and its links.
OFFLOADS = (
    ("optimizer",),
    ("activations",),
    ("optimizer", "activations"),
    ("parameters",),
    ("parameters", "activations"),
)
# By rule: why a layout is not looked at. Shown with their counts.
REASONS = {
    "tensor domain": "tensor ranks would leave the scale-up domain, or not divide it evenly",
    "tensor heads": "tensor ranks must divide the attention heads",
    "tensor dims": "tensor ranks must divide the MLP's width and the vocabulary",
    "sequence": "tensor and context ranks must divide a row evenly",
    "context": f"context ranks would have fewer than {FEWEST_CONTEXT_TOKENS:,} tokens of a row",
    "rows on context ranks": "several rows at once on context ranks: fewer of both send less",
    "rows": "more data ranks than rows in the batch: some would have none",
    "replicas": "the batch's rows must be a multiple of the replicas",
    "stages": "more pipeline stages than the model has blocks, embedding and head",
    "uneven stages": "three or more stages a rank whose blocks do not divide evenly",
    "micro-batches": "fewer micro-batches than the pipeline's schedule needs",
    "rounds": "micro-batches do not make equal rounds of an interleaved schedule",
    "experts": "expert ranks must divide the experts and the ranks of a stage",
    "wide micro-batch": f"a micro-batch of more than {MOST_MICRO_BATCH_TOKENS:,} tokens a rank",
    "memory": "does not fit into the memory of an accelerator, or of its machine",
    "exact memory": "timed, but does not fit by the exact ledger of the engine",
    "too slow": "cannot be as fast as what was found, even if data parallel messages took no time",
    "more recomputation": "fits with less recomputation, which is faster",
    "engine": "refused by the engine's rules",
}


@dataclass(frozen=True)
class Pins:
    """What is fixed beforehand; None is free. max_*: bounds. tp: a number given here may leave the
    scale-up domain. headroom_bytes: of an accelerator's memory that must stay free;
    -inf: as if it had any amount."""

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    ep: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    zero: int | None = None
    reshard: Literal["always", "never", "node"] | None = None
    reduce_gradients: Literal["step", "micro-batch"] | None = None
    micro_batch_rows: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    recompute: Recompute | None = None
    precision: Precision | Literal["any"] | None = None
    offload: tuple[str, ...] | Literal["any"] | None = None
    checkpoint: Literal["synchronous", "asynchronous"] | None = None
    max_tp: int | None = None
    max_cp: int | None = None
    max_pp: int | None = None
    compiled: bool = True
    headroom_bytes: float = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is to go to the host in any case."""
        return () if self.offload in (None, "any") else self.offload

    def given(self) -> dict[str, Any]:
        """What differs from an empty value."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {key: value for key, value in values.items() if value != getattr(Pins(), key)}


class Mesh(NamedTuple):
    tp: int
    cp: int
    pp: int
    ep: int
    dp: int


class Family(NamedTuple):
    """Layouts that differ in how data ranks divide the model."""

    mesh: Mesh
    schedule: str
    stages_per_rank: int
    micro_batch_rows: int
    recompute: Recompute
    recompute_every: int
    precision: Precision


@dataclass(frozen=True)
class Task:
    """What is to be laid out. rows: of a step, each of seq_len tokens."""

    dims: Dims
    cluster: Cluster
    num_gpus: int
    seq_len: int
    rows: int
    pins: Pins = Pins()

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len


Refused = Counter[str]


def with_offload(task: Task, kinds: tuple[str, ...]) -> Task:
    return replace(task, pins=replace(task.pins, offload=kinds))


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def meshes(task: Task, refused: Refused) -> Iterator[Mesh]:
    """All ways to divide the accelerators among the axes that the rules allow; the others are
    counted in `refused`."""
    dims, pins = task.dims, task.pins
    for tp in _sizes(task.num_gpus, pins.tp, pins.max_tp):
        problem = tensor_problem(task, tp)
        for cp in _sizes(task.num_gpus // tp, pins.cp, pins.max_cp):
            found = problem or context_problem(task, tp, cp)
            for pp in _sizes(task.num_gpus // tp // cp, pins.pp, pins.max_pp):
                dp = task.num_gpus // tp // cp // pp
                wrong = found
                if not wrong and pp > dims.num_layers + 2:
                    wrong = "stages"
                if not wrong and dp > task.rows:
                    wrong = "rows"
                if wrong:
                    refused[wrong] += 1
                    continue
                yield from _with_experts(task, Mesh(tp, cp, pp, 1, dp), refused)


def _sizes(number: int, pinned: int | None, most: int | None) -> list[int]:
    if pinned is not None:
        return [pinned] if number % pinned == 0 else []
    return [d for d in divisors(number) if most is None or d <= most]


def tensor_problem(task: Task, tp: int) -> str:
    """The rule that so many tensor ranks break, or nothing."""
    dims, domain = task.dims, task.cluster.scaleup_gpus
    if task.pins.tp is None and (tp > domain or domain % tp):
        return "tensor domain"
    heads, kv_heads = dims.num_heads, dims.num_kv_heads
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        return "tensor heads"
    widths = [dims.d_ff, dims.vocab_size] + ([dims.experts.d_ff] if dims.experts else [])
    return "tensor dims" if any(width % tp for width in widths) else ""


def context_problem(task: Task, tp: int, cp: int) -> str:
    parts = tp * (2 * cp if cp > 1 else 1)
    if task.seq_len % parts:
        return "sequence"
    short = cp > 1 and task.seq_len // cp < FEWEST_CONTEXT_TOKENS
    return "context" if short and task.pins.cp is None else ""


def _with_experts(task: Task, mesh: Mesh, refused: Refused) -> Iterator[Mesh]:
    experts = task.dims.experts
    if experts is None:
        if task.pins.ep in (None, 1):
            yield mesh
        else:
            refused["experts"] += 1
        return
    wanted = divisors(experts.num_experts) if task.pins.ep is None else [task.pins.ep]
    for ep in wanted:
        if experts.num_experts % ep or (mesh.dp * mesh.cp * mesh.tp) % ep:
            refused["experts"] += 1
        else:
            yield mesh._replace(ep=ep)


def schedules(task: Task, mesh: Mesh, refused: Refused) -> list[tuple[str, int]]:
    """(schedule, stages a rank). gpipe is not among them unless it is asked for: 1f1b idles as long
    and holds less."""
    pins, parts = task.pins, task.dims.num_layers + 2
    if mesh.pp == 1:  # what is asked of a pipeline asks for one
        free = pins.schedule is None and pins.stages_per_rank is None
        return [("1f1b", 1)] if free else []
    every = [("1f1b", 1), *(("interleaved-1f1b", v) for v in VIRTUAL_STAGES)]
    every += [("zbv", 2), ("dualpipev", 2)]
    if pins.schedule == "gpipe":
        every = [("gpipe", 1)]
    found = []
    for schedule, v in every:
        asked = pins.schedule in (None, schedule) and pins.stages_per_rank in (None, v)
        if not asked:
            continue
        stages = mesh.pp * v
        if stages > parts:
            refused["stages"] += 1
        elif v > 2 and parts % stages and (parts - 2) % stages and pins.stages_per_rank is None:
            refused["uneven stages"] += 1
        else:
            found.append((schedule, v))
    return found


def body(task: Task, family: Family) -> Arrangement:
    """A layout with the cheapest data parallelism that there is: ZeRO-1 over all data ranks."""
    mesh, halves, offload = family.mesh, family.schedule in ZERO_BUBBLE, task.pins.kinds
    return Arrangement(
        seq_len=task.seq_len,
        micro_batch_rows=family.micro_batch_rows,
        global_batch_rows=task.rows,
        tp=mesh.tp,
        cp=mesh.cp,
        pp=mesh.pp,
        stages_per_rank=family.stages_per_rank,
        schedule=family.schedule,
        dp_shard=mesh.dp,
        ep=mesh.ep,
        zero=1,
        reshard="never",
        reduce_every_micro_batch=False,
        precision=family.precision,
        recipe="tensorwise" if family.precision == "fp8" else "none",
        recompute=family.recompute,
        recompute_every=family.recompute_every,
        compiled=task.pins.compiled and not halves and family.recompute != "sqrt",
        loss_chunk_tokens=CHUNK_TOKENS,
        offload_optimizer="optimizer" in offload,
        offload_parameters="parameters" in offload,
        offload_activations="activations" in offload,
        stages_checkpoint=task.pins.checkpoint != "synchronous",
    )


def leanest(body: Arrangement) -> Arrangement:
    """The data parallelism that holds the least: everything sharded over all data ranks."""
    if body.dp_shard * body.cp == 1 and not _fetches(body):
        return body.having(zero=0)
    if body.pp > 1:
        return body.having(zero=3)
    return body.having(zero=3, reshard="always", reduce_every_micro_batch=True)


def recomputations(task: Task, schedule: str = "1f1b") -> list[Level]:
    """The most recomputation first: it holds the least."""
    if schedule in ZERO_BUBBLE:
        return [("none", 2)] if task.pins.recompute in (None, "none") else []
    asked = task.pins.recompute
    if asked is not None and asked not in dict(RECOMPUTE):
        return [(asked, 2)]
    return [(mode, n) for mode, n in reversed(RECOMPUTE) if asked in (None, mode)]


def leanest_levels(task: Task, schedule: str = "1f1b") -> list[Level]:
    """One of these holds the least: groups keep fewer inputs, which many blocks and micro-batches
    make up for what is there while a group is computed again."""
    found = recomputations(task, schedule)[:1]
    if task.pins.recompute is None and schedule not in ZERO_BUBBLE:
        found.append(("sqrt", 2))
    return found


@lru_cache(maxsize=64)
def no_more(level: Level) -> tuple[Level, ...]:
    """Levels that hold no more than this one, and itself."""
    if level in WHOLE_BLOCKS:
        return WHOLE_BLOCKS[WHOLE_BLOCKS.index(level) :]
    return (level, WHOLE_BLOCKS[-1]) if level[0] == "selective" else (level,)


@lru_cache(maxsize=64)
def no_less(level: Level) -> tuple[Level, ...]:
    return tuple(other for other in {*RECOMPUTE, level} if level in no_more(other))


def lighter(level: Level) -> list[Level]:
    """Those that take less time; of several in a row the next one, which holds the least."""
    if level[0] == "selective":
        return [WHOLE_BLOCKS[0]]
    place = WHOLE_BLOCKS.index(level) if level in WHOLE_BLOCKS else 0
    found: list[Level] = [*WHOLE_BLOCKS[place - 1 : place]] if place else []
    return [*found, ("selective", 2)] if level == WHOLE_BLOCKS[-1] else found


def default_precision(cluster: Cluster) -> Precision:
    """bf16 where the accelerator has it."""
    return "bf16" if cluster.accelerator.bf16_flops_per_s else "fp16"


def precisions(task: Task) -> list[Precision]:
    """Of products: 8 bits alter the numbers, so they are looked at only if asked for."""
    asked = task.pins.precision
    if asked is not None and asked != "any":
        return [asked]
    eight = asked == "any" and task.cluster.accelerator.fp8_flops_per_s
    return [default_precision(task.cluster), *(["fp8"] if eight else [])]


def micro_batches(task: Task, mesh: Mesh) -> list[int]:
    """Powers of two, and what makes a single micro-batch."""
    if task.pins.micro_batch_rows is not None:
        return [task.pins.micro_batch_rows]
    rows = ceil(task.rows / mesh.dp)
    found = [1 << i for i in range(rows.bit_length()) if 1 << i <= rows]
    return sorted({*found, rows}) if mesh.pp == 1 else found


def micro_batch_problem(task: Task, mesh: Mesh, micro: int, schedule: str, v: int) -> str:
    """The rule that pieces of so many rows break on this pipeline, or nothing."""
    free = task.pins.micro_batch_rows is None
    if free and micro > 1 and micro * task.seq_len // mesh.cp > MOST_MICRO_BATCH_TOKENS:
        return "wide micro-batch"
    if free and task.pins.cp is None and micro > 1 and mesh.cp > 1:
        return "rows on context ranks"
    if mesh.pp == 1:
        return ""
    return _number_problem(ceil(ceil(task.rows / mesh.dp) / micro), mesh.pp, schedule, v)


@lru_cache(maxsize=4096)
def _number_problem(number: int, pp: int, schedule: str, v: int) -> str:
    layout = LayoutConfig.model_construct(pp=pp, pp_schedule=schedule, pp_stages_per_rank=v)
    if number < fewest_micro_batches(layout):
        return "micro-batches"
    return "rounds" if next_micro_batches(number, layout) != number else ""


def data_layouts(task: Task, body: Arrangement, refused: Refused) -> Iterator[Arrangement]:
    """The ways in which the data ranks of a layout can divide the model."""
    pins, dp, asked = task.pins, body.dp_shard, _asked_stage(task.pins)
    if dp * body.cp == 1:
        if asked in (None, 0) and pins.dp_shard in (None, 1) and pins.dp_replicate in (None, 1):
            yield body.having(zero=0)
            if _fetches(body) and asked is None:
                yield _staged(body, 3, "always")
        elif pins.dp_shard in (None, 1) and pins.dp_replicate in (None, 1):
            yield _staged(body, asked or 0, pins.reshard or "always")
        return
    for shard in divisors(dp):
        replicas = dp // shard
        if pins.dp_shard not in (None, shard) or pins.dp_replicate not in (None, replicas):
            continue
        if task.rows % replicas:
            refused["replicas"] += 1
            continue
        for zero, reshard in _stages(task, body, shard):
            staged = _staged(body.having(dp_shard=shard, dp_replicate=replicas), zero, reshard)
            several = staged.num_micro_batches > 1
            if not several or _reduces(pins, staged):
                yield staged
            if several and zero == 3 and body.pp == 1 and pins.reduce_gradients != "micro-batch":
                yield staged.having(reduce_every_micro_batch=False)


def _fetches(body: Arrangement) -> bool:
    """Whether one rank, too, has a use for stage 3: blocks come from the host one by one."""
    return body.offload_parameters and body.pp == 1


def _reduces(pins: Pins, layout: Arrangement) -> bool:
    """As often as is asked."""
    each = layout.reduce_every_micro_batch
    return pins.reduce_gradients in (None, "micro-batch" if each else "step")


def _asked_stage(pins: Pins) -> int | None:
    """Only stage 3 has weights that are gathered again."""
    return 3 if pins.reshard is not None else pins.zero


def _stages(task: Task, body: Arrangement, shard: int) -> list[tuple[int, Any]]:
    """(ZeRO stage, resharding) that shard ranks can have; stage 0 shards nothing, so it is listed
    once, where all ranks are shards."""
    pins, asked = task.pins, _asked_stage(task.pins)
    found: list[tuple[int, Any]] = [(0, "never")] if shard == body.dp_shard else []
    if shard * body.cp > 1:
        found.append((1, "never"))
        # With a pipeline weights stay gathered, as at stage 1; kept without one, as at stage 2.
        if body.pp > 1:
            found += [(3, "never")] if asked == 3 else []
        else:
            found += [(2, "never"), (3, "always")]
            found += [(3, "never")] if pins.reshard == "never" else []
            # FSDP2 divides anew only what no tensor ranks divide.
            if body.tp == 1 and shard * body.cp > task.cluster.gpus_per_node:
                found.append((3, "node"))
    return [
        (zero, reshard)
        for zero, reshard in found
        if asked in (None, zero) and pins.reshard in (None, reshard)
    ]


def _staged(body: Arrangement, zero: int, reshard: Any) -> Arrangement:
    return body.having(
        zero=zero,
        reshard=reshard if body.pp == 1 else "never",
        reduce_every_micro_batch=zero >= 2 and body.pp == 1,
    )
