"""Why a layout is what it is: for each axis what else could be, priced; what binds; what would
change the decision. No torch.

Every number is of a layout that was priced: `alone` changes one thing and lets the data ranks fill
the accelerators; `best` searches again with the other value held fixed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stepwell.hardware import GIB
from stepwell.plan.explain.change import Changed, changed, grown
from stepwell.plan.job import Arrangement
from stepwell.plan.memory.ledger import state_bytes_per_parameter
from stepwell.plan.search.candidates import Candidate, Ranking, mesh_of
from stepwell.plan.search.fewest import what_fits
from stepwell.plan.search.prices import Prices
from stepwell.plan.search.runs import (
    data_text,
    offloaded,
    recompute_text,
    reshard_text,
    short,
)
from stepwell.plan.search.search import search
from stepwell.plan.search.space import OFFLOADS, Pins, Task, default_precision, with_offload
from stepwell.plan.steptime.step import StepTime, predict_step
from stepwell.plan.units import in_gib, seconds_text, size_text
from stepwell.types import ConfigError

LINKS = {"network": "network_bytes_per_s", "scale-up links": "scaleup_bytes_per_s"}
KINDS = ("optimizer", "parameters", "activations")
MESSAGES = "all communication"
FIT = "Does it fit on one?"
ROOMY = 0.7  # of one's memory: with less state there is room for activations
WORTH_TELLING = 1.5  # times the best step; layouts that take longer are not looked for
PARTS = {
    "products": "matrix products",
    "attention": "attention",
    "memory": "operations that only move memory",
    "quantisation": "quantisation",
    "host": "launches by the host",
    "recomputation": "recomputation",
    "exposed tp": "tensor ranks' messages",
    "exposed cp": "context ranks' messages",
    "exposed ep": "expert ranks' messages",
    "exposed pp": "messages between stages",
    "exposed data": "data ranks' messages",
    "exposed offload": "moving to and from the host",
    "exposed world": "sums over all ranks",
    "contention": "computing slowed by messages beside it",
    "bubble": "pipeline bubble",
    "gradient accumulation": "adding up micro-batches' gradients",
    "optimizer": "optimiser step",
    "straggling": "waiting for the slowest",
}


@dataclass(frozen=True)
class Alternative:
    """label: the other value. alone: with it and nothing else. best: the fastest layout that has
    it, if any fits; None where that was not searched for, too (`searched`)."""

    label: str
    alone: Changed
    best: Candidate | None = None
    searched: bool = False


@dataclass(frozen=True)
class Reason:
    """question: of the decision tree. value: what was chosen. lead: what that means; told: a
    sentence or two about each alternative."""

    axis: str
    question: str
    value: str
    lead: str
    alternatives: tuple[Alternative, ...] = ()
    told: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The answer in words."""
        return " ".join(filter(None, (self.lead, *self.told)))


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


@dataclass(frozen=True)
class Explanation:
    reasons: tuple[Reason, ...]
    reliefs: tuple[Relief, ...]
    scenarios: tuple[Scenario, ...]
    runners_up: tuple[Candidate, ...]

    @property
    def binding(self) -> Relief:
        return min(self.reliefs, key=lambda relief: relief.step_s)


def explain(ranking: Ranking, prices: Prices, deep: bool = True) -> Explanation:
    """Of the best layout found. deep: also search with each other value held fixed, and under
    other circumstances. Raises ConfigError where nothing fits."""
    task, best = ranking.task, ranking.best
    return Explanation(
        reasons=tuple(reasons(prices, task, best, deep)),
        reliefs=tuple(reliefs(prices, task, best)),
        scenarios=tuple(scenarios(prices, task, best)) if deep else (),
        runners_up=tuple(runners_up(ranking)),
    )


def runners_up(ranking: Ranking, most: int = 8) -> list[Candidate]:
    """The best of each other mesh."""
    seen, found = {mesh_of(ranking.best.layout)}, []
    for candidate in ranking.found:
        if mesh_of(candidate.layout) not in seen and len(found) < most:
            seen.add(mesh_of(candidate.layout))
            found.append(candidate)
    return found


# --- axis by axis ----------------------------------------------------------------------------


