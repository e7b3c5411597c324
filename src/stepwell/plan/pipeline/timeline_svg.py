"""A pipeline's step as a picture: a row for each rank, a box for each action. No torch."""

from __future__ import annotations

import html

from stepwell.plan.pipeline.bubble import Timeline

WIDTH, ROW, LEFT, TOP = 960.0, 26.0, 62.0, 30.0
MIN_LABEL_WIDTH = 13.0  # of a box that its micro-batch's number fits in
# By kind: fill of a rank's first stage, of its further ones, of the text in it.
COLOURS = {
    "F": ("#4878a8", "#7ba3cc", "#ffffff"),
    "B": ("#c0703c", "#dc9c6c", "#ffffff"),
    "I": ("#c0703c", "#dc9c6c", "#ffffff"),
    "W": ("#5a9367", "#8fbf99", "#ffffff"),
}
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward: gradients of inputs",
    "W": "gradients of weights",
}


def timeline_svg(timeline: Timeline, title: str = "", unit: str = "") -> str:
    """An `<svg>` that scales to its place, with a title and a description for screen readers. The
    text outside of boxes has the colour of the page. unit: of time, on the axis."""
    total = timeline.total_s or 1
    scale = (WIDTH - LEFT - 8) / total
    height = TOP + timeline.num_ranks * ROW + 42
    said = (
        f"{timeline.num_ranks} ranks, {timeline.num_stages} stages; bubble "
        f"{timeline.bubble_share:.1%} of the work"
    )
    name = html.escape(title or "Timeline of a pipeline")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" role="img" '
        'width="100%" font-family="sans-serif" font-size="11" fill="currentColor">',
        f"<title>{name}</title><desc>{html.escape(said)}</desc>",
        f'<text x="0" y="14" font-size="13">{name}: {html.escape(said)}</text>',
    ]
    for rank in range(timeline.num_ranks):
        y = TOP + rank * ROW
        parts.append(f'<text x="0" y="{y + 16:g}">rank {rank}</text>')
        parts.append(
            f'<rect x="{LEFT:g}" y="{y:g}" width="{total * scale:.1f}" height="{ROW - 4:g}" '
            'fill="currentColor" fill-opacity="0.07"/>'
        )
    first = _first_stages(timeline)
    for event in timeline.events:
        kind, stage, micro_batch, _ = event.action
        x, y = LEFT + event.start_s * scale, TOP + event.rank * ROW
        width = (event.end_s - event.start_s) * scale
        fill = COLOURS[kind][stage != first[event.rank]]
        span = f"{event.start_s:g} to {event.end_s:g}{html.escape(unit)}"
        parts.append(
            f'<rect x="{x:.1f}" y="{y:g}" width="{max(width - 0.6, 0.4):.1f}" '
            f'height="{ROW - 4:g}" fill="{fill}"><title>stage {stage}, {NAMES[kind]} of '
            f"micro-batch {micro_batch}: {span}</title></rect>"
        )
        if width >= MIN_LABEL_WIDTH:
            parts.append(
                f'<text x="{x + width / 2:.1f}" y="{y + 15:g}" text-anchor="middle" '
                f'fill="{COLOURS[kind][2]}" pointer-events="none">{micro_batch}</text>'
            )
    parts += _legend(timeline, height - 26)
    parts.append(
        f'<text x="{WIDTH - 8:g}" y="{height - 30:g}" text-anchor="end">{total:.4g}'
        f"{html.escape(unit)}</text></svg>"
    )
    return "".join(parts)


def _first_stages(timeline: Timeline) -> dict[int, int]:
    first: dict[int, int] = {}
    for event in timeline.events:
        stage = event.action.stage
        first[event.rank] = min(stage, first.get(event.rank, stage))
    return first


def _legend(timeline: Timeline, y: float) -> list[str]:
    kinds = {event.action.kind for event in timeline.events}
    shown = [(COLOURS[kind][0], NAMES[kind]) for kind in "FBIW" if kind in kinds]
    if timeline.num_stages > timeline.num_ranks:
        shown.append((COLOURS["F"][1], "lighter: a rank's further stages"))
    parts, x = [], LEFT
    for fill, name in shown:
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="12" height="12" fill="{fill}"/>')
        parts.append(f'<text x="{x + 17:g}" y="{y + 10:g}">{name}</text>')
        x += 34 + 6.2 * len(name)
    return parts
