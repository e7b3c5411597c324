"""The machines that ranks run on, and the link that each axis of a layout crosses. No torch.

Rates of links are the vendors' figures per accelerator and direction, as collected in Stas Bekman's
"Machine Learning Engineering" (network, compute/accelerator); what a program gets of them is the
step's affair (`plan/steptime/step`). Machines' memory where nobody says how much: of servers with
scale-up links 2 TiB beside 8 (DGX A100, H100); of inference cards what AWS's largest machines of
them have (g5.48xlarge and g6.48xlarge 768 GiB, g6e.48xlarge 1,536 GiB, of 8 each: AWS Batch's user
guide, "GPU jobs", and torchx, specs/named_resources_aws.py); of workstation and consumer boards
64 GiB a card, which is an assumption.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from stepwell.hardware import GIB, Accelerator, accelerator
from stepwell.plan.units import nearest_of
from stepwell.schema import Above0, Positive, Section, explain, read_toml
from stepwell.types import ConfigError

Link = Literal["scaleup", "pcie", "network"]

GB, GBIT = 1e9, 1e9 / 8
PCIE_GB_PER_S = 31.5  # PCIe 4.0 x 16
USUAL_HOST_GIB = 256  # beside each accelerator
WORKSTATION_HOST_GIB = 64
NETWORK_GBIT_PER_S = 100.0  # where the table has none


class Links(NamedTuple):
    """GB/s of the scale-up links (NVLink, xGMI; None: there are none) and of PCIe, Gbit/s of the
    usual network, gpus_per_node, how many share the scale-up links, and the machine's own memory
    beside each, in GiB."""

    scaleup: float | None
    pcie: float | None
    network: float | None
    gpus_per_node: int = 8
    scaleup_gpus: int = 8
    host_gib: int = USUAL_HOST_GIB


LINKS: dict[str, Links] = {
    "v100-16g": Links(150, 16, 50),
    "v100-32g": Links(150, 16, 100),
    "a100-40g": Links(300, 31, 200),
    "a100-80g": Links(300, 31, 200),
    "a100-80g-pcie": Links(300, 31, None, 8, 2),
    "a800": Links(200, 31, 200),
    "h100-sxm": Links(450, 63, 400),
    "h100-96g-hbm2e-500w": Links(450, 63, 400),
    "h100-nvl": Links(300, 63, None, 8, 2),
    "h100-pcie": Links(300, 63, None, 8, 2),
    "h800": Links(200, 63, 400),
    "h20": Links(450, 63, 400),
    "h200": Links(450, 63, 400),
    "gh200": Links(450, 450, 400, 1, 1),
    "b200": Links(900, 63, 400),
    "gb200": Links(900, 450, 400, 4, 72),
    "b300": Links(900, 63, 800),
    "gb300": Links(900, 450, 800, 4, 72),
    "mi250x": Links(350, 31, 200),
    "mi300x": Links(448, 63, 400),
    "mi325x": Links(448, 63, 400),
    "mi350x": Links(535.5, 63, 400),
    "mi355x": Links(535.5, 63, 400),
    "l40s": Links(None, 31, None, 8, 1, 192),
    "l4": Links(None, 31, None, 8, 1, 96),
    "a10": Links(None, 31, None, 8, 1, 96),
    "rtx-a6000": Links(56, 31, None, 8, 2, WORKSTATION_HOST_GIB),
    "rtx3090": Links(56, 31, None, 8, 2, WORKSTATION_HOST_GIB),
    "rtx4090": Links(None, 31, None, 8, 1, WORKSTATION_HOST_GIB),
    "rtx5090": Links(None, 63, None, 8, 1, WORKSTATION_HOST_GIB),
}


@dataclass(frozen=True)
class Cluster:
    """Machines of gpus_per_node accelerators; scaleup_gpus of them share fast links (an NVLink
    domain, which may span machines, or hold only part of one). Rates are per accelerator and
    direction, in bytes/s; scaleup's is PCIe's where there are no such links. host_memory_bytes: of
    a machine, if known. ring_share: of the network's rate, what collectives get where that is less
    than what a message between two gets."""

    accelerator: Accelerator
    gpus_per_node: int
    scaleup_gpus: int
    scaleup_bytes_per_s: float
    network_bytes_per_s: float
    pcie_bytes_per_s: float
    host_memory_bytes: int | None = None
    name: str = ""
    ring_share: float = 1.0

    def host_room_bytes(self, num_used: int) -> int:
        """Of a machine whose first num_used accelerators are used; where nobody says, what is usual
        beside as many: a smaller machine may have no others."""
        usual = LINKS[self.accelerator.name].host_gib * GIB * min(num_used, self.gpus_per_node)
        return self.host_memory_bytes or usual

    def link(self, num_ranks: int, stride: int, world: int) -> Link:
        """The slowest link that any group of an axis crosses: groups of num_ranks ranks, `stride`
        apart, next to each other on `world` ranks."""
        if not _straddles(self.scaleup_gpus, num_ranks, stride, world):
            return "scaleup"
        return "network" if _straddles(self.gpus_per_node, num_ranks, stride, world) else "pcie"


def _straddles(size: int, num_ranks: int, stride: int, world: int) -> bool:
    """Whether a border between `size` ranks and the next cuts through a group. num_ranks x stride
    ranks in a row are whole groups; a border anywhere within them cuts through one."""
    return num_ranks > 1 and size < world and size % (num_ranks * stride) != 0


class ClusterFile(Section):
    """A cluster as a TOML file describes it. gpu: a name of `hardware`. What is left out is as
    usual for the accelerator. *_gb_per_s: gigabytes a second, accelerator and direction;
    network_gbit_per_s: gigabits. memory_gib: of an accelerator; host_memory_gib: of a machine."""

    gpu: str
    name: str | None = None
    gpus_per_node: Positive | None = None
    scaleup_gpus: Positive | None = None
    scaleup_gb_per_s: Above0 | None = None
    network_gbit_per_s: Above0 | None = None
    pcie_gb_per_s: Above0 | None = None
    memory_gib: Above0 | None = None
    host_memory_gib: Above0 | None = None


def cluster(gpu: str) -> Cluster:
    """The usual machines of an accelerator; ConfigError for a name that is not in `hardware`."""
    device, links = accelerator(gpu), LINKS[gpu]
    pcie = (links.pcie or PCIE_GB_PER_S) * GB
    return Cluster(
        accelerator=device,
        gpus_per_node=links.gpus_per_node,
        scaleup_gpus=links.scaleup_gpus,
        scaleup_bytes_per_s=links.scaleup * GB if links.scaleup else pcie,
        network_bytes_per_s=(links.network or NETWORK_GBIT_PER_S) * GBIT,
        pcie_bytes_per_s=pcie,
        name=gpu,
    )


def read_cluster(path: str | Path) -> Cluster:
    """A cluster of one's own; ConfigError as `read_toml`, for unknown keys and for rates that are
    not positive, or where machines and scale-up domains do not divide each other evenly."""
    values = read_toml(path, "cluster file")
    try:
        file = ClusterFile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, ClusterFile, str(path))) from error
    found = cluster(file.gpu)
    device = found.accelerator
    if file.memory_gib is not None:
        device = replace(device, memory_bytes=round(file.memory_gib * GIB))
    scaled = {
        "scaleup_bytes_per_s": (file.scaleup_gb_per_s, GB),
        "network_bytes_per_s": (file.network_gbit_per_s, GBIT),
        "pcie_bytes_per_s": (file.pcie_gb_per_s, GB),
    }
    given: dict[str, Any] = {k: v * unit for k, (v, unit) in scaled.items() if v is not None}
    if file.scaleup_gb_per_s is None and LINKS[file.gpu].scaleup is None:
        given["scaleup_bytes_per_s"] = given.get("pcie_bytes_per_s", found.pcie_bytes_per_s)
    for key in ("gpus_per_node", "scaleup_gpus"):
        if (count := getattr(file, key)) is not None:
            given[key] = count
    if file.host_memory_gib is not None:
        given["host_memory_bytes"] = round(file.host_memory_gib * GIB)
    given = {"scaleup_gpus": _usual_domain(found, given), **given}
    made = replace(found, accelerator=device, name=file.name or file.gpu, **given)
    _check_domain(made, str(path))
    return made


def _usual_domain(usual: Cluster, given: Mapping[str, Any]) -> int:
    """How many share the scale-up links where only the machine's size was said: as usual, but all
    of a machine where that is usual, and no more than one has."""
    per_node = given.get("gpus_per_node", usual.gpus_per_node)
    if usual.scaleup_gpus == usual.gpus_per_node:
        return per_node
    inside = usual.scaleup_gpus < usual.gpus_per_node
    return min(usual.scaleup_gpus, per_node) if inside else usual.scaleup_gpus


def _check_domain(made: Cluster, where: str) -> None:
    domain, per_node = made.scaleup_gpus, made.gpus_per_node
    if domain % per_node and per_node % domain:
        legal = [n for n in range(1, per_node) if per_node % n == 0]
        legal += [per_node * n for n in (domain // per_node, domain // per_node + 1) if n]
        raise ConfigError(
            f"{where}: scaleup_gpus={domain} must divide gpus_per_node={per_node}, or be a "
            f"multiple of it (a domain of several machines); {nearest_of(domain, legal)}"
        )
