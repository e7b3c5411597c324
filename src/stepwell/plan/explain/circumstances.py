"""What binds a layout, and what would change the decision for it: the same search under other
circumstances. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepwell.plan.explain.change import changed
from stepwell.plan.job import Arrangement
from stepwell.plan.search.candidates import Candidate, mesh_of
from stepwell.plan.search.prices import Prices
from stepwell.plan.search.runs import offloaded, recompute_text, short, state_text
from stepwell.plan.search.search import search
from stepwell.plan.search.space import Pins, Task
from stepwell.plan.steptime.step import StepTime, predict_step
from stepwell.plan.units import seconds_text
from stepwell.types import ConfigError

LINKS = {"network": "network_bytes_per_s", "scale-up links": "scaleup_bytes_per_s"}
MESSAGES = "all communication"


@dataclass(frozen=True)
class Relief:
    """What a step would take without one constraint. layout: another one, where it would be."""

    name: str
    step_s: float
    layout: Arrangement | None = None


@dataclass(frozen=True)
class Scenario:
    """best: under the changed circumstances; None if nothing fits. per_token: step time per token
    over today's."""

    name: str
    best: Candidate | None
    per_token: float
    changes: str


def reliefs(prices: Prices, task: Task, best: Candidate) -> Iterator[Relief]:
    """The step without one constraint at a time, the others as they are."""
    job, cluster = best.job, best.job.cluster
    unbounded = replace(task.pins, headroom_bytes=-math.inf)
    endless = fastest(prices, task, unbounded, best.step_s)
    if endless is not None:
        yield Relief("memory", endless.step_s, endless.layout)
    for name, key in LINKS.items():
        free = replace(cluster, **{key: 1e6 * getattr(cluster, key)})
        # A network beyond the scale-up links only moves the border to those.
        yield Relief(name, min(best.step_s, predict_step(replace(job, cluster=free)).total_s))
    yield Relief(MESSAGES, best.step_s - messages_s(best.step))
    for name, part in (("bubble", "bubble"), ("recomputation", "recomputation")):
        yield Relief(name, best.step_s - best.step.parts.get(part, 0.0))


def messages_s(step: StepTime) -> float:
    """What would be gone without any communication; the bubble stays."""
    saved = step.exposed_s - step.parts.get("exposed offload", 0.0)
    saved += step.parts.get("contention", 0.0)
    # Stragglers are waited for in proportion.
    rest = step.total_s - step.parts.get("straggling", 0.0)
    return saved * step.total_s / rest


def links_note(reliefs: Sequence[Relief], best: Candidate) -> str:
    """Why no single link binds though messages cost; empty where one does, or they cost nothing."""
    saved = {relief.name: best.step_s - relief.step_s for relief in reliefs}
    each = {name: saved.get(name, 0.0) for name in LINKS}
    if saved[MESSAGES] < 0.01 * best.step_s or max(each.values()) > 0.5 * saved[MESSAGES]:
        return ""
    return (
        f"Messages cost {seconds_text(saved[MESSAGES])}, but no link alone binds: a ring through "
        "several machines goes at the rate of the slower of both links, so with one of them faster "
        "the other bounds it; and each message still waits for those before it."
    )


def scenarios(prices: Prices, task: Task, best: Candidate) -> Iterator[Scenario]:
    cluster = task.cluster
    device = cluster.accelerator
    larger = replace(device, memory_bytes=2 * device.memory_bytes)
    on = {
        "twice the memory": replace(cluster, accelerator=larger),
        "half the network": replace(cluster, network_bytes_per_s=cluster.network_bytes_per_s / 2),
    }
    for name, other in on.items():
        if task.num_gpus > cluster.scaleup_gpus or name == "twice the memory":
            yield _scenario(name, prices.on(other), replace(task, cluster=other), best)
    yield _scenario("twice the batch", prices, replace(task, rows=2 * task.rows), best)
    if task.rows > 1:
        yield _scenario("half the batch", prices, replace(task, rows=task.rows // 2), best)
    if task.rows >= 4:
        longer = replace(task, seq_len=4 * task.seq_len, rows=task.rows // 4)
        yield _scenario("rows four times as long", prices, longer, best)


def _scenario(name: str, prices: Prices, task: Task, best: Candidate) -> Scenario:
    known_s = _known_s(prices, task, best)
    forced = as_forced(task, best)
    ways = [task] if forced == task else [forced, task]
    every = [best_with(prices, one, {}, known_s) for one in ways]
    found = min(filter(None, every), key=lambda c: c.step_s, default=None)
    if found is None:
        return Scenario(name, None, math.inf, "nothing fits")
    per_token = found.step_s / found.layout.global_batch_tokens
    per_token /= best.step_s / best.layout.global_batch_tokens
    same = mesh_of(found.layout) == mesh_of(best.layout)
    told = "the same mesh" if same else short(found.layout)
    if same and found.layout.recompute != best.layout.recompute:
        told += f", {recompute_text(found.layout)}"
    if same and found.layout.micro_batch_rows != best.layout.micro_batch_rows:
        told += f", micro-batch {found.layout.micro_batch_rows}"
    if same and state_text(found.layout) != state_text(best.layout):
        told += f", {state_text(found.layout)}"
    if same and offloaded(found.layout) != offloaded(best.layout):
        told += f", {', '.join(f'offload {k}' for k in offloaded(found.layout)) or 'no offload'}"
    return Scenario(name, found, per_token, told)


def _known_s(prices: Prices, task: Task, best: Candidate) -> float:
    """What the layout of today would take there, if it fits; nothing slower need be looked for."""
    layout = best.layout.having(seq_len=task.seq_len, global_batch_rows=task.rows)
    now = changed(prices, task, layout, {})
    if not now.works or isinstance(found := prices.as_run(layout), str):
        return math.inf
    return 1.0001 * now.step_s if found.headroom_bytes >= task.pins.headroom_bytes else math.inf


def as_forced(task: Task, best: Candidate) -> Task:
    """Where nothing fits without, other values are looked for with what goes to the host, and with
    groups of blocks that are computed again, too."""
    offload, recompute = task.pins.offload, task.pins.recompute
    if offload is None and offloaded(best.layout):
        offload = "any"
    if best.layout.recompute == "sqrt":
        recompute = "sqrt"
    return replace(task, pins=replace(task.pins, offload=offload, recompute=recompute))


def best_with(
    prices: Prices, task: Task, pins: dict[str, Any], at_most_s: float = math.inf
) -> Candidate | None:
    try:
        return fastest(prices, task, replace(task.pins, **pins), at_most_s)
    except ConfigError:
        return None


def fastest(
    prices: Prices, task: Task, pins: Pins, at_most_s: float = math.inf
) -> Candidate | None:
    found = search(
        task.dims,
        prices.cluster,
        task.num_gpus,
        task.seq_len,
        task.rows * task.seq_len,
        pins,
        slack=1.0,
        prices=prices,
        at_most_s=at_most_s,
        may_offload=False,
    ).found
    return found[0] if found else None
