"""Ranks and the mesh they form: a value that is passed along, never a global.

The dense view of the ranks is (dp_replicate, dp_shard) today; pipeline, context and tensor axes
will join it as (pp, dp_replicate, dp_shard, cp, tp).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stepwell.config import LayoutConfig
from stepwell.types import ConfigError

AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Mesh:
    """This process's place among the ranks.

    device_mesh: the dense view with dims `AXES`, or None for a single process without a group.
    background_group: a second CPU group for work that runs beside training (asynchronous
    checkpoints), so that its messages never mix with the step's.
    """

    world: int
    rank: int
    local_rank: int
    device: torch.device
    dp_replicate: int = 1
    dp_shard: int = 1
    device_mesh: DeviceMesh | None = None
    background_group: dist.ProcessGroup | None = None

    @property
    def data_rank(self) -> int:
        """Number of this rank's share of the global batch."""
        return self.rank

    @property
    def data_world(self) -> int:
        """Into how many shares the global batch is split."""
        return self.dp_replicate * self.dp_shard

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def axis_sizes(layout: LayoutConfig, world: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard) for `world` ranks; raises ConfigError if they do not fill it."""
    replicate, shard = layout.dp_replicate, layout.dp_shard
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    if world % replicate:
        best = min(divisors, key=lambda d: (abs(d - replicate), d))
        raise ConfigError(
            f"layout.dp_replicate={replicate} must divide the number of ranks, {world}; "
            f"the nearest that does is {best}"
        )
    fitting = world // replicate
    if shard == -1:
        return replicate, fitting
    if replicate * shard != world:
        raise ConfigError(
            f"layout.dp_replicate={replicate} x layout.dp_shard={shard} = {replicate * shard} "
            f"must equal the number of ranks, {world}; with this dp_replicate the only legal "
            f"dp_shard is {fitting} (or -1), or start {replicate * shard} ranks"
        )
    return replicate, shard


def launched_ranks(environ: Mapping[str, str]) -> tuple[int, int, int] | None:
    """(world, rank, local_rank) as torchrun or Slurm's wrapper sets them, or None."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    rank = int(environ["RANK"])
    return int(environ["WORLD_SIZE"]), rank, int(environ.get("LOCAL_RANK", rank))


def init_distributed(
    layout: LayoutConfig, device_type: str = "cpu", timeout_s: float = 600.0
) -> Mesh:
    """Joins the process group that torchrun announces, or stands alone without any.

    CPU ranks talk over gloo, CUDA ranks over nccl (with gloo beside it for CPU tensors). A group
    that this process has joined before is used again. Raises ConfigError for a layout that does
    not fill the world, before anything is started.
    """
    world, rank, local_rank = launched_ranks(os.environ) or (1, 0, 0)
    grouped = launched_ranks(os.environ) is not None
    replicate, shard = axis_sizes(layout, world)
    device = torch.device("cpu")
    if device_type == "cuda":
        num_devices = torch.cuda.device_count()
        if local_rank >= num_devices:
            raise ConfigError(
                f"local rank {local_rank} needs a CUDA device of its own but this machine shows "
                f"{num_devices}; start at most {num_devices} processes here"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if not grouped:
        return Mesh(world=1, rank=0, local_rank=0, device=device)
    if not dist.is_initialized():
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device_type == "cuda" else None,
        )
    background = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(background, dist.ProcessGroup)
    return Mesh(
        world=world,
        rank=rank,
        local_rank=local_rank,
        device=device,
        dp_replicate=replicate,
        dp_shard=shard,
        device_mesh=init_device_mesh(device_type, (replicate, shard), mesh_dim_names=AXES),
        background_group=background,
    )


def shutdown(mesh: Mesh) -> None:
    """Leaves the process group, if there is one."""
    if mesh.device_mesh is not None and dist.is_initialized():
        dist.destroy_process_group()


def all_reduce_sum(x: Tensor, mesh: Mesh) -> Tensor:
    """The sum of `x` over all ranks, as a new tensor."""
    return _all_reduce(x, mesh, dist.ReduceOp.SUM)


def all_reduce_max(x: Tensor, mesh: Mesh) -> Tensor:
    """The element-wise maximum of `x` over all ranks, as a new tensor."""
    return _all_reduce(x, mesh, dist.ReduceOp.MAX)


def _all_reduce(x: Tensor, mesh: Mesh, op: Any) -> Tensor:
    total = x.detach().clone()
    if mesh.device_mesh is not None:
        dist.all_reduce(total, op=op)
    return total


def barrier(mesh: Mesh) -> None:
    """Returns once every rank has come here."""
    if mesh.device_mesh is not None:
        dist.barrier()


def broadcast_object(value: Any, mesh: Mesh, source: int = 0) -> Any:
    """Rank `source`'s value, on every rank. Only for values of our own making: it is pickled."""
    if mesh.device_mesh is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
    return box[0]


def all_gather_objects(value: Any, mesh: Mesh, background: bool = False) -> list[Any]:
    """Every rank's value, in rank order. background: over the group beside training's."""
    if mesh.device_mesh is None:
        return [value]
    values: list[Any] = [None] * mesh.world
    dist.all_gather_object(values, value, group=mesh.background_group if background else None)
    return values
