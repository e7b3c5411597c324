"""Ratios of interleaved rounds, and how they are shown."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.drive import OURS


def ratios(records: list[dict[str, Any]], speed: str) -> list[dict[str, Any]]:
    """Ours against each peer: minimum, median and maximum over the rounds, and peak memory.
    speed: the chunks' entry to compare."""
    finals = [r for r in records if not r["trial"] and r["chunks"]]
    ours = next((r for r in finals if r["library"] == OURS), None)
    if ours is None:
        return []
    rows = []
    for peer in finals:
        if peer is ours:
            continue
        speeds = [a[speed] / b[speed] for a, b in zip(ours["chunks"], peer["chunks"], strict=False)]
        rows.append(
            {
                "peer": peer["library"],
                "peer_variant": peer["variant"],
                "our_variant": ours["variant"],
                "min": round(min(speeds), 3),
                "median": round(statistics.median(speeds), 3),
                "max": round(max(speeds), 3),
                "our_tokens_per_s": median(ours, speed),
                "peer_tokens_per_s": median(peer, speed),
                "our_peak_mb": peak(ours),
                "peer_peak_mb": peak(peer),
            }
        )
    return rows


def median(record: dict[str, Any], key: str) -> float:
    return round(statistics.median(c[key] for c in record["chunks"]), 1)


def peak(record: dict[str, Any]) -> float:
    return max(c["peak_rss_mb"] for c in record["chunks"])


def show(job: str, target: float, rows: list[dict[str, Any]], unit: str = "tokens") -> str:
    """A Markdown table."""
    form = ",.0f" if unit == "tokens" else ",.1f"
    lines = [
        f"### {job} (target {target:g}x)",
        f"| peer (its better variant) | ours | min | median | max | {unit}/s ours / peer "
        "| peak MiB ours / peer |",
        "|-|-|-|-|-|-|-|",
    ]
    lines += [
        f"| {r['peer']} {r['peer_variant']} | {r['our_variant']} | {r['min']:.2f} "
        f"| **{r['median']:.2f}** | {r['max']:.2f} "
        f"| {r['our_tokens_per_s']:{form}} / {r['peer_tokens_per_s']:{form}} "
        f"| {r['our_peak_mb']:,.0f} / {r['peer_peak_mb']:,.0f} |"
        for r in rows
    ]
    return "\n".join(lines)
