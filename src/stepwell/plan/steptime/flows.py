"""How long a step's collectives take by themselves, by axis and phase; what hides them is the
step's affair. No torch.

A ring passes a group's bytes through every machine's border once, on as many network cards as the
group has ranks there: its rate is the smaller of the scale-up links' and the network's times those
ranks. An exchange sends every rank's share through its own card, each token once to a machine that
has any of its experts (DeepSeek-V3, 2412.19437, 3.2.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2

from stepwell.plan.cluster import Cluster
from stepwell.plan.comms.collectives import Sent

# Devices that are linked to each other in pairs: up to eight of them, or up to four (boards of four
# A100 or H100 have no switch; NVIDIA's HGX datasheets).
UNSWITCHED = ("v100", "mi")
UNSWITCHED_FOURS = ("a100", "a800", "h100", "h800", "h200", "h20")
# A message inside a machine takes this share of one between machines.
NEAR_HOP = 0.1


@dataclass(frozen=True)
class Flow:
    """Of one axis and phase in a step: seconds at the full rates of the scale-up links and of the
    network, and messages that wait for each other, in hops between machines. moved_s: that the same
    bytes would take over the scale-up links; pcie_s: that those of them which cross a GPU's PCIe
    link take there, at its full rate."""

    axis: str
    phase: str
    scaleup_s: float
    network_s: float
    hops: float
    moved_s: float
    pcie_s: float

    def seconds(self, scaleup: float, network: float, hop_s: float) -> float:
        return self.scaleup_s / scaleup + self.network_s / network + self.hops * hop_s


def flows(sent: Iterable[Sent], machines: Cluster, copies: int = 1) -> tuple[Flow, ...]:
    """copies: experts that a token goes to."""
    table: dict[tuple[str, str], list[float]] = {}
    for one in sent:
        sums = table.setdefault((one.axis, one.phase), [0.0] * 5)
        moved_s = one.wire_bytes / machines.scaleup_bytes_per_s
        pcie_s = _pcie_bytes(one, machines) / machines.pcie_bytes_per_s
        for i, value in enumerate((*_one(one, machines, copies), moved_s, pcie_s)):
            sums[i] += one.calls * value
    return tuple(Flow(axis, phase, *sums) for (axis, phase), sums in table.items())


def _one(sent: Sent, machines: Cluster, copies: int) -> tuple[float, float, float]:
    """Of one call."""
    near = min(sent.num_ranks, max(1, machines.scaleup_gpus // sent.stride))
    num_bytes = sent.wire_bytes
    if sent.axis == "pp":
        far = _far_neighbours(sent, machines)
        near_s = (1 - far) * num_bytes / machines.scaleup_bytes_per_s
        return near_s, far * num_bytes / machines.network_bytes_per_s, far + (1 - far) * NEAR_HOP
    hops = _hops(sent, near)
    if near >= sent.num_ranks:
        return num_bytes / _scaleup_rate(machines, near), 0.0, hops
    if sent.kind == "all-to-all":
        domains = sent.num_ranks / near
        reached = (domains - 1) * (1 - (1 - 1 / domains) ** copies)
        whole = num_bytes * sent.num_ranks / (sent.num_ranks - 1)
        network_s = whole * reached / copies / machines.network_bytes_per_s
        scaleup_s = num_bytes / machines.scaleup_bytes_per_s
        # Machines pass on inside what arrives from outside, as it arrives.
        return (0.0, network_s, hops) if network_s > scaleup_s else (scaleup_s, 0.0, hops)
    rate = ring_rate(machines, near)
    if rate < machines.scaleup_bytes_per_s:
        return 0.0, num_bytes / rate, hops
    return num_bytes / rate, 0.0, hops


def _pcie_bytes(sent: Sent, machines: Cluster) -> float:
    """Of one call, over the link between a GPU and its machine: all without faster links; with
    them what leaves their reach, to which a ring's ranks there have a card each."""
    if machines.scaleup_gpus == 1:
        return sent.wire_bytes
    near = min(sent.num_ranks, max(1, machines.scaleup_gpus // sent.stride))
    return 0.0 if near >= sent.num_ranks else sent.wire_bytes / near


def _far_neighbours(sent: Sent, machines: Cluster) -> float:
    """Of a stage's two neighbours, those on other machines; of stages that share machines, the one
    beside a machine's border."""
    if sent.stride * sent.num_ranks <= machines.scaleup_gpus:
        return 0.0
    return 1.0 if sent.stride >= machines.scaleup_gpus else 0.5


def ring_rate(machines: Cluster, near: int) -> float:
    """Bytes a second of a rank in a ring through several machines, `near` of its ranks in each."""
    return min(near * machines.network_bytes_per_s, machines.scaleup_bytes_per_s)


def _scaleup_rate(machines: Cluster, num_ranks: int) -> float:
    """Without a switch a few ranks use the links among them only."""
    name, together = machines.accelerator.name, machines.scaleup_gpus
    most = 8 if name.startswith(UNSWITCHED) else 4 if name.startswith(UNSWITCHED_FOURS) else 1
    if 1 < together <= most:
        return machines.scaleup_bytes_per_s * (num_ranks - 1) / (together - 1)
    return machines.scaleup_bytes_per_s


def _hops(sent: Sent, near: int) -> float:
    """Rings wait for every rank in turn, reductions to all climb trees between machines, exchanges
    go out side by side. Groups of one rank a machine (shards beside tensor ranks that fill it)
    gather and scatter in a logarithmic number of steps (PAT: NCCL 2.23's release notes)."""
    if sent.kind == "recv":
        return 0.0  # waited for by whom it is sent
    if sent.kind == "send":
        return NEAR_HOP if near >= sent.num_ranks else 1.0
    machines = sent.num_ranks / near
    inside = NEAR_HOP * (near - 1)
    if sent.kind == "all-reduce":
        return 2 * (inside + log2(machines))
    if sent.kind == "all-to-all":
        return NEAR_HOP + (1.0 if machines > 1 else 0.0)
    if near == 1 and sent.kind in ("all-gather", "reduce-scatter"):
        return log2(machines)
    return inside + machines - 1
