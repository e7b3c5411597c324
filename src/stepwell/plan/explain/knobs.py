"""What would make a configured run faster, by predicted gain. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stepwell.config import Run
from stepwell.hardware import GIB
from stepwell.parallel.rules import check_run
from stepwell.plan.explain.change import Changed, changed, grown
from stepwell.plan.job import Arrangement, job_of
from stepwell.plan.search.prices import Prices, as_run, checked_run
from stepwell.plan.search.runs import settings_between, settings_text
from stepwell.plan.search.space import KINDS, RECOMPUTE, Task
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

LEAST_GAIN = 0.003  # of a step; below that a knob is not worth a line
LEAST_COMBINED_GAIN = 0.005
MOST_COMBINED = 5


@dataclass(frozen=True)
class Knob:
    """gain: share of the step time per token that it saves, negative if it costs. setting: what to
    write. refused: why the engine does not run it, if so. alters: what of the training it changes
    besides speed. saves: the part of a step that shrinks most, and by how many seconds. step_s:
    with it."""

    name: str
    setting: str
    gain: float
    changed: Changed
    step_s: float
    refused: str = ""
    alters: str = ""
    saves: tuple[str, float] = ("", 0.0)

    @property
    def works(self) -> bool:
        return self.changed.works and not self.refused


def knobs(
    prices: Prices,
    task: Task,
    layout: Arrangement,
    config: ModelConfig | None,
    beside_s: float = 0.0,
    run: Run | None = None,
) -> list[Knob]:
    """All that have an effect, the largest gain first. beside_s: of a step, what is not predicted
    and only grows with the batch. run: what is configured, whose other keys have a say, too."""
    before = prices.time(layout)
    per_token = (before.total_s + beside_s) / layout.global_batch_tokens
    found: list[Knob] = []
    for name, changes, alters in turns(task, layout):
        rows = changes.get("global_batch_rows", task.rows)
        after = changed(prices, replace(task, rows=rows), layout, changes)
        if after.layout is None or after.step is None or after.layout == layout:
            continue
        step_s = after.step_s + beside_s * rows / task.rows
        gain = 1 - step_s / after.layout.global_batch_tokens / per_token
        if abs(gain) < LEAST_GAIN:
            continue
        refused = ""
        if run is not None and after.works:
            refused = refusal_of_run(prices, run, after.layout)
        if after.works and gain > 0:
            refused = refused or refusal(prices, after.layout, config)
        part, seconds = grown(before, after.step)
        setting = settings_text(layout, after.layout)
        found.append(Knob(name, setting, gain, after, step_s, refused, alters, (part, seconds)))
    return sorted(found, key=lambda knob: -knob.gain)


def refusal(prices: Prices, layout: Arrangement, config: ModelConfig | None) -> str:
    """What the engine's rules have against the layout, or its exact ledger, where the layout is all
    that memory depends on (a recipe may have another optimiser)."""
    if config is None:
        return ""
    try:
        run = checked_run(config, layout)
    except ConfigError as error:
        return str(error)
    if job_of(run, layout.num_gpus, prices.cluster).layout != layout:
        return ""
    exact = as_run(prices.candidate(layout), config)
    if exact.headroom_bytes >= 0:
        return ""
    has = prices.cluster.accelerator.memory_bytes
    return f"needs {exact.peak_bytes / GIB:.1f} of {has / GIB:.1f} GiB by the engine's own ledger"


def refusal_of_run(prices: Prices, run: Run, layout: Arrangement) -> str:
    """What the engine's rules have against what is configured, with its layout changed."""
    try:
        before = job_of(run, layout.num_gpus, prices.cluster).layout
        check_run(turned_run(run, before, layout), layout.num_gpus)
    except ConfigError as error:
        return str(error)
    return ""


def turned_run(run: Run, before: Arrangement, after: Arrangement) -> Run:
    """With the keys that lead from its layout to the other. Raises ConfigError."""
    return Run.parse(run.model_dump(exclude_none=True), settings_between(before, after))


