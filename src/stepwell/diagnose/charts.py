"""Charts as inline SVG whose colours are CSS variables, so that they follow light and dark.

Each function returns an `<svg>` element with a title and a description for screen readers.
"""

from __future__ import annotations

import html
import io
import math
import re
import zlib
from collections.abc import Sequence
from typing import Any

# Drawn in these colours, which are then replaced by variables; one a variable.
_VARIABLES = {
    "#010203": "--text",
    "#010204": "--muted",
    "#010205": "--line",
    "#010206": "--c1",
    "#010207": "--c2",
    "#010208": "--c3",
    "#010209": "--band",
}
_COLOR = {name: color for color, name in _VARIABLES.items()}
SERIES = ("--c1", "--c2", "--c3")
MAX_POINTS = 400
WIDTH_IN, HEIGHT_IN = 4.7, 2.9


def line_chart(
    title: str,
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    *,
    x_label: str = "step",
    y_label: str = "",
    phases: Sequence[tuple[str, float, float]] = (),
    percent: bool = False,
    y_from_zero: bool = False,
    smooth: bool = True,
) -> str:
    """lines: (name, x, y); non-finite values are gaps. phases: (name, first x, last x), shaded.

    With many points a line is drawn twice: as it is, faint, and smoothed.
    """
    figure, axes = _axes()
    for i, (name, first, last) in enumerate(phases):
        if i % 2 == 0:
            axes.axvspan(first, last, color=_COLOR["--band"], lw=0)
        middle = (first + last) / 2
        axes.text(
            middle,
            1.02,
            name,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=9,
            color=_COLOR["--muted"],
        )
    for i, (name, x, y) in enumerate(lines):
        color = _COLOR[SERIES[i % len(SERIES)]]
        x, y = thin(x, [100 * v if percent else v for v in y])
        if smooth and len(x) > 30:
            axes.plot(x, y, color=color, lw=0.9, alpha=0.35)
            axes.plot(x, smoothed(y), color=color, lw=2, label=name)
        else:
            axes.plot(x, y, color=color, lw=2, label=name, marker="o" if len(x) < 20 else None)
    if y_from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(f"{y_label} (%)" if percent else y_label)
    if len(lines) > 1:
        axes.legend(frameon=False, labelcolor=_COLOR["--text"])
    parts = [f"{name}: {_describe(x, y, percent)}" for name, x, y in lines]
    return _svg(figure, title, "; ".join(parts))


def bar_chart(
    title: str,
    bars: Sequence[tuple[str, float, float | None, float | None, str]],
    *,
    y_label: str = "",
    percent: bool = False,
) -> str:
    """bars: (name, value, low, high, the text above it); low and high are an interval or None."""
    figure, axes = _axes()
    scale = 100 if percent else 1
    heights = [scale * value for _, value, *_ in bars]
    axes.bar(range(len(bars)), heights, color=_COLOR["--c1"], width=0.6)
    tops = []
    for i, (_, value, low, high, text) in enumerate(bars):
        top = scale * max(value, high if high is not None else value)
        if low is not None and high is not None:
            axes.vlines(i, scale * low, scale * high, color=_COLOR["--text"], lw=1.4)
            for end in (low, high):
                axes.hlines(scale * end, i - 0.09, i + 0.09, color=_COLOR["--text"], lw=1.4)
        tops.append(top)
        axes.annotate(
            text,
            (i, top),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            color=_COLOR["--text"],
            weight="bold",
        )
    axes.set_xticks(range(len(bars)), [name for name, *_ in bars])
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_ylim(0, max([*tops, 1e-9]) * 1.15)
    axes.set_ylabel(f"{y_label} (%)" if percent else y_label)
    return _svg(figure, title, "; ".join(f"{name} {text}" for name, *_, text in bars))


