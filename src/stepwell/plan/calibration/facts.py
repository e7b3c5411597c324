"""Columns that a table of measured runs may have for what else only its notes can say: facts of a
program, each of which decides over what `plan/calibration/habits` assumes. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from stepwell.plan.calibration.cells import (
    Cells,
    optional,
    optional_choice,
    optional_count,
    optional_flag,
    optional_share,
    optional_words,
)
from stepwell.plan.job import Arrangement, Program
from stepwell.types import DataError

Read = Callable[[Cells, str], Any]
PROGRAMS = get_args(Program)
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev")
OFFLOADS = ("optimizer", "parameters", "activations")


def one_of(*known: str) -> Read:
    return lambda cells, name: optional_choice(cells, name, known)


# Column, which is also the field of `Arrangement`: how it is read.
FACTS: dict[str, Read] = {
    "schedule": one_of(*SCHEDULES),
    "compiled": optional_flag,
    "optimizer": one_of("adamw", "adamw8bit", "muon"),
    "gradient_precision": one_of("fp32", "bf16"),
    "state_precision": one_of("fp32", "bf16"),
    "moment_precision": one_of("fp32", "bf16"),
    "attention_kernel": one_of("native", "older", "triton"),
    "overlap_tp": optional_flag,
    "overlap_ep": optional_flag,
    "overlap_data": optional_flag,
    "reshard": one_of("always", "never", "node"),
    "loss_chunk_tokens": optional_count,
    "imbalance": optional,
    "trained_share": optional_share,
    "cp_method": one_of("ring", "ulysses"),
}
# Of several fields, or of the model and its machines.
OTHERS = (
    "program", "shard_group", "reduce_gradients", "offload", "head_dim", "tied", "n_shared_experts",
    "n_dense_layers", "network_gbit_per_s",
)  # fmt: skip


def with_facts(layout: Arrangement, cells: Cells) -> Arrangement:
    """`layout` with what the row says itself."""
    read = {name: reader(cells, name) for name, reader in FACTS.items()}
    found = {name: value for name, value in read.items() if value is not None}
    if found.get("imbalance", 1.0) < 1:
        raise DataError(f"imbalance={cells['imbalance']!r} must be at least 1")
    kinds = ("step", "micro_batch", "micro-batch")
    if (often := optional_choice(cells, "reduce_gradients", kinds)) is not None:
        found["reduce_every_micro_batch"] = often != "step"
    if (offload := optional_words(cells, "offload", OFFLOADS)) is not None:
        found |= {f"offload_{kind}": kind in offload for kind in OFFLOADS}
    return replace(layout, **found)
