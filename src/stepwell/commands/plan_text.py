"""A plan in the terminal. No torch."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepwell.hardware import GIB
from stepwell.plan.explain.answer import (
    Review,
    Searched,
    activation_items,
    memory_items,
    traffic_json,
    training,
)
from stepwell.plan.explain.circumstances import LINKS, links_note
from stepwell.plan.explain.knobs import Knob
from stepwell.plan.explain.reasons import fastest_offload
from stepwell.plan.explain.words import change_text, count_text, part_text
from stepwell.plan.job import Dims
from stepwell.plan.measured.gap import Gap
from stepwell.plan.measured.shown import (
    LINE_COLUMNS,
    LINK_COLUMNS,
    easing,
    head,
    line_rows,
    link_rows,
)
from stepwell.plan.methods.evaluated import Evaluated
from stepwell.plan.methods.text import configured, of_limit
from stepwell.plan.search.candidates import Candidate, Ranking
from stepwell.plan.search.runs import data_text, offloaded, recompute_text, short, state_text
from stepwell.plan.search.space import REASONS, Task
from stepwell.plan.steptime.waterfall import CONVENTION, LEAST_SHARE, waterfall
from stepwell.plan.units import count_of, in_gib, seconds_text, size_text, tokens_text

WIDTH = 100
TOO_CLOSE = 1.02  # below what predictions can tell apart


@dataclass(frozen=True)
class Hanging:
    """A paragraph whose first line begins with `first`, the others below the text behind it."""

    text: str
    first: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = " " * len(self.first)
        lines = textwrap.wrap(
            self.text, max(options.max_width, 2 * len(indent)), initial_indent=self.first,
            subsequent_indent=indent, break_on_hyphens=False,
        )  # fmt: skip
        yield from (Text(line, no_wrap=True, overflow="ignore") for line in lines)


def show(what: RenderableType) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=WIDTH)
    console.print(what)


def searched(answer: Searched, most: int) -> Group:
    ranking, best = answer.ranking, answer.best
    parts: list[RenderableType] = [
        heading(ranking.task.dims, ranking.task),
        *[note(f"assumed: {what}") for what in answer.assumed],
        *headline(best),
        "",
        layout_table(best),
    ]
    close = [c for c in answer.explanation.runners_up if c.step_s < TOO_CLOSE * best.step_s]
    if close:
        names = "; ".join(short(c.layout) for c in close[:3])
        parts.append(note(f"Within {100 * (TOO_CLOSE - 1):.0f} %, too close to call: {names}."))
    if ranking.offload:
        parts.append(note(offload_text(ranking)))
    faster = fastest_offload(answer.explanation.reasons)
    if faster is not None and TOO_CLOSE * faster.step_s < best.step_s:
        change = change_text(faster.step_s, best.step_s)
        said = f"{seconds_text(faster.step_s)} ({change}): {short(faster.layout)}."
        parts.append(note(f"Faster with offload (--offload any): {said}"))
    if answer.gap is not None:
        parts += ["", title("Measured against predicted"), *gap_lines(answer.gap)]
        parts += [*knobs_and_fastest(answer, best)]
    if answer.training_tokens:
        parts += ["", training_text(best, answer.training_tokens)]
    parts += ["", title("Why"), *reasons(answer)]
    parts += ["", title("What binds"), *binding(answer)]
    if answer.explanation.scenarios:
        parts += ["", title("What would change it"), scenario_table(answer)]
    parts += ["", title("Where the time goes"), waterfall_table(best)]
    parts += ["", title("What a GPU holds"), memory_table(best), machine_note(best)]
    parts += ["", title("What a GPU sends in a step"), traffic_table(best)]
    if answer.explanation.runners_up:
        parts += ["", title("The best of other meshes")]
        parts.append(candidates_table([best, *answer.explanation.runners_up[:most]], best))
    if len(answer.pareto) > 1 or answer.batches:
        parts += ["", title("Speed against memory left, and batch"), pareto_table(answer)]
    parts += ["", title("What was looked at"), *looked_at(answer)]
    return Group(*parts)


def offload_text(ranking: Ranking) -> str:
    """What goes to the host if no kind of it was asked for, and why."""
    kinds, without = " and ".join(ranking.offload), ranking.resident_s
    if without == math.inf:
        return f"Nothing fits without offload; to the host: {kinds}."
    return f"To the host: {kinds}; without offload the fastest takes {seconds_text(without)}."


def reviewed(answer: Review) -> Group:
    candidate, method = answer.candidate, answer.method
    of = "" if method is None else ", in the policy's training alone"
    parts: list[RenderableType] = [
        heading(answer.task.dims, answer.task, answer.run.name),
        *[note(f"assumed: {what}") for what in answer.assumed],
        *(headline(candidate) if method is None else headline_of_method(method)),
        "",
        layout_table(candidate),
    ]
    if method is not None:
        lines = [Text(f"  {line}") for line in configured(method)]
        parts += ["", title("All models of the method, and its whole step"), *lines]
    if answer.gap is not None:
        parts += ["", title("Measured against predicted"), *gap_lines(answer.gap)]
        parts += knobs_and_fastest(answer, candidate)
    parts += ["", title(f"Where the time goes{of}"), waterfall_table(candidate)]
    parts += ["", title(f"What a GPU holds{of}"), memory_table(candidate)]
    parts += [machine_note(candidate)] if method is None else []
    parts += ["", title(f"What a GPU sends in a step{of}"), traffic_table(candidate)]
    if answer.gap is None:
        parts += knobs_and_fastest(answer, candidate)
    return Group(*parts)


def knobs_and_fastest(answer: Searched | Review, now: Candidate) -> list[RenderableType]:
    """Against the measured step where its parts are known, else against the predicted one."""
    found = None if answer.gap is None else answer.gap.comparison
    if found is not None and not found.of_device:
        return []
    whole = isinstance(answer, Review) and answer.method is not None
    before = answer.step_s if found is None or whole else found.measured.step_s
    gains = {} if answer.gap is None else answer.gap.gains
    parts: list[RenderableType] = [
        *("", title("Knobs by predicted gain"), *knob_lines(answer.knobs, gains)),
        *together_lines(answer.together, now, before, whole),
    ]
    if answer.fastest is not None:
        after = answer.fastest.step_s + (0.0 if found is None else found.fitted.beside_s)
        gain = 1 - after / before
        more = f"{100 * gain:.1f} % less" if gain > 0.001 else "no faster"
        parts += ["", title("The fastest layout that a search finds")]
        parts.append(f"  {short(answer.fastest.layout)}: {seconds_text(after)}, {more}")
    return parts


# --- pieces ----------------------------------------------------------------------------------


def title(text: str) -> Text:
    return Text(text, style="bold")


def note(text: str) -> Padding:
    return Padding(Text(text, style="dim"), (0, 0, 0, 2))


def heading(dims: Dims, task: Task, name: str = "") -> Text:
    cluster = task.cluster
    count, active = dims.parameters(), dims.parameters(active=True)
    size = f"{count_text(count)} parameters"
    if dims.experts:
        size += f" ({count_text(active)} active)"
    text = Text()
    text.append(name or dims.name, style="bold")
    machines = math.ceil(task.num_gpus / cluster.gpus_per_node)
    here = f", {machines:,} machines of {cluster.gpus_per_node}" if machines > 1 else ""
    text.append(
        f": {size}, {task.num_gpus:,} x {cluster.name}{here}; a step is "
        f"{count_of(task.rows, 'row')} of {task.seq_len:,} tokens = {task.tokens:,}"
    )
    return text


def headline(found: Candidate) -> list[RenderableType]:
    fits, host = found.fits, found.memory.host
    has = found.job.cluster.accelerator.memory_bytes
    verdict = Text(
        "  fits" if fits else "  does not fit", style="bold green" if fits else "bold red"
    )
    verdict.append(
        f": {in_gib(found.peak_bytes)} of {has / GIB:.1f} GiB a GPU"
        + (f", {found.headroom_bytes / GIB:.1f} left" if found.headroom_bytes >= 0 else ""),
        style="not bold default",
    )
    speed = Text(
        f"  {seconds_text(found.step_s)} a step, {found.tokens_per_s:,.0f} tokens/s "
        f"({found.step.tokens_per_s_per_gpu:,.0f} a GPU), MFU {100 * found.step.mfu:.1f} %, "
        f"HFU {100 * found.step.hfu:.1f} %"
    )
    lines: list[RenderableType] = [verdict, speed]
    if host.shortage:
        lines.append(Text(f"  {host.shortage}", style="bold red"))
    if found.not_in_engine:
        lines.append(Text(f"  not in the engine yet: {found.not_in_engine}", style="yellow"))
    return lines


def headline_of_method(found: Evaluated) -> list[RenderableType]:
    """All models in the worst moment, and the whole step."""
    verdict = Text(
        "  fits" if found.fits else "  does not fit",
        style="bold green" if found.fits else "bold red",
    )
    left = found.limit - found.peak
    verdict.append(
        f": {of_limit(found)}" + (f", {left / GIB:.1f} left" if left >= 0 else ""),
        style="not bold default",
    )
    lines: list[RenderableType] = [verdict, Text(f"  {seconds_text(found.step_s)} a whole step")]
    if found.host_shortage:
        lines.append(Text(f"  {found.host_shortage}", style="bold red"))
    return lines


def layout_table(found: Candidate) -> Table:
    layout = found.layout
    table = plain()
    pipeline = layout.schedule
    if layout.stages_per_rank > 1:
        pipeline += f", {layout.stages_per_rank} stages a rank"
    rows = [
        ("tensor (TP)", str(layout.tp), ""),
        ("context (CP)", str(layout.cp), layout.cp_method if layout.cp > 1 else ""),
        ("pipeline (PP)", str(layout.pp), pipeline if layout.pp > 1 else ""),
    ]
    if found.job.dims.experts:
        rows.append(("experts (EP)", str(layout.ep), ""))
    rows += [
        ("data (DP)", str(layout.data_ranks), data_words(found)),
        ("state", state_text(layout), ""),
        (
            "micro-batch",
            str(layout.micro_batch_rows),
            f"rows, {layout.num_micro_batches} of them a step",
        ),
        ("recompute", recompute_text(layout).removeprefix("recompute "), ""),
        ("precision", layout.precision, layout.recipe if layout.recipe != "none" else ""),
    ]
    if offloaded(layout):
        rows.append(("offload", ", ".join(offloaded(layout)), ""))
    for row in rows:
        table.add_row(*row)
    return table


def data_words(found: Candidate) -> str:
    layout = found.layout
    if layout.dp_replicate == 1:
        return ""
    several = layout.dp_shard * layout.cp > 1
    return f"{data_text(layout)}: replicas x shards" if several else "replicas"


def training_text(best: Candidate, tokens: int) -> str:
    whole = training(best, tokens)
    return (
        f"  {tokens:,} tokens: {whole['steps']:,.0f} steps, {whole['days']:,.1f} days, "
        f"{whole['gpu_hours']:,.0f} GPU-hours, if nothing is lost to restarts"
    )


def reasons(answer: Searched) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for number, reason in enumerate(answer.explanation.reasons, 1):
        head = Text(f"  {number}. {reason.question} ")
        head.append(reason.value, style="bold")
        lines.append(head)
        if reason.lead:
            lines.append(Hanging(reason.lead, "     "))
        lines += [Hanging(told, "     - ") for told in reason.told]
    return lines


def binding(answer: Searched) -> list[RenderableType]:
    best, table = answer.best, plain()
    for relief in sorted(answer.explanation.reliefs, key=lambda r: r.step_s):
        what = f"without {'the limit of ' if relief.name == 'memory' else ''}{relief.name}"
        if relief.name in LINKS:
            what = f"if the {relief.name} took no time"
        other = short(relief.layout) if relief.layout else ""
        table.add_row(
            what, seconds_text(relief.step_s), change_text(relief.step_s, best.step_s), other
        )
    told = links_note(answer.explanation.reliefs, best)
    return [table, note(told)] if told else [table]


def scenario_table(answer: Searched) -> Table:
    table = plain("with", "time per token", "the best is then")
    for s in answer.explanation.scenarios:
        per = "" if math.isinf(s.per_token) else f"{100 * (s.per_token - 1):+.1f} %"
        table.add_row(s.name, per, s.changes)
    return table


def waterfall_table(found: Candidate) -> Table:
    table, left = plain(), 1.0
    losses = waterfall(found.step)
    table.add_row("peak", "", f"{found.step.peak_flops_per_s / 1e12:,.0f} TFLOP/s", "100.0 %")
    for loss in losses[1:]:
        if loss.share < LEAST_SHARE:
            continue
        left -= loss.share
        bar = "-" * round(40 * loss.share)
        table.add_row(
            part_text(loss.name),
            seconds_text(loss.seconds),
            f"-{100 * loss.share:.1f} %",
            f"{100 * left:.1f} %",
            bar,
        )
    table.add_row(
        "MFU", seconds_text(losses[0].seconds), "", f"{100 * found.step.mfu:.1f} %", CONVENTION
    )
    return table


def memory_table(found: Candidate) -> Table:
    table = plain()
    items = memory_items(found)
    total = sum(items.values())
    for name, num_bytes in sorted(items.items(), key=lambda pair: -pair[1]):
        if num_bytes < 0.002 * total:
            continue
        bar = "#" * round(40 * num_bytes / total)
        table.add_row(name.replace("_", " "), size_text(num_bytes), bar)
        if name == "activations":
            modules = activation_items(found).items()
            of = ", ".join(f"{module} {size_text(n)}" for module, n in modules if n)
            table.add_row("", "", f"{of} ({recompute_text(found.layout)})")
    if found.exact:
        tensors = size_text(found.exact.peak_bytes)
        table.add_row("tensors of these", tensors, "as `stepwell pretrain --check` says on a GPU")
    phase = found.exact.phase if found.exact else found.memory.phase
    where = f" on pipeline rank {found.memory.pp_rank}" if found.layout.pp > 1 else ""
    table.add_row("peak", size_text(total), f"in the {phase} phase{where}")
    return table


def machine_note(found: Candidate) -> Padding:
    return note(f"A machine's memory: {found.memory.host.text}")


def traffic_table(found: Candidate) -> Table:
    table = plain("axis", "over", "calls", "sent")
    for row in traffic_json(found):
        table.add_row(row["axis"], row["link"], f"{row['calls']:,}", size_text(row["wire_bytes"]))
    return table


def candidates_table(candidates: Iterable[Candidate], best: Candidate) -> Table:
    table = plain("a step", "", "a GPU", "MFU", "layout")
    for c in candidates:
        versus = "" if c is best else change_text(c.step_s, best.step_s)
        table.add_row(
            seconds_text(c.step_s),
            versus,
            size_text(c.peak_bytes),
            f"{100 * c.step.mfu:.1f} %",
            short(c.layout),
        )
    return table


def pareto_table(answer: Searched) -> Table:
    table = plain("batch", "tokens/s a GPU", "left", "layout")
    rows = list(answer.pareto)
    rows += [other.found[0] for other in answer.batches if other.found]
    for c in sorted(rows, key=lambda c: (c.layout.global_batch_tokens, c.step_s)):
        table.add_row(
            tokens_text(c.layout.global_batch_tokens),
            f"{c.step.tokens_per_s_per_gpu:,.0f}",
            size_text(c.headroom_bytes),
            short(c.layout),
        )
    return table


def looked_at(answer: Searched) -> list[RenderableType]:
    ranking = answer.ranking
    table = plain()
    for name, count in ranking.refused_meshes.most_common():
        table.add_row(f"{count:,}", "meshes", REASONS[name])
    for name, count in ranking.refused.most_common():
        table.add_row(f"{count:,}", "layouts", REASONS[name])
    head = (
        f"  {ranking.number_text} in "
        f"{ranking.seconds:.1f} s; {ranking.num_timed:,} fit and were timed. Not taken:"
    )
    return [head, table]


def knob_lines(
    knobs: Sequence[Knob], gains: Mapping[str, tuple[float, float]]
) -> list[RenderableType]:
    """gains: of a measured step, whatever its cause."""
    table = plain("gain", *(["if measured"] if gains else []), "", "a step", "a GPU", "set")
    works = [k for k in knobs if k.works and k.gain > 0]
    blocked = [k for k in knobs if not k.works and k.gain > 0.02][:4]
    for knob in works:
        name = knob.name + (f" ({knob.alters})" if knob.alters else "")
        after = knob.changed
        table.add_row(
            f"{100 * knob.gain:+.1f} %", *range_text(knob, gains), name, seconds_text(knob.step_s),
            size_text(after.peak_bytes), knob.setting,
        )  # fmt: skip
    for knob in blocked:
        after = knob.changed
        why = after.broken or knob.refused.splitlines()[0] if (after.broken or knob.refused) else ""
        why = why or after.shortage or f"needs {size_text(after.peak_bytes)}"
        gain = f"{100 * knob.gain:+.1f} %", *range_text(knob, gains)
        table.add_row(*gain, knob.name, "-", "-", Text(why, style="dim"))
    if not works and not blocked:
        return ["  none that gains anything: of its neighbours this layout is the fastest"]
    return [table]


def range_text(knob: Knob, gains: Mapping[str, tuple[float, float]]) -> list[str]:
    least, most = gains.get(knob.name, (0.0, 0.0))
    return [f"{100 * least:+.0f} to {100 * most:+.0f} %"] if gains else []


def together_lines(
    together: Sequence[Knob], now: Candidate, before_s: float, whole: bool = False
) -> list[RenderableType]:
    """whole: of a step that has more in it than what `now` is of, and so no MFU."""
    if not together:
        return []
    last, step = together[-1], now.step
    names = ", then ".join(f"{k.name} ({100 * k.gain:+.1f} %)" for k in together)
    least = step.model_flops / step.peak_flops_per_s
    mfu = [100 * least / seconds for seconds in (before_s, last.step_s)]
    rates = "" if whole else f" MFU {mfu[0]:.1f} -> {mfu[1]:.1f} %,"
    return [
        "",
        f"  One after the other: {names}.",
        f"  Together {seconds_text(before_s)} -> {seconds_text(last.step_s)} a step,{rates} "
        f"{size_text(last.changed.peak_bytes)}.",
    ]


def gap_lines(gap: Gap) -> list[RenderableType]:
    lines: list[RenderableType] = [Padding(head(gap), (0, 0, 0, 2))]
    if gap.comparison is not None:
        return [*lines, *comparison_lines(gap)]
    if not gap.suspects:
        return [*lines, "  No slower than predicted: what it loses is below, and so is what gains."]
    lines.append("  What would explain it, each by itself:")
    for suspect in gap.suspects:
        text = Text(f"{suspect.name}: ", style="bold")
        text.append(f"{suspect.text}. ", style="not bold")
        if not suspect.likely:
            text.append("Hardly that alone. ", style="not bold")
        text.append(f"Look at: {sentence(suspect.look)}", style="not bold dim")
        if suspect.eased_by:
            text.append(f" If so, gains most: {easing(suspect.eased_by)}.", style="not bold")
        lines.append(Padding(text, (0, 0, 0, 4)))
    lines.append(
        note(
            "Knobs below: what they gain of the predicted step, and of the measured one, by which "
            "of the likely causes it is. A trace tells."
        )
    )
    return lines


def sentence(text: str) -> str:
    return text if text.endswith("?") else f"{text}."


def comparison_lines(gap: Gap) -> list[RenderableType]:
    """The parts, the messages, what loses most; the knobs follow."""
    comparison = gap.comparison
    assert comparison is not None
    lines: list[RenderableType] = [note(f"Note: {doubt}.") for doubt in comparison.doubts]
    for columns, rows in (
        (LINE_COLUMNS, line_rows(comparison)),
        (LINK_COLUMNS, link_rows(comparison)),
    ):
        if not rows:
            continue
        table = plain(*columns)
        for row in rows:
            table.add_row(*row)
        lines += ["", table]
    if comparison.causes:
        lines += ["", "  What loses most, against the prediction:"]
    for cause in comparison.causes:
        text = Text(f"{cause.title}, {cause.seconds:+.3f} s: ", style="bold")
        text.append(f"{cause.text}. ", style="not bold")
        text.append(f"Look at: {sentence(cause.look)}", style="not bold dim")
        if cause.eased_by:
            text.append(f" Shrinks it most: {easing(cause.eased_by)}.", style="not bold")
        lines.append(Padding(text, (0, 0, 0, 4)))
    if comparison.knobs:
        lines.append(note("Knobs below: gains of the measured step, at the rates that it shows."))
    return lines


def plain(*columns: str) -> Table:
    table = Table(box=None, show_header=bool(columns), padding=(0, 2, 0, 0), pad_edge=False)
    numeric = {
        "a step",
        "a GPU",
        "sent",
        "MFU",
        "calls",
        "tokens/s a GPU",
        "left",
        "time per token",
        "gain",
        "if measured",
        *LINE_COLUMNS[1:],
        *LINK_COLUMNS[2:],
    }
    for column in columns:
        table.add_column(
            column, justify="right" if column in numeric else "left", overflow="fold",
            header_style="dim",
        )  # fmt: skip
    return table