def paired_bar_chart(
    title: str,
    rows: Sequence[tuple[str, float, float | None]],
    names: tuple[str, str] = ("predicted", "measured"),
    *,
    x_label: str = "",
) -> str:
    """Horizontal bars, two a row: (name, first value, second value or None)."""
    figure, axes = _axes(height_in=max(1.6, 0.75 + 0.42 * len(rows)))
    for offset, color, index in ((-0.19, "--c1", 1), (0.19, "--c2", 2)):
        places = [(i + offset, row[index]) for i, row in enumerate(rows) if row[index] is not None]
        if places:
            at, widths = zip(*places, strict=True)
            axes.barh(at, widths, height=0.36, color=_COLOR[color], label=names[index - 1])
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlabel(x_label)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=_COLOR["--line"], lw=0.8)
    if any(second is not None for *_, second in rows):
        axes.legend(frameon=False, labelcolor=_COLOR["--text"])
    return _svg(figure, title, "; ".join(f"{name}: {first:.4g}" for name, first, _ in rows))


def thin(
    x: Sequence[float], y: Sequence[float], most: int = MAX_POINTS
) -> tuple[list[float], list[float]]:
    """At most `most` points: means of equal stretches (a stretch without a finite value is NaN)."""
    size = max(1, math.ceil(len(x) / most))
    pieces = [slice(i, i + size) for i in range(0, len(x), size)]
    return [_finite_mean(x[p]) for p in pieces], [_finite_mean(y[p]) for p in pieces]


def _finite_mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def smoothed(values: Sequence[float], half: int | None = None) -> list[float]:
    """Mean over a window of up to 2*half + 1 finite neighbours; gaps stay gaps."""
    half = half or max(1, len(values) // 40)
    found = []
    for i, value in enumerate(values):
        reach = min(half, i, len(values) - 1 - i)
        window = values[i - reach : i + reach + 1]
        found.append(_finite_mean(window) if math.isfinite(value) else math.nan)
    return found


def _describe(x: Sequence[float], y: Sequence[float], percent: bool) -> str:
    finite = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
    if not finite:
        return "no finite value"
    (x0, y0), (x1, y1) = finite[0], finite[-1]
    text = (lambda v: f"{100 * v:.1f} %") if percent else (lambda v: f"{v:.4g}")
    return f"{text(y0)} at {x0:g}, {text(y1)} at {x1:g}"


def _axes(height_in: float = HEIGHT_IN):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_COLOR["--line"])
    axes.tick_params(colors=_COLOR["--muted"], labelsize=9, length=3)
    axes.xaxis.label.set(color=_COLOR["--muted"], size=9)
    axes.yaxis.label.set(color=_COLOR["--muted"], size=9)
    axes.grid(axis="y", color=_COLOR["--line"], lw=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure, title: str, description: str) -> str:
    import matplotlib

    target = io.StringIO()
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "font.family": "sans-serif",
        "legend.fontsize": 9,
    }
    with matplotlib.rc_context(settings):
        figure.savefig(
            target,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    return _inline(target.getvalue(), title, description)


def _inline(text: str, title: str, description: str) -> str:
    """An element for HTML: no prolog, no namespaces, ids that no other chart has, and variables
    for colours and the font."""
    text = text[text.index("<svg") :]
    view_box = re.search(r'viewBox="([^"]+)"', text)
    assert view_box is not None
    body = text[text.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    prefix = "c" + format(hash_of(title + description), "x")
    body = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{prefix}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", body)
    body = re.sub(r"font: ([^;\"]*?)(\d[\d.]*)px [^;\"]*", r"font: \1\2px var(--font)", body)
    for color, name in _VARIABLES.items():
        body = body.replace(color, f"var({name})")
    return (
        f'<svg class="chart" role="img" viewBox="{view_box.group(1)}" '
        f'aria-labelledby="{prefix}-title {prefix}-desc">'
        f'<title id="{prefix}-title">{html.escape(title)}</title>'
        f'<desc id="{prefix}-desc">{html.escape(description)}</desc>{body}'
    )


def hash_of(text: str) -> int:
    """A short number that is the same in every process."""
    return zlib.crc32(text.encode())
