"""How long a step takes, and where its time goes. Closed form, no torch.

`ledger(job)` counts what no rate changes; `price` turns it into seconds with the coefficients. A
step is its busiest pipeline rank's: products, attention and memory traffic one after another, what
of the communication nothing hides, the bubble, the optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

from stepwell.parallel.schedules import ZERO_BUBBLE, bubble_fraction
from stepwell.plan.comms.collectives import collectives
from stepwell.plan.comms.host_link import Moved, busiest_way, moved
from stepwell.plan.comms.step import Sent
from stepwell.plan.footprint.pieces import recomputed_of_ranks
from stepwell.plan.job import Arrangement, Dims, Job
from stepwell.plan.steptime.coefficients import SHIPPED, Coefficients, peak
from stepwell.plan.steptime.exposed import exposed_of
from stepwell.plan.steptime.flows import Flow, flows
from stepwell.plan.steptime.muon import orthogonal_products
from stepwell.plan.steptime.rates import Rates, Seconds, pass_seconds, rates_of
from stepwell.plan.steptime.work import Product, Work, logits_twice, work_of

# Bytes a parameter that an optimiser's step moves: gradient, master and both moments read, the
# three written, the gradient's norm read before, the 16-bit copy written.
ADAMW_BYTES = 34.0
# Moments in 8 bits: as much where masters are in 16, since what takes the time is looking moments
# up and rounding them again, block by block (2110.02861).
ADAMW_8BIT_BYTES = 22.0
# The same on the host, and what the processors of a machine move: ZeRO-Offload's AdamW steps 10^9
# parameters in .22 s on two Xeons (2101.06840, table 4).
HOST_ADAMW_BYTES, HOST_BYTES_PER_S = 28.0, 127e9
# What copies from and to pinned memory get of PCIe: nvbandwidth's 24.8 of 31.5 GB/s on an A100
# (forums.developer.nvidia.com/t/352186).
PCIE = 0.79
# Tensors of a block with biases: four matrices, two norms.
PARAMETERS_OF_A_BLOCK = 12


@dataclass(frozen=True)
class StepTime:
    """parts: seconds by name; they add up to total_s. model_flops: of the step on one GPU, causal
    attention counted by half, nothing recomputed counted. hardware_flops: with what is recomputed.
    ideal_s: model_flops at peak_flops_per_s, the datasheet's for the run's precision. recomputed:
    what part "recomputation" is of."""

    parts: dict[str, float]
    model_flops: float
    hardware_flops: float
    peak_flops_per_s: float
    tokens: int
    num_gpus: int
    product_peak_s: float
    attention_peak_s: float
    recomputed: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def mfu(self) -> float:
        return self.model_flops / self.peak_flops_per_s / self.total_s

    @property
    def hfu(self) -> float:
        return self.hardware_flops / self.peak_flops_per_s / self.total_s

    @property
    def bubble_share(self) -> float:
        """Of the step."""
        return self.parts.get("bubble", 0.0) / self.total_s

    @property
    def exposed_s(self) -> float:
        """Communication that nothing hides."""
        return sum(s for name, s in self.parts.items() if name.startswith("exposed "))

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.total_s / self.num_gpus


@dataclass(frozen=True)
class Ledger:
    """What a step asks for, before any rate. moved: between GPU and host. orthogonal: products of
    Muon's step, with their number."""

    job: Job
    work: Work
    flows: tuple[Flow, ...]
    moved: tuple[Moved, ...] = ()
    orthogonal: tuple[tuple[Product, float], ...] = ()


