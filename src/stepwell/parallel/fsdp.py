"""ZeRO-3 and its hybrid by FSDP2: parameters, gradients and optimiser state sharded over dp_shard,
replicated over dp_replicate (ZeRO, 1910.02054; PyTorch FSDP, 2304.11277)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from stepwell.config import LayoutConfig, PrecisionConfig
from stepwell.parallel.mesh import Mesh
from stepwell.types import ConfigError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def apply_fsdp(
    decoder: nn.Module, mesh: Mesh, layout: LayoutConfig, precision: PrecisionConfig
) -> nn.Module:
    """Shards `decoder` in place, one unit a block and one for the rest; returns it.

    Gradients are summed over the ranks, not averaged: the loss already carries the denominator of
    the global batch. A single process without a group is left as it is. Raises ConfigError when
    float64 weights would be reduced in fewer bits.
    """
    if mesh.device_mesh is None:
        return decoder
    if precision.param == "fp64" and precision.reduce != "fp64":
        raise ConfigError(
            f"precision.reduce={precision.reduce!r} would round float64 gradients; with "
            "precision.param='fp64' the only legal value is 'fp64'"
        )
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.compute],
        reduce_dtype=DTYPES[precision.reduce],
        # The decoder casts its own activations; FSDP2 would also round float32 rope tables.
        cast_forward_inputs=False,
    )
    ranks = mesh.device_mesh if mesh.dp_replicate > 1 else mesh.device_mesh["dp_shard"]
    blocks = decoder.blocks
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        fully_shard(
            block,
            mesh=ranks,
            mp_policy=policy,
            reshard_after_forward=layout.reshard_after_forward,
        )
    # The root is needed again at once by the backward pass: resharding it would only gather twice.
    fully_shard(decoder, mesh=ranks, mp_policy=policy, reshard_after_forward=False)
    for unit in _units(decoder):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    decoder.register_forward_hook(_reshard_without_grad)
    return decoder


def set_gradient_sync(decoder: nn.Module, on: bool) -> None:
    """Off for all but the last micro-batch of a step: gradients then add up unsharded, in the
    reduce dtype, and are summed over the ranks once."""
    if isinstance(decoder, FSDPModule):
        decoder.set_requires_gradient_sync(on)


def _reshard_without_grad(decoder: nn.Module, inputs: Any, outputs: Any) -> None:
    # Units that stay gathered after their forward wait for a backward to shard them again. Without
    # one, the module would show its gathered, rounded weights to whoever saves or loads next.
    if not torch.is_grad_enabled():
        for unit in _units(decoder):
            unit.reshard()


def _units(decoder: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in decoder.modules() if isinstance(module, FSDPModule))
