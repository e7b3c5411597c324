"""What goes with offload, 8-bit moments and gradient release, and whether the host has room. No
torch.

The rules are lines of `rules.RULES`; the host's memory depends on the machine, so the engine checks
it by itself (`check_host`) before it builds anything.
"""

from __future__ import annotations

import os
from math import prod
from typing import TYPE_CHECKING

from stepwell.config import Run
from stepwell.hardware import GIB, available_memory_bytes
from stepwell.models.activations import block_bytes, seen_outside
from stepwell.models.flops import parameter_shapes
from stepwell.parallel.remat import dtype_bytes, segments_of
from stepwell.types import ConfigError

if TYPE_CHECKING:
    from stepwell.parallel.rules import AxisSizes

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


# --- rules -----------------------------------------------------------------------------------


def offload_twice(run: Run, sizes: AxisSizes) -> str | None:
    if run.offload.parameters and run.offload.optimizer:
        return (
            "offload.parameters=true moves the optimiser to the host already; set "
            "offload.optimizer=false"
        )
    return None


def host_steps_adamw(run: Run, sizes: AxisSizes) -> str | None:
    if run.offload.optimizer and run.optim.kind != "adamw":
        return (
            f"offload.optimizer=true steps AdamW on the host, not optim.kind={run.optim.kind!r}; "
            "set optim.kind='adamw' or offload.optimizer=false"
        )
    return None


def eight_bits(run: Run, sizes: AxisSizes) -> str | None:
    if run.optim.kind != "adamw8bit":
        return None
    if run.precision.param != "fp32":
        return (
            "optim.kind='adamw8bit' computes in float32, not precision.param="
            f"{run.precision.param!r}; set precision.param='fp32' or optim.kind='adamw'"
        )
    if run.offload.parameters:
        return (
            "optim.kind='adamw8bit' saves memory of the device, where offload.parameters=true "
            "leaves no moments; set optim.kind='adamw' or offload.parameters=false"
        )
    return None


def release(run: Run, sizes: AxisSizes) -> str | None:
    """A step within the backward pass sees one gradient of one micro-batch, and can't be undone."""
    optim = run.optim
    if not optim.release_gradients:
        return None
    ranks = sizes.dp_replicate * sizes.dp_shard
    rows, micro = run.train.global_batch_rows, run.train.micro_batch_rows
    least = -(-rows // ranks)
    clashes = {
        f"optim.kind={optim.kind!r} (set 'adamw')": optim.kind != "adamw",
        f"optim.clip_norm={optim.clip_norm:g} (set 0)": optim.clip_norm != 0,
        f"guard.action={run.guard.action!r} (set 'none': nothing can be refused afterwards)": (
            run.guard.action != "none"
        ),
        f"method.kind={run.method.kind!r}, whose steps have any number of micro-batches": (
            run.method.kind == "grpo"
        ),
        f"train.micro_batch_rows={micro}: a step has one micro-batch (set {least} or more)": (
            run.method.kind != "grpo" and micro < least
        ),
        "offload.optimizer=true (set false)": run.offload.optimizer,
    }
    found = [clash for clash, there in clashes.items() if there]
    if not found:
        return None
    return "optim.release_gradients=true does not go with " + ", nor with ".join(found)


# --- whether the host has room ---------------------------------------------------------------


def check_host(run: Run, sizes: AxisSizes, grouped: bool) -> None:
    """Raises ConfigError when what the run moves to the host cannot be there. Before anything is
    built: from the configuration alone. grouped: whether there is a process group."""
    if run.offload.parameters and not grouped:
        raise ConfigError(
            "offload.parameters=true is done by FSDP2, which needs a process group; start with "
            "--nproc 1 or torchrun (or use offload.optimizer=true)"
        )
    if not (run.offload.optimizer or run.offload.parameters or run.offload.activations):
        return
    on_host = min(prod(sizes), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    problem = host_shortage(run, sizes, on_host, available_memory_bytes())
    if problem:
        raise ConfigError(problem)


def host_shortage(
    run: Run, sizes: AxisSizes, ranks_on_host: int, available_bytes: int
) -> str | None:
    """What is wrong when the ranks of this host need more of its memory than is free, else None."""
    needed = {key: n * ranks_on_host for key, n in host_bytes(run, sizes).items()}
    total = sum(needed.values())
    if total <= available_bytes:
        return None
    parts = ", ".join(f"offload.{key} {n / GIB:.2f} GiB" for key, n in needed.items())
    return (
        f"offload needs {total / GIB:.2f} GiB of host memory for {ranks_on_host} ranks ({parts}), "
        f"but {available_bytes / GIB:.2f} GiB are available; offload less, or shard over more "
        f"hosts (layout.dp_shard={sizes.dp_shard} now)"
    )


def host_bytes(run: Run, sizes: AxisSizes) -> dict[str, int]:
    """Host memory of one rank by key of `offload`: weights, two moments and gradients or copies of
    this rank's share; what the blocks of one micro-batch save (a pipeline has several at once)."""
    found = {}
    num_parameters = sum(prod(s) for s in parameter_shapes(run.model).values())
    sharded = sizes.dp_shard * sizes.cp if run.layout.zero else 1
    share = num_parameters * _BYTES[run.precision.param] // (sizes.pp * sharded * sizes.tp)
    for key in ("optimizer", "parameters"):
        if getattr(run.offload, key):
            found[key] = 4 * share
    if run.offload.activations:
        a, w = dtype_bytes(run.precision)
        tokens = run.train.micro_batch_rows * run.data.seq_len // sizes.cp
        block = block_bytes(run.model, tokens, a, w, run.layout.compile, sizes.tp)
        blocks = -(-run.model.num_layers // sizes.pp)
        found["activations"] = seen_outside(segments_of(run, sizes, 0, blocks), block)
    return found
