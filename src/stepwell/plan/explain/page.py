"""A plan as one HTML page: the mesh on the machines, the reasons, memory by stage, the waterfall,
what else there was. Self-contained; worth printing. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from stepwell.files import write_text
from stepwell.hardware import GIB
from stepwell.plan.explain import pictures
from stepwell.plan.explain.answer import Review, Searched, traffic_json, training
from stepwell.plan.explain.circumstances import links_note
from stepwell.plan.explain.knobs import Knob
from stepwell.plan.explain.words import change_text, count_text
from stepwell.plan.measured.gap import Gap
from stepwell.plan.measured.shown import cause_rows, easing, head, line_rows, link_rows
from stepwell.plan.methods.evaluated import Evaluated
from stepwell.plan.methods.text import alike_text
from stepwell.plan.search.candidates import Candidate
from stepwell.plan.search.runs import short
from stepwell.plan.search.space import REASONS, Task
from stepwell.plan.steptime.waterfall import CONVENTION
from stepwell.plan.units import count_of, seconds_text, size_text


class Figure(NamedTuple):
    name: str
    value: str
    note: str = ""
    kind: str = ""


class Rows(NamedTuple):
    """numbers: names of the columns that are set to the right."""

    id: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()
    note: str = ""


def write_page(answer: Searched | Review, path: Path) -> Path:
    """The page, whole or not at all."""
    text = render(answer)
    write_text(path, text)
    return path


def render(answer: Searched | Review) -> str:
    return filled(**(_of_search(answer) if isinstance(answer, Searched) else _of_review(answer)))


def filled(**values: Any) -> str:
    """The template with these values."""
    import jinja2

    source = files("stepwell.plan.explain").joinpath("page.html.j2").read_text("utf-8")
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(source)
    return template.render(**values)


def _of_search(answer: Searched) -> dict[str, Any]:
    best, task = answer.best, answer.ranking.task
    tables = [*_gap(answer.gap), _runners_up(answer), _binding(answer)]
    if answer.explanation.scenarios:
        tables.append(_scenarios(answer))
    tables += [_knobs(answer.knobs), _traffic(best), _frontier(answer), _looked_at(answer)]
    found = of_candidate(best, task, task.dims.name, tables)
    found["reasons"] = answer.explanation.reasons
    if answer.training_tokens:
        whole = training(best, answer.training_tokens)
        days = Figure(
            "the whole training", f"{whole['days']:,.0f} days", f"{answer.training_tokens:,} tokens"
        )
        found["figures"].append(days)
    return found


def _of_review(answer: Review) -> dict[str, Any]:
    tables = [*_gap(answer.gap), _knobs(answer.knobs), _traffic(answer.candidate)]
    method = answer.method
    if method is None:
        return of_candidate(answer.candidate, answer.task, answer.run.name, tables)
    found = of_candidate(
        answer.candidate, answer.task, answer.run.name, [_moments(method), *tables]
    )
    found["figures"] = _figures_of_method(method)
    found["memory_title"] = "What a GPU holds in the policy's training alone"
    found["time_title"] = "From peak to MFU, in the policy's training alone"
    return found


def _figures_of_method(found: Evaluated) -> list[Figure]:
    here, there = found.peak <= found.limit, found.host_of_machine <= found.host_limit
    return [
        Figure(
            "memory of a GPU, all models",
            size_text(found.peak),
            f"of {size_text(found.limit)} while {found.phase}: {_verdict(here)}",
            "good" if here else "bad",
        ),
        Figure(
            "a machine's own memory",
            size_text(found.host_of_machine),
            f"of {found.host_text}: {_verdict(there)}",
            "good" if there else "bad",
        ),
        Figure("a whole step", seconds_text(found.step_s)),
    ]


def _verdict(fits: bool) -> str:
    return "fits" if fits else "does not fit"


def _moments(found: Evaluated) -> Rows:
    rows = [(name, size_text(held), size_text(found.limit)) for name, held in found.phases.items()]
    times = ", ".join(f"{name} {seconds_text(s)}" for name, s in found.times.items())
    note = " ".join([f"A whole step: {times}.", *(f"{said}." for said in alike_text(found))])
    columns = ("while", "a GPU holds", "of")
    return Rows("moments", "All models of the method", columns, rows, columns[1:], note)


def _gap(found: Gap | None) -> list[Rows]:
    if found is None:
        return []
    if found.comparison is not None:
        return _compared(found)
    rows = [(s.name, s.text, s.look, easing(s.eased_by)) for s in found.suspects]
    columns = ("suspect", "what would explain it by itself", "look at", "if so, gains most")
    return [Rows("gap", "Measured against predicted", columns, rows, note=head(found))]


def _compared(found: Gap) -> list[Rows]:
    comparison = found.comparison
    assert comparison is not None
    note = " ".join([head(found), *(f"Note: {doubt}." for doubt in comparison.doubts)])
    lines = ("part of a step", "measured, s", "predicted, s", "difference, s")
    links = ("messages of", "link", "busy, s", "exposed, s", "GiB", "GB/s", "expected", "rated")
    causes = ("what loses", "s a step", "why", "look at", "knobs that shrink it")
    return [
        Rows("gap", "Measured against predicted", lines, line_rows(comparison), lines[1:], note),
        Rows("links", "Messages measured", links, link_rows(comparison), links[2:]),
        Rows("causes", "What loses most", causes, cause_rows(comparison), causes[1:2]),
    ]


def of_candidate(best: Candidate, task: Task, name: str, tables: Sequence[Rows]) -> dict[str, Any]:
    """What every page of a layout has, for `filled`."""
    layout, cluster = best.layout, task.cluster
    has = cluster.accelerator.memory_bytes
    host, here = best.memory.host, best.headroom_bytes >= 0
    return {
        "title": f"{name} on {task.num_gpus:,} x {cluster.name}",
        "lead": (
            f"{count_text(task.dims.parameters())} parameters; a step is "
            f"{count_of(task.rows, 'row')} of {task.seq_len:,} tokens ({task.tokens:,}). "
            "Predicted, not measured."
        ),
        "figures": [
            Figure(
                "memory of a GPU",
                size_text(best.peak_bytes),
                f"of {has / GIB:.1f} GiB: {_verdict(here)}",
                "good" if here else "bad",
            ),
            Figure(
                "a machine's own memory",
                size_text(host.total),
                f"of {host.room / GIB:.1f} GiB: {_verdict(host.fits)}",
                "good" if host.fits else "bad",
            ),
            Figure(
                "a step",
                seconds_text(best.step_s),
                f"{seconds_text(best.step.exposed_s)} of it exposed messages",
            ),
            Figure(
                "tokens a second",
                f"{best.tokens_per_s:,.0f}",
                f"{best.step.tokens_per_s_per_gpu:,.0f} a GPU",
            ),
            Figure("MFU", f"{100 * best.step.mfu:.1f} %", f"HFU {100 * best.step.hfu:.1f} %"),
        ],
        "layout": short(layout),
        "missing": best.not_in_engine,
        "stages": layout.pp > 1,
        "machine": pictures.machine(best.job),
        "machines": pictures.machines(best.job),
        "numbering": (
            "Ranks are numbered with tensor ranks as neighbours, then context ranks, shards, "
            "replicas and pipeline stages."
        ),
        "reasons": (),
        "memory": pictures.memory_bars(best),
        "legend": pictures.legend(),
        "waterfall": pictures.waterfall_chart(best),
        "step": seconds_text(best.step_s),
        "convention": CONVENTION,
        "tables": [table for table in tables if table.rows],
    }


def _runners_up(answer: Searched) -> Rows:
    best = answer.best
    rows = [
        (
            short(c.layout),
            seconds_text(c.step_s),
            "" if c is best else change_text(c.step_s, best.step_s),
            size_text(c.peak_bytes),
            f"{100 * c.step.mfu:.1f} %",
        )
        for c in (best, *answer.explanation.runners_up)
    ]
    columns = ("layout", "a step", "against the best", "a GPU", "MFU")
    return Rows("runners-up", "The best of each mesh", columns, rows, columns[1:])


def _binding(answer: Searched) -> Rows:
    best = answer.best
    rows = [
        (
            relief.name,
            seconds_text(relief.step_s),
            change_text(relief.step_s, best.step_s),
            short(relief.layout) if relief.layout else "",
        )
        for relief in sorted(answer.explanation.reliefs, key=lambda r: r.step_s)
    ]
    columns = ("without the cost or limit of", "a step", "change", "layout")
    told = links_note(answer.explanation.reliefs, best)
    return Rows("binding", "What binds", columns, rows, columns[1:3], told)


def _scenarios(answer: Searched) -> Rows:
    rows = [
        (s.name, "" if math.isinf(s.per_token) else f"{100 * (s.per_token - 1):+.1f} %", s.changes)
        for s in answer.explanation.scenarios
    ]
    columns = ("with", "time a token", "the best is then")
    return Rows("scenarios", "What would change the decision", columns, rows, columns[1:2])


def _knobs(knobs: Sequence[Knob]) -> Rows:
    rows = [
        (
            f"{100 * knob.gain:+.1f} %",
            knob.name + (f" ({knob.alters})" if knob.alters else ""),
            size_text(knob.changed.peak_bytes),
            knob.setting if knob.works else knob.changed.broken or knob.refused or "does not fit",
        )
        for knob in knobs
        if knob.gain > 0
    ]
    columns = ("gain", "knob", "a GPU", "set")
    return Rows("knobs", "Knobs by predicted gain", columns, rows, ("gain", "a GPU"))


def _traffic(found: Candidate) -> Rows:
    rows = [
        (row["axis"], row["link"], f"{row['calls']:,}", size_text(row["wire_bytes"]))
        for row in traffic_json(found)
    ]
    columns = ("axis", "over", "calls", "sent")
    return Rows("traffic", "What a GPU sends in a step", columns, rows, columns[2:])


def _frontier(answer: Searched) -> Rows:
    found = [*answer.pareto, *(other.found[0] for other in answer.batches if other.found)]
    rows = [
        (
            f"{c.layout.global_batch_tokens:,}",
            f"{c.step.tokens_per_s_per_gpu:,.0f}",
            size_text(c.headroom_bytes),
            short(c.layout),
        )
        for c in sorted(found, key=lambda c: (c.layout.global_batch_tokens, c.step_s))
    ]
    columns = ("batch", "tokens/s a GPU", "left", "layout")
    return Rows("frontier", "Speed against memory left, and batch", columns, rows, columns[:3])


def _looked_at(answer: Searched) -> Rows:
    ranking = answer.ranking
    rows = [
        (f"{count:,}", what, REASONS[name])
        for what, refused in (("meshes", ranking.refused_meshes), ("layouts", ranking.refused))
        for name, count in refused.most_common()
    ]
    note = f"{ranking.number_text}; {ranking.num_timed:,} fit and were timed. Not taken:"
    return Rows(
        "looked-at", "What was looked at", ("number", "of", "rule"), rows, ("number",), note
    )
