"""A method's plan as one HTML page: which model is where, what each holds in each moment, where a
step's time goes, what else there was. Self-contained; worth printing. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepwell.files import write_text
from stepwell.plan.explain.page import Figure, Rows, filled
from stepwell.plan.explain.words import count_text
from stepwell.plan.methods import pictures
from stepwell.plan.methods.evaluated import Evaluated
from stepwell.plan.methods.methods import MethodPlan
from stepwell.plan.methods.text import (
    NAMES,
    alike_text,
    settings_text,
    verdict,
    workload_text,
)
from stepwell.plan.units import in_gib, seconds_text, size_text


def write_page(plan: MethodPlan, path: Path) -> Path:
    """The page, whole or not at all."""
    write_text(path, render(plan))
    return path


def render(plan: MethodPlan) -> str:
    """Of what the plan has chosen; where nothing fits, of what was asked for."""
    one = plan.chosen or plan.asked
    good = "good" if one.fits else "bad"
    sampled = one.sampling is not None
    return filled(
        title=f"{plan.method} of {plan.name} on {plan.num_gpus:,} x {plan.gpu}",
        lead=(
            f"{NAMES[plan.method]}; {count_text(plan.parameters)} parameters. A step's work: "
            f"{workload_text(plan.method, plan.workload)}. Predicted, not measured."
        ),
        figures=[
            Figure(
                "memory of a GPU",
                size_text(one.peak),
                f"of {size_text(one.limit)} while {one.phase}: "
                f"{'fits' if one.fits else 'does not fit'}",
                good,
            ),
            Figure("a step", seconds_text(one.step_s), _longest(one)),
            Figure(
                "all models, each once",
                size_text(plan.state_bytes),
                f"{plan.bytes_per_parameter:.3g} bytes a parameter, as usually drawn",
            ),
            *_host(one),
        ],
        layout_title="Which model is where",
        layout=f"{_who(one)}: {one.layout}",
        missing="sampling without a whole copy of the policy on every GPU" if one.lacks else "",
        machine=pictures.gpus(one),
        machine_note="What rests on each GPU, as a share of what is usable:",
        numbering=(
            "GPUs that train are numbered with tensor ranks as neighbours, then shards; those that "
            "serve follow."
        ),
        why_title="What fits, and why",
        reasons=list(_reasons(plan, one)),
        memory_title="What a GPU that trains holds in each moment",
        memory=pictures.moments_chart(one),
        legend=pictures.legend(),
        models=pictures.models_chart(one),
        models_note="Each model by itself, and what sampling needs:" if sampled else "Each model:",
        models_legend=pictures.legend_of_parts(),
        time_title="Where a step's time goes",
        waterfall=pictures.time_chart(one),
        time_note=f"A step of {seconds_text(one.step_s)}; its parts follow each other.",
        tables=[_alternatives(plan), _models(one), _settings(one)],
    )


def _host(one: Evaluated) -> list[Figure]:
    if not one.host_of_machine:
        return []
    return [Figure("a machine's memory", size_text(one.host_of_machine), f"of {one.host_text}")]


def _longest(one: Evaluated) -> str:
    name = max(one.times, key=lambda part: one.times[part])
    return f"{seconds_text(one.times[name])} of it {name}"


def _who(one: Evaluated) -> str:
    servers = "".join(f", {n} for the {name}" for name, n in one.servers.items())
    return ("1 GPU trains" if one.trainers == 1 else f"{one.trainers:,} GPUs train") + servers


def _reasons(plan: MethodPlan, one: Evaluated) -> Iterator[dict[str, Any]]:
    """In the form of `explain.reasons.Reason`, as the template reads it."""
    first, *rest = verdict(plan)
    yield _reason("As it is usually drawn:", "yes" if plan.fits else "no", first, rest)
    if one is not plan.asked:
        yield _reason("Drawn here:", "the nearest that fits", "; ".join(one.changes), ())
    if one.why_tp:
        yield _reason("Tensor ranks:", str(one.job.layout.tp), one.why_tp, ())
    for said in alike_text(one):
        yield _reason("Sampled more than once?", f"{one.sampled_alike} times", said, ())


def _reason(question: str, value: str, lead: str, told: Any) -> dict[str, Any]:
    return {"question": question, "value": value, "lead": lead, "told": told}


def _alternatives(plan: MethodPlan) -> Rows:
    found = [("as usually drawn", plan.asked)]
    if plan.nearest is not None and not plan.fits:
        found.append((_changes(plan.nearest), plan.nearest))
    found += [(_changes(one), one) for one in plan.others]
    if plan.elsewhere is not None:
        there = f"on {plan.num_gpus} x {plan.elsewhere.gpu}: {_changes(plan.elsewhere)}"
        found.append((there, plan.elsewhere))
    rows = [
        (
            name,
            f"{_who(one)}: {one.layout}",
            in_gib(one.peak),
            in_gib(one.host_of_machine) if one.host_of_machine else "0",
            seconds_text(one.step_s),
            "not yet" if one.lacks else "yes" if one.fits else "no",
        )
        for name, one in found
    ]
    columns = ("placement", "layout", "GiB a GPU", "GiB of a host", "a step", "fits")
    return Rows("alternatives", "What else there was", columns, rows, columns[2:])


def _changes(one: Evaluated) -> str:
    return "; ".join(one.changes) or "as usually drawn"


def _models(one: Evaluated) -> Rows:
    rows = [
        (
            name,
            *(in_gib(n) if n else "0" for n in (*model.named().values(), model.total)),
        )
        for name, model in one.models.items()
    ]
    columns = ("model", "frozen", "gradients", "float32", "moments", "on the host", "on a GPU")
    return Rows("models", "GiB of each model on a GPU", columns, rows, columns[1:])


def _settings(one: Evaluated) -> Rows:
    rows = [(words,) for words in settings_text(one)]
    note = "Keys of a run that is placed so; --write writes them as a recipe."
    return Rows("settings", "Settings", ("key and value",), rows, note=note)
