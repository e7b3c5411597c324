"""Why a layout is what it is: for each axis what else could be, priced. No torch.

Every number is of a layout that was priced: `alone` changes one thing and lets the data ranks fill
the accelerators; `best` searches again with the other value held fixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from stepwell.hardware import GIB
from stepwell.plan.explain.change import Changed, changed, grown
from stepwell.plan.explain.circumstances import (
    Relief,
    Scenario,
    as_forced,
    best_with,
    reliefs,
    scenarios,
)
from stepwell.plan.explain.questions import questions
from stepwell.plan.explain.words import change_text, count_text, part_text
from stepwell.plan.memory.ledger import state_bytes_per_parameter
from stepwell.plan.search.candidates import Candidate, Ranking, mesh_of
from stepwell.plan.search.fewest import what_fits
from stepwell.plan.search.prices import Prices, budget_gain_s
from stepwell.plan.search.runs import offloaded, recompute_text, short
from stepwell.plan.search.search import SAME
from stepwell.plan.search.space import OFFLOADS, Pins, Task, with_offload
from stepwell.plan.units import in_gib, seconds_text, size_text

FIT = "Does it fit on one?"
ROOMY = 0.7  # of one's memory: with less state there is room for activations
WORTH_TELLING = 1.5  # times the best step; layouts that take longer are not looked for


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


def reasons(prices: Prices, task: Task, best: Candidate, deep: bool = True) -> Iterator[Reason]:
    """In the decision tree's order. Axes that the user has fixed are explained all the same."""
    yield _whole_model(prices, task, best)
    within = as_forced(task, best)
    for asked in questions(task, best.layout):
        found = []
        for label, changes, pins in asked.others:
            searched = deep and not fixed(task.pins, pins)
            alone = changed(prices, task, best.layout, changes)
            if alone.works and (searched or _is_close(alone, best)):
                alone = _exactly(alone, prices, task)
            limit = WORTH_TELLING * best.step_s
            if alone.works:  # nothing slower need be looked for
                limit = min(limit, 1.0001 * alone.step_s)
            other = best_with(prices, within, pins, limit) if searched else None
            found.append(Alternative(label, alone, other, searched))
        told = [_told(alternative, best) for alternative in found]
        if deep and found and not any(alternative.searched for alternative in found):
            told.append("Held fixed, so layouts with other values are not searched.")
        lead = _budget(prices, best) if asked.axis == "recompute" else asked.lead
        yield Reason(asked.axis, asked.question, asked.value, lead, tuple(found), tuple(told))


def fastest_offload(reasons: Iterable[Reason]) -> Candidate | None:
    """Of all that was searched with some other offload than the best layout's."""
    asked = [alternative for r in reasons if r.axis == "offload" for alternative in r.alternatives]
    found = [alternative.best for alternative in asked if alternative.best is not None]
    return min(found, key=lambda c: c.step_s, default=None)


def _budget(prices: Prices, best: Candidate) -> str:
    """What choosing block by block could gain."""
    if best.layout.recompute == "none":
        return "Nothing, so choosing block by block (remat.budget_bytes) has nothing to save."
    most = budget_gain_s(prices, best)
    share = f"{seconds_text(most)} ({100 * most / best.step_s:.1f} % of the step)"
    return (
        f"Choosing block by block (remat.budget_bytes) would save {share} at most: it is priced "
        "by the room that is left, not searched."
    )


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
        if alone.step_s < (1 - SAME) * best.step_s:  # of what is not taken for its speed alone
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
        resident = (
            "" if offloaded(best.layout) or label.startswith("offload") else " without offload"
        )
        text += (
            f" No layout with it that fits{resident} takes less than {WORTH_TELLING:g} times as "
        )
        text += "long."
    return text