def turns(task: Task, now: Arrangement) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, changes, what else they alter)."""
    rows = now.micro_batch_rows
    for n in {2 * rows, rows // 2} - {0}:
        if n * now.data_ranks <= task.rows:
            yield f"micro-batches of {n} rows", {"micro_batch_rows": n}, ""
    for mode, every in RECOMPUTE:
        again = {"recompute": mode, "recompute_every": every}
        if (mode, every) != (now.recompute, now.recompute_every):
            name = f"recompute one block in {every}" if mode == "every" else f"recompute {mode}"
            yield name, again, ""
    yield from _of_data(task, now)
    if not now.compiled:
        yield "compile the blocks", {"compiled": True}, ""
    if now.precision in ("bf16", "fp16") and task.cluster.accelerator.fp8_flops_per_s:
        eight = {"precision": "fp8", "recipe": "tensorwise"}
        yield "products in 8 bits", eight, "the numbers are computed in 8 bits"
    for axis, name in (("tp", "TP"), ("pp", "PP"), ("cp", "CP"), ("ep", "EP")):
        if axis == "ep" and not task.dims.experts:
            continue
        size = getattr(now, axis)
        for n in {2 * size, size // 2} - {0}:
            yield f"{name} {n}", {axis: n}, ""
    if now.pp > 1:
        for schedule, v in (("interleaved-1f1b", 2), ("interleaved-1f1b", 4), ("zbv", 2)):
            if (schedule, v) != (now.schedule, now.stages_per_rank):
                many = f"{schedule} with {v} stages a rank"
                yield many, {"schedule": schedule, "stages_per_rank": v}, ""
    batch = {"global_batch_rows": 2 * task.rows}
    yield "a batch twice as large", batch, "half as many steps for the same tokens"
    for kind in KINDS:
        if getattr(now, f"offload_{kind}"):
            yield f"no offload of {kind}", {f"offload_{kind}": False}, ""


def _of_data(task: Task, now: Arrangement) -> Iterator[tuple[str, dict[str, Any], str]]:
    pipeline = now.pp > 1
    stages = {
        "ZeRO-1": {"zero": 1, "reshard": "never", "reduce_every_micro_batch": False},
        "ZeRO-2": {"zero": 2, "reshard": "never", "reduce_every_micro_batch": True},
        "ZeRO-3": {"zero": 3, "reshard": "always", "reduce_every_micro_batch": True},
    }
    for name, changes in stages.items():
        if changes["zero"] != now.zero and not pipeline and now.dp_shard * now.cp > 1:
            yield name, changes, ""
    if now.zero == 3 and not pipeline:
        if now.reshard == "always":
            yield "keep weights after the forward pass", {"reshard": "never"}, ""
            yield "reshard within the machine", {"reshard": "node"}, ""
        if now.reduce_every_micro_batch and now.num_micro_batches > 1:
            once = {"reduce_every_micro_batch": False}
            yield "reduce gradients once a step", once, ""
    ranks, here = now.data_ranks, task.cluster.gpus_per_node // (now.tp * now.cp)
    for machines in (1, 2, 4):
        shard = here * machines
        if 0 < shard < ranks and ranks % shard == 0 and shard != now.dp_shard:
            many = "a machine" if machines == 1 else f"{machines} machines"
            replicas = {"dp_shard": shard, "dp_replicate": ranks // shard}
            yield f"shard within {many}, replicate across (HSDP)", replicas, ""


def together(
    prices: Prices,
    task: Task,
    layout: Arrangement,
    config: ModelConfig | None,
    beside_s: float = 0.0,
    run: Run | None = None,
) -> list[Knob]:
    """The knobs that work, one after the other, each time the one that gains most; only those that
    leave the training as it is. Their gains are each of the step before."""
    taken: list[Knob] = []
    while len(taken) < MOST_COMBINED:
        found = knobs(prices, task, layout, config, beside_s, run)
        best = next((k for k in found if k.works and not k.alters), None)
        if best is None or best.gain < LEAST_COMBINED_GAIN or best.changed.layout is None:
            break
        taken.append(best)
        layout = best.changed.layout
    return taken
