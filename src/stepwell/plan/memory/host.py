"""What a run keeps in the memory of each machine: offload, checkpoints on their way to disk,
batches, processes. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from stepwell.config import Run
from stepwell.hardware import GIB
from stepwell.parallel.lever_rules import host_bytes
from stepwell.parallel.rules import axis_sizes
from stepwell.plan.cluster import Cluster
from stepwell.plan.memory.models import predict_models
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

# Of a process before it has a model: 0.3 GiB measured on a CPU (torch and the engine imported);
# CUDA's libraries and context take about 2 more.
PROCESS_BYTES = {"cpu": round(0.3 * GIB), "cuda": round(2.3 * GIB)}
# Of a token of a batch: token, target and position in 8 bytes each, weight and document in 4.
BATCH_BYTES_PER_TOKEN = 32
# The batch at work and the one that is drawn.
NUM_BATCHES = 2
# Parts of `host_bytes` that are in pinned memory (a quarter: the buffer between device and host;
# a half: parameters and gradients, not the moments).
PINNED = {"offload.optimizer": 0.25, "offload.parameters": 0.5, "offload.activations": 1.0}


@dataclass(frozen=True)
class HostMemory:
    """items: bytes on a machine, by what. pinned: the part of them that cannot be swapped out;
    torch rounds each pinned allocation up to a power of two, so it may take up to twice as much.
    available: of the machine, None where the cluster does not say."""

    ranks_per_machine: int
    items: dict[str, int]
    pinned: int
    available: int | None = None

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def most(self) -> int:
        """If every pinned allocation is rounded up as far as can be."""
        return self.total + self.pinned

    @property
    def fits(self) -> bool | None:
        """None where the machine's memory is not known."""
        return None if self.available is None else self.total <= self.available

    @property
    def shortage(self) -> str | None:
        """What is wrong if it does not fit."""
        if self.available is None or self.total <= self.available:
            return None
        largest = sorted(self.items, key=lambda key: -self.items[key])[:3]
        parts = ", ".join(f"{key} {self.items[key] / GIB:.1f} GiB" for key in largest)
        return (
            f"{self.total / GIB:.1f} GiB of host memory for {self.ranks_per_machine} ranks a "
            f"machine ({parts}) are more than its {self.available / GIB:.1f} GiB"
        )

    def lines(self) -> list[str]:
        known = "" if self.available is None else f" of {self.available / GIB:,.0f} GiB"
        head = f"host memory of a machine ({self.ranks_per_machine} ranks): "
        found = [f"{head}{self.total / GIB:,.1f} GiB{known}, {self.pinned / GIB:,.1f} pinned"]
        found += [f"  {key:<20} {n / GIB:>9,.2f} GiB" for key, n in self.items.items()]
        return found + ([self.shortage] if self.shortage else [])

    def as_json(self) -> dict[str, Any]:
        return {
            "ranks_per_machine": self.ranks_per_machine,
            "items": self.items,
            "total": self.total,
            "pinned": self.pinned,
            "available": self.available,
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
    here = min(world, cluster.gpus_per_node)
    offloaded = {f"offload.{key}": n for key, n in host_bytes(run, sizes).items()}
    models = predict_models(run, world, critic)
    of_rank = dict(offloaded)
    parked = models["reference"].host if "reference" in models else 0
    if parked:
        of_rank["reference"] = parked
    staged = staged_bytes(run, world, critic)
    if staged:
        of_rank["checkpoint"] = staged
    of_rank["batches"] = batch_bytes(run, sizes.dp_replicate * sizes.dp_shard)
    of_rank["processes"] = PROCESS_BYTES[device]
    pinned = sum(PINNED[key] * n for key, n in offloaded.items()) + parked
    return HostMemory(
        ranks_per_machine=here,
        items={key: n * here for key, n in of_rank.items()},
        pinned=round(pinned * here),
        available=cluster.host_memory_bytes,
    )


def staged_bytes(run: Run, world: int, critic: ModelConfig | None = None) -> int:
    """Of a rank: what an asynchronous checkpoint copies to the host before it is written, masters
    and moments of what is trained. 0 for one that is not asynchronous."""
    if not run.checkpoint.asynchronous:
        return 0
    plain = run.model_copy(
        update={"offload": run.offload.model_copy(update={"optimizer": False, "parameters": False})}
    )
    models = predict_models(plain, world, critic)
    trained = [models[name] for name in ("policy", "critic") if name in models]
    return sum(model.master + model.moments for model in trained)


def batch_bytes(run: Run, num_shares: int) -> int:
    """Of a rank's rows of a step."""
    rows = -(-run.train.global_batch_rows // num_shares)
    return NUM_BATCHES * prod((rows, run.data.seq_len, BATCH_BYTES_PER_TOKEN))
