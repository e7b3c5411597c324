"""Tensor parallelism with sequence parallelism (Megatron-LM, 1909.08053; 2205.05198): which part of
each parameter a rank of the tp axis holds.

Parameters are DTensors on the tp axis, so that FSDP2 shards them further, checkpoints keep global
names and shapes, and initialisation finds its place; the modules compute on the local parts, and
their collectives are explicit (`models/collectives`).
"""

from __future__ import annotations

import logging

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from stepwell.models.axes import axes_of, divided_dim
from stepwell.models.layers import Linear, SharedRows
from stepwell.parallel.mesh import Mesh
from stepwell.sections.model import ModelConfig


def tp_placement(axes: tuple[str, ...], cfg: ModelConfig, tp: int) -> Placement:
    """How `tp` ranks hold a parameter with these logical axes: divided evenly along one, or whole.

    Fewer key/value heads than ranks stay whole: each rank computes the one that its query heads
    use, and the ranks' gradients are summed.
    """
    dim = divided_dim(axes, cfg, tp)
    return Replicate() if dim is None else Shard(dim)


def apply_tensor_parallel(decoder: nn.Module, mesh: Mesh, cfg: ModelConfig) -> nn.Module:
    """Turns the parameters of a decoder (or a piece of one) on the meta device into DTensors over
    the tp axis, in place; returns it. Without such an axis nothing changes."""
    if mesh.device_mesh is None or mesh.tp_group is None:
        return decoder
    axis, tp = mesh.device_mesh["tp"], mesh.sizes.tp
    for name, parameter in list(decoder.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        placement = tp_placement(axes_of(name), cfg, tp)
        laid_out = distribute_tensor(parameter.detach(), axis, [placement], src_data_rank=None)
        module = decoder.get_submodule(owner)
        setattr(module, leaf, nn.Parameter(laid_out, parameter.requires_grad))
        shares_heads = "kv_heads" in axes_of(name) and placement.is_replicate()
        if shares_heads and isinstance(module, Linear):
            start = mesh.place.tp * cfg.num_kv_heads // tp * cfg.head_dim
            module.rows = SharedRows(mesh.tp_group, start, start + cfg.head_dim)
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_not_about_order)
    return decoder


def _not_about_order(record: logging.LogRecord) -> bool:
    # Gathering what FSDP2 and tensor parallelism both shard takes two steps, which torch finds
    # worth a warning on every rank. Nothing is reduced there.
    return "sequential all_gather operations" not in record.getMessage()
