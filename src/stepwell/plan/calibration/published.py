"""Runs that others have measured and published, as jobs of the planner. No torch.

The table's form is that of `data/published_runs.csv` (docs/planner-calibration.md): one measured
run a row, an empty cell where its source prints nothing. A row that cannot be used is
kept with the reason; nothing is guessed that would decide the step time, except what `_job` says.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from stepwell.hardware import GIB
from stepwell.plan.calibration.habits import habits
from stepwell.plan.cluster import GBIT, Cluster, cluster
from stepwell.plan.job import Arrangement, Dims, Experts, Job, Program, Recompute
from stepwell.types import ConfigError, DataError, nearest

REQUIRED = (
    "id", "model_name", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "mlp_kind",
    "vocab", "seq_len", "gpu", "n_gpus", "tp", "pp", "cp", "ep", "micro_batch",
    "global_batch_sequences", "precision", "activation_checkpointing", "attention",
)  # fmt: skip
MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib")
# Of no use alone: which FLOPs a source counts is not in the table.
RATES = ("tflops_per_gpu", "mfu_pct")
# Other programs' names of devices whose own name is not in `hardware`.
ALIASES = {"blackwell-184gib": "gb200"}
# Of the same three matrices, whatever the gate.
GATED = ("swiglu", "geglu", "reglu")
# Words of notes that say that element-wise operations are fused (a compiler, or fused kernels), and
# that attention is a kernel written for the device.
FUSED = r"\bcompile|JAX|XLA|TE[;+ ]|Megatron"
NATIVE = r"JAX|XLA|TE[;+ ]|Megatron|cuDNN"
# Mean width of keys (192) and values (128) of a head of latent attention (DeepSeek-V2, 2405.04434).
LATENT_DIM = 160
# Of Omni-Path's rate, what rings get, over what they get of other networks' (55 of 400 Gbit/s a
# machine: bigscience, experiments/bandwidth/README.md).
OMNI_PATH = 0.18
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
    measurement. recompute_known: the source prints what is recomputed."""

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


@dataclass(frozen=True)
class Table:
    """`skipped`: row id -> why it cannot be used."""

    runs: tuple[Published, ...]
    skipped: dict[str, str]

    def reasons(self) -> dict[str, int]:
        """Reason -> number of rows; values in reasons are left out, so that like adds up. `skipped`
        has them whole."""
        return dict(Counter(re.sub(r"'[^']*'", "…", why) for why in self.skipped.values()))


def shipped_table() -> Path:
    """The table that the planner's coefficients were fitted to."""
    return Path(
        str(resources.files("stepwell.plan.calibration").joinpath("data", "published_runs.csv"))
    )


def shipped_ids() -> set[str]:
    with open(shipped_table(), newline="", encoding="utf-8") as file:
        return {row["id"] for row in csv.DictReader(file)}


