"""On how many accelerators something fits. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from stepwell.plan.cluster import Cluster
from stepwell.plan.footprint.footprint import headroom
from stepwell.plan.job import Arrangement
from stepwell.plan.search.candidates import Candidate
from stepwell.plan.search.checks import check_task
from stepwell.plan.search.prices import Prices
from stepwell.plan.search.space import (
    OFFLOADS,
    Family,
    Task,
    body,
    data_layouts,
    leanest,
    leanest_levels,
    meshes,
    micro_batch_problem,
    precisions,
    schedules,
    with_offload,
)
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError


def fewest_gpus(task: Task, times: int = 64, config: ModelConfig | None = None) -> int | None:
    """The number of accelerators on which something fits: doubled as often as needed, then the
    least of up to 16 numbers of whole machines between. None if not even `times` as many are
    enough. config: the engine's model, which then must run it, too."""
    prices, number = Prices(task.dims, task.cluster, config), task.num_gpus
    while number < times * task.num_gpus:
        number *= 2
        if _something_fits(replace(task, num_gpus=number), prices):
            between = (replace(task, num_gpus=n) for n in _between(task.cluster, number))
            return next((t.num_gpus for t in between if _something_fits(t, prices)), number)
    return None


def _between(cluster: Cluster, number: int, most: int = 16) -> range:
    """Of half of `number` to itself, whole machines where that is more than one."""
    low, machine = number // 2, cluster.gpus_per_node
    step = machine if low >= machine else 1
    while (number - low) // step > most:
        step *= 2
    return range(low - low % step + step, number, step)


def _something_fits(task: Task, prices: Prices) -> bool:
    """Offload is free where it is not held fixed."""
    try:
        check_task(task)
    except ConfigError:
        return False
    held = task.pins.offload
    kinds = ((), *OFFLOADS) if held in (None, "any") else (held,)
    return any(what_fits(with_offload(task, kind), prices) for kind in kinds)


def what_fits(task: Task, prices: Prices) -> Candidate | None:
    """One of the leanest of each mesh that fits, and that the engine runs."""
    spare = task.pins.headroom_bytes
    for layout in _leanest(task):
        if not prices.fits(layout, spare):
            continue
        found = prices.as_run(layout)
        if not isinstance(found, str) and found.headroom_bytes >= spare and found.fits:
            return found
    return None


def leanest_of(task: Task, prices: Prices) -> Arrangement | None:
    """What lacks the least of an accelerator's memory, then what holds the least of its machine's;
    None where the rules allow nothing."""

    def lacking(layout: Arrangement) -> tuple[float, float, float]:
        held = prices.memory(layout)
        lacks = task.pins.headroom_bytes - headroom(held, task.cluster)
        return max(0.0, lacks), held.host.total, held.total

    return min(_leanest(task), key=lacking, default=None)


def _leanest(task: Task) -> Iterator[Arrangement]:
    """Of each mesh what holds the least, within what is held fixed."""
    pins, rows = task.pins, task.pins.micro_batch_rows or 1
    free = (pins.schedule, pins.stages_per_rank) == (None, None)
    held = (pins.zero, pins.reshard, pins.reduce_gradients, pins.dp_shard, pins.dp_replicate)
    sharded = held == (None,) * len(held)
    precision = precisions(task)[-1]
    for mesh in meshes(task, Counter()):
        for schedule, v in [("1f1b", 1)] if free else schedules(task, mesh, Counter()):
            if micro_batch_problem(task, mesh, rows, schedule, v):
                continue
            for level in leanest_levels(task, schedule):
                family = body(task, Family(mesh, schedule, v, rows, *level, precision))
                yield from [leanest(family)] if sharded else data_layouts(task, family, Counter())
