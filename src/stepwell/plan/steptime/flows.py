"""How long a step's collectives take by themselves, by axis and phase; what hides them is the
step's affair. No torch.

A ring passes a group's bytes through every machine's border once, on as many network cards as the
group has ranks there: its rate is the smaller of the scale-up links' and the network's times those
ranks; inside a machine, between cards that no such links join, PCIe's. An exchange sends every
rank's share through its own card, each token once to a machine that has any of its experts
(DeepSeek-V3, 2412.19437, 3.2.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2

from stepwell.plan.cluster import Cluster
from stepwell.plan.comms.step import Sent

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


def flows(
    sent: Iterable[Sent], machines: Cluster, copies: int = 1, wraps: bool = False
) -> tuple[Flow, ...]:
    """copies: experts that a token goes to. wraps: a pipeline's last rank sends to its first."""
    table: dict[tuple[str, str], list[float]] = {}
    for one in sent:
        sums = table.setdefault((one.axis, one.phase), [0.0] * 5)
        moved_s = one.wire_bytes / machines.scaleup_bytes_per_s
        pcie_s = _pcie_bytes(one, machines) / machines.pcie_bytes_per_s
        for i, value in enumerate((*_one(one, machines, copies, wraps), moved_s, pcie_s)):
            sums[i] += one.calls * value
    return tuple(Flow(axis, phase, *sums) for (axis, phase), sums in table.items())


def _one(sent: Sent, machines: Cluster, copies: int, wraps: bool) -> tuple[float, float, float]:
    """Of one call."""
    if sent.axis == "pp":
        return _to_a_stage(sent, machines, wraps)
    linked = _of_group(sent, machines.scaleup_gpus)
    near = max(linked, _of_group(sent, machines.gpus_per_node))
    num_bytes, hops = sent.wire_bytes, _hops(sent, near)
    if linked >= sent.num_ranks:
        return num_bytes / _scaleup_rate(machines, linked), 0.0, hops
    if near >= sent.num_ranks:
        ways = 1 if sent.kind == "all-to-all" else linked
        return num_bytes / _pcie_rate(machines, ways), 0.0, hops
    if sent.kind == "all-to-all":
        domains = sent.num_ranks / near
        reached = (domains - 1) * (1 - (1 - 1 / domains) ** copies)
        whole = num_bytes * sent.num_ranks / (sent.num_ranks - 1)
        network_s = whole * reached / copies / (machines.ring_share * machines.network_bytes_per_s)
        scaleup_s = num_bytes / machines.scaleup_bytes_per_s
        # Machines pass on inside what arrives from outside, as it arrives.
        return (0.0, network_s, hops) if network_s > scaleup_s else (scaleup_s, 0.0, hops)
    rate = ring_rate(machines, near)
    if rate < machines.scaleup_bytes_per_s:
        return 0.0, num_bytes / rate, hops
    return num_bytes / rate, 0.0, hops


def _of_group(sent: Sent, together: int) -> int:
    """Of a group's ranks, those that are among `together` neighbouring ones."""
    return min(sent.num_ranks, max(1, together // sent.stride))


def _to_a_stage(sent: Sent, machines: Cluster, wraps: bool) -> tuple[float, float, float]:
    far = _far_neighbours(sent, machines, wraps)
    linked = sent.stride < machines.scaleup_gpus
    rate = machines.scaleup_bytes_per_s if linked else _pcie_rate(machines, 1)
    near_s = (1 - far) * sent.wire_bytes / rate
    far_s = far * sent.wire_bytes / machines.network_bytes_per_s
    return near_s, far_s, far + (1 - far) * NEAR_HOP


def _pcie_bytes(sent: Sent, machines: Cluster) -> float:
    """Of one call, over the link between a GPU and its machine: all without faster links; with
    them what leaves their reach, to which a ring's ranks there have a card each."""
    if machines.scaleup_gpus == 1:
        return sent.wire_bytes
    near = _of_group(sent, machines.scaleup_gpus)
    return 0.0 if near >= sent.num_ranks else sent.wire_bytes / near


def _far_neighbours(sent: Sent, machines: Cluster, wraps: bool) -> float:
    """Of the two neighbours of the stage that has most of them on other machines, how many. Stages
    that share machines have one there beside a border; one that is left alone on the last machine
    has both, if its next is the first stage's rank again."""
    if sent.link(machines) != "network":
        return 0.0
    each = max(machines.scaleup_gpus, machines.gpus_per_node) // sent.stride
    alone = each <= 1 or (wraps and sent.num_ranks % each == 1)
    return 1.0 if alone else 0.5


def ring_rate(machines: Cluster, near: int) -> float:
    """Bytes a second of a rank in a ring through several machines, `near` of its ranks in each."""
    network = near * machines.ring_share * machines.network_bytes_per_s
    return min(network, machines.scaleup_bytes_per_s)


def _pcie_rate(machines: Cluster, linked: int) -> float:
    """The same between cards of one machine, `linked` of which have faster links among them."""
    return min(linked * machines.pcie_bytes_per_s, machines.scaleup_bytes_per_s)


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
