"""The predictor at what a trace shows: rates, contention, overlap, and line by line what was
measured of what it predicts. No torch.

A rate is never set above what the hardware's best reaches, and a line is never longer than it was
measured: so no change of the layout saves more than the trace shows of what it removes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stepwell.plan.cluster import Cluster
from stepwell.plan.job import Arrangement, Job
from stepwell.plan.measured.lines import (
    COMPUTING,
    NAMES,
    predicted_parts,
    scaled,
    slower_memory,
)
from stepwell.plan.measured.links import links_of, message_seconds
from stepwell.plan.measured.parts import Measured
from stepwell.plan.search.prices import Prices
from stepwell.plan.search.space import Family, Task
from stepwell.plan.steptime.coefficients import SHIPPED, Coefficients
from stepwell.plan.steptime.step import StepTime, predict_step

ROUNDS = 6
# A rate's limits when it is set to what was measured, of the hardware's best.
SLOWEST, FASTEST = 1e-6, 1.0
MOST_LAUNCH = 100.0
MOST_MEMORY = 1e3  # times what is predicted
# Share of the attention that is planned, below which none of it ran as such.
NO_ATTENTION = 0.05


@dataclass(frozen=True)
class Fitted:
    """job: as it ran. rates: that were measured. memory: times what is predicted that operations
    take which only move memory. lines: seconds by NAMES, (predicted at these, measured), where less
    was measured than that. beside_s: of a step, what lasts longer, whatever a layout changes."""

    job: Job
    rates: Coefficients
    memory: float
    lines: Mapping[str, tuple[float, float]]
    beside_s: float

    def step(self, job: Job) -> StepTime:
        """Of the same model on machines of these kinds, without what is beside it."""
        ran = self.job.layout
        layout = replace(
            job.layout,
            flash=job.layout.flash and ran.flash,
            overlap_data=job.layout.overlap_data and ran.overlap_data,
        )
        step = slower_memory(predict_step(replace(job, layout=layout), self.rates), self.memory)
        steps = job.layout.global_batch_tokens / ran.global_batch_tokens
        parts = predicted_parts(step)
        factors = {
            name: _shrunk(parts[name], steps * before, steps * measured) / parts[name]
            for name, (before, measured) in self.lines.items()
            if parts[name]
        }
        return scaled(step, factors)

    @property
    def least(self) -> float:
        """What of a prediction is left at least."""
        return min((measured / before for before, measured in self.lines.values()), default=1.0)

    def prices(self, shipped: Prices) -> Prices:
        """Of the same model and machines, at what was measured."""
        found = MeasuredPrices(shipped, shipped.cluster, self)
        found.memory = shipped.memory
        return found


def _shrunk(now: float, before: float, measured: float) -> float:
    """A line that was predicted to last `before` and did `measured`, where `now` is predicted: what
    it loses is a share of what was there, and what it gains comes to it."""
    return measured * now / before if now <= before else measured + now - before


class MeasuredPrices(Prices):
    """Prices at what was measured of one layout."""

    def __init__(self, like: Prices, cluster: Cluster, fitted: Fitted):
        super().__init__(like.dims, cluster, like.config, fitted.rates)
        self.fitted = fitted

    def _time(self, layout: Arrangement) -> StepTime:
        return self.fitted.step(self.job(layout))

    def loose_bounds(self, task: Task, alike: Sequence[Family]) -> list[float]:
        return [self.fitted.least * bound for bound in super().loose_bounds(task, alike)]

    def on(self, cluster: Cluster) -> Prices:
        plain, found = super().on(cluster), MeasuredPrices(self, cluster, self.fitted)
        found.memory = self.memory
        if plain.time == self.time:
            found.time, found.bound = self.time, self.bound
        return found


def fit(job: Job, measured: Measured) -> Fitted:
    if not fused(job, measured):
        job = replace(job, layout=replace(job.layout, flash=False))
        measured = _with_scores(job, measured)
    rates = _with_links(job, measured, SHIPPED)
    rates = _with_contention(job, measured, rates)
    rates = _with_computing(job, measured, rates)
    job = _with_overlap(job, measured, rates)
    rates = _with_launches(job, measured, _with_computing(job, measured, rates))
    memory = _memory(job, measured, rates)
    lines = predicted_parts(slower_memory(predict_step(job, rates), memory))
    pairs = {name: (lines[name], measured.parts.get(name, 0.0)) for name in NAMES}
    less = {name: pair for name, pair in pairs.items() if pair[1] < pair[0]}
    beside_s = sum(max(0.0, seconds - before) for before, seconds in pairs.values())
    return Fitted(job, rates, memory, less, beside_s)


def fused(job: Job, measured: Measured) -> bool:
    """Whether attention ran as the kernels that the plan counts on."""
    planned = predicted_parts(predict_step(job))["attention"]
    ran = measured.parts.get("attention", 0.0)
    return not job.layout.flash or ran > NO_ATTENTION * planned


def _with_scores(job: Job, measured: Measured) -> Measured:
    """Attention's products in their own line, as they are predicted where it is not fused."""
    lines = predicted_parts(predict_step(job))
    parts = dict(measured.parts)
    both = lines["products"] + lines["attention"]
    all_s = parts.get("products", 0.0) + parts.get("attention", 0.0)
    parts |= {name: all_s * lines[name] / both for name in ("products", "attention")}
    return replace(measured, parts=parts)


