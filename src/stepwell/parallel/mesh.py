"""Ranks and the mesh they form: a value that is passed along, never a global.

The dense view of the ranks is (pp, dp_replicate, dp_shard, cp, tp), the last varying fastest. FSDP2
shards over dp_shard and cp together, so its view is (pp, dp_replicate, fsdp, tp). Experts will be
laid out on the sparse view (pp, edp, ep) of the same ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stepwell.launch.environ import rank_timeout_s
from stepwell.parallel.remedies import divisors
from stepwell.parallel.rules import AxisSizes, axis_sizes
from stepwell.sections.layout import LayoutConfig
from stepwell.types import ConfigError, StepwellError

Result = TypeVar("Result")

ALONE = AxisSizes()
AXES = ("pp", "dp_replicate", "fsdp", "tp")


@dataclass(frozen=True)
class Mesh:
    """This process's place among the ranks.

    sizes: the dense view. device_mesh: FSDP2's view with dims `AXES`, or None for a single process
    without a group. cp_group: the ranks that share this rank's rows, None without context
    parallelism.
    background_group: a second CPU group for work that runs beside training (asynchronous
    checkpoints), so that its messages never mix with the step's.
    """

    world: int
    rank: int
    local_rank: int
    device: torch.device
    sizes: AxisSizes = ALONE
    device_mesh: DeviceMesh | None = None
    cp_group: dist.ProcessGroup | None = None
    background_group: dist.ProcessGroup | None = None

    @property
    def place(self) -> AxisSizes:
        """This rank's number on each axis of the dense view."""
        rest, numbers = self.rank, []
        for size in reversed(self.sizes):
            numbers.append(rest % size)
            rest //= size
        return AxisSizes(*reversed(numbers))

    @property
    def data_rank(self) -> int:
        """Number of this rank's share of the global batch; pipeline, context and tensor ranks have
        the same."""
        return self.place.dp_replicate * self.sizes.dp_shard + self.place.dp_shard

    @property
    def data_world(self) -> int:
        """Into how many shares the global batch is split."""
        return self.sizes.dp_replicate * self.sizes.dp_shard

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def counts_rows(self) -> bool:
        """Whether this rank is the one that counts its share's rows: the others of its data share
        have the same."""
        return self.counts_tokens and self.place.cp == 0

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank counts its tokens of the rows: its pipeline's and tensor axis's other
        ranks hold the same, its context axis's others."""
        return self.place.pp == 0 and self.place.tp == 0

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        return self._group("tp", self.sizes.tp)

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        return self._group("pp", self.sizes.pp)

    def _group(self, axis: str, size: int) -> dist.ProcessGroup | None:
        if self.device_mesh is None or size == 1:
            return None
        return self.device_mesh.get_group(axis)


def fsdp_sizes(layout: LayoutConfig, sizes: AxisSizes) -> tuple[int, int, int, int]:
    """FSDP2's view, with dims `AXES`: without any sharding (zero 0) all data ranks replicate."""
    replicate, shard = sizes.dp_replicate, sizes.dp_shard * sizes.cp
    if layout.zero == 0:
        replicate, shard = replicate * shard, 1
    return sizes.pp, replicate, shard, sizes.tp


