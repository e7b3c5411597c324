"""What a run keeps in the memory of each machine: offload, checkpoints on their way to disk,
batches, processes. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from stepwell.config import Run
from stepwell.hardware import GIB
from stepwell.parallel.lever_rules import host_bytes
from stepwell.parallel.rules import axis_sizes
from stepwell.plan.cluster import Cluster
from stepwell.plan.memory.models import ModelBytes, critic_of, predict_models
from stepwell.plan.units import in_gib
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

# Of a process before it has a model: 0.3 GiB measured on a CPU (torch and the engine imported);
# CUDA's libraries and context take about 2 more.
PROCESS_BYTES = {"cpu": round(0.3 * GIB), "cuda": round(2.3 * GIB)}
# Of a token of a batch: token, target and position in 8 bytes each, weight and document in 4.
BATCH_BYTES_PER_TOKEN = 32
# The batch at work and the one that is drawn.
NUM_BATCHES = 2
# What leaves a checkpoint's copy away: of a recipe, and beside --model.
NOT_STAGED = "checkpoint.asynchronous=false (--checkpoint synchronous)"
# Parts of `host_bytes` that are in pinned memory (a quarter: the buffer between device and host;
# a half: parameters and gradients, not the moments), and a reference that is parked there.
PINNED = {
    "offload.optimizer": 0.25,
    "offload.parameters": 0.5,
    "offload.activations": 1.0,
    "reference": 1.0,
}


@dataclass(frozen=True)
class HostMemory:
    """items: bytes on a machine, by what. pinned: the part of them that cannot be swapped out;
    torch rounds each pinned allocation up to a power of two, so it may take up to twice as much.
    room: what the machine has; known: whether the cluster says so."""

    ranks_per_machine: int
    items: dict[str, int]
    pinned: int
    room: int
    known: bool = False

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def most(self) -> int:
        """If every pinned allocation is rounded up as far as can be."""
        return self.total + self.pinned

    @property
    def fits(self) -> bool:
        return self.total <= self.room

    @property
    def shortage(self) -> str | None:
        """What is wrong if it does not fit, and from when on it would."""
        if self.fits:
            return None
        largest = sorted(self.items, key=lambda key: -self.items[key])[:3]
        parts = ", ".join(f"{key} {self.items[key] / GIB:.1f} GiB" for key in largest)
        many = "1 rank" if self.ranks_per_machine == 1 else f"{self.ranks_per_machine} ranks"
        less = self.total - self.items.get("checkpoint", 0)
        instead = "" if less > self.room else f", or with {NOT_STAGED}"
        has = "its" if self.known else "the usual"
        return (
            f"{self.total / GIB:.1f} GiB of host memory for {many} a machine ({parts}) are more "
            f"than {has} {self.room / GIB:.1f} GiB; it fits from host_memory_gib="
            f"{ceil(self.total / GIB)} on{instead}"
        )

    @property
    def text(self) -> str:
        has = f"{self.room / GIB:,.1f} GiB{'' if self.known else ' as is usual'}"
        items = ", ".join(f"{key} {in_gib(n)}" for key, n in self.items.items())
        return f"{in_gib(self.total)} of {has} ({items})"

    def as_json(self) -> dict[str, Any]:
        return {
            "ranks_per_machine": self.ranks_per_machine,
            "items": self.items,
            "total": self.total,
            "pinned": self.pinned,
            "available": self.room if self.known else None,
            "room": self.room,
            "fits": self.fits,
        }


def host_memory(
    run: Run,
    world: int,
    cluster: Cluster,
    critic: ModelConfig | None = None,
    device: str = "cuda",
) -> HostMemory:
    """Of the fullest machine. critic: as in `models.predict_models`.

    Files that are mapped into memory (token stores, weights as they are read) are not counted: the
    system gives their pages back. Raises ConfigError when the ranks cannot be laid out.
    """
    if world < 1:
        raise ConfigError(f"world={world} must be at least 1")
    sizes = axis_sizes(run.layout, world)
    of_rank = {f"offload.{key}": n for key, n in host_bytes(run, sizes).items()}
    if (own := critic_of(run, critic)) is not None:
        for key, num_bytes in host_bytes(own, sizes).items():
            if key != "activations":  # of one model at a time
                of_rank[f"offload.{key}"] += num_bytes
    models = predict_models(without_offload(run), world, critic)
    parked = models["reference"].host if "reference" in models else 0
    if parked:
        of_rank["reference"] = parked
    if run.checkpoint.asynchronous:
        of_rank["checkpoint"] = staged_bytes(models)
    rows = run.train.global_batch_rows
    of_rank["batches"] = batch_bytes(rows, run.data.seq_len, sizes.dp_replicate * sizes.dp_shard)
    of_rank["processes"] = PROCESS_BYTES[device]
    return of_machine(of_rank, world, cluster)


def of_machine(of_rank: Mapping[str, float], world: int, cluster: Cluster) -> HostMemory:
    """of_rank: bytes of one of `world` ranks, by what."""
    here = min(world, cluster.gpus_per_node)
    pinned = sum(PINNED.get(key, 0.0) * n for key, n in of_rank.items())
    return HostMemory(
        ranks_per_machine=here,
        items={key: round(n * here) for key, n in of_rank.items()},
        pinned=round(pinned * here),
        room=cluster.host_room_bytes(here),
        known=cluster.host_memory_bytes is not None,
    )


def without_offload(run: Run) -> Run:
    """Of parameters and the optimiser: wherever they live, a checkpoint copies them."""
    away = run.offload.model_copy(update={"optimizer": False, "parameters": False})
    return run.model_copy(update={"offload": away})


def staged_bytes(models: Mapping[str, ModelBytes]) -> int:
    """Of a rank: what an asynchronous checkpoint copies to the host before it is written, masters
    and moments of what is trained. models: without offload."""
    trained = [models[name] for name in ("policy", "critic") if name in models]
    return sum(model.master + model.moments for model in trained)


def batch_bytes(global_rows: int, seq_len: int, num_shares: int) -> int:
    """Of a rank's rows of a step."""
    return NUM_BATCHES * prod((-(-global_rows // num_shares), seq_len, BATCH_BYTES_PER_TOKEN))
