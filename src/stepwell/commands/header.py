"""What a run is and what it will need, before it starts: in a few lines, or as JSON. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from stepwell.commands.ranks import Ranks, layout_text
from stepwell.config import Run
from stepwell.hardware import DeviceKind, device_kind
from stepwell.models.flops import count_parameters
from stepwell.models.lora_shapes import trained_shapes
from stepwell.parallel.lever_rules import share_in_8_bits
from stepwell.parallel.rules import AxisSizes, axis_sizes
from stepwell.parallel.schedules import split_blocks
from stepwell.plan.memory.ledger import MemoryLedger, predict_memory
from stepwell.plan.memory.models import ModelBytes, predict_models
from stepwell.plan.memory.shards import num_shards
from stepwell.sections.methods import DPO, RewardModel, SampledMethod
from stepwell.train.curriculum import low_rate_warnings, shares_of

KIB, MIB, GIB = 2**10, 2**20, 2**30


def header_text(run: Run, ranks: Ranks | None = None, device: DeviceKind | None = None) -> str:
    """Parameters, work, layout and predicted memory of each of the ranks, by default of a single
    process. device: what they are on, by default as training would be on this machine. The parts of
    the memory add up to the total, in the unit that it is shown in."""
    ranks, device = ranks or Ranks(), device or device_kind()
    ledger = predict_memory(run, ranks.world, ranks.grouped, device=device)
    lines = [
        f"{run.name}: {count_parameters(run.model).total:,} parameters ({run.model.family}"
        f"{trained_text(run)}), {run.precision.compute}, {run.optim.kind}",
        f"  {work_text(run)}",
    ]
    if ranks.grouped:
        lines.append(f"  {ranks_text(run, ranks)}")
    if levers := levers_of(run):
        lines.append("  " + ", ".join(f"{name} {value}" for name, value in levers.items()))
    lines += stage_lines(run)
    lines += memory_lines(run, ranks, ledger, device)
    lines += model_lines(models_of(run, ranks))
    return "\n".join(lines)


def plan_of(run: Run, ranks: Ranks, device: DeviceKind | None = None) -> dict[str, Any]:
    """`header_text` as values; sizes in bytes."""
    sizes, layout = axis_sizes(run.layout, ranks.world), run.layout
    device = device or device_kind()
    ledger = predict_memory(run, ranks.world, ranks.grouped, device=device)
    pipeline = None
    if sizes.pp > 1:
        pipeline = {
            "schedule": layout.pp_schedule,
            "stages_per_rank": layout.pp_stages_per_rank,
            "blocks": [len(blocks) for blocks in split_blocks(run.model.num_layers, layout)],
        }
    return {
        "name": run.name,
        "method": run.method.kind,
        "parameters": count_parameters(run.model).total,
        "trained": sum(prod(s) for s in trained_shapes(run.model, run.lora).values()),
        "steps": run.train.steps,
        "compute": run.precision.compute,
        "optimizer": run.optim.kind,
        "ranks": ranks.world,
        "ranks_assumed": ranks.assumed,
        "layout": {**sizes._asdict(), "zero": layout.zero, "compile": layout.compile},
        "pipeline": pipeline,
        "remat": run.remat.mode,
        "fp8": run.precision.fp8.recipe,
        "offload": offloaded(run),
        "stages": [shares._asdict() for shares in shares_of(run)],
        "warnings": low_rate_warnings(run),
        "memory": {
            "device": device,
            "peak_bytes": ledger.peak_bytes,
            "phase": ledger.phase,
            "pp_rank": ledger.pp_rank,
            "items": ledger.items.named(),
            "by_phase": ledger.by_phase,
            "host": ledger.host,
            "models": {name: held.named() for name, held in models_of(run, ranks).items()},
        },
    }


def work_text(run: Run) -> str:
    method, steps = run.method, run.train.steps
    if isinstance(method, SampledMethod):
        answers = method.prompts_per_step * method.group_size
        return (
            f"{steps:,} steps, {method.prompts_per_step} prompts x {method.group_size} answers = "
            f"{answers:,} answers of at most {method.max_new_tokens} tokens a rollout"
        )
    if isinstance(method, DPO):
        what = "labelled answers" if method.loss.kind == "kto" else "pairs"
        return units_text(run, method.pairs_per_step, what)
    if isinstance(method, RewardModel):
        what = "pairs" if method.objective == "bradley-terry" else "rows"
        return units_text(run, method.rows_per_step, what)
    tokens = run.train.global_batch_rows * run.data.seq_len
    most = "at most " if method.kind == "sft" else ""
    return (
        f"{steps:,} steps of {most}{tokens:,} tokens ({run.train.global_batch_rows} rows of "
        f"{run.data.seq_len}) = {steps * tokens:,} tokens"
    )


def trained_text(run: Run) -> str:
    """What of the model a run with adapters trains."""
    if run.lora.rank == 0:
        return ""
    trained = sum(prod(shape) for shape in trained_shapes(run.model, run.lora).values())
    base = f" over a base in {run.lora.quantize}" if run.lora.quantize != "none" else ""
    return f"; {trained:,} trained, in adapters of rank {run.lora.rank}{base}"


def units_text(run: Run, a_step: int, what: str) -> str:
    """Of a method whose steps count pairs or rows, which are packed into rows of data.seq_len."""
    method, steps = run.method, run.train.steps
    bound = ""
    if isinstance(method, DPO | RewardModel) and method.epochs is not None:
        bound = f", or {method.epochs:g} passes over the data"
    return (
        f"{steps:,} steps of {a_step} {what} = {steps * a_step:,}{bound}; rows of "
        f"{run.data.seq_len} tokens"
    )


def stage_lines(run: Run) -> list[str]:
    """What the stages of a pretraining run read, when, and how much of the learning rate they get;
    then the warnings."""
    lines = [f"  warning: {warning}" for warning in low_rate_warnings(run)]
    if not run.data.stages:
        return lines
    found = [
        f"    data.{s.name:<10} steps {s.first + 1:,} to {s.stop:,}: {s.token_share:.1%} of the "
        f"tokens, {s.lr_share:.1%} of the learning-rate mass"
        for s in shares_of(run)
    ]
    return ["  stages:", *found, *lines]


def ranks_text(run: Run, ranks: Ranks) -> str:
    """ "4 ranks: pp 2 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 1, zero 1, 1f1b ..."."""
    layout, sizes = run.layout, axis_sizes(run.layout, ranks.world)
    many = f"{ranks.world} rank{'' if ranks.world == 1 else 's'}"
    if ranks.assumed:
        many += " (assumed: the fewest that the layout fits; --nproc N says how many)"
    text = f"{many}: {layout_text(sizes)}, zero {layout.zero}"
    if sizes.cp > 1:
        text += f", {layout.cp_method} attention"
    if sizes.pp > 1:
        counts = [str(len(blocks)) for blocks in split_blocks(run.model.num_layers, layout)]
        text += f", pipeline {layout.pp_schedule} with {' + '.join(counts)} blocks"
    return text


def levers_of(run: Run) -> dict[str, str]:
    """What saves memory or time, where it is in use."""
    remat, fp8 = run.remat, run.precision.fp8
    every = {"every": f" {remat.every}", "budget": f" of {size_text(remat.budget_bytes or 0)}"}
    found = {
        "recomputation": remat.mode + every.get(remat.mode, ""),
        "fp8": fp8.recipe,
        "offload of": " and ".join(offloaded(run)) or "none",
        "gradients": "released as they come" if run.optim.release_gradients else "none",
        "moments in 8 bits": moments_text(run),
        "blocks": "compiled" if run.layout.compile else "none",
    }
    return {name: value for name, value in found.items() if value != "none"}


def moments_text(run: Run) -> str:
    eight = run.optim.kind == "adamw8bit"
    return f"{share_in_8_bits(run, run.layout.tp):.0%}" if eight else "none"


def offloaded(run: Run) -> list[str]:
    return [key for key, on in run.offload.model_dump().items() if on]


def memory_lines(run: Run, ranks: Ranks, ledger: MemoryLedger, device: DeviceKind) -> list[str]:
    sizes = axis_sizes(run.layout, ranks.world)
    each = f" on each of {ranks.world} ranks" if ranks.world > 1 else ""
    if sizes.pp > 1:
        each = f" on pipeline rank {ledger.pp_rank}, which needs the most of {sizes.pp}"
    items = {
        name: ledger.items.named()[item] for name, item in item_names(run, ranks, sizes).items()
    }
    where = {
        "cpu": "tensors on a CPU; `stepwell plan` is of GPUs",
        "cuda": "tensors on a GPU; `stepwell plan` adds what is beside them",
    }[device]
    lines = [
        f"  predicted memory, at the highest point of a step: {size_text(ledger.peak_bytes)}{each}",
        f"    {parts_text(items)} ({ledger.phase} phase; {where})",
    ]
    if ledger.host:
        kinds = ", ".join(f"offload.{key} {size_text(n)}" for key, n in ledger.host.items())
        a_rank = " of each rank" if ranks.world > 1 else ""
        lines.append(f"    on the host{a_rank}: {kinds}")
    return lines


def models_of(run: Run, ranks: Ranks) -> dict[str, ModelBytes]:
    """What each of the method's models holds on a rank. Raises CheckpointError for a critic or
    reward model whose folder holds none."""
    critic, rewards = None, {}
    if isinstance(run.method, SampledMethod):
        from stepwell.posttrain.ppo.placement import other_models

        critic, rewards = other_models(run)
    return predict_models(run, ranks.world, critic, rewards)


def model_lines(models: Mapping[str, ModelBytes]) -> list[str]:
    """A line for each of several models; nothing for one alone, which the step's memory tells."""
    if len(models) < 2:
        return []
    lines = []
    for name, held in models.items():
        parts = {k: n for k, n in held.named().items() if n and k != "host"}
        text = ", ".join(f"{key} {size_text(n)}" for key, n in parts.items())
        if held.host:
            text += f"{', ' if text else ''}on the host {size_text(held.host)}"
        lines.append(f"    {name}: {text or 'nothing of its own'}")
    total = sum(held.total for held in models.values())
    return [f"  state of {len(models)} models: {size_text(total)}", *lines]


