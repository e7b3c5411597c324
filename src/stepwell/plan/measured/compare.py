"""A traced step beside the predicted one, part by part: what is slower, why, and which knobs gain
most at the rates that were measured. No torch.

The predictor's few rates are set to what the trace shows (products, attention, memory, links,
launches); what it still does not explain stays as it is, whatever a knob changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stepwell.config import Run
from stepwell.plan.comms.collectives import collectives
from stepwell.plan.explain.knobs import Knob, knobs, together
from stepwell.plan.job import Job
from stepwell.plan.measured.fitted import Fitted, fit, fused
from stepwell.plan.measured.likeness import axis_name, check_ranks, doubts_of, other_device
from stepwell.plan.measured.lines import (
    COMPUTING,
    LINES,
    NAMES,
    Line,
    predicted_parts,
    slower_memory,
)
from stepwell.plan.measured.links import Link, links_of
from stepwell.plan.measured.parts import COPIES, IDLE, LONG_GAP_S, Measured, parts_of
from stepwell.plan.measured.trace import Trace
from stepwell.plan.search.prices import Prices
from stepwell.plan.search.space import Task
from stepwell.plan.steptime.step import StepTime, predict_step
from stepwell.sections.model import ModelConfig

LEAST_SHARE = 0.01  # of a step, below which a difference is not worth a cause
MOST_KNOBS = 3
WAITING = 0.2  # share of messages' time, from which waiting for other ranks is worth a word
SLOW_LINK = 0.8  # of the expected rate


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


def compare(
    trace: Trace,
    job: Job,
    config: ModelConfig | None,
    deep: bool = True,
    run: Run | None = None,
) -> Comparison:
    """deep: also the knobs one after the other. config: the engine's model, if it has it. run: the
    recipe that is planned, whose other keys have a say in what a knob may do. Raises ConfigError
    for a trace of another number of ranks."""
    check_ranks(trace, job.layout.num_gpus)
    measured = parts_of(trace, job.layout)
    step = predict_step(job)
    lines = tuple(_lines(measured, step))
    links = tuple(links_of(measured, job))
    fitted = fit(job, measured)
    doubts = tuple(doubts_of(trace, _sent(links, job), job))
    plain = Comparison(measured, step.total_s, lines, links, (), (), (), fitted, doubts, False)
    if other_device(trace, job):
        return plain
    prices = fitted.prices(Prices(job.dims, job.cluster, config))
    task, layout = task_of(job), job.layout
    asked = (prices, task, layout, config, fitted.beside_s, run)
    found = tuple(knobs(*asked))
    more = tuple(together(*asked)) if deep else ()
    causes = tuple(_causes(lines, links, measured, job, fitted, found))
    return replace(plain, causes=causes, knobs=found, together=more, of_device=True)


def _sent(links: tuple[Link, ...], job: Job) -> dict[str, tuple[float | None, float]]:
    """Bytes by axis, in the trace (None where it has no messages) and as planned."""
    found: dict[str, tuple[float | None, float]] = {
        link.axis: (link.messages.wire_bytes, link.predicted_bytes) for link in links
    }
    planned: dict[str, float] = {}
    for one in collectives(job):
        axis = axis_name(one.axis)
        planned[axis] = planned.get(axis, 0.0) + one.wire_bytes * one.calls
    missing = {axis: (None, size) for axis, size in planned.items() if size and axis != "world"}
    return {**missing, **found}


def task_of(job: Job) -> Task:
    layout = job.layout
    return Task(job.dims, job.cluster, layout.num_gpus, layout.seq_len, layout.global_batch_rows)


def _lines(measured: Measured, step: StepTime) -> Iterator[Line]:
    predicted = predicted_parts(step)
    for name in NAMES:
        pair = measured.parts.get(name, 0.0), predicted.get(name, 0.0)
        if max(pair) > 1e-3 * measured.step_s:
            yield Line(name, *pair)


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
    if not fused(job, measured):
        causes, lines = _without_attention(lines, measured, job)
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


def _without_attention(
    lines: tuple[Line, ...], measured: Measured, job: Job
) -> tuple[list[Cause], tuple[Line, ...]]:
    """What it costs that attention is not fused; and the lines beside what is then expected."""
    names = tuple(COMPUTING.values())
    planned = predicted_parts(predict_step(job))
    apart = replace(job, layout=replace(job.layout, flash=False))
    expected = predicted_parts(predict_step(apart))
    expected["products"] += expected.pop("attention")
    excess_s = sum(measured.parts.get(name, 0.0) - planned[name] for name in names)
    more_s = min(excess_s, sum(expected.get(name, 0.0) - planned[name] for name in names))
    rest = tuple(
        line._replace(predicted_s=expected[line.name]) if line.name in names else line
        for line in lines
        if line.name != "attention"
    )
    if more_s < LEAST_SHARE * measured.step_s:
        return [], rest
    text = (
        f"no kernel of fused attention ran, and {planned['attention']:.2f} s of it are planned: "
        "scores go through memory, and count with products and operations that only move memory"
    )
    look = (
        "what scaled_dot_product_attention may choose from: a dense mask, 32 bits, a head too wide "
        "or attn_implementation='eager' rule flash out"
    )
    return [Cause("attention", more_s, text, look)], rest


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
    stepping = measured.optimizer_idle_s
    waits = max(0.0, line.measured_s - stepping - measured.launches_s)
    text = f"{measured.launches_s:.3f} s in short pauses between kernels"
    if measured.longest_gap_s > LONG_GAP_S:
        longest_ms = 1000 * measured.longest_gap_s
        text += f", {waits:.3f} s in longer ones (the longest {longest_ms:,.0f} ms)"
    if stepping > LEAST_SHARE * measured.step_s:
        text += f", {stepping:.3f} s while the optimiser steps"
    if stepping > max(waits, measured.launches_s):
        return text, "is the optimiser fused? what it reads back (.item(), a norm) between tensors"
    if waits > measured.launches_s:
        return text, "what the host does there: the data loader, logging, .item(), a checkpoint"
    return text, "launches: layout.compile=true, larger micro-batches; Python's garbage collector"


def _of_messages(line: Line, link: Link | None, job: Job, fitted: Fitted) -> tuple[str, str]:
    if link is None or not link.predicted_bytes:
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
        now_s = fitted.step(job).total_s
        then = slower_memory(predict_step(hidden, fitted.rates), fitted.memory)
        saved_s = min(line.measured_s, now_s - then.total_s)
        if saved_s > LEAST_SHARE * now_s:
            texts.append(f"beside computing as foreseen, a step would take {saved_s:.2f} s less")
        looks.append("are gathers issued a block ahead (layout.prefetch_forward)?")
    return "; ".join(texts), " ".join(looks) or "the messages' sizes and number in the trace"
