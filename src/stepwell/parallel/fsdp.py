"""ZeRO's stages by FSDP2 (ZeRO, 1910.02054; PyTorch FSDP, 2304.11277): what dp_shard x cp ranks
divide among them, replicated over dp_replicate.

FSDP2 always shards the master weights and hands out copies in compute dtype. Stage 3 gives the
copies back after each block, in the forward and the backward pass. Stages 1 and 2 gather them once
a step. Stage 2 reduces gradients into shards after every micro-batch, stage 1 adds them up whole
and reduces once; optimiser state is sharded in all three. Stage 0 shards over one rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from stepwell.parallel.mesh import Mesh
from stepwell.sections.layout import LayoutConfig, PrecisionConfig
from stepwell.types import ConfigError

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def apply_fsdp(
    decoder: nn.Module,
    mesh: Mesh,
    layout: LayoutConfig,
    precision: PrecisionConfig,
    offload_parameters: bool = False,
) -> nn.Module:
    """Shards `decoder` in place, one unit a block and one for the rest; returns it.

    Gradients are summed over the ranks, not averaged: the loss already carries the denominator of
    the global batch. offload_parameters: shards and their gradients live on the host, and the
    optimiser steps there; materialise them there. A single process without a group is left as it
    is. Raises ConfigError when float64 weights would be reduced in fewer bits.
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
    offload = OffloadPolicy()
    if offload_parameters:
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    _, replicate, shard, tp = mesh.device_mesh.shape
    ranks = mesh.device_mesh[("dp_replicate", "fsdp") if replicate > 1 else "fsdp"]
    reshard = _reshard_after_forward(layout, shard, tp)
    blocks = list(_blocks(decoder))
    for block in blocks:
        fully_shard(
            block,
            mesh=ranks,
            mp_policy=policy,
            reshard_after_forward=reshard,
            offload_policy=offload,
        )
    # The root is needed again at once by the backward pass: resharding it would only gather twice.
    fully_shard(
        decoder,
        mesh=ranks,
        mp_policy=policy,
        reshard_after_forward=False,
        offload_policy=offload,
    )
    for unit in _units(decoder):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    _prefetch(decoder, blocks, layout)
    decoder.register_forward_hook(_reshard_without_grad)
    return decoder


def begin_micro_batch(decoder: nn.Module, layout: LayoutConfig, last: bool) -> None:
    """Before the forward and backward pass of each micro-batch of a step: what its backward pass
    sums over the ranks, and whether it gives the gathered weights back.

    Gradients that wait add up unsharded in the reduce dtype; between replicas they always wait for
    the last micro-batch.
    """
    if isinstance(decoder, FSDPModule):
        decoder.set_requires_gradient_sync(last or reduces_every_micro_batch(layout))
        decoder.set_requires_all_reduce(last)
        if layout.zero < 3:
            decoder.set_reshard_after_backward(last)


def reduces_every_micro_batch(layout: LayoutConfig) -> bool:
    if layout.reduce_gradients == "auto":
        return layout.zero >= 2
    return layout.reduce_gradients == "micro_batch"


def _reshard_after_forward(layout: LayoutConfig, shard: int, tp: int) -> bool | int:
    """FSDP2's setting: an integer reshards to that many neighbours."""
    if layout.zero < 3 or layout.reshard_after_forward == "never":
        return False
    if layout.reshard_after_forward == "always":
        return True
    on_node = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // tp)
    return max(d for d in range(1, shard + 1) if shard % d == 0 and d <= on_node)


def _prefetch(decoder: nn.Module, blocks: list[Any], layout: LayoutConfig) -> None:
    """Names the blocks to be gathered while another one is at work."""
    ahead, back = layout.prefetch_forward, layout.prefetch_backward
    assert isinstance(decoder, FSDPModule)
    segments: Any = decoder.segments
    lengths = [stop - start for start, stop, _ in segments]
    ends = [sum(lengths[: g + 1]) for g, length in enumerate(lengths) for _ in range(length)]
    if ahead and blocks:
        decoder.set_modules_to_forward_prefetch(blocks[:ahead])
    for i, block in enumerate(blocks):
        if ahead and i + 1 < len(blocks):
            # Within a group that is computed again, not beyond it: the next one has been let go.
            stop = ends[i] if i + 1 < ends[i] else len(blocks)
            block.set_modules_to_forward_prefetch(blocks[i + 1 : stop][:ahead])
        if back > 1 and i > 0:  # one is what FSDP2 does by itself
            block.set_modules_to_backward_prefetch(blocks[max(0, i - back) : i][::-1])


def _blocks(decoder: nn.Module) -> Iterator[nn.Module]:
    blocks = decoder.blocks
    assert isinstance(blocks, nn.ModuleDict)
    return iter(blocks.values())


def _reshard_without_grad(decoder: nn.Module, inputs: Any, outputs: Any) -> None:
    # Units that stay gathered after their forward wait for a backward to shard them again. Without
    # one, the module would show its gathered, rounded weights to whoever saves or loads next.
    if not torch.is_grad_enabled():
        for unit in _units(decoder):
            unit.reshard()


def _units(decoder: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in decoder.modules() if isinstance(module, FSDPModule))