def _with_links(job: Job, measured: Measured, rates: Coefficients) -> Coefficients:
    """Each link as fast as its messages' fastest; stages' messages wait for stages."""
    expected, found = {"network": 0.0, "scaleup": 0.0}, {"network": 0.0, "scaleup": 0.0}
    for link in links_of(measured, job):
        if link.axis == "pp" or not link.messages.link_s or not link.predicted_s:
            continue
        kind = "network" if link.link == "network" else "scaleup"
        expected[kind] += link.predicted_s
        found[kind] += link.messages.link_s
    both = {name: s for name, s in found.items() if s and expected[name]}
    return _times(rates, {name: expected[name] / seconds for name, seconds in both.items()})


def _with_contention(job: Job, measured: Measured, rates: Coefficients) -> Coefficients:
    """What messages cost the computing beside them: what the trace shows, if it does; else as
    shipped, but no more than leaves room for the predicted rates, nor than messages ran hidden."""
    data = measured.messages.get("data")
    step = predict_step(job, rates)
    planned_s = step.parts["contention"]
    if data is None or not planned_s:
        return rates.changed(contention=0.0)
    if measured.slowed is not None:
        wanted_s = measured.slowed * data.hidden_s
    else:
        lines = predicted_parts(step)
        excess_s = sum(measured.parts.get(n, 0.0) - lines[n] for n in COMPUTING.values())
        hidden_s = message_seconds(job, rates)["data"] - step.parts["exposed data"]
        # What waits for the slowest rank is exposed in a trace.
        ran_s = data.hidden_s + step.parts["straggling"]
        ran = min(1.0, ran_s / hidden_s) if hidden_s and data.hidden_s else 0.0
        wanted_s = ran * min(planned_s, max(0.0, planned_s + excess_s))

    def slowed_s(contention: float) -> float:
        return predict_step(job, rates.changed(contention=contention)).parts["contention"]

    return rates.changed(contention=_reaching(slowed_s, wanted_s, 1e-4, 1.0) if wanted_s else 0.0)


def _with_computing(job: Job, measured: Measured, rates: Coefficients) -> Coefficients:
    for _ in range(ROUNDS):
        lines = predicted_parts(predict_step(job, rates))
        factors = {
            name: lines[name] / measured.parts[name]
            for name in ("products", "attention")
            if lines[name] and measured.parts.get(name)
        }
        all_bits = dict.fromkeys(("matmul_16", "matmul_8", "matmul_4"), factors.get("products", 1))
        rates = _times(rates, all_bits | {"attention": factors.get("attention", 1.0)})
    return rates


def _memory(job: Job, measured: Measured, rates: Coefficients) -> float:
    """Of `slower_memory`, such that its line is as long as measured; no faster than the memory."""
    line, wanted_s = COMPUTING["memory"], measured.parts.get(COMPUTING["memory"], 0.0)
    step, factor = predict_step(job, rates), 1.0
    sums = step.parts["gradient accumulation"]
    for _ in range(ROUNDS):
        now = slower_memory(step, factor)
        of_passes = now.parts["memory"] + now.parts["quantisation"] + now.recomputed["memory"]
        if not of_passes:
            return 1.0
        line_s = predicted_parts(now)[line]
        slowed = line_s / (of_passes + sums)
        factor *= max(0.0, wanted_s / slowed - sums) / of_passes
        factor = min(MOST_MEMORY, max(rates.memory, factor))
    return factor


def _with_overlap(job: Job, measured: Measured, rates: Coefficients) -> Job:
    """Data ranks' messages beside no computing, if that is nearer to what was measured."""
    if not job.layout.overlap_data or "data" not in measured.messages:
        return job
    apart = replace(job, layout=replace(job.layout, overlap_data=False))
    wanted = measured.parts.get("exposed data", 0.0)

    def distance(one: Job) -> float:
        return abs(predict_step(one, rates).parts.get("exposed data", 0.0) - wanted)

    return min((job, apart), key=distance)


def _with_launches(job: Job, measured: Measured, rates: Coefficients) -> Coefficients:
    """The host as slow as the short pauses are long."""
    low, high = rates.launch_s, rates.launch_s * MOST_LAUNCH

    def idle_s(launch_s: float) -> float:
        return predict_step(job, rates.changed(launch_s=launch_s)).parts["host"]

    if idle_s(low) >= measured.launches_s or idle_s(high) < measured.launches_s:
        return rates
    return rates.changed(launch_s=_reaching(idle_s, measured.launches_s, low, high))


def _reaching(seconds: Callable[[float], float], wanted_s: float, low: float, high: float) -> float:
    """Where `seconds`, which grows, reaches wanted_s between the two; the nearer one if nowhere."""
    for _ in range(24):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) < wanted_s else (low, middle)
    return low


def _times(rates: Coefficients, factors: Mapping[str, float]) -> Coefficients:
    """Rates times factors, within the limits."""
    now = rates.as_dict()
    return rates.changed(
        **{key: min(FASTEST, max(SLOWEST, f * now[key])) for key, f in factors.items()}
    )