def item_names(run: Run, ranks: Ranks, sizes: AxisSizes) -> dict[str, str]:
    """How a reader calls the items of the ledger."""
    shards = num_shards(run, sizes)
    return {
        f"weights (1/{shards} of them)" if shards > 1 else "weights": "parameters",
        "optimiser": "optimizer",
        "gradients": "gradients",
        f"weights {'gathered' if ranks.grouped else 'cast'} for use": "working_copies",
        "activations": "activations",
        "logits": "logits",
        "workspace": "workspace",
    }


def parts_text(parts: Mapping[str, int]) -> str:
    """The parts that are there, in the unit of their sum, rounded so that they add up to it: those
    with the largest remainders go up."""
    total = sum(parts.values())
    step, unit, digits = unit_of(total)
    counts = {name: int(n // step) for name, n in parts.items()}
    missing = round(total / step) - sum(counts.values())
    for name in sorted(parts, key=lambda name: -(parts[name] / step % 1))[: max(0, missing)]:
        counts[name] += 1
    per = 10**digits
    return ", ".join(
        f"{name} {counts[name] / per:,.{digits}f} {unit}" for name, n in parts.items() if n
    )


def size_text(num_bytes: float) -> str:
    """`155 MiB`; from 1 GiB on `1.5 GiB`, below 10 MiB in KiB."""
    step, unit, digits = unit_of(num_bytes)
    return f"{round(num_bytes / step) / 10**digits:,.{digits}f} {unit}"


def unit_of(num_bytes: float) -> tuple[float, str, int]:
    """The smallest step that is shown, in bytes; its unit; digits after the point."""
    if num_bytes >= GIB:
        return GIB / 10, "GiB", 1
    return (MIB, "MiB", 0) if num_bytes >= 10 * MIB else (KIB, "KiB", 0)
