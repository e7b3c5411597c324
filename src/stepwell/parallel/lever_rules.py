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
from stepwell.models.activations import seen_outside
from stepwell.models.axes import axes_of, divided_dim
from stepwell.models.flops import parameter_shapes
from stepwell.models.lora_shapes import trained_shapes
from stepwell.parallel.remat import DTYPE_BYTES, bytes_of_block, segments_of
from stepwell.parallel.remedies import Complaint, Way, multiples, only, values_of
from stepwell.parallel.schedules import micro_batches_of, most_in_flight
from stepwell.types import ConfigError

if TYPE_CHECKING:
    from stepwell.parallel.rules import AxisSizes

# optim.kind "adamw8bit" (train.adamw8bit): what it quantises, and into what.
# Smaller matrices would save nothing and lose the most.
QUANTISED_MIN_ELEMENTS, QUANTISED_BLOCK = 4096, 256


# --- rules -----------------------------------------------------------------------------------


def offload_twice(run: Run, sizes: AxisSizes) -> list[Complaint]:
    if run.offload.parameters and run.offload.optimizer:
        said = "offload.parameters=true moves the optimiser to the host already"
        return [Complaint(said, (only(offload__optimizer=False),))]
    return []


def host_steps_adamw(run: Run, sizes: AxisSizes) -> list[Complaint]:
    if not run.offload.optimizer or run.optim.kind == "adamw":
        return []
    said = f"offload.optimizer=true steps AdamW on the host, not optim.kind={run.optim.kind!r}"
    return [Complaint(said, (only(optim__kind="adamw"), only(offload__optimizer=False)))]


def eight_bits(run: Run, sizes: AxisSizes) -> list[Complaint]:
    if run.optim.kind != "adamw8bit":
        return []
    found, adamw = [], only(optim__kind="adamw")
    if run.precision.param != "fp32":
        said = (
            "optim.kind='adamw8bit' computes in float32, not precision.param="
            f"{run.precision.param!r}"
        )
        found.append(Complaint(said, (only(precision__param="fp32"), adamw), "param"))
    if run.offload.parameters:
        said = (
            "optim.kind='adamw8bit' saves memory of the device, where offload.parameters=true "
            "leaves no moments"
        )
        found.append(Complaint(said, (adamw, only(offload__parameters=False)), "offload"))
    if share_in_8_bits(run, sizes.tp) == 0:
        d_model = run.model.d_model
        said = (
            f"optim.kind='adamw8bit' leaves all moments in float32: no matrix of at least "
            f"{QUANTISED_MIN_ELEMENTS} elements has rows of whole blocks of {QUANTISED_BLOCK} on a "
            f"rank (model.d_model={d_model})"
        )
        wider = values_of("model.d_model", multiples(QUANTISED_BLOCK, d_model))
        found.append(Complaint(said, (wider, adamw), "nothing"))
    return found


