"""A measured step beside the predicted one as rows of text, for the terminal and the page, and as
JSON. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stepwell.hardware import GIB
from stepwell.plan.explain.knobs import Knob
from stepwell.plan.measured.compare import Comparison
from stepwell.plan.measured.gap import Gap
from stepwell.plan.measured.lines import NAMES, Line

LINE_COLUMNS = ("part of a step", "measured", "predicted", "difference")
LINK_COLUMNS = ("messages", "link", "busy", "exposed", "sent", "GB/s", "expected", "rated")


def head(gap: Gap) -> str:
    source = f" ({gap.source})" if gap.source else ""
    return (
        f"{gap.measured_s:.4g} s measured{source}, {gap.predicted_s:.4g} s predicted: "
        f"{100 * (gap.ratio - 1):+.1f} %"
    )


def line_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """LINE_COLUMNS."""
    whole = Line("a step", comparison.measured.step_s, comparison.predicted_s)
    return [
        (NAMES.get(x.name, x.name), f"{x.measured_s:.3f} s", f"{x.predicted_s:.3f} s",
         f"{round(x.more_s, 3) + 0.0:+.3f} s")  # never -0.000
        for x in (*comparison.lines, whole)
    ]  # fmt: skip


def link_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """LINK_COLUMNS; the rate is that of the fastest tenth of each size."""
    rows = []
    for link in comparison.links:
        messages = link.messages
        rate = messages.bytes_per_s
        sent = f"{messages.wire_bytes / GIB:,.2f} GiB" if messages.wire_bytes else "?"
        rows.append((
            link.axis, link.link, f"{messages.busy_s:.3f} s", f"{messages.exposed_s:.3f} s", sent,
            "?" if rate is None else f"{rate / 1e9:,.1f}", f"{link.expected / 1e9:,.1f}",
            f"{link.rated / 1e9:,.1f}",
        ))  # fmt: skip
    return rows


def cause_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    return [
        (c.title, f"{c.seconds:+.3f}", c.text, c.look, easing(c.eased_by))
        for c in comparison.causes
    ]


def easing(knobs: Iterable[Knob]) -> str:
    return ", ".join(f"{k.name} ({100 * k.gain:+.1f} %)" for k in knobs)


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    measured, rates = comparison.measured, comparison.fitted.rates
    return {
        "num_steps": measured.num_steps,
        "comm/exposed_s": measured.exposed_s,
        "lines": [
            {
                "name": line.name,
                "text": NAMES[line.name],
                "measured_s": line.measured_s,
                "predicted_s": line.predicted_s,
                "difference_s": line.more_s,
            }
            for line in comparison.lines
        ],
        "messages": [
            {
                "axis": link.axis,
                "link": link.link,
                **link.messages._asdict(),
                "hidden_s": link.messages.hidden_s,
                "bytes_per_s": link.messages.bytes_per_s,
                "expected_bytes_per_s": link.expected,
                "rated_bytes_per_s": link.rated,
                "predicted_wire_bytes": link.predicted_bytes,
                "predicted_busy_s": link.predicted_s,
            }
            for link in comparison.links
        ],
        "causes": [
            {
                "name": cause.name,
                "seconds": cause.seconds,
                "text": cause.text,
                "look": cause.look,
                "eased_by": [{"name": k.name, "gain": k.gain} for k in cause.eased_by],
            }
            for cause in comparison.causes
        ],
        "rates": rates.as_dict(),
        "memory_factor": comparison.fitted.memory,
        "slowed_by_messages": measured.slowed,
        "optimizer_idle_s": measured.optimizer_idle_s,
        "beside_s": comparison.fitted.beside_s,
        "doubts": list(comparison.doubts),
        "of_device": comparison.of_device,
    }
