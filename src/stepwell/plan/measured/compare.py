"""A traced step beside the predicted one, part by part: what is slower, why, and which knobs gain
most at the rates that were measured. No torch.

The predictor's few rates are set to what the trace shows (products, attention, memory, links,
launches); what it still does not explain stays as it is, whatever a knob changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from stepwell.plan.comms.collectives import collectives
from stepwell.plan.comms.step import Sent
from stepwell.plan.explain.knobs import Knob, knobs, together
from stepwell.plan.job import Job
from stepwell.plan.measured.likeness import axis_name, check_ranks, doubts_of, other_device
from stepwell.plan.measured.parts import COPIES, IDLE, Measured, Messages, parts_of
from stepwell.plan.measured.trace import Trace
from stepwell.plan.search.prices import Prices
from stepwell.plan.search.space import Task
from stepwell.plan.steptime.coefficients import SHIPPED, Coefficients
from stepwell.plan.steptime.flows import ring_rate
from stepwell.plan.steptime.step import StepTime, ledger, predict_step
from stepwell.sections.model import ModelConfig

LEAST_SHARE = 0.01  # of a step, below which a difference is not worth a cause
MOST_KNOBS = 3
ROUNDS = 6
# A rate's limits when it is set to what was measured, of the shipped one.
SLOWEST, FASTEST = 1e-6, 2.0
MOST_LAUNCH = 100.0
WAITING = 0.2  # share of messages' time, from which waiting for other ranks is worth a word
SLOW_LINK = 0.8  # of the expected rate
# Lines of the comparison, as they are shown.
NAMES = {
    "products": "matrix products",
    "attention": "attention",
    "memory-bound": "operations that only move memory",
    "optimizer": "optimiser step",
    COPIES: COPIES,
    "exposed tp": "tensor ranks' messages, exposed",
    "exposed cp": "context ranks' messages, exposed",
    "exposed ep": "expert ranks' messages, exposed",
    "exposed data": "data ranks' messages, exposed",
    "exposed world": "sums over all ranks, exposed",
    "exposed other": "other messages, exposed",
    "exposed pp": "stages' messages and bubble",
    IDLE: "idle (launches, host)",
}
# The line that each part of a predicted step belongs to.
LINES = {
    "products": "products",
    "attention": "attention",
    "memory": "memory-bound",
    "quantisation": "memory-bound",
    "gradient accumulation": "memory-bound",
    "optimizer": "optimizer",
    "exposed offload": COPIES,
    "bubble": "exposed pp",
    "host": IDLE,
}
COMPUTING = {"products": "products", "attention": "attention", "memory": "memory-bound"}


class Line(NamedTuple):
    """Seconds of a step; name: a key of NAMES."""

    name: str
    measured_s: float
    predicted_s: float

    @property
    def more_s(self) -> float:
        return self.measured_s - self.predicted_s


@dataclass(frozen=True)
class Link:
    """One axis's messages. link: that they cross. expected: bytes/s that the prediction counts on,
    rated: by the link's vendor. predicted_bytes, predicted_s: that the plan sends, and takes if
    nothing hides it."""

    axis: str
    link: str
    messages: Messages
    expected: float
    rated: float
    predicted_bytes: float
    predicted_s: float


@dataclass(frozen=True)
class Cause:
    """A line on which a step loses. seconds: more than predicted. look: how to find out more.
    eased_by: knobs that shrink it most."""

    name: str
    seconds: float
    text: str
    look: str
    eased_by: tuple[Knob, ...] = ()

    @property
    def title(self) -> str:
        return NAMES[self.name]


@dataclass(frozen=True)
class Fitted:
    """The job at the rates that were measured. beside_s: of a step, what they do not explain."""

    job: Job
    rates: Coefficients
    beside_s: float

    def prices(self, shipped: Prices) -> Prices:
        """Of the same model and machines, at these rates."""
        found = Prices(shipped.dims, shipped.cluster, shipped.config, self.rates)
        found.memory = shipped.memory
        return found


@dataclass(frozen=True)
class Comparison:
    """lines: of both steps, which add up to each but for what is next to nothing. predicted_s: of a
    step. knobs, together: gains of the measured step. doubts: why the trace may be of something
    else than what is planned. of_device: it may be of the device that is planned; else there are
    neither causes nor knobs, whose rates would be another device's."""

    measured: Measured
    predicted_s: float
    lines: tuple[Line, ...]
    links: tuple[Link, ...]
    causes: tuple[Cause, ...]
    knobs: tuple[Knob, ...]
    together: tuple[Knob, ...]
    fitted: Fitted
    doubts: tuple[str, ...]
    of_device: bool


