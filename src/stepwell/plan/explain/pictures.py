"""Pictures of a plan as inline SVG: the mesh on the machines, memory by stage, the waterfall. No
torch.

Colours are CSS variables of the page (`--s0` ...), so that they follow light, dark and print.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from stepwell.hardware import GIB
from stepwell.plan.explain.words import part_text
from stepwell.plan.footprint.footprint import footprint
from stepwell.plan.job import Arrangement, Job
from stepwell.plan.search.candidates import Candidate
from stepwell.plan.steptime.waterfall import LEAST_SHARE, waterfall
from stepwell.plan.units import in_gib, size_text

WIDTH = 720
MOST_STAGES, MOST_COLUMNS = 32, 24
MOST_ENDS = 8  # pipeline ranks at either end whose memory is drawn
NUM_COLORS = 8  # --s0 to --s7
# What a GPU holds, in few kinds.
KINDS = {
    "weights": ("parameters", "masters", "working_copies", "gathered"),
    "gradients": ("gradients",),
    "optimiser": ("optimizer",),
    "activations": ("activations", "norms", "attention", "mlp", "residual", "logits", "waiting"),
    "workspace": ("workspace",),
}
OTHER = "driver, communicators, fragmentation"


class Place(NamedTuple):
    """Of a rank in the dense view."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


def place_of(rank: int, layout: Arrangement) -> Place:
    """The last axis varies fastest."""
    rank, tp = divmod(rank, layout.tp)
    rank, cp = divmod(rank, layout.cp)
    rank, shard = divmod(rank, layout.dp_shard)
    pp, replica = divmod(rank, layout.dp_replicate)
    return Place(pp, replica, shard, cp, tp)


def svg(width: float, height: float, title: str, description: str, inside: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f"<desc>{escape(description)}</desc>{''.join(inside)}</svg>"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"'
    return f"<text {place}>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, color: str, hint: str = "") -> str:
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" rx="2" '
        f'style="fill:{f"var({color})" if color.startswith("--") else color}">{inside}</rect>'
    )


# --- the mesh --------------------------------------------------------------------------------


