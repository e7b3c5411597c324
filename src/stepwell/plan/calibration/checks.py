"""What a measured run cannot have been: the planner's rules of layouts, without those that are only
our engine's, and the limits of the hardware. No torch."""

from __future__ import annotations

import math

from stepwell.hardware import GIB
from stepwell.parallel.schedules import ZERO_BUBBLE
from stepwell.plan.job import Arrangement, Dims, Job
from stepwell.plan.steptime.coefficients import generation
from stepwell.plan.steptime.step import least_step_s, predict_step
from stepwell.types import DataError

FEWEST_WORDS = 2  # of a vocabulary: with one there is nothing to predict
SLOWEST = 100.0  # times the predicted step: nothing that is known here explains more
# Scales of blocks of 32 or 16 values are units of these.
BLOCK_SCALED = {"mxfp8": ("blackwell", "mi35"), "nvfp4": ("blackwell",)}
# The fewest and the most of a schedule.
STAGES_A_RANK = {"gpipe": (1, 1), "1f1b": (1, 1), "interleaved-1f1b": (2, math.inf)}
STAGES_A_RANK |= dict.fromkeys(ZERO_BUBBLE, (2, 2))


def check_dims(dims: Dims, head_dim_is_printed: bool) -> None:
    heads, kv_heads = dims.num_heads, dims.num_kv_heads
    if dims.vocab_size < FEWEST_WORDS:
        raise DataError(f"vocab={dims.vocab_size} must be at least {FEWEST_WORDS}")
    if dims.d_model % heads and not head_dim_is_printed:
        raise DataError(
            f"d_model={dims.d_model} is no multiple of n_heads={heads}; a head of another width is "
            "said in head_dim"
        )
    if heads % kv_heads:
        raise DataError(f"n_heads={heads} is no multiple of n_kv_heads={kv_heads}")
    if dims.experts is None:
        return
    top_k, experts = dims.experts.top_k, dims.experts.num_experts
    dense, layers = dims.experts.num_dense_layers, dims.num_layers
    if top_k > experts:
        raise DataError(f"top_k={top_k} is more than n_experts={experts}")
    if dense > layers:
        raise DataError(f"n_dense_layers={dense} is more than n_layers={layers}")


def check_layout(job: Job) -> None:
    """Raises DataError with the rule that is broken."""
    dims, layout = job.dims, job.layout
    _tensor(dims, layout)
    _context(layout)
    _pipeline(dims, layout)
    _experts(dims, layout)
    _precision(job)


def _tensor(dims: Dims, layout: Arrangement) -> None:
    """Vocabularies are padded by other programs."""
    tp, kv_heads = layout.tp, dims.num_kv_heads
    width = dims.experts.d_ff if dims.experts else dims.d_ff
    for name, size in (("n_heads", dims.num_heads), ("d_ff", width)):
        if size % tp:
            raise DataError(f"tp={tp} does not divide {name}={size}")
    if kv_heads % tp and tp % kv_heads:
        raise DataError(f"tp={tp} neither divides n_kv_heads={kv_heads} nor is a multiple of it")


def _context(layout: Arrangement) -> None:
    parts = layout.tp if layout.sequence_parallel else 1
    parts *= 2 * layout.cp if layout.cp > 1 else 1
    if layout.seq_len % parts:
        raise DataError(
            f"seq_len={layout.seq_len} does not divide into the {parts} parts of tp={layout.tp}, "
            f"cp={layout.cp}"
        )


def _pipeline(dims: Dims, layout: Arrangement) -> None:
    pp, v, schedule = layout.pp, layout.stages_per_rank, layout.schedule
    if pp * v > dims.num_layers + 2:
        raise DataError(
            f"pp={pp} x vpp={v} are more stages than n_layers={dims.num_layers}, an embedding and "
            "a head"
        )
    if pp == 1 and schedule != "1f1b":
        raise DataError(f"schedule={schedule!r} is of a pipeline, and pp=1 has none")
    fewest, most = STAGES_A_RANK[schedule]
    if not fewest <= v <= most:
        near = min(max(v, fewest), most)
        raise DataError(f"schedule={schedule!r} cannot have vpp={v}; the nearest is {near:g}")


def _experts(dims: Dims, layout: Arrangement) -> None:
    ep, ranks = layout.ep, layout.num_gpus // layout.pp
    if ep == 1:
        return
    if dims.experts is None:
        raise DataError(f"ep={ep} without n_experts: a dense model has none to divide")
    if dims.experts.num_experts % ep:
        raise DataError(f"ep={ep} does not divide n_experts={dims.experts.num_experts}")
    if ranks % ep:
        raise DataError(f"ep={ep} does not divide the {ranks} ranks of a pipeline stage")


def _precision(job: Job) -> None:
    """The device must have a rate, and units for the scales."""
    device, recipe = job.cluster.accelerator, job.layout.recipe
    device.peak_flops_per_s(job.layout.precision)
    has = BLOCK_SCALED.get(recipe)
    if has and generation(device) not in has and not device.name.startswith(has):
        raise DataError(f"{device.name} has no units for precision={recipe!r}")


def check_measured(job: Job, step_s: float | None, peak_bytes: float | None) -> None:
    """Raises DataError for a step that beats the datasheet's peak, or takes more than `SLOWEST`
    times what is predicted, and for more memory than the device has."""
    device, least = job.cluster.accelerator, least_step_s(job)
    if step_s is not None and step_s < least:
        raise DataError(
            f"a step of {step_s:.4g} s beats the peak of {job.layout.num_gpus} {device.name}, "
            f"whose products alone take {least:.4g} s"
        )
    if step_s is not None and step_s > (most := SLOWEST * predict_step(job).total_s):
        raise DataError(
            f"a step of {step_s:.4g} s is over {SLOWEST:.0f} times what is predicted; on "
            f"{job.layout.num_gpus} {device.name} nothing explains more than {most:.4g} s: is it "
            "in seconds, of one step, and the rate of one GPU?"
        )
    if peak_bytes is not None and peak_bytes > device.memory_bytes:
        raise DataError(
            f"peak_mem_gib={peak_bytes / GIB:.1f} is more than the "
            f"{device.memory_bytes / GIB:.1f} GiB of {device.name}"
        )