def compare(trace: Trace, job: Job, config: ModelConfig | None, deep: bool = True) -> Comparison:
    """deep: also the knobs one after the other. config: the engine's model, if it has it. Raises
    ConfigError for a trace of another number of ranks."""
    check_ranks(trace, job.layout.num_gpus)
    measured = parts_of(trace, job.layout)
    step = predict_step(job)
    lines = tuple(_lines(measured, step))
    links = tuple(links_of(measured, job))
    fitted = fit(job, measured)
    sent = {link.axis: (link.messages.wire_bytes, link.predicted_bytes) for link in links}
    doubts = tuple(doubts_of(trace, sent, job))
    plain = Comparison(measured, step.total_s, lines, links, (), (), (), fitted, doubts, False)
    if other_device(trace, job):
        return plain
    prices = fitted.prices(Prices(job.dims, job.cluster, config))
    task, layout = task_of(job), fitted.job.layout
    found = tuple(knobs(prices, task, layout, config, fitted.beside_s))
    more = tuple(together(prices, task, layout, config, fitted.beside_s)) if deep else ()
    causes = tuple(_causes(lines, links, measured, job, fitted, found))
    return replace(plain, causes=causes, knobs=found, together=more, of_device=True)


def task_of(job: Job) -> Task:
    layout = job.layout
    return Task(job.dims, job.cluster, layout.num_gpus, layout.seq_len, layout.global_batch_rows)


def _lines(measured: Measured, step: StepTime) -> Iterator[Line]:
    predicted = predicted_parts(step)
    for name in NAMES:
        pair = measured.parts.get(name, 0.0), predicted.get(name, 0.0)
        if max(pair) > 1e-3 * measured.step_s:
            yield Line(name, *pair)


def predicted_parts(step: StepTime) -> dict[str, float]:
    """A predicted step by NAMES; they add up to it. What a kernel recomputes, or takes longer
    beside messages, is its own time in a trace; what waits for the slowest rank waits in the
    messages of the widest axis."""
    found: dict[str, float] = dict.fromkeys(NAMES, 0.0)
    for part, seconds in step.parts.items():
        if part in LINES or part.startswith("exposed "):
            found[LINES.get(part, part)] += seconds
    for part, seconds in step.recomputed.items():
        found[LINES[part]] += seconds
    computing = {name: found[name] for name in COMPUTING.values()}
    slowed = step.parts.get("contention", 0.0) / (sum(computing.values()) or 1.0)
    for name, seconds in computing.items():
        found[name] += slowed * seconds
    widest = next(
        (f"exposed {a}" for a in ("data", "pp", "tp") if f"exposed {a}" in step.parts), IDLE
    )
    found[widest] += step.parts.get("straggling", 0.0)
    return found


# --- links -----------------------------------------------------------------------------------


def links_of(measured: Measured, job: Job) -> Iterator[Link]:
    by_axis: dict[str, list[Sent]] = {}
    for sent in collectives(job):
        by_axis.setdefault(axis_name(sent.axis), []).append(sent)
    seconds = message_seconds(job, SHIPPED)
    for axis, messages in measured.messages.items():
        sent = by_axis.get(axis, [])
        heaviest = max(sent, key=lambda s: s.wire_bytes * s.calls, default=None)
        if heaviest is None:
            continue
        link, rated, share = _rate(heaviest, job)
        bytes_sent = sum(s.wire_bytes * s.calls for s in sent)
        yield Link(axis, link, messages, share * rated, rated, bytes_sent, seconds.get(axis, 0.0))