def read_table(path: str | Path) -> Table:
    """Raises DataError if the file is not there, is not text, or lacks columns, naming them."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from error
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        named = ", ".join(f"{name}{nearest(name, columns)}" for name in missing)
        raise DataError(f"{path} lacks the columns {named}")
    if not any(name in columns for name in MEASURED):
        raise DataError(f"{path} has no measured column: one of {', '.join(MEASURED)} is needed")
    runs, skipped = [], {}
    for number, row in enumerate(rows, 2):
        row_id = (row.get("id") or "").strip() or f"line {number}"
        if row_id in skipped or any(run.row_id == row_id for run in runs):
            row_id = f"{row_id} (line {number})"
        try:
            runs.append(read_row(row, row_id))
        except (ConfigError, DataError) as error:
            skipped[row_id] = str(error)
    return Table(tuple(runs), skipped)


def read_runs(path: str | Path) -> list[Published]:
    """The rows of `read_table` that can be used."""
    return list(read_table(path).runs)


def read_row(row: dict[str, Any], row_id: str) -> Published:
    """Raises DataError or ConfigError with the reason if the row cannot be used."""
    cells = {k: (v or "").strip() for k, v in row.items() if isinstance(k, str)}
    job = _job(cells)
    fit = cells.get("fit", "") or "ok"
    memory = _optional(cells, "peak_mem_gib")
    step = _step_s(cells, job)
    if step is None and memory is None and fit != "OOM":
        alone = [name for name in RATES if cells.get(name)]
        why = f"{alone[0]} alone says no time" if alone else f"no {', '.join(MEASURED)} printed"
        raise DataError(why)
    return Published(
        row_id=row_id,
        job=job,
        step_s=step,
        peak_bytes=None if memory is None else memory * _memory_unit(cells),
        mem_kind=cells.get("mem_kind", ""),
        fits=fit != "OOM",
        source_key=cells.get("source_key") or cells.get("source") or "unnamed",
        family=cells.get("model_family") or cells["model_name"],
        config_key=cells.get("config_key") or row_id,
        quality=cells.get("quality") or "A",
        workload=cells.get("workload") or "pretrain",
        precision=cells["precision"],
        recompute_known=bool(cells["activation_checkpointing"]),
        notes=cells.get("notes", ""),
    )


# --- cells -----------------------------------------------------------------------------------


def _number(cells: dict[str, str], name: str) -> float:
    text = cells.get(name, "")
    if not text:
        raise DataError(f"{name} is not printed")
    try:
        value = float(text)
    except ValueError as error:
        raise DataError(f"{name}={text!r} is not a number") from error
    if not 0 < value < float("inf"):
        raise DataError(f"{name}={text!r} must be above 0")
    return value


def _count(cells: dict[str, str], name: str) -> int:
    value = _number(cells, name)
    if value != int(value):
        raise DataError(f"{name}={cells[name]!r} is not a whole number")
    return int(value)


def _optional(cells: dict[str, str], name: str) -> float | None:
    return _number(cells, name) if cells.get(name) else None


def _choice(cells: dict[str, str], name: str, known: Iterable[str]) -> str:
    text = cells[name]
    if text not in known:
        what = f"{name}={text!r} is unknown{nearest(text, known)}" if text else f"no {name} printed"
        raise DataError(what)
    return text


def _step_s(cells: dict[str, str], job: Job) -> float | None:
    """Of several printed figures one: the others follow from it."""
    if (step := _optional(cells, "step_time_s")) is not None:
        return step
    layout = job.layout
    if (rate := _optional(cells, "tokens_per_s_per_gpu")) is not None:
        return layout.global_batch_tokens / rate / layout.num_gpus
    return None


def _memory_unit(cells: dict[str, str]) -> float:
    """The tools that measure count in units of 1,024, whatever they are called when printed. (Where
    InternEvo prints "GB", weights of 40.2e9 bytes are 39.)"""
    return float(GIB)


# --- model -----------------------------------------------------------------------------------


def _dims(cells: dict[str, str]) -> Dims:
    width, heads = _count(cells, "d_model"), _count(cells, "n_heads")
    printed = re.search(r"head_dim (\d+)", cells.get("notes", ""))
    kind = _choice(cells, "mlp_kind", (*GATED, "gelu", "squared_relu"))
    kind = "swiglu" if kind in GATED else kind
    d_ff = _count(cells, "d_ff")
    dims = Dims(
        name=cells["model_name"],
        num_layers=_count(cells, "n_layers"),
        d_model=width,
        num_heads=heads,
        num_kv_heads=_count(cells, "n_kv_heads"),
        head_dim=int(printed.group(1)) if printed else width // heads,
        d_ff=d_ff,
        vocab_size=_count(cells, "vocab"),
        mlp=kind,  # type: ignore[arg-type]
    )
    if kind == "gelu":
        dims = replace(dims, learned_positions=_count(cells, "seq_len"))
    if "MLA" in cells.get("notes", ""):
        dims = replace(dims, score_dim=LATENT_DIM)
    if cells.get("n_experts"):
        return _with_experts(dims, cells)
    return _tied_by_size(dims, _optional(cells, "n_params_total"))


def _with_experts(dims: Dims, cells: dict[str, str]) -> Dims:
    """Experts that see every token are in the notes, or follow from the active parameters. Dense
    layers are as wide as the experts that a token meets."""
    experts = Experts(_count(cells, "n_experts"), _count(cells, "top_k"), dims.d_ff)
    notes = cells.get("notes", "")
    shared = re.search(r"(\d+) shared expert", notes)
    dense = re.search(r"(\d+) dense layer", notes)
    dims = replace(dims, experts=experts)
    active = _optional(cells, "n_params_active")
    if shared:
        experts = replace(experts, num_shared=int(shared.group(1)))
    elif active:
        one = dims.num_layers * dims.mlp_parameters(dims.d_ff)
        missing = round((active - dims.parameters(active=True)) / one)
        experts = replace(experts, num_shared=min(max(0, missing), 4))
    if dense and int(dense.group(1)) < dims.num_layers:
        experts = replace(experts, num_dense_layers=int(dense.group(1)))
    return replace(dims, experts=experts, d_ff=dims.d_ff * (experts.top_k + experts.num_shared))


def _tied_by_size(dims: Dims, total: float | None) -> Dims:
    """Whether the head is the embedding follows from the number of parameters."""
    tied = replace(dims, tied=True)
    if total and abs(tied.parameters() - total) < abs(dims.parameters() - total):
        return tied
    return dims


# --- layout ----------------------------------------------------------------------------------


def _job(cells: dict[str, str]) -> Job:
    """Where a source prints nothing: the optimiser is sharded among data ranks (zero 1), a
    micro-batch is `_usual_rows`, sequence parallelism goes with tensor ranks, recomputation is its
    program's default (`plan/calibration/habits`)."""
    notes = cells.get("notes", "")
    dims, machines = _dims(cells), _cluster(cells)
    num_gpus = _count(cells, "n_gpus")
    tp, pp, cp, ep = (_count(cells, name) for name in ("tp", "pp", "cp", "ep"))
    if num_gpus % (tp * pp * cp):
        raise DataError(f"n_gpus={num_gpus} is no multiple of tp x pp x cp = {tp * pp * cp}")
    dp = num_gpus // (tp * pp * cp)
    zero, shard = _zero(cells, dp)
    batch = _count(cells, "global_batch_sequences")
    rows = _count(cells, "micro_batch") if cells["micro_batch"] else _usual_rows(batch, dp, pp)
    if batch < rows * dp and batch % dp == 0:
        rows = batch // dp
    if batch % (rows * dp):
        raise DataError(f"global batch '{batch}' is no multiple of micro_batch x dp '{rows * dp}'")
    precision, recipe = PRECISIONS[_choice(cells, "precision", PRECISIONS)]
    device = machines.accelerator
    # What has a rate on the device only under another name computes in 16 bits.
    device.peak_flops_per_s(precision)
    program, flash = _program(cells, zero), cells["attention"] != "no-flash"
    megatron = program == "megatron"
    layout = Arrangement(
        seq_len=_count(cells, "seq_len"),
        micro_batch_rows=rows,
        global_batch_rows=batch,
        tp=tp,
        sequence_parallel=cells.get("sp", "").lower() != "false" and tp > 1,
        cp=cp,
        pp=pp,
        stages_per_rank=int(_optional(cells, "vpp") or 1) if pp > 1 else 1,
        schedule="interleaved-1f1b" if pp > 1 and (_optional(cells, "vpp") or 1) > 1 else "1f1b",
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
        overlap_tp="AsyncTP" in notes
        or (megatron and flash and cells.get("sp", "").lower() == "true"),
        overlap_ep="all-to-all overlap on" in notes,
        overlap_data=flash,
        attention_kernel=_attention_kernel(megatron, notes),
        gradient_precision=_gradient_precision(notes, megatron and flash),
        state_precision="bf16" if "PURE" in notes else "fp32",
        program=program,
        trained_share=ADAPTER_SHARE if cells.get("workload") == "lora" else 1.0,
    )
    known = bool(cells["activation_checkpointing"])
    source = cells.get("source_key") or cells.get("source", "")
    return Job(dims, habits(layout, dims, source, notes, known), machines)