def ledger(job: Job) -> Ledger:
    copies = job.dims.experts.top_k if job.dims.experts else 1
    wraps = job.layout.stages_per_rank > 1 and job.layout.schedule not in ZERO_BUBBLE
    sent = collectives(job)
    counted_apart = job.layout.adapters is not None
    if job.layout.trained_share < 1 and not counted_apart:
        sent = [_of_trained(one, job.layout.trained_share) for one in sent]
    if job.layout.program == "fsdp" and job.layout.compiled and job.layout.precision == "fp8":
        sent = [_in_8_bits(one) for one in sent]
    if job.layout.program == "fsdp" and not job.layout.overlap_data:
        sent = [_by_parameter(one) for one in sent]
    if job.layout.ep > 1:
        sent = [_uneven(one, job.layout.imbalance) for one in sent]
    if job.layout.program == "megatron" and job.layout.zero:
        sent = [part for one in sent for part in _by_groups(one, job.layout)]
    crossed = flows(sent, job.cluster, copies, wraps)
    products = tuple(orthogonal_products(job))
    return Ledger(job, work_of(job), crossed, tuple(moved(job)), products)


def _in_8_bits(sent: Sent) -> Sent:
    """FSDP programs gather what they multiply with."""
    if sent.purpose == "gather weights":
        return replace(sent, num_bytes=sent.num_bytes // 2)
    return sent


def _uneven(sent: Sent, imbalance: float) -> Sent:
    """An exchange lasts as long as for the rank whose experts get the most tokens."""
    if sent.axis != "ep":
        return sent
    return replace(sent, num_bytes=int(sent.num_bytes * imbalance))


def _by_parameter(sent: Sent) -> Sent:
    """Before FSDP gathered blocks, ZeRO-3 gathered and reduced each parameter by itself."""
    if sent.axis != "dp_shard":
        return sent
    pieces = PARAMETERS_OF_A_BLOCK
    return replace(sent, num_bytes=sent.num_bytes // pieces, calls=sent.calls * pieces)


def _by_groups(sent: Sent, layout: Arrangement) -> list[Sent]:
    """A sharded optimiser within groups of data ranks: gradients are scattered within a group and
    summed up across groups, weights handed out within."""
    if sent.axis != "dp_shard":
        return [sent]
    shards = layout.dp_shard * layout.cp
    own = replace(sent, num_ranks=shards)
    if sent.kind == "all-gather" and layout.shards_broadcast:
        each = sent.num_bytes // shards
        return [replace(own, kind="broadcast", num_bytes=each, calls=sent.calls * shards)]
    if layout.dp_replicate == 1 or sent.kind == "all-gather":
        return [own] if shards > 1 else []
    across = replace(
        sent,
        kind="all-reduce",
        axis="dp_replicate",
        num_ranks=layout.dp_replicate,
        stride=sent.stride * shards,
        num_bytes=sent.num_bytes // shards,
    )
    return [own, across] if shards > 1 else [across]


def _of_trained(sent: Sent, share: float) -> Sent:
    """Gradients, and weights that the optimiser has changed, are the trained ones'."""
    if sent.purpose in ("reduce gradients", "sum replicas") or sent.phase == "optimizer":
        return replace(sent, num_bytes=int(sent.num_bytes * share))
    return sent


def predict_step(job: Job, coefficients: Coefficients = SHIPPED) -> StepTime:
    """Raises ConfigError for a precision that the device has no rate for."""
    return price(ledger(job), coefficients)


# --- a step ----------------------------------------------------------------------------------


def price(counted: Ledger, c: Coefficients) -> StepTime:
    job, work = counted.job, counted.work
    layout = job.layout
    rates = rates_of(job, c)
    ranks, whole_s = _ranks(work, layout, rates)
    busiest = max(ranks, key=lambda pair: pair[0].total + pair[1].total + pair[2].total)
    forward, backward, again = busiest
    m = layout.num_micro_batches
    parts = {
        "products": m * (forward.products + backward.products),
        "attention": m * (forward.attention + backward.attention),
        "memory": m * (forward.memory + backward.memory),
        "quantisation": m * (forward.casts + backward.casts + again.casts),
        "host": m * (forward.host + backward.host + again.host),
        "recomputation": m * (again.total - again.casts - again.host),
    }
    exposed, hidden = exposed_of(counted.flows, layout, c, forward, backward, again)
    messages_s = sum(exposed.get(f"exposed {axis}", 0.0) for axis in ("tp", "cp", "ep"))
    # The host launches on while a pass waits for its messages.
    launched_s = min(messages_s, m * (forward.waiting + backward.waiting + again.waiting))
    parts["host"] -= launched_s
    parts.update(exposed)
    inner = m * (forward.total + backward.total + again.total) + messages_s - launched_s
    parts["bubble"] = _bubble(layout, inner / m, ranks, whole_s)
    computing = {"forward": m * forward.total, "backward": m * (backward.total + again.total)}
    parts["exposed offload"] = _offload(counted, computing, hidden)
    parts["gradient accumulation"] = _accumulation(layout, work, rates)
    parts["optimizer"] = _optimizer(counted, rates)
    parts["straggling"] = c.straggling * log2(max(1, layout.num_gpus)) * sum(parts.values())
    kinds = {"products": again.products, "attention": again.attention, "memory": again.memory}
    return _step_time(job, work, parts, {name: m * seconds for name, seconds in kinds.items()})


def _ranks(work: Work, layout: Arrangement, rates: Rates):
    """Seconds of a micro-batch, (forward, backward, again), on a middle rank and the one with the
    head; and of all ranks of the pipeline together."""
    pieces = [
        (
            pass_seconds(piece.forward, rates),
            pass_seconds(piece.backward, rates),
            pass_seconds(piece.again, rates) if piece.again else Seconds(),
            fullest,
            number,
            last,
        )
        for piece, fullest, number, last in work.blocks
    ]
    middle = (Seconds(), Seconds(), Seconds())
    final = (Seconds(), Seconds(), Seconds())
    whole_s = 0.0
    for *passes, fullest, number, last in pieces:
        for i, one in enumerate(passes):
            middle[i].add(one, fullest)
            final[i].add(one, last)
            whole_s += (number - last) * one.total
    final[0].add(pass_seconds(work.head.forward, rates))
    final[1].add(pass_seconds(work.head.backward, rates))
    embedding = pass_seconds(work.embedding, rates)
    if layout.pp == 1:
        final[0].add(embedding)
        return [final], sum(part.total for part in final)
    return [middle, final], whole_s + sum(part.total for part in final)


def _bubble(layout: Arrangement, micro_batch_s: float, ranks, whole_s: float) -> float:
    """What the busiest rank waits: the other stages' time of one micro-batch, and as much less with
    the schedule as with even stages."""
    p = layout.pp
    if p == 1:
        return 0.0
    busiest_s = max(sum(part.total for part in rank) for rank in ranks)
    waits = (whole_s - busiest_s) * micro_batch_s / busiest_s
    m = layout.num_micro_batches
    even = bubble_fraction(layout.schedule, p, m, layout.stages_per_rank)
    return waits * even * m / (p - 1)


def _offload(counted: Ledger, computing: dict[str, float], hidden: dict[str, float]) -> float:
    """What of the copies between GPU and host nothing hides, forward and backward: computing does
    as long as it lasts, on a link that carries the messages which it hides as well. The optimiser's
    are in its own part. computing, hidden: seconds by phase, hidden at the link's full rate."""
    link = PCIE * counted.job.cluster.pcie_bytes_per_s
    seconds = 0.0
    for phase in ("forward", "backward"):
        copies_s = busiest_way(counted.moved, phase) / link
        free_s = max(0.0, computing[phase] - hidden.get(phase, 0.0) / PCIE)
        seconds += max(0.0, copies_s - free_s)
    return seconds


def _optimizer(counted: Ledger, rates: Rates) -> float:
    job, work, layout = counted.job, counted.work, counted.job.layout
    shards = layout.dp_shard * layout.cp if layout.zero else 1
    own = work.trained_parameters / shards
    each = ADAMW_BYTES / (2 if layout.state_precision == "bf16" else 1)
    if layout.optimizer == "adamw8bit":
        each = ADAMW_8BIT_BYTES
    in_16_bits = replace(rates, sixteen=rates.half)
    products_s = sum(n * in_16_bits.product_s(p) for p, n in counted.orthogonal)
    step_s = own * each / rates.memory + products_s
    if layout.offload_optimizer or layout.offload_parameters:
        # Gradients go down and weights come up while the host steps those that are there.
        copies_s = busiest_way(counted.moved, "optimizer") / (PCIE * job.cluster.pcie_bytes_per_s)
        host = HOST_BYTES_PER_S / job.cluster.gpus_per_node
        step_s = max(copies_s, own * HOST_ADAMW_BYTES / host)
    return step_s


def _accumulation(layout: Arrangement, work: Work, rates: Rates) -> float:
    """Each micro-batch's gradients are added to those before: sums are read and written. Where data
    ranks sum them each time, that is of a rank's part, and counted with the messages; where the
    optimiser steps each weight as its gradient comes, there is no sum."""
    shared = layout.reduce_every_micro_batch and layout.data_ranks * layout.cp > 1
    if shared or layout.release_gradients:
        return 0.0
    size = 2 if layout.gradient_precision == "bf16" else 4
    return layout.num_micro_batches * work.trained_parameters * 2 * size / rates.memory


# --- FLOPs -----------------------------------------------------------------------------------


def _step_time(
    job: Job, work: Work, parts: dict[str, float], recomputed: dict[str, float]
) -> StepTime:
    layout, dims = job.layout, job.dims
    tokens = layout.global_batch_tokens
    matrices, attention = flops_per_token(dims, layout.seq_len)
    scale = tokens / layout.num_gpus
    share = {"none": 0.0, "selective": 0.0, "budget": 0.5}.get(layout.recompute, 1.0)
    if layout.recompute == "every":
        share = sum(recomputed_of_ranks(dims, layout)) / dims.num_layers
    products, scores = _useful_flops(job)
    model = products + scores
    head = 2.0 * dims.embedding_parameters
    more = share * (matrices - head + attention) * scale
    if logits_twice(dims, layout):
        more += head * scale
    top = _peak(job)
    return StepTime(
        parts=parts,
        model_flops=model,
        hardware_flops=model + more,
        peak_flops_per_s=top,
        tokens=tokens,
        num_gpus=layout.num_gpus,
        product_peak_s=products / top,
        attention_peak_s=scores / top,
        recomputed=recomputed,
    )


def least_step_s(job: Job) -> float:
    """Seconds of the useful products at the datasheet's peak: no step is faster."""
    return sum(_useful_flops(job)) / _peak(job)


def _useful_flops(job: Job) -> tuple[float, float]:
    """Of a GPU and step: the matrices' and attention's. What is frozen has no weight gradients."""
    layout = job.layout
    matrices, attention = flops_per_token(job.dims, layout.seq_len)
    scale = layout.global_batch_tokens / layout.num_gpus
    trained = 3.0 if layout.trains_base else 2.0
    return trained * matrices * scale, 3 * attention * scale


def _peak(job: Job) -> float:
    """FLOP/s by the datasheet, in the run's precision."""
    layout = job.layout
    bits = {"fp8": 4 if layout.recipe == "nvfp4" else 8, "fp32": 32}.get(layout.precision, 16)
    return peak(job.cluster.accelerator, bits)


def flops_per_token(dims: Dims, seq_len: int) -> tuple[float, float]:
    """Forward FLOPs of the matrices (blocks that the token meets, and the head) and of causal
    attention, within its window where it has one."""
    d = dims
    dense = d.num_layers - d.num_expert_layers
    blocks = d.num_layers * d.attention_parameters + dense * d.mlp_parameters(d.d_ff)
    if d.experts:
        one = d.mlp_parameters(d.experts.d_ff)
        blocks += d.num_expert_layers * one * (d.experts.top_k + d.experts.num_shared)
    scores = 4.0 * d.num_layers * d.score_width * d.mean_keys(seq_len)
    return 2.0 * (blocks + d.embedding_parameters), scores