def release(run: Run, sizes: AxisSizes) -> list[Complaint]:
    """A step within the backward pass sees one gradient of one micro-batch, and can't be undone."""
    optim, packed = run.optim, not run.method.row_steps
    if not optim.release_gradients:
        return []
    micro = run.train.micro_batch_rows
    least = -(-run.train.global_batch_rows // (sizes.dp_replicate * sizes.dp_shard))
    # said: whether it is so, and what would mend it
    clashes: dict[str, tuple[bool, tuple[Way, ...]]] = {
        f"optim.kind={optim.kind!r}": (optim.kind != "adamw", (only(optim__kind="adamw"),)),
        f"optim.clip_norm={optim.clip_norm:g}": (
            optim.clip_norm != 0,
            (only(optim__clip_norm=0.0),),
        ),
        f"guard.action={run.guard.action!r} (nothing can be refused afterwards)": (
            run.guard.action != "none",
            (only(guard__action="none"),),
        ),
        f"method.kind={run.method.kind!r}, whose steps have any number of micro-batches": (
            packed,
            (),
        ),
        f"train.micro_batch_rows={micro}, for a step has one micro-batch": (
            not packed and micro < least,
            (only(train__micro_batch_rows=least), only(train__global_batch_rows=_rows(run, sizes))),
        ),
        "offload.optimizer=true": (run.offload.optimizer, (only(offload__optimizer=False),)),
    }
    return [
        Complaint(
            f"optim.release_gradients=true does not go with {clash}", ways, clash.split("=")[0]
        )
        for clash, (there, ways) in clashes.items()
        if there
    ]


def _rows(run: Run, sizes: AxisSizes) -> int:
    """The most rows of a step that are one micro-batch on each rank."""
    return run.train.micro_batch_rows * sizes.dp_replicate * sizes.dp_shard


def share_in_8_bits(run: Run, tp: int = 1) -> float:
    """The part of all moments that optim.kind "adamw8bit" keeps in 8 bits: those of large matrices
    whose rows are whole blocks on a tensor rank."""
    shapes = trained_shapes(run.model, run.lora, strict=False)
    eight = sum(
        prod(shape)
        for name, shape in shapes.items()
        if is_quantised(shape, local_columns(run, name, shape, tp))
    )
    return eight / max(sum(prod(shape) for shape in shapes.values()), 1)


def is_quantised(shape: tuple[int, ...], columns: int) -> bool:
    """Whether a parameter's moments are in 8 bits; columns: of a tensor rank's part."""
    large = len(shape) == 2 and prod(shape) >= QUANTISED_MIN_ELEMENTS
    return large and columns % QUANTISED_BLOCK == 0


def local_columns(run: Run, name: str, shape: tuple[int, ...], tp: int) -> int:
    dim = divided_dim(axes_of(name), run.model, tp)
    return shape[-1] // tp if dim == len(shape) - 1 else shape[-1]


# --- whether the host has room ---------------------------------------------------------------


def check_host(run: Run, sizes: AxisSizes, grouped: bool, ranks_on_host: int | None = None) -> None:
    """Raises ConfigError when what the run moves to the host cannot be there. Before anything is
    built: from the configuration alone. grouped: whether there is a process group. ranks_on_host:
    by default what the launcher says."""
    if run.offload.parameters and not grouped:
        raise ConfigError(
            "offload.parameters=true is done by FSDP2, which needs a process group; start with "
            "--nproc 1 or torchrun (or use offload.optimizer=true)"
        )
    if not (run.offload.optimizer or run.offload.parameters or run.offload.activations):
        return
    here = ranks_on_host or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_host = min(prod(sizes), here)
    problem = host_shortage(run, sizes, on_host, available_memory_bytes())
    if problem:
        raise ConfigError(problem)


def _in_flight(run: Run, sizes: AxisSizes, pp_rank: int) -> float:
    layout, train, shares = run.layout, run.train, sizes.dp_replicate * sizes.dp_shard
    if sizes.pp == 1:
        return 1
    m = micro_batches_of(train.global_batch_rows, train.micro_batch_rows, shares, layout)
    v = layout.pp_stages_per_rank
    return most_in_flight(layout.pp_schedule, sizes.pp, m, v, pp_rank) / v


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


def host_bytes(run: Run, sizes: AxisSizes, pp_rank: int = 0) -> dict[str, int]:
    """Host memory of one rank by key of `offload`: weights, two moments and gradients or copies of
    this rank's share; what its blocks save, of all micro-batches that a pipeline has at once."""
    found = {}
    if not (run.offload.optimizer or run.offload.parameters or run.offload.activations):
        return found
    sharded = sizes.dp_shard * sizes.cp if run.layout.zero else 1
    ranks = sizes.pp * sharded * sizes.tp
    trained = sum(prod(s) for s in trained_shapes(run.model, run.lora, strict=False).values())
    share = trained * DTYPE_BYTES[run.precision.param] // ranks
    if run.offload.optimizer:
        found["optimizer"] = 4 * share
    if run.offload.parameters:
        whole = sum(prod(s) for s in parameter_shapes(run.model).values())
        frozen = whole if run.lora.rank else 0
        found["parameters"] = 4 * share + frozen * DTYPE_BYTES[run.precision.compute] // ranks
    if run.offload.activations:
        block = bytes_of_block(run, sizes)
        blocks = -(-run.model.num_layers // sizes.pp)
        once = seen_outside(segments_of(run, sizes, 0, blocks), block)
        found["activations"] = round(once * _in_flight(run, sizes, pp_rank))
    return found