# (label, changes, pins) of a value that could be instead.
_Other = tuple[str, dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class _Question:
    """others: values that could be instead."""

    axis: str
    question: str
    value: str
    others: tuple[_Other, ...]
    lead: str = ""


def reasons(prices: Prices, task: Task, best: Candidate, deep: bool = True) -> Iterator[Reason]:
    """In the decision tree's order. Axes that the user has fixed are explained all the same."""
    yield _whole_model(prices, task, best)
    within = _as_offloaded(task, best)
    for asked in _questions(task, best.layout):
        found = []
        for label, changes, pins in asked.others:
            searched = deep and not fixed(task.pins, pins)
            alone = changed(prices, task, best.layout, changes)
            if alone.works and (searched or _is_close(alone, best)):
                alone = _exactly(alone, prices, task)
            limit = WORTH_TELLING * best.step_s
            if alone.works:  # nothing slower need be looked for
                limit = min(limit, 1.0001 * alone.step_s)
            other = _best_with(prices, within, pins, limit) if searched else None
            found.append(Alternative(label, alone, other, searched))
        told = [_told(alternative, best) for alternative in found]
        if deep and found and not any(alternative.searched for alternative in found):
            told.append("Held fixed, so layouts with other values are not searched.")
        yield Reason(asked.axis, asked.question, asked.value, asked.lead, tuple(found), tuple(told))


def _as_offloaded(task: Task, best: Candidate) -> Task:
    """Where nothing fits without, other values are looked for with what was offloaded, too."""
    offload = task.pins.offload
    if offload is None and offloaded(best.layout):
        offload = tuple(offloaded(best.layout))
    return replace(task, pins=replace(task.pins, offload=offload))


def _is_close(alone: Changed, best: Candidate) -> bool:
    """Whether the engine's own ledger may decide: it hardly fits, or it would be faster."""
    full = 0.95 * best.job.cluster.accelerator.memory_bytes
    return alone.step_s < best.step_s or alone.peak_bytes > full


def _exactly(alone: Changed, prices: Prices, task: Task) -> Changed:
    """What seems to fit, by the engine's own ledger."""
    assert alone.layout is not None
    exact = prices.as_run(alone.layout)
    if isinstance(exact, str):
        return replace(alone, broken=exact)
    spare = max(0.0, task.pins.headroom_bytes)
    fits = exact.fits and exact.headroom_bytes >= spare
    return replace(alone, peak_bytes=exact.peak_bytes, fits=fits)


def fixed(pins: Pins, wanted: dict[str, Any]) -> bool:
    return any(getattr(pins, key) not in (None, "any") for key in wanted)


def _best_with(
    prices: Prices, task: Task, pins: dict[str, Any], at_most_s: float = math.inf
) -> Candidate | None:
    try:
        return _search(prices, task, replace(task.pins, **pins), at_most_s)
    except ConfigError:
        return None


def _search(
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


def _whole_model(prices: Prices, task: Task, best: Candidate) -> Reason:
    dims, device = task.dims, task.cluster.accelerator
    count = dims.parameters()
    each = state_bytes_per_parameter()
    state, has = each * count, device.memory_bytes
    whole = f"{state / GIB:,.0f} GiB" if state > 10 * GIB else size_text(state)
    text = (
        f"{count_text(count)} parameters with AdamW in mixed precision hold {each} bytes each: "
        f"{whole}, and one {device.name} has {has / GIB:.1f} GiB. "
    )
    if task.num_gpus == 1:
        return Reason("fit", FIT, "yes", text + _on_the_one(best))
    value, told = _on_one(prices, task, state / has)
    return Reason("fit", FIT, value, text + told)


def _on_the_one(best: Candidate) -> str:
    """What makes the plan for one accelerator fit into it."""
    layout, has = best.layout, best.job.cluster.accelerator.memory_bytes
    how = [recompute_text(layout)] if layout.recompute != "none" else []
    how += [f"offload {kind}" for kind in offloaded(layout)]
    with_it = f" with {', '.join(how)}" if how else ""
    return f"The plan{with_it} holds {size_text(best.peak_bytes)} of {has / GIB:.1f} GiB."


def _on_one(prices: Prices, task: Task, share: float) -> tuple[str, str]:
    """What holds the least on one accelerator, and whether it fits; share: of one's memory that the
    state fills."""
    fills = f"The state alone fills {share:,.1f} of them before the first activation, so "
    alone = replace(task, num_gpus=1, pins=Pins(headroom_bytes=task.pins.headroom_bytes))
    for kinds in ((), *OFFLOADS):
        lean = what_fits(with_offload(alone, kinds), prices)
        if lean is None:
            continue
        if kinds:
            return "no", f"{fills}it must be divided, or {' and '.join(kinds)} kept on the host."
        if share < ROOMY:
            return "yes", "The model fits on one, so nothing need be divided but the batch."
        text = f"With {recompute_text(lean.layout)} it fits just so, {size_text(lean.peak_bytes)} "
        return "just", text + "a row; divided among several it leaves room for activations."
    if share < 1:
        return "no", f"The state alone fills {share:.2f} of one, and activations the rest: divide."
    return "no", f"{fills}it must be divided."


def _questions(task: Task, now: Arrangement) -> Iterator[_Question]:
    yield _Question(
        "zero",
        "How much of the state do data ranks divide?",
        zero_text(now),
        tuple(
            (f"ZeRO-{z}", _zero(now, z), {"zero": z})
            for z in (0, 1, 2, 3)
            if z != now.zero and not (z == 2 and now.pp > 1) and now.dp_shard * now.cp > 1
        ),
        _zero_lead(now),
    )
    yield _sized(task, now, "tp", "Tensor ranks within the scale-up domain?", "TP")
    yield _sized(task, now, "pp", "Pipeline stages across machines?", "PP")
    if now.pp > 1:
        yield _schedules(now)
    yield _sized(task, now, "cp", "Context ranks for long rows?", "CP")
    if task.dims.experts:
        yield _sized(task, now, "ep", "Expert ranks?", "EP")
    yield _replicas(task, now)
    rows = now.micro_batch_rows
    yield _Question(
        "micro_batch_rows",
        "How many rows at a time?",
        f"micro-batch {rows}",
        tuple(
            (f"micro-batch {n}", {"micro_batch_rows": n}, {"micro_batch_rows": n})
            for n in ([rows // 2] if rows > 1 else []) + [2 * rows]
            if n * now.data_ranks <= task.rows
        ),
    )
    yield _Question(
        "recompute",
        "What is computed again?",
        recompute_text(now),
        tuple(_recomputations(now)),
        "Not searched: groups of blocks (--recompute sqrt), and budgets of bytes.",
    )
    yield _precisions(task, now)
    yield _offloads(now)


def _recomputations(now: Arrangement) -> Iterator[_Other]:
    for mode, every in (("none", 2), ("selective", 2), ("every", 4), ("full", 2)):
        if mode != now.recompute:
            other = now.having(recompute=mode, recompute_every=every)
            changes = {"recompute": mode, "recompute_every": every}
            yield recompute_text(other), changes, {"recompute": mode}


def _precisions(task: Task, now: Arrangement) -> _Question:
    """Products in 8 bits beside those in 16: each alters the numbers of the other."""
    device, asked, others = task.cluster.accelerator, task.pins.precision, ()
    lead = f"{device.name} has no products in 8 bits."
    if device.fp8_flops_per_s:
        value = "fp8" if now.precision != "fp8" else default_precision(task.cluster)
        recipe = "tensorwise" if value == "fp8" else "none"
        others = ((value, {"precision": value, "recipe": recipe}, {"precision": value}),)
        lead = "8 bits alter the numbers, so they are taken only if asked for (--precision fp8, or"
        lead += " --precision any to search both)."
        if asked is not None:
            both = "both were searched" if asked == "any" else f"--precision {asked}"
            lead = f"As asked for ({both}); 8 bits alter the numbers."
    return _Question("precision", "Products in how many bits?", now.precision, others, lead)


def _offloads(now: Arrangement) -> _Question:
    """To the host: it leans on memory and links that the planner knows little of."""
    has = tuple(offloaded(now))
    lead = (
        "To the hosts goes only what is asked for (--offload), or where nothing fits without, or "
        "only what computes activations again; then all kinds are priced."
    )
    value = f"offload {' and '.join(has)}" if has else "no offload"
    others = tuple(
        (
            f"offload {' and '.join(kinds)}" if kinds else "no offload",
            {f"offload_{kind}": kind in kinds for kind in KINDS},
            {"offload": kinds},
        )
        for kinds in ((), *OFFLOADS)
        if kinds != has and (has or now.recompute != "none" or kinds == ("optimizer",))
    )
    return _Question("offload", "What goes to the host?", value, others, lead)


def zero_text(layout: Arrangement) -> str:
    return f"ZeRO-{layout.zero}{reshard_text(layout)}"


def _zero(now: Arrangement, zero: int) -> dict[str, Any]:
    once = zero < 2 or now.pp > 1
    reshard = "always" if zero == 3 and now.pp == 1 else "never"
    return {"zero": zero, "reshard": reshard, "reduce_every_micro_batch": not once}


def _zero_lead(now: Arrangement) -> str:
    ranks = now.dp_shard * now.cp
    if ranks == 1:
        return "There is one data rank, and so nothing to divide."
    divided = {
        0: "Each data rank has all of its stage's state.",
        1: f"Masters and moments are divided among {ranks:,} ranks; weights and gradients are "
        "whole on each.",
        2: f"Masters, moments and gradients are divided among {ranks:,} ranks.",
        3: f"Masters, moments, gradients and weights are divided among {ranks:,} ranks; a block's "
        "weights are gathered when it is at work.",
    }
    if now.pp > 1 and now.zero == 3:
        return divided[1]
    return divided[now.zero]


def _sized(task: Task, now: Arrangement, axis: str, question: str, name: str) -> _Question:
    size = getattr(now, axis)
    wanted = {size // 2, 2 * size} if size > 1 else {2}
    if axis == "pp" and size > 2:
        wanted.add(1)
    if axis == "tp" and size > 2:
        wanted.add(1)
    if axis == "cp" and size == 1 and task.seq_len < 4096:
        wanted = set()
    leads = {
        "tp": f"Every layer is computed by {size} neighbours, which exchange activations around "
        "each of its halves and hide nothing of it."
        if size > 1
        else "Layers are not divided.",
        "pp": f"The blocks are divided among {size} stages, which pass activations on."
        if size > 1
        else "No pipeline, so no bubble.",
        "cp": f"Each row's tokens are divided among {size} ranks."
        if size > 1
        else f"Rows of {task.seq_len:,} tokens stay whole.",
        "ep": f"The experts are divided among {size} ranks."
        if size > 1
        else "Every rank has all experts.",
    }
    return _Question(
        axis,
        question,
        f"{name} {size}",
        tuple((f"{name} {n}", {axis: n}, {axis: n}) for n in sorted(wanted)),
        leads[axis],
    )


def _schedules(now: Arrangement) -> _Question:
    kinds = [("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 4), ("zbv", 2)]
    others = []
    for schedule, v in kinds:
        if (schedule, v) == (now.schedule, now.stages_per_rank):
            continue
        changes: dict[str, Any] = {"schedule": schedule, "stages_per_rank": v}
        label = schedule + (f" with {v} stages a rank" if v > 1 else "")
        others.append((label, changes, changes))
    value = now.schedule + (
        f", {now.stages_per_rank} stages a rank" if now.stages_per_rank > 1 else ""
    )
    idle = f"{now.num_micro_batches} micro-batches pass through {now.pp} ranks."
    return _Question("schedule", "In what order?", value, tuple(others), idle)


def _replicas(task: Task, now: Arrangement) -> _Question:
    ranks, here = now.data_ranks, max(1, task.cluster.gpus_per_node // (now.tp * now.cp))
    wanted = {1, ranks // here if ranks % here == 0 else 1, 2} - {now.dp_replicate}
    wanted = {n for n in wanted if ranks % n == 0 and n < ranks * now.cp}
    others = tuple(
        (
            f"{n} replicas" if n > 1 else "no replicas",
            {"dp_replicate": n, "dp_shard": ranks // n},
            {"dp_replicate": n, "dp_shard": ranks // n},
        )
        for n in sorted(wanted)
    )
    m = now.num_micro_batches
    shared = (
        f"{ranks:,} share{'s' if ranks > 1 else ''} of the batch, {m:,} "
        f"micro-batch{'es' if m > 1 else ''}{' each' if ranks > 1 else ''}."
    )
    return _Question(
        "data", "And the rest: how are data ranks arranged?", data_text(now), others, shared
    )


def _told(alternative: Alternative, best: Candidate) -> str:
    """A sentence about another value."""
    label, alone = alternative.label, alternative.alone
    has = best.job.cluster.accelerator.memory_bytes
    price = ""
    if alone.step is not None:
        name, more = grown(alone.step, best.step)
        price = f"{seconds_text(alone.step_s)} ({change_text(alone.step_s, best.step_s)}"
        price += (
            f", {part_text(name)} {seconds_text(more, sign=True)})"
            if more > 0.002 * best.step_s
            else ")"
        )
    how = f" (with {' and '.join(alone.also)})" if alone.also else " alone"
    if alone.broken:
        text = f"{label}: {alone.broken.removeprefix(label + ' ')}"
        text += f"; it would take {price}." if price and alone.fits else "."
    elif alone.shortage:
        text = f"{label}{how} does not fit: {alone.shortage}."
    elif not alone.fits:
        margin = ", which leaves less than the margin" if alone.peak_bytes <= has else ""
        text = f"{label}{how} needs {size_text(alone.peak_bytes)} of {has / GIB:.1f} GiB{margin}."
    else:
        text = f"{label}{how} takes {price}"
        if alone.step_s < best.step_s:  # of what is not taken for its speed alone
            text += f" and holds {size_text(alone.peak_bytes)}"
            more_bytes = alone.peak_bytes - best.peak_bytes
            text += f" ({'+' if more_bytes >= 0 else ''}{in_gib(more_bytes)})"
        text += "."
    if alternative.best is not None and alternative.best.layout != alone.layout:
        other = alternative.best
        versus = change_text(other.step_s, best.step_s)
        text += f" The best with it takes {seconds_text(other.step_s)} ({versus}): "
        text += f"{short(other.layout)}."
    elif alternative.searched and alternative.best is None and not (alone.broken or alone.fits):
        text += f" No layout with it that fits takes less than {WORTH_TELLING:g} times as long."
    return text


def count_text(count: int) -> str:
    """`8.0 billion`, `134.5 million`."""
    if count >= 10**9:
        return f"{count / 1e9:,.1f} billion"
    return f"{count / 1e6:,.1f} million"


def part_text(name: str) -> str:
    return PARTS.get(name, name)


def change_text(after: float, before: float) -> str:
    share = after / before - 1
    return "the same" if abs(share) < 5e-4 else f"{100 * share:+.1f} %"


def messages_s(step: StepTime) -> float:
    """What would be gone without any communication; the bubble stays."""
    saved = step.exposed_s - step.parts.get("exposed offload", 0.0)
    saved += step.parts.get("contention", 0.0)
    # Stragglers are waited for in proportion.
    rest = step.total_s - step.parts.get("straggling", 0.0)
    return saved * step.total_s / rest


# --- what binds, and what would change the decision ------------------------------------------


def reliefs(prices: Prices, task: Task, best: Candidate) -> Iterator[Relief]:
    """The step without one constraint at a time, the others as they are."""
    job, cluster = best.job, best.job.cluster
    unbounded = replace(task.pins, headroom_bytes=-math.inf)
    endless = _search(prices, task, unbounded, best.step_s)
    if endless is not None:
        yield Relief("memory", endless.step_s, endless.layout)
    for name, key in LINKS.items():
        free = replace(cluster, **{key: 1e6 * getattr(cluster, key)})
        # A network beyond the scale-up links only moves the border to those.
        yield Relief(name, min(best.step_s, predict_step(replace(job, cluster=free)).total_s))
    yield Relief(MESSAGES, best.step_s - messages_s(best.step))
    for name, part in (("bubble", "bubble"), ("recomputation", "recomputation")):
        yield Relief(name, best.step_s - best.step.parts.get(part, 0.0))


def links_note(found: Explanation, best: Candidate) -> str:
    """Why no single link binds though messages cost; empty where one does, or they cost nothing."""
    saved = {relief.name: best.step_s - relief.step_s for relief in found.reliefs}
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
    with_offload = _as_offloaded(task, best)
    ways = [task] if with_offload == task else [with_offload, task]
    every = [_best_with(prices, one, {}, known_s) for one in ways]
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
    if same and zero_text(found.layout) != zero_text(best.layout):
        told += f", {zero_text(found.layout)}"
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