def sparse_view(mesh: Mesh, ep: int) -> DeviceMesh:
    """The same ranks as (pp, edp, ep): `ep` neighbours divide the experts, and the edp ranks of
    one expert are its data parallel ranks. Every rank must call it together.

    Raises ConfigError if ep does not divide the ranks of a pipeline stage.
    """
    stage = mesh.world // mesh.sizes.pp
    if mesh.device_mesh is None:
        raise ConfigError("a single process without a group has no sparse view")
    if stage % ep:
        raise ConfigError(
            f"ep={ep} must divide the {stage} ranks of a pipeline stage; the nearest that does is "
            f"{divisors(stage, ep)[0]}"
        )
    return init_device_mesh(
        mesh.device.type, (mesh.sizes.pp, stage // ep, ep), mesh_dim_names=("pp", "edp", "ep")
    )


def launched_ranks(environ: Mapping[str, str]) -> tuple[int, int, int] | None:
    """(world, rank, local_rank) as torchrun or Slurm's wrapper sets them, or None."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    rank = int(environ["RANK"])
    return int(environ["WORLD_SIZE"]), rank, int(environ.get("LOCAL_RANK", rank))


def init_distributed(
    layout: LayoutConfig, device_type: str = "cpu", timeout_s: float | None = None
) -> Mesh:
    """Joins the process group that torchrun announces, or stands alone without any.

    CPU ranks talk over gloo, CUDA ranks over nccl (with gloo beside it for CPU tensors). A group
    that this process has joined before is used again. A collective waits timeout_s for the last
    rank (by default what `--rank-timeout` says). Raises ConfigError for a layout that does not
    fill the world, before anything is started.
    """
    limit = timedelta(seconds=timeout_s or rank_timeout_s(os.environ))
    launched = launched_ranks(os.environ)
    world, rank, local_rank = launched or (1, 0, 0)
    sizes = axis_sizes(layout, world)
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
    if launched is None:
        return Mesh(world=1, rank=0, local_rank=0, device=device)
    if not dist.is_initialized():
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            timeout=limit,
            device_id=device if device_type == "cuda" else None,
        )
    background = dist.new_group(backend="gloo", timeout=limit)
    assert isinstance(background, dist.ProcessGroup)
    return mesh_of_ranks(layout, sizes, rank, local_rank, device, background, limit)


def mesh_of_ranks(
    layout: LayoutConfig,
    sizes: AxisSizes,
    rank: int,
    local_rank: int,
    device: torch.device,
    background: dist.ProcessGroup | None = None,
    limit: timedelta | None = None,
) -> Mesh:
    """The place of `rank` in the process group that this process has joined. limit: how long its
    groups' collectives wait for the last rank."""
    world, cp_group = dist.get_world_size(), None
    if sizes.cp > 1:
        outer = world // (sizes.cp * sizes.tp)
        names = ("outer", "cp", "tp")
        cp_mesh = init_device_mesh(device.type, (outer, sizes.cp, sizes.tp), mesh_dim_names=names)
        _limit_waiting(cp_mesh, limit)
        cp_group = cp_mesh.get_group("cp")
    device_mesh = init_device_mesh(device.type, fsdp_sizes(layout, sizes), mesh_dim_names=AXES)
    _limit_waiting(device_mesh, limit)
    return Mesh(
        world=world,
        rank=rank,
        local_rank=local_rank,
        device=device,
        sizes=sizes,
        device_mesh=device_mesh,
        cp_group=cp_group,
        background_group=background,
    )


def _limit_waiting(device_mesh: DeviceMesh, limit: timedelta | None) -> None:
    """Groups of a mesh come with a time limit of their own, whatever the default group's is."""
    if limit is None:
        return
    for group in device_mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(limit, group)


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


def broadcast_object(value: Any, mesh: Mesh) -> Any:
    """Rank 0's value, on every rank. Only for values of our own making: it is pickled."""
    if mesh.device_mesh is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def all_gather_objects(value: Any, mesh: Mesh, background: bool = False) -> list[Any]:
    """Every rank's value, in rank order. background: over the group beside training's."""
    if mesh.device_mesh is None:
        return [value]
    values: list[Any] = [None] * mesh.world
    dist.all_gather_object(values, value, group=mesh.background_group if background else None)
    return values


def on_main(work: Callable[[], Result], mesh: Mesh) -> Result:
    """What rank 0 finds, on every rank; its StepwellError is raised on every rank."""
    result, error = None, None
    if mesh.is_main:
        try:
            result = work()
        except StepwellError as failure:
            error = failure
    result, error = broadcast_object((result, error), mesh)
    if error is not None:
        raise error
    return result
