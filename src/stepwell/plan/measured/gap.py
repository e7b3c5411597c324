"""What could explain that a measured step takes longer than predicted, where only its seconds are
known; and which knobs gain most if that is it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from stepwell.plan.explain.knobs import Knob, knobs
from stepwell.plan.job import Job
from stepwell.plan.measured.compare import Comparison, task_of
from stepwell.plan.search.prices import Prices
from stepwell.plan.steptime.coefficients import SHIPPED as COEFFICIENTS
from stepwell.plan.steptime.step import StepTime, predict_step
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

# What can be measured of a step.
MEASURES = ("step_s", "mfu", "tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu")
LEAST_SHARE = 0.1  # of the gap, below which a cause is not worth a line
WITHIN = 1.02  # no slower than predicted
MOST_ADVICE = 2
SLOWEST = 100.0  # times the predicted step: nothing that is known here explains more
WAITING = "waiting"
# Shares of the expected rate that are seen in practice; less is hardly the only cause. Networks
# lose cards, RDMA or their routes; clocks fall by a third at most before a GPU is replaced.
USUAL = {"network": 0.2, "scaleup": 0.5, "products": 0.65}
# Of a cluster's kinds: name, whose messages, the unit of its rate and its bytes, how to find out.
LINKS = {
    "network": (
        *("the network", "messages between machines", "Gbit/s a GPU", 1e9 / 8),
        "an all-reduce benchmark over the same machines; GPU-direct RDMA and all cards in use?",
    ),
    "scaleup": (
        *("the scale-up links", "messages within a machine", "GB/s", 1e9),
        "an all-reduce benchmark within one machine; are tensor ranks neighbours on it?",
    ),
}


@dataclass(frozen=True)
class Suspect:
    """One cause that explains a measured step by itself. look: how to find out. knobs: what they
    gain if it is the cause. likely: it need not be slower than such things usually get."""

    name: str
    text: str
    look: str
    knobs: tuple[Knob, ...] = ()
    likely: bool = True

    @property
    def eased_by(self) -> tuple[Knob, ...]:
        """What gains most, and leaves the training as it is; nothing shortens waiting."""
        if self.name == WAITING:
            return ()
        found = [k for k in self.knobs if k.works and not k.alters and k.gain > 0]
        return tuple(found[:MOST_ADVICE])


@dataclass(frozen=True)
class Gap:
    """Seconds of a step, measured and predicted. source: where the measured ones are from.
    comparison: by parts, where a trace was given; then there are causes instead of suspects."""

    measured_s: float
    predicted_s: float
    suspects: tuple[Suspect, ...]
    source: str = ""
    comparison: Comparison | None = None

    def without_knobs(self) -> Gap:
        """Where what it is of is but a part of what a knob changes."""
        suspects = tuple(replace(suspect, knobs=()) for suspect in self.suspects)
        comparison = self.comparison
        if comparison is not None:
            causes = tuple(replace(cause, eased_by=()) for cause in comparison.causes)
            comparison = replace(comparison, causes=causes, knobs=(), together=())
        return replace(self, suspects=suspects, comparison=comparison)

    @property
    def ratio(self) -> float:
        return self.measured_s / self.predicted_s

    @property
    def gains(self) -> dict[str, tuple[float, float]]:
        """Of each knob the least and the most that it gains of the measured step, by which of the
        likely suspects is the cause."""
        likely = [suspect.knobs for suspect in self.suspects if suspect.likely and suspect.knobs]
        by_cause = [{knob.name: knob.gain for knob in knobs} for knobs in likely]
        names = dict.fromkeys(name for gains in by_cause for name in gains)
        each = {name: [gains.get(name, 0.0) for gains in by_cause] for name in names}
        return {name: (min(gains), max(gains)) for name, gains in each.items()}


def gap(job: Job, measured_s: float, config: ModelConfig | None = None, source: str = "") -> Gap:
    """What a measured step lacks of the predicted one. config: the engine's model, if it has it.
    Raises ConfigError for a time that is not above 0."""
    if not measured_s > 0:
        raise ConfigError(f"--measured: a step of {measured_s} s must be above 0")
    predicted = predict_step(job).total_s
    slower = measured_s > WITHIN * predicted
    found = list(_suspects(job, measured_s, config)) if slower else []
    found.sort(key=lambda suspect: not suspect.likely)
    return Gap(measured_s, predicted, tuple(found), source)


def _suspects(job: Job, measured_s: float, config: ModelConfig | None) -> Iterator[Suspect]:
    layout, cluster, c = job.layout, job.cluster, COEFFICIENTS
    over = measured_s - predict_step(job).total_s
    yield from _slow_links(job, measured_s, config)
    slow = _factor(lambda f: predict_step(job, c.slower_products(f)).total_s, measured_s)
    if slow is not None:
        yield Suspect(
            "slow products",
            f"matrix products at {100 * slow:.0f} % of the expected rate",
            "clocks and power under load; one slow GPU slows all: time each rank's forward pass",
            _advice(Prices(job.dims, cluster, config, c.slower_products(slow)), job),
            slow >= USUAL["products"],
        )
    others = {"compiled": layout.compiled, "overlap_data": layout.data_ranks > 1}
    for name in (name for name, sensible in others.items() if sensible):
        other = replace(job, layout=replace(layout, **{name: False}))
        share = min(1.0, (predict_step(other).total_s - measured_s + over) / over)
        if share > LEAST_SHARE:
            yield _missing(name, share)
    each_ms = 1000 * over / layout.num_micro_batches
    yield Suspect(
        WAITING,
        f"{over:.2f} s a step, {each_ms:,.0f} ms a micro-batch, in which nothing runs",
        "the data loader, checkpoints, evaluation, logging; idle time in a trace of one step",
        _advice(Prices(job.dims, cluster, config), job, over),
    )


def _slow_links(job: Job, measured_s: float, config: ModelConfig | None) -> Iterator[Suspect]:
    for link, (name, messages, unit, unit_bytes, look) in LINKS.items():
        slow = _factor(lambda f, link=link: predict_step(_slow(job, link, f)).total_s, measured_s)
        if slow is None:
            continue
        rate = getattr(job.cluster, f"{link}_bytes_per_s") / unit_bytes
        yield Suspect(
            name,
            f"{messages} at {slow * rate:,.0f} instead of {rate:,.0f} {unit} ({100 * slow:.0f} %)",
            look,
            _advice(Prices(job.dims, _slow(job, link, slow).cluster, config), job),
            slow >= USUAL[link],
        )


def _missing(name: str, share: float) -> Suspect:
    if name == "compiled":
        return Suspect(
            "blocks that are not compiled",
            f"eager blocks explain {100 * share:.0f} % of the gap",
            "layout.compile=true in run.toml? graph breaks or recompilations in the log?",
        )
    return Suspect(
        "gathers that nothing hides",
        f"data ranks' messages beside no computing explain {100 * share:.0f} % of the gap",
        "a trace: do all-gathers run beside the products? layout.prefetch_forward above 0?",
    )


def _slow(job: Job, link: str, factor: float) -> Job:
    key = f"{link}_bytes_per_s"
    cluster = replace(job.cluster, **{key: getattr(job.cluster, key) * factor})
    return replace(job, cluster=cluster)


def _advice(prices: Prices, job: Job, beside_s: float = 0.0) -> tuple[Knob, ...]:
    return tuple(knobs(prices, task_of(job), job.layout, prices.config, beside_s))


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
    seconds, what = ways[name](value), f"{name}={value:g}"
    check_possible(seconds, what, job, step)
    return check_explained(seconds, what, job, step)


def check_possible(seconds: float, what: str, job: Job, step: StepTime) -> float:
    """The seconds of a step. Raises ConfigError where useful products take longer at the peak."""
    least = step.model_flops / step.peak_flops_per_s
    if seconds < least * (1 - 1e-9):
        raise ConfigError(
            f"--measured {what} cannot be: a step of {seconds:.3g} s would be an MFU of "
            f"{100 * least / seconds:.0f} %; at the peak rate of {job.layout.num_gpus:,} x "
            f"{job.cluster.name} its products alone take {least:.4g} s. Is it of another model, "
            "batch or number of GPUs?"
        )
    return seconds


def check_explained(seconds: float, what: str, job: Job, step: StepTime) -> float:
    """The seconds of a step of which no more is known than that. Raises ConfigError where they are
    more than `SLOWEST` times what is predicted."""
    most = SLOWEST * step.total_s
    if not seconds <= most:
        raise ConfigError(
            f"--measured {what} is of no such step: {seconds:.3g} s are over {SLOWEST:.0f} times "
            f"the {step.total_s:.3g} s predicted on {job.layout.num_gpus:,} x {job.cluster.name}, "
            f"and nothing explains more than {most:.4g} s. Is it in another unit (step_s is in "
            "seconds, tokens_per_s of all GPUs, mfu a share), or of another batch, model or device?"
        )
    return seconds
