"""Figures of a measured run that follow from others of its row, and whether they agree: where two
contradict each other, nobody can say which is right. No torch."""

from __future__ import annotations

from stepwell.plan.calibration.cells import (
    Cells,
    optional,
    optional_choice,
    optional_count,
    optional_flag,
)
from stepwell.plan.job import Job
from stepwell.plan.steptime.step import flops_per_token, least_step_s
from stepwell.types import DataError

STEP = 0.05  # a mean rate beside a median step; of the shipped table's rows .2 % at most
# Parameters are printed round, or without embeddings; the shipped table is within 7 %.
PARAMETERS = 0.25
# FLOP/s as printed over those of a causal model: with recomputation up to 4/3, with all pairs of a
# long row's tokens up to twice. The shipped table has .9 to 2.3.
FLOPS = 0.5, 3.0
# The same as a share of a peak, which may be that with sparsity (twice) or that of 16 bits.
MFU = 0.45, 9.0
ATTENTION_FLOPS = ("full", "causal_half", "none")


def check_agreement(cells: Cells, job: Job, step_s: float | None) -> None:
    """Raises DataError with both figures."""
    _machines(cells, job)
    _parameters(cells, job)
    _step(cells, job)
    _flops(cells, job, step_s)


def _machines(cells: Cells, job: Job) -> None:
    """Several machines are whole ones, and tensor ranks fill them evenly."""
    per_node, layout = optional_count(cells, "gpus_per_node"), job.layout
    if per_node is None or layout.num_gpus <= per_node:
        return
    if layout.num_gpus % per_node:
        raise DataError(f"n_gpus={layout.num_gpus} is no multiple of gpus_per_node={per_node}")
    if per_node % layout.tp and layout.tp % per_node:
        raise DataError(
            f"tp={layout.tp} neither divides gpus_per_node={per_node} nor is a multiple of it"
        )


def _parameters(cells: Cells, job: Job) -> None:
    total, active = (optional(cells, f"n_params_{name}") for name in ("total", "active"))
    if total is not None and active is not None and active > total:
        raise DataError(f"n_params_active={active:.4g} is more than n_params_total={total:.4g}")
    counted = {"total": job.dims.parameters(), "active": job.dims.parameters(active=True)}
    for name, printed in (("total", total), ("active", active)):
        if printed is not None and abs(counted[name] / printed - 1) > PARAMETERS:
            raise DataError(
                f"n_params_{name}={printed:.4g} is of another model: n_layers, d_model, d_ff and "
                f"vocab make {counted[name]:.4g}"
            )


def _step(cells: Cells, job: Job) -> None:
    step, rate = (optional(cells, name) for name in ("step_time_s", "tokens_per_s_per_gpu"))
    if step is None or rate is None:
        return
    follows = job.layout.global_batch_tokens / rate / job.layout.num_gpus
    if max(follows / step, step / follows) > 1 + STEP:
        raise DataError(
            f"step_time_s={step:.4g} and tokens_per_s_per_gpu={rate:.4g}, which is a step of "
            f"{follows:.4g} s with this batch, contradict each other"
        )


def _flops(cells: Cells, job: Job, step_s: float | None) -> None:
    optional_flag(cells, "recompute_counted")
    optional_choice(cells, "attn_flops", ATTENTION_FLOPS)
    mfu, rate = optional(cells, "mfu_pct"), optional(cells, "tflops_per_gpu")
    if mfu is not None and mfu > 100:
        raise DataError(f"mfu_pct={mfu:.4g} must be at most 100")
    if step_s is None:
        return
    tokens = job.layout.global_batch_tokens / job.layout.num_gpus
    flops = 3 * sum(flops_per_token(job.dims, job.layout.seq_len)) * tokens
    for name, printed, follows, (least, most) in (
        ("mfu_pct", mfu, 100 * least_step_s(job) / step_s, MFU),
        ("tflops_per_gpu", rate, flops / step_s / 1e12, FLOPS),
    ):
        if printed is not None and not least <= printed / follows <= most:
            raise DataError(
                f"{name}={printed:.4g} and a step of {step_s:.4g} s, by which it is "
                f"{follows:.4g}, contradict each other"
            )
