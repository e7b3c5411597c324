"""What would make a configured run faster, by predicted gain; and what could explain that a
measured step takes longer than predicted. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stepwell.parallel.rules import check_run
from stepwell.plan.explain.change import Changed, changed, grown
from stepwell.plan.job import Arrangement, Job
from stepwell.plan.search.runs import run_of, settings_text
from stepwell.plan.search.search import Prices
from stepwell.plan.search.space import RECOMPUTE, Task
from stepwell.plan.steptime.coefficients import SHIPPED as COEFFICIENTS
from stepwell.plan.steptime.step import predict_step
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

LEAST_GAIN = 0.003  # of a step; below that a knob is not worth a line
LEAST_COMBINED_GAIN = 0.005
MOST_COMBINED = 5
# What can be measured of a step.
MEASURES = ("step_s", "mfu", "tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu")


@dataclass(frozen=True)
class Knob:
    """gain: share of the step time per token that it saves, negative if it costs. setting: what to
    write. refused: why the engine does not run it, if so. alters: what of the training it changes
    besides speed. saves: the part of a step that shrinks most, and by how many seconds."""

    name: str
    setting: str
    gain: float
    changed: Changed
    refused: str = ""
    alters: str = ""
    saves: tuple[str, float] = ("", 0.0)

    @property
    def works(self) -> bool:
        return self.changed.works and not self.refused


def knobs(
    prices: Prices, task: Task, layout: Arrangement, config: ModelConfig | None
) -> list[Knob]:
    """All that have an effect, the largest gain first."""
    before = prices.time(layout)
    per_token = before.total_s / layout.global_batch_tokens
    found: list[Knob] = []
    for name, changes, alters in _turns(task, layout):
        rows = changes.get("global_batch_rows", task.rows)
        after = changed(prices, replace(task, rows=rows), layout, changes)
        if after.layout is None or after.step is None or after.layout == layout:
            continue
        gain = 1 - after.step_s / after.layout.global_batch_tokens / per_token
        if abs(gain) < LEAST_GAIN:
            continue
        refused = _refusal(after.layout, config) if after.works and gain > 0 else ""
        part, seconds = grown(before, after.step)
        setting = settings_text(layout, after.layout)
        found.append(Knob(name, setting, gain, after, refused, alters, (part, seconds)))
    return sorted(found, key=lambda knob: -knob.gain)


def _refusal(layout: Arrangement, config: ModelConfig | None) -> str:
    if config is None:
        return ""
    try:
        check_run(run_of(config, layout), layout.num_gpus)
    except ConfigError as error:
        return str(error)
    return ""


def _turns(task: Task, now: Arrangement) -> Iterator[tuple[str, dict[str, Any], str]]:
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
    for kind in ("optimizer", "parameters", "activations"):
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
    prices: Prices, task: Task, layout: Arrangement, config: ModelConfig | None
) -> list[Knob]:
    """The knobs that work, one after the other, each time the one that gains most; only those that
    leave the training as it is. Their gains are each of the step before."""
    taken: list[Knob] = []
    while len(taken) < MOST_COMBINED:
        best = next(
            (k for k in knobs(prices, task, layout, config) if k.works and not k.alters), None
        )
        if best is None or best.gain < LEAST_COMBINED_GAIN or best.changed.layout is None:
            break
        taken.append(best)
        layout = best.changed.layout
    return taken


# --- a measured step -------------------------------------------------------------------------


@dataclass(frozen=True)
class Suspect:
    """One cause that explains a measured step by itself. look: how to find out."""

    name: str
    text: str
    look: str


@dataclass(frozen=True)
class Gap:
    """Seconds of a step, measured and predicted."""

    measured_s: float
    predicted_s: float
    suspects: tuple[Suspect, ...]

    @property
    def ratio(self) -> float:
        return self.measured_s / self.predicted_s


def gap(job: Job, measured_s: float) -> Gap:
    """What a measured step lacks of the predicted one. Raises ConfigError for a time that is not
    above 0."""
    if not measured_s > 0:
        raise ConfigError(f"--measured: a step of {measured_s} s must be above 0")
    predicted = predict_step(job).total_s
    found = tuple(_suspects(job, measured_s)) if measured_s > 1.02 * predicted else ()
    return Gap(measured_s, predicted, found)


def _suspects(job: Job, measured_s: float) -> Iterator[Suspect]:
    layout, cluster = job.layout, job.cluster
    over = measured_s - predict_step(job).total_s
    slow = _factor(lambda f: _with_network(job, f), measured_s)
    if slow is not None:
        rate = slow * cluster.network_bytes_per_s * 8 / 1e9
        yield Suspect(
            "the network",
            f"messages between machines at {rate:,.0f} instead of "
            f"{cluster.network_bytes_per_s * 8 / 1e9:,.0f} Gbit/s a GPU ({100 * slow:.0f} %)",
            "an all-reduce benchmark over the same machines; GPU-direct RDMA and all cards in use?",
        )
    slow = _factor(lambda f: _with_scaleup(job, f), measured_s)
    if slow is not None:
        rate = slow * cluster.scaleup_bytes_per_s / 1e9
        yield Suspect(
            "the scale-up links",
            f"messages within a machine at {rate:,.0f} instead of "
            f"{cluster.scaleup_bytes_per_s / 1e9:,.0f} GB/s ({100 * slow:.0f} %)",
            "an all-reduce benchmark within one machine; are tensor ranks neighbours on it?",
        )
    slow = _factor(lambda f: _with_products(job, f), measured_s)
    if slow is not None:
        yield Suspect(
            "slow products",
            f"matrix products at {100 * slow:.0f} % of the expected rate",
            "clocks and power under load; one slow GPU slows all: time each rank's forward pass",
        )
    if layout.compiled:
        eager = predict_step(replace(job, layout=replace(layout, compiled=False))).total_s
        share = min(1.0, (eager - measured_s + over) / over)
        if share > 0.1:
            yield Suspect(
                "blocks that are not compiled",
                f"eager blocks explain {100 * share:.0f} % of the gap",
                "layout.compile=true in run.toml? graph breaks or recompilations in the log?",
            )
    if layout.data_ranks > 1:
        apart = predict_step(replace(job, layout=replace(layout, overlap_data=False))).total_s
        share = min(1.0, (apart - measured_s + over) / over)
        if share > 0.1:
            yield Suspect(
                "gathers that nothing hides",
                f"data ranks' messages beside no computing explain {100 * share:.0f} % of the gap",
                "a trace: do all-gathers run beside the products? layout.prefetch_forward above 0?",
            )
    each_ms = 1000 * over / layout.num_micro_batches
    yield Suspect(
        "waiting",
        f"{over:.2f} s a step, {each_ms:,.0f} ms a micro-batch, in which nothing runs",
        "the data loader, checkpoints, evaluation, logging; idle time in a trace of one step",
    )


def _with_network(job: Job, factor: float) -> float:
    rate = job.cluster.network_bytes_per_s * factor
    cluster = replace(job.cluster, network_bytes_per_s=rate)
    return predict_step(replace(job, cluster=cluster)).total_s


def _with_scaleup(job: Job, factor: float) -> float:
    rate = job.cluster.scaleup_bytes_per_s * factor
    cluster = replace(job.cluster, scaleup_bytes_per_s=rate)
    return predict_step(replace(job, cluster=cluster)).total_s


def _with_products(job: Job, factor: float) -> float:
    c = COEFFICIENTS
    return predict_step(job, c.changed(matmul_16=c.matmul_16 * factor)).total_s


def _factor(seconds: Callable[[float], float], wanted_s: float) -> float | None:
    """The factor below 1 with which a step takes wanted_s; None if not even a thousandth does."""
    low, high = 1e-3, 1.0
    if seconds(low) < wanted_s:
        return None
    for _ in range(24):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) > wanted_s else (low, middle)
    return high


def measured_step_s(given: Mapping[str, float], job: Job) -> float:
    """Seconds of a step from what was measured: step_s, mfu or tokens_per_s (of all GPUs), or
    tokens_per_s_per_gpu, or tflops_per_gpu. Raises ConfigError for other names, or several, and for
    a step faster than the useful products take at the peak rate."""
    step, layout = predict_step(job), job.layout
    ways: dict[str, Callable[[float], float]] = {
        "step_s": lambda x: x,
        "mfu": lambda x: step.model_flops / step.peak_flops_per_s / x,
        "tokens_per_s": lambda x: layout.global_batch_tokens / x,
        "tokens_per_s_per_gpu": lambda x: layout.global_batch_tokens / layout.num_gpus / x,
        "tflops_per_gpu": lambda x: step.model_flops / x / 1e12,
    }
    if len(given) != 1 or next(iter(given)) not in ways:
        raise ConfigError(
            f"--measured {' '.join(f'{k}={v:g}' for k, v in given.items())}: give one of "
            f"{', '.join(f'{name}=' for name in ways)}"
        )
    name, value = next(iter(given.items()))
    if not value > 0:
        raise ConfigError(f"--measured {name}={value:g} must be above 0")
    seconds, least = ways[name](value), step.model_flops / step.peak_flops_per_s
    if seconds < least * (1 - 1e-9):
        raise ConfigError(
            f"--measured {name}={value:g} cannot be: a step of {seconds:.3g} s would be an MFU of "
            f"{100 * least / seconds:.0f} %; at the peak rate of {layout.num_gpus:,} x "
            f"{job.cluster.name} its products alone take {least:.4g} s. Is it of another model, "
            "batch or number of GPUs?"
        )
    return seconds