def _usual_rows(batch: int, dp: int, pp: int) -> int:
    """Of a micro-batch whose size is not printed: one in a pipeline, else up to four, as many as
    divide a rank's share."""
    return 1 if pp > 1 else math.gcd(4, max(1, batch // dp))


def _zero(cells: dict[str, str], dp: int) -> tuple[int, int]:
    """The stage, and how many ranks shard: all data ranks unless the notes name a group."""
    text = cells.get("zero_stage", "").removesuffix(".0") or "1"
    named = re.search(
        r"(?:ZeRO-1|FSDP) group (\d+)|sharded over groups of (\d+)", cells.get("notes", "")
    )
    group = int(next(g for g in named.groups() if g)) if named else dp
    zero = 3 if text == "hsdp" else int(_choice({"zero_stage": text}, "zero_stage", "0123"))
    return zero, group if 0 < group <= dp and dp % group == 0 else dp


def _recompute(cells: dict[str, str]) -> Recompute:
    printed = cells["activation_checkpointing"]
    if not printed:
        return "none"
    _choice(cells, "activation_checkpointing", ("none", "selective", "full"))
    if "every-other-layer" in cells.get("notes", ""):
        return "every"
    return printed  # type: ignore[return-value]


def _program(cells: dict[str, str], zero: int) -> Program:
    """Whose habits: Megatron's for model parallelism and its sharded optimiser, else FSDP's; the
    notes may name Megatron where gradients are divided, too."""
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


# --- machines --------------------------------------------------------------------------------


def _cluster(cells: dict[str, str]) -> Cluster:
    name = cells["gpu"]
    machines = cluster(ALIASES.get(name, name))
    given: dict[str, Any] = {}
    if cells.get("gpus_per_node"):
        per_node = _count(cells, "gpus_per_node")
        given["gpus_per_node"] = per_node
        if machines.scaleup_gpus == machines.gpus_per_node:
            given["scaleup_gpus"] = per_node
    network = network_bytes_per_s(cells.get("interconnect", ""), given.get("gpus_per_node", 8))
    if network is not None:
        given["network_bytes_per_s"] = network
    return replace(machines, **given)


def network_bytes_per_s(interconnect: str, gpus_per_node: int) -> float | None:
    """Of one accelerator and direction, from words like "8x400 Gb/s IB per node"; None if they name
    no rate. Omni-Path, without one: a link of 100 Gbit/s for each accelerator. Of Omni-Path's, what
    compares with other networks'."""
    reached = OMNI_PATH if "Omni-Path" in interconnect else 1.0
    several = re.search(r"(\d+)x [^;]*?(\d+) ?Gb/s|(\d+)x(\d+) ?Gb/s", interconnect)
    if several:
        links, rate = (int(x) for x in several.groups() if x)
        return reached * links * rate * GBIT / gpus_per_node
    single = re.search(r"(\d+) ?Gb/s per (GPU|node)", interconnect)
    if single:
        share = 1 if single.group(2) == "GPU" else gpus_per_node
        return reached * int(single.group(1)) * GBIT / share
    return reached * 100 * GBIT if reached < 1 else None
