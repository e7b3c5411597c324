"""The machines that a published run was measured on, from the words of a table. No torch."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from stepwell.plan.calibration.cells import Cells, number, optional, optional_count
from stepwell.plan.cluster import GBIT, LINKS, Cluster, cluster
from stepwell.types import DataError

# Other programs' names of devices whose own name is not in `hardware`.
ALIASES = {"blackwell-184gib": "gb200"}
# Of Omni-Path's rate, what rings get, over what they get of other networks' (55 of 400 Gbit/s a
# machine: bigscience, experiments/bandwidth/README.md). Messages between two stages get more: at
# this rate BLOOM's pipelines would be the slower the more stages they have, and they are not.
OMNI_PATH = 0.18
OMNI_PATH_GBIT = 100.0  # of a link, where no rate is said
RATE = r"(\d+(?:\.\d+)?) ?[Gg]b(?:it)?(?:/s|ps)"
SEVERAL = re.compile(rf"(\d+)x [^;]*?{RATE}|(\d+)x{RATE}")
SINGLE = re.compile(rf"{RATE} per ([A-Za-z]+)")
ONE, WHOLE = ("gpu", "accelerator", "card"), ("node", "machine", "server", "host")


def machines_of(cells: Cells) -> Cluster:
    """Raises ConfigError for a device that `hardware` has not, DataError for machines that cannot
    be."""
    machines, given = cluster(_device(cells)), dict[str, Any]()
    if (per_node := optional_count(cells, "gpus_per_node")) is not None:
        given["gpus_per_node"] = per_node
        domain = machines.scaleup_gpus
        if domain == machines.gpus_per_node:
            given["scaleup_gpus"] = per_node
        elif domain % per_node and per_node % domain:
            raise DataError(
                f"gpus_per_node={per_node}: {domain} {machines.name} share fast links, which is "
                "neither a multiple nor a part of it"
            )
    network = _network(cells, per_node or machines.gpus_per_node)
    if network is not None:
        given["network_bytes_per_s"] = network
    if "omni-path" in cells.get("interconnect", "").casefold():
        given["ring_share"] = OMNI_PATH
    return replace(machines, **given)


def _device(cells: Cells) -> str:
    """In any spelling of capitals. Raises DataError where the name is of several."""
    if not cells.get("gpu"):
        raise DataError("no gpu printed")
    name = cells["gpu"].casefold()
    name = ALIASES.get(name, name)
    several = [one for one in LINKS if one.startswith(name)]
    if name not in LINKS and len(several) > 1:
        raise DataError(f"gpu={cells['gpu']!r} is of several: {', '.join(several)}")
    return name if name in LINKS else cells["gpu"]


def _network(cells: Cells, gpus_per_node: int) -> float | None:
    if cells.get("network_gbit_per_s"):
        return number(cells, "network_gbit_per_s") * GBIT
    return network_bytes_per_s(cells.get("interconnect", ""), gpus_per_node)


def unknown_network(cells: Cells, machines: Cluster) -> str:
    """What is taken instead where a run crosses a network of which the row names no rate."""
    inside = max(machines.gpus_per_node, machines.scaleup_gpus)
    words = cells.get("interconnect", "")
    known = optional(cells, "network_gbit_per_s") or network_bytes_per_s(words, 1)
    if known or number(cells, "n_gpus") <= inside:
        return ""
    rate = f"its GPU's usual {machines.network_bytes_per_s / GBIT:g} Gbit/s each"
    if not words:
        return f"no rate of the network: {rate}"
    return f"interconnect={words!r} says no rate for a GPU or a machine: {rate}"


def network_bytes_per_s(interconnect: str, gpus_per_node: int) -> float | None:
    """Of one accelerator and direction, from words like "8x400 Gb/s IB per node"; None if they name
    no rate. Omni-Path, without one: a link for each accelerator."""
    if several := SEVERAL.search(interconnect):
        links, rate = (float(x) for x in several.groups() if x)
        return links * rate * GBIT / gpus_per_node
    single = SINGLE.search(interconnect)
    if single and single.group(2).casefold() in (*ONE, *WHOLE):
        share = 1 if single.group(2).casefold() in ONE else gpus_per_node
        return float(single.group(1)) * GBIT / share
    return OMNI_PATH_GBIT * GBIT if "omni-path" in interconnect.casefold() else None