def machine(job: Job) -> str:
    """The first machine: what each of its GPUs is."""
    layout, here = job.layout, min(job.cluster.gpus_per_node, job.layout.num_gpus)
    columns = min(here, 8)
    wide, high = WIDTH / columns, 58
    parts = []
    for i in range(here):
        place = place_of(i, layout)
        x, y = (i % columns) * wide, (i // columns) * (high + 6)
        parts.append(box(x + 2, y, wide - 4, high, color_of_stage(place.pp, layout.pp)))
        parts.append(text(x + wide / 2, y + 17, f"GPU {i}", "gpu", "middle"))
        for j, words in enumerate(_labels(place, layout)):
            parts.append(text(x + wide / 2, y + 32 + 12 * j, words, "gpu small", "middle"))
    height = -(-here // columns) * (high + 6)
    return svg(WIDTH, height, "The first machine", "Each GPU and its place on the axes", parts)


def _labels(place: Place, layout: Arrangement) -> list[str]:
    names = {"pp": "PP", "cp": "CP", "tp": "TP"}
    words = [f"{names[a]} {getattr(place, a)}" for a in names if getattr(layout, a) > 1]
    data = place.dp_replicate * layout.dp_shard + place.dp_shard
    words = [f"DP {data}", *words] if layout.data_ranks > 1 else words
    return [" ".join(words[:2]), " ".join(words[2:])] if len(words) > 2 else [" ".join(words)]


def color_of_stage(stage: int, num_stages: int) -> str:
    """No two stages have the same: more than the page has colours get hues in their order."""
    if num_stages <= NUM_COLORS:
        return f"--s{stage if num_stages > 1 else 0}"
    return f"hsl({330 * stage / (num_stages - 1):.0f} 60% var(--stage))"


def machines(job: Job) -> str:
    """All machines: a strip for each pipeline stage (as many as there is room for), several beside
    each other where they are short; a cell for each machine, a square for each GPU."""
    layout, per_node = job.layout, job.cluster.gpus_per_node
    a_stage = max(1, layout.num_gpus // layout.pp)
    rows = min(layout.pp, MOST_STAGES)
    here = min(per_node, a_stage)
    num_cells = -(-a_stage // here)
    shown = min(num_cells, MOST_COLUMNS)
    left, wide = 66, min(46.0, (WIDTH - 66 - 40) / shown)
    across = max(1, min(here, 4))
    side = (wide - 6) / across
    high = side * -(-here // across) + 8
    strip = left + shown * wide + (40 if num_cells > shown else 10)
    beside = max(1, min(rows, int(WIDTH // strip)))
    parts = []
    for stage in range(rows):
        start, y = (stage % beside) * WIDTH / beside, (stage // beside) * (high + 3)
        words = f"stage {stage}" if layout.pp > 1 else "all"
        parts.append(text(start, y + high / 2 + 4, words))
        for cell in range(shown):
            x = start + left + cell * wide
            first = stage * a_stage + cell * here
            hint = f"machine {first // per_node}: {_span(first, here, layout)}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide - 2:.1f}" height="{high:.1f}" rx="3" '
                f'class="machine"><title>{escape(hint)}</title></rect>'
            )
            for i in range(here):
                gx, gy = x + 2 + (i % across) * side, y + 4 + (i // across) * side
                parts.append(
                    box(gx, gy, side - 1.5, side - 1.5, color_of_stage(stage, layout.pp), hint)
                )
        if num_cells > shown:
            words = f"+ {num_cells - shown:,}"
            parts.append(text(start + left + shown * wide + 2, y + high / 2 + 4, words, "small"))
    height = -(-rows // beside) * (high + 3)
    if layout.pp > rows:
        height += 16
        parts.append(text(0, height - 4, f"and {layout.pp - rows} more stages", "small"))
    what = f"{layout.num_gpus} GPUs, a strip for each pipeline stage, a cell for each machine"
    return svg(WIDTH, height, "The mesh on the machines", what, parts)


def _span(first: int, number: int, layout: Arrangement) -> str:
    begin, end = place_of(first, layout), place_of(first + number - 1, layout)
    words = []
    for name, a, b in zip(Place._fields, begin, end, strict=True):
        if getattr(layout, name) > 1:
            words.append(f"{name} {a}" if a == b else f"{name} {a} to {b}")
    return ", ".join(words)


# --- memory ----------------------------------------------------------------------------------


def memory_of_stage(job: Job, pp_rank: int) -> dict[str, float]:
    """Bytes on a GPU of one pipeline rank, by kind."""
    held = footprint(job, pp_rank)
    found = {kind: sum(held.items.get(n, 0.0) for n in names) for kind, names in KINDS.items()}
    known = {name for names in KINDS.values() for name in names}
    found["workspace"] += sum(n for name, n in held.items.items() if name not in known)
    found[OTHER] = held.total - held.allocated
    return found


def memory_bars(found: Candidate) -> str:
    job = found.job
    layout, has = job.layout, job.cluster.accelerator.memory_bytes
    ranks, gap = list(range(layout.pp)), 0
    if layout.pp > 2 * MOST_ENDS:
        gap = layout.pp - 2 * MOST_ENDS
        ranks = [*range(MOST_ENDS), *range(layout.pp - MOST_ENDS, layout.pp)]
    bars = {rank: memory_of_stage(job, rank) for rank in ranks}
    most = max(has, *(sum(bar.values()) for bar in bars.values()))
    left, high = 66, 18
    scale = (WIDTH - left - 60) / most
    parts = []
    for i, (rank, bar) in enumerate(bars.items()):
        x, y = float(left), (i + (gap > 0 and i >= MOST_ENDS)) * (high + 5)
        parts.append(text(0, y + 13, f"rank {rank}" if layout.pp > 1 else "a GPU"))
        for j, (kind, num_bytes) in enumerate(bar.items()):
            hint = f"{kind}: {size_text(num_bytes)}"
            parts.append(box(x, y, num_bytes * scale, high, f"--s{j}", hint))
            x += num_bytes * scale
        parts.append(text(x + 4, y + 13, in_gib(sum(bar.values())), "small"))
    if gap:
        between = f"… ranks {MOST_ENDS} to {MOST_ENDS + gap - 1} are between those above and below"
        parts.append(text(0, MOST_ENDS * (high + 5) + 13, between, "small"))
    height = (len(bars) + (gap > 0)) * (high + 5)
    limit = left + has * scale
    parts.append(f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="{height}" class="limit"/>')
    parts.append(text(limit, height + 12, f"{has / GIB:.1f} GiB", "small", "end"))
    what = "GiB by kind on each pipeline rank, and what the accelerator has"
    return svg(WIDTH, height + 16, "Memory of each stage", what, parts)


def legend() -> list[tuple[str, str]]:
    """(colour, kind)."""
    return [(f"--s{i}", kind) for i, kind in enumerate([*KINDS, OTHER])]


# --- time ------------------------------------------------------------------------------------


def waterfall_chart(found: Candidate) -> str:
    losses = [loss for loss in waterfall(found.step) if loss.share >= LEAST_SHARE]
    left, high = 270, 18
    scale = WIDTH - left - 70
    rows = [("peak", 1.0, 1.0, "--s0"), *_steps(losses)]
    parts = []
    for i, (name, start, share, color) in enumerate(rows):
        y = i * (high + 5)
        parts.append(text(left - 8, y + 13, name, "", "end"))
        parts.append(box(left + (start - share) * scale, y, share * scale, high, color))
        shown = f"{100 * share:.1f} %"
        parts.append(text(left + start * scale + 4, y + 13, shown, "small"))
    what = "Shares of a step between the accelerator's peak and the MFU"
    return svg(WIDTH, len(rows) * (high + 5), "From peak to MFU", what, parts)


def _steps(losses: Sequence) -> list[tuple[str, float, float, str]]:
    """(name, where it ends, its share, colour) of each loss, then what is left."""
    found, top = [], 1.0
    for loss in losses[1:]:
        found.append((part_text(loss.name), top, loss.share, "--s1"))
        top -= loss.share
    useful = losses[0].share
    return [*found, ("MFU", useful, useful, "--s3")]