def _rate(sent: Sent, job: Job) -> tuple[str, float, float]:
    """The link, its rate for a rank of the group, and the share of it that is expected."""
    cluster = job.cluster
    near = min(sent.num_ranks, max(1, cluster.scaleup_gpus // sent.stride))
    if near >= sent.num_ranks and sent.axis != "pp":
        return "scaleup", cluster.scaleup_bytes_per_s, SHIPPED.scaleup
    if sent.axis in ("pp", "ep"):
        far = sent.stride * sent.num_ranks > cluster.scaleup_gpus
        if not far:
            return "scaleup", cluster.scaleup_bytes_per_s, SHIPPED.scaleup
        return "network", cluster.network_bytes_per_s, SHIPPED.network
    rate = ring_rate(cluster, near)
    if rate < cluster.scaleup_bytes_per_s:
        return "network", rate, SHIPPED.network
    return "scaleup", rate, SHIPPED.scaleup


def message_seconds(job: Job, rates: Coefficients) -> dict[str, float]:
    """By axis, if nothing hides them."""
    found: dict[str, float] = {}
    for flow in ledger(job).flows:
        axis = axis_name(flow.axis)
        seconds = flow.seconds(rates.scaleup, rates.network, rates.hop_s)
        found[axis] = found.get(axis, 0.0) + seconds
    return found


# --- the predictor at what was measured ------------------------------------------------------


def fit(job: Job, measured: Measured) -> Fitted:
    rates = _with_links(job, measured, SHIPPED)
    rates = _with_computing(job, measured, rates)
    job = _with_overlap(job, measured, rates)
    rates = _with_launches(job, measured, _with_computing(job, measured, rates))
    return Fitted(job, rates, measured.step_s - predict_step(job, rates).total_s)


def _with_links(job: Job, measured: Measured, rates: Coefficients) -> Coefficients:
    """Each link as fast as its messages' fastest; stages' messages wait for stages."""
    expected, found = {"network": 0.0, "scaleup": 0.0}, {"network": 0.0, "scaleup": 0.0}
    for link in links_of(measured, job):
        if link.axis == "pp" or not link.messages.link_s:
            continue
        expected[link.link] += link.predicted_s
        found[link.link] += link.messages.link_s
    both = {name: s for name, s in found.items() if s and expected[name]}
    return _times(rates, {name: expected[name] / seconds for name, seconds in both.items()})


def _with_computing(job: Job, measured: Measured, rates: Coefficients) -> Coefficients:
    """First messages slow computing less, if it is faster than predicted; then rates change."""
    step = predict_step(job, rates)
    slowed = step.parts.get("contention", 0.0)
    lines = predicted_parts(step)
    excess = sum(measured.parts.get(n, 0.0) - lines[n] for n in COMPUTING.values()) + slowed
    if slowed:
        share = min(1.0, max(0.0, excess / slowed))
        rates = rates.changed(contention=SHIPPED.contention * share)
    for _ in range(ROUNDS):
        lines = predicted_parts(predict_step(job, rates))
        pairs = {n: (lines[line], measured.parts.get(line, 0.0)) for n, line in COMPUTING.items()}
        factors = {name: p / m if p and m else 1.0 for name, (p, m) in pairs.items()}
        products = dict.fromkeys(("matmul_16", "matmul_8", "matmul_4"), factors["products"])
        rates = _times(rates, products | {k: factors[k] for k in ("attention", "memory")})
    return rates


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
    for _ in range(24):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if idle_s(middle) < measured.launches_s else (low, middle)
    return rates.changed(launch_s=low)


def _times(rates: Coefficients, factors: Mapping[str, float]) -> Coefficients:
    """Rates times factors, within limits around what is shipped."""
    shipped, now = SHIPPED.as_dict(), rates.as_dict()
    new = {k: min(FASTEST, max(SLOWEST, f * now[k] / shipped[k])) for k, f in factors.items()}
    return rates.changed(**{key: share * shipped[key] for key, share in new.items()})


# --- causes ----------------------------------------------------------------------------------


def _causes(
    lines: tuple[Line, ...],
    links: tuple[Link, ...],
    measured: Measured,
    job: Job,
    fitted: Fitted,
    found: tuple[Knob, ...],
) -> list[Cause]:
    causes = []
    for line in lines:
        if line.more_s < LEAST_SHARE * measured.step_s:
            continue
        if line.name.startswith("exposed "):
            link = next((x for x in links if line.name == f"exposed {x.axis}"), None)
            text, look = _of_messages(line, link, job, fitted)
        elif line.name == IDLE:
            text, look = _of_idle(line, measured)
        else:
            text, look = _of_computing(line, measured, job)
        causes.append(Cause(line.name, line.more_s, text, look, _eased(line.name, found)))
    return sorted(causes, key=lambda cause: -cause.seconds)


def _eased(name: str, found: tuple[Knob, ...]) -> tuple[Knob, ...]:
    """Of the knobs that work and leave the training as it is, those that shrink this line most."""
    parts = {
        "contention": "exposed data",
        "straggling": "exposed data",
        "recomputation": "products",
    }
    parts |= LINES
    eases = [
        k for k in found
        if k.works and not k.alters and k.gain > 0 and parts.get(k.saves[0], k.saves[0]) == name
    ]  # fmt: skip
    return tuple(eases[:MOST_KNOBS])


def _of_computing(line: Line, measured: Measured, job: Job) -> tuple[str, str]:
    share = line.predicted_s / line.measured_s
    text = f"at {100 * share:.0f} % of the expected rate"
    if line.name in measured.heaviest:
        text += f"; most of it in {measured.heaviest[line.name][:60]}"
    if line.name == "memory-bound" and job.layout.compiled:
        eager = replace(job, layout=replace(job.layout, compiled=False))
        slow = predicted_parts(predict_step(eager))[line.name]
        if line.measured_s > 0.8 * slow:
            text += f"; eager blocks would take {slow:.2f} s"
    looks = {
        "products": "clocks and power under load; shapes that are no multiples of 128",
        "attention": "is it the device's own kernel (cuDNN, FlashAttention-3) or a fallback?",
        "memory-bound": "layout.compile=true in run.toml? graph breaks, recompilations in the log?",
        "optimizer": "is the optimiser fused? is the gradient's norm taken tensor by tensor?",
        COPIES: "pinned memory and non-blocking copies; offload that nothing hides",
    }
    return text, looks[line.name]


def _of_idle(line: Line, measured: Measured) -> tuple[str, str]:
    waits = line.measured_s - measured.launches_s
    text = (
        f"{measured.launches_s:.3f} s in short pauses between kernels, {waits:.3f} s in longer "
        f"ones (the longest {1000 * measured.longest_gap_s:,.0f} ms)"
    )
    if waits > measured.launches_s:
        return text, "what the host does there: the data loader, logging, .item(), a checkpoint"
    return text, "launches: layout.compile=true, larger micro-batches; Python's garbage collector"


def _of_messages(line: Line, link: Link | None, job: Job, fitted: Fitted) -> tuple[str, str]:
    if link is None:
        return (
            "the plan foresees no such messages",
            "is the layout that is planned the one that was measured?",
        )
    messages = link.messages
    texts = [f"{messages.busy_s:.2f} s under way, {messages.hidden_s:.2f} s of it hidden"]
    looks = []
    rate = messages.bytes_per_s
    if rate is not None and link.axis != "pp":
        texts.append(
            f"the {link.link} gives {rate / 1e9:,.0f} of {link.rated / 1e9:,.0f} GB/s "
            f"({link.expected / 1e9:,.0f} expected)"
        )
        if rate < SLOW_LINK * link.expected:
            looks.append("a benchmark of that link alone; GPU-direct RDMA, all cards in use?")
    waits = messages.busy_s - messages.link_s
    if waits > WAITING * messages.busy_s:
        texts.append(f"{waits:.2f} s more than if all went as fast as the fastest tenth")
        looks.append("other ranks' traces: which one comes last to each message?")
    if link.axis == "data" and job.layout.overlap_data and not fitted.job.layout.overlap_data:
        hidden = replace(fitted.job, layout=replace(fitted.job.layout, overlap_data=True))
        rest = predict_step(hidden, fitted.rates).parts.get("exposed data", 0.0)
        texts.append(f"beside computing as foreseen, {rest:.2f} s would stay exposed")
        looks.append("are gathers issued a block ahead (layout.prefetch_forward)?")
    return "; ".join(texts), " ".join(looks) or "the messages' sizes and number in the trace"
