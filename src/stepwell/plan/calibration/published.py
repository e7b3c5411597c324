"""Runs that others have measured and published, as jobs of the planner. No torch.

One measured run a row (`plan/calibration/table`), an empty cell where its source prints nothing.
Nothing is guessed that would decide the step time, except what `Published.assumed` says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from stepwell.plan.calibration.agreement import check_agreement
from stepwell.plan.calibration.cells import (
    Cells,
    choice,
    count,
    optional,
    optional_choice,
    optional_count,
    optional_flag,
)
from stepwell.plan.calibration.checks import check_dims, check_layout, check_measured
from stepwell.plan.calibration.facts import PROGRAMS, with_facts
from stepwell.plan.calibration.habits import habits, memory_unit
from stepwell.plan.calibration.machines import machines_of, unknown_network
from stepwell.plan.job import Arrangement, Dims, Experts, Job, Program, Recompute
from stepwell.types import DataError

# Columns that are looked at where they are there, beside those of `plan/calibration/facts`.
OPTIONAL = (
    "n_params_total", "n_params_active", "n_experts", "top_k", "interconnect", "gpus_per_node",
    "sp", "vpp", "dp", "zero_stage", "mem_kind", "notes", "source_key", "model_family", "workload",
    "fit", "quality", "config_key",
)  # fmt: skip
MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib")
# Of no use alone: which FLOPs a source counts is not in the table.
RATES = ("tflops_per_gpu", "mfu_pct")
MEASURED_AS = ("reserved", "allocated", "active", "nvidia-smi")
WORKLOADS = ("pretrain", "sft", "lora")
ATTENTION = ("flash", "no-flash", "sdpa/flex", "sdpa", "flex")
RECOMPUTE = ("none", "selective", "full", "every")
# Of the same three matrices, whatever the gate.
GATED = ("swiglu", "geglu", "reglu")
# Words of notes that say that element-wise operations are fused (a compiler, or fused kernels), and
# that attention is a kernel written for the device.
FUSED = r"\bcompile|JAX|XLA|TE[;+ ]|Megatron"
NATIVE = r"JAX|XLA|TE[;+ ]|Megatron|cuDNN"
# Mean width of keys (192) and values (128) of a head of latent attention (DeepSeek-V2, 2405.04434).
LATENT_DIM = 160
# Of adapters whose rank is not printed: 16 on every matrix of a 7B is .5 %.
ADAPTER_SHARE = 0.005

Format = Literal["bf16", "fp16", "fp32", "fp8"]
# As printed -> format of the products and recipe of the scales (`Arrangement`).
PRECISIONS: dict[str, tuple[Format, str]] = {
    "bf16": ("bf16", "none"),
    "fp16": ("fp16", "none"),
    "fp32": ("fp32", "none"),
    "fp8": ("fp8", "tensorwise"),
    "fp8-cs": ("fp8", "tensorwise"),
    "fp8-lm": ("fp8", "tensorwise"),
    "fp8-rowwise": ("fp8", "rowwise"),
    "mxfp8": ("fp8", "mxfp8"),
    "nvfp4": ("fp8", "nvfp4"),
}


@dataclass(frozen=True)
class Published:
    """A measured run. step_s: measured, or what follows from the one rate that was; None where only
    memory was. peak_bytes is what mem_kind says. fits: False where it ran out of memory. family,
    source_key: what cross-validation leaves out whole. config_key: rows with the same one repeat a
    measurement. recompute_known: the source prints what is recomputed. assumed: what was taken
    where it prints nothing, or nothing that is understood."""

    row_id: str
    job: Job
    step_s: float | None
    peak_bytes: float | None
    mem_kind: str
    fits: bool
    source_key: str
    family: str
    config_key: str
    quality: str
    workload: str
    precision: str
    recompute_known: bool
    notes: str
    assumed: tuple[str, ...] = ()


def read_row(cells: Cells, row_id: str) -> Published:
    """Raises DataError or ConfigError with the reason if the row cannot be used."""
    job = _job(cells)
    fits = optional_choice(cells, "fit", ("ok", "OOM")) != "OOM"
    memory, step = optional(cells, "peak_mem_gib"), _step_s(cells, job)
    if step is not None and not fits:
        raise DataError("fit=OOM, and yet a step was measured")
    if step is None and memory is None and fits:
        alone = [name for name in RATES if cells.get(name)]
        why = f"{alone[0]} alone says no time" if alone else f"no {', '.join(MEASURED)} printed"
        raise DataError(why)
    peak_bytes = None if memory is None else memory * memory_unit(cells.get("source_key", ""))
    check_measured(job, step, peak_bytes)
    check_agreement(cells, job, step)
    return Published(
        row_id=row_id,
        job=job,
        step_s=step,
        peak_bytes=peak_bytes,
        mem_kind=cells.get("mem_kind", ""),
        fits=fits,
        source_key=cells.get("source_key") or cells.get("source") or "unnamed",
        family=cells.get("model_family") or cells["model_name"],
        config_key=cells.get("config_key") or row_id,
        quality=optional_choice(cells, "quality", ("A", "B")) or "A",
        workload=optional_choice(cells, "workload", WORKLOADS) or "pretrain",
        precision=choice(cells, "precision", PRECISIONS),
        recompute_known=bool(cells["activation_checkpointing"]),
        notes=cells.get("notes", ""),
        assumed=tuple(_assumed(cells, job)),
    )


def _step_s(cells: Cells, job: Job) -> float | None:
    """Of several printed figures one: the others follow from it."""
    step, rate = optional(cells, "step_time_s"), optional(cells, "tokens_per_s_per_gpu")
    if step is None and rate is not None:
        return job.layout.global_batch_tokens / rate / job.layout.num_gpus
    return step


def _assumed(cells: Cells, job: Job) -> Iterator[str]:
    layout, machines = job.layout, job.cluster
    if not cells["micro_batch"]:
        yield "no micro_batch: one row in a pipeline, else up to four"
    if not cells["activation_checkpointing"]:
        yield "no activation_checkpointing: its program's default"
    if not cells["attention"]:
        yield "no attention: flash"
    if not cells.get("zero_stage") and layout.data_ranks > 1:
        yield "no zero_stage: 1"
    if cells.get("zero_stage", "").casefold() == "hsdp" and layout.dp_replicate == 1:
        yield "zero_stage=hsdp without its group: all data ranks shard"
    if not cells.get("sp") and layout.tp > 1:
        yield "no sp: tensor ranks divide tokens"
    if not cells.get("vpp") and layout.pp > 1:
        yield "no vpp: one stage a rank"
    if not cells.get("gpus_per_node") and layout.num_gpus > machines.gpus_per_node:
        yield f"no gpus_per_node: {machines.name}'s usual {machines.gpus_per_node}"
    if network := unknown_network(cells, machines):
        yield network
    kind = cells.get("mem_kind", "")
    if cells.get("peak_mem_gib") and not any(words in kind for words in MEASURED_AS):
        yield f"mem_kind={kind!r}: taken as nvidia-smi's"


# --- model -----------------------------------------------------------------------------------


def _dims(cells: Cells) -> Dims:
    width, heads = count(cells, "d_model"), count(cells, "n_heads")
    head_dim = optional_count(cells, "head_dim") or _in_notes(r"head_dim (\d+)", cells)
    kind = choice(cells, "mlp_kind", (*GATED, "gelu", "squared_relu"))
    kind = "swiglu" if kind in GATED else kind
    dims = Dims(
        name=cells["model_name"],
        num_layers=count(cells, "n_layers"),
        d_model=width,
        num_heads=heads,
        num_kv_heads=count(cells, "n_kv_heads"),
        head_dim=head_dim or max(1, width // heads),
        d_ff=count(cells, "d_ff"),
        vocab_size=count(cells, "vocab"),
        mlp=kind,  # type: ignore[arg-type]
    )
    if kind == "gelu":
        dims = replace(dims, learned_positions=count(cells, "seq_len"))
    if "MLA" in cells.get("notes", ""):
        dims = replace(dims, score_dim=LATENT_DIM)
    if cells.get("n_experts"):
        dims = _with_experts(dims, cells)
    elif cells.get("top_k"):
        raise DataError(f"top_k={cells['top_k']!r} without n_experts")
    else:
        dims = _tied_by_size(dims, optional(cells, "n_params_total"))
    if (tied := optional_flag(cells, "tied")) is not None:
        dims = replace(dims, tied=tied)
    check_dims(dims, head_dim is not None)
    return dims


def _in_notes(pattern: str, cells: Cells) -> int | None:
    found = re.search(pattern, cells.get("notes", ""))
    return int(found.group(1)) if found else None


def _with_experts(dims: Dims, cells: Cells) -> Dims:
    """Experts that see every token are printed, or follow from the active parameters. Dense layers
    are as wide as the experts that a token meets."""
    experts = Experts(count(cells, "n_experts"), count(cells, "top_k"), dims.d_ff)
    shared = optional_count(cells, "n_shared_experts") or _in_notes(r"(\d+) shared expert", cells)
    dense = optional_count(cells, "n_dense_layers") or _in_notes(r"(\d+) dense layer", cells)
    dims = replace(dims, experts=experts)
    active = optional(cells, "n_params_active")
    if shared is None and active:
        one = dims.num_layers * dims.mlp_parameters(dims.d_ff)
        missing = round((active - dims.parameters(active=True)) / one)
        shared = min(max(0, missing), 4)
    experts = replace(experts, num_shared=shared or 0, num_dense_layers=dense or 0)
    return replace(dims, experts=experts, d_ff=dims.d_ff * (experts.top_k + experts.num_shared))


def _tied_by_size(dims: Dims, total: float | None) -> Dims:
    """Whether the head is the embedding follows from the number of parameters."""
    tied = replace(dims, tied=True)
    if total and abs(tied.parameters() - total) < abs(dims.parameters() - total):
        return tied
    return dims


# --- layout ----------------------------------------------------------------------------------


def _job(cells: Cells) -> Job:
    """Where a source prints nothing: the optimiser is sharded among data ranks (zero 1), a
    micro-batch is `_usual_rows`, sequence parallelism goes with tensor ranks, recomputation is its
    program's default (`plan/calibration/habits`)."""
    notes = cells.get("notes", "")
    dims, machines = _dims(cells), machines_of(cells)
    dp = _data_ranks(cells)
    tp, pp, cp, ep = (count(cells, name) for name in ("tp", "pp", "cp", "ep"))
    zero, shard = _zero(cells, dp)
    batch = count(cells, "global_batch_sequences")
    rows = optional_count(cells, "micro_batch") or _usual_rows(batch, dp, pp)
    if batch % (rows * dp):
        raise DataError(
            f"global_batch_sequences={batch} is no multiple of micro_batch x dp = {rows * dp}"
        )
    precision, recipe = PRECISIONS[choice(cells, "precision", PRECISIONS)]
    program = _program(cells, zero)
    attention = optional_choice(cells, "attention", ATTENTION) or "flash"
    sequence = optional_flag(cells, "sp")
    megatron, flash = program == "megatron", attention != "no-flash"
    stages = _stages_per_rank(cells, pp)
    layout = Arrangement(
        seq_len=count(cells, "seq_len"),
        micro_batch_rows=rows,
        global_batch_rows=batch,
        tp=tp,
        sequence_parallel=sequence is not False and tp > 1,
        cp=cp,
        pp=pp,
        stages_per_rank=stages,
        schedule="interleaved-1f1b" if stages > 1 else "1f1b",
        dp_replicate=dp // shard,
        dp_shard=shard,
        ep=ep,
        zero=zero,
        reduce_every_micro_batch=zero >= 2 and "no_sync" not in notes,
        precision=precision,
        recipe=recipe,
        recompute=_recompute(cells),
        flash=flash,
        compiled=megatron or bool(re.search(FUSED, notes)),
        offload_activations="activation CPU offload" in notes or "checkpoint-in-cpu Y" in notes,
        overlap_tp="AsyncTP" in notes or (megatron and flash and sequence is True),
        overlap_ep="all-to-all overlap on" in notes,
        overlap_data=flash,
        attention_kernel=_attention_kernel(megatron, notes),
        gradient_precision=_gradient_precision(notes, megatron and flash),
        state_precision="bf16" if "PURE" in notes else "fp32",
        program=program,
        trained_share=ADAPTER_SHARE if cells.get("workload", "").casefold() == "lora" else 1.0,
    )
    known = bool(cells["activation_checkpointing"])
    source = cells.get("source_key") or cells.get("source", "")
    layout = with_facts(habits(layout, dims, source, notes, known), cells)
    job = Job(dims, layout, machines)
    check_layout(job)
    return job


def _data_ranks(cells: Cells) -> int:
    num_gpus = count(cells, "n_gpus")
    others = math.prod(count(cells, name) for name in ("tp", "pp", "cp"))
    if num_gpus % others:
        raise DataError(f"n_gpus={num_gpus} is no multiple of tp x pp x cp = {others}")
    dp, printed = num_gpus // others, optional_count(cells, "dp")
    if printed not in (None, dp):
        raise DataError(f"dp={printed} is not n_gpus / (tp x pp x cp) = {dp}")
    return dp


def _stages_per_rank(cells: Cells, pp: int) -> int:
    stages = optional_count(cells, "vpp") or 1
    if pp == 1 and stages > 1:
        raise DataError(f"vpp={stages} is of a pipeline, and pp=1 has none")
    return stages


def _usual_rows(batch: int, dp: int, pp: int) -> int:
    """Of a micro-batch whose size is not printed: one in a pipeline, else up to four, as many as
    divide a rank's share."""
    return 1 if pp > 1 else math.gcd(4, max(1, batch // dp))


def _zero(cells: Cells, dp: int) -> tuple[int, int]:
    """The stage, and how many ranks shard: all data ranks unless a group is named."""
    text = cells.get("zero_stage", "").removesuffix(".0") or "1"
    kind = choice({"zero_stage": text}, "zero_stage", ("0", "1", "2", "3", "hsdp"))
    group = optional_count(cells, "shard_group")
    for words in (r"(?:ZeRO-1|FSDP) group (\d+)", r"sharded over groups of (\d+)"):
        group = group or _in_notes(words, cells)
    if group and dp % group:
        raise DataError(f"groups of {group} ranks that shard do not divide the {dp} data ranks")
    return 3 if kind == "hsdp" else int(kind), group or dp


def _recompute(cells: Cells) -> Recompute:
    printed = optional_choice(cells, "activation_checkpointing", RECOMPUTE) or "none"
    if printed != "none" and "every-other-layer" in cells.get("notes", ""):
        return "every"
    return printed  # type: ignore[return-value]


def _program(cells: Cells, zero: int) -> Program:
    """Whose habits: Megatron's for model parallelism and its sharded optimiser, else FSDP's; the
    notes may name Megatron where gradients are divided, too."""
    if (printed := optional_choice(cells, "program", PROGRAMS)) is not None:
        return printed  # type: ignore[return-value]
    if cells.get("zero_stage", "") in ("2", "2.0") and re.search(
        r"\bMegatron\b", cells.get("notes", "")
    ):
        return "megatron"
    return "fsdp" if zero >= 2 or "FSDP" in cells.get("notes", "") else "megatron"


def _gradient_precision(notes: str, megatron: bool) -> Literal["fp32", "bf16"]:
    """As they are summed up."""
    return "bf16" if megatron or re.search(r"PURE|sums in bf16", notes) else "fp32"


def _attention_kernel(megatron: bool, notes: str) -> Literal["native", "older", "triton"]:
    if "triton/flash" in notes or "triton attention" in notes:
        return "triton"
    return "native" if megatron or re.search(NATIVE, notes) else "older"
