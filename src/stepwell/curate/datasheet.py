"""`datasheet.html`: what went in, what came out, and why everything else went.

Every number is one of `curation.json`, or counted here on the finished files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa

from stepwell.curate.tally import value_counts
from stepwell.data.batches import SCHEMA, text_bytes
from stepwell.data.decontam.step import LABEL as LEAKS
from stepwell.data.store import TokenStore

NUM_BINS, NUM_VALUES = 20, 25
TEMPLATE = "datasheet.html.j2"
# What decisions call their numbers, in words; others are shown by their names.
WORDS = {
    "num_docs": "documents looked at",
    "documents": "documents looked at",
    "num_removed": "removed",
    "num_blank": "of them blank",
    "num_equal": "of them with the same shingles as one that stays",
    "num_clusters": "clusters",
    "num_candidates": "candidate pairs of MinHash",
    "num_plausible": "of them plausible by size and signature",
    "num_compared": "of them compared exactly",
    "num_matched": "of them at the threshold or above",
    "num_not_compared": "pairs at most that crowded buckets left unseen",
    "precision_of_candidates": "share of candidates that matched",
    "precision_of_compared": "share of compared pairs that matched",
    "distinct_repeated": "distinct passages that repeat",
    "copies_cut": "copies of them cut",
    "documents_cut": "documents that lost text",
    "num_without_tokens": "documents without a known word",
    "k_means_clusters": "clusters of k-means",
    "largest_k_means_cluster": "documents of the largest of them",
}
# Shown as tables of their own.
CLUSTER_TABLES = ("cluster_sizes", "largest_clusters")


def render(curation: Mapping[str, Any], labels: Sequence[Mapping[str, Any]], out: Path) -> str:
    """The page. curation: the content of curation.json; labels: of `label_tables`."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(
        files("stepwell.curate").joinpath(TEMPLATE).read_text("utf-8")
    )
    tally = curation["tally"]
    return template.render(
        name=out.name,
        curation=curation,
        num_read=sum(tally["read"].values()),
        text_read=total(tally["steps"]["read"]["in"])[1] if "read" in tally["steps"] else 0,
        funnel=funnel(tally),
        sources=sources_table(curation),
        matrix=removed_matrix(tally),
        decisions={name: decision(values) for name, values in curation["decisions"].items()},
        labels=labels,
        stores=curation["stores"],
        cpu=cpu_table(tally),
        size=size_text,
        share=share_text,
        count="{:,}".format,
        edge=edge_text,
    )


def funnel(tally: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each step: documents and bytes in and out, its reasons by number."""
    rows = []
    for name, entry in tally["steps"].items():
        docs_in, bytes_in = total(entry["in"])
        docs_out, bytes_out = total(entry["out"])
        rows.append(
            {
                "name": name,
                "docs_in": docs_in, "docs_out": docs_out,
                "bytes_in": bytes_in, "bytes_out": bytes_out,
                "edited": entry["edited"],
                "sources": sorted(entry["in"]),
                "reasons": [
                    {"reason": reason, "docs": docs, "examples": entry["examples"].get(reason, [])}
                    for reason, docs in by_number(entry["dropped"])
                ],
                "edits": by_number(entry["edits"]),
            }
        )  # fmt: skip
    return rows


def sources_table(curation: Mapping[str, Any]) -> list[dict[str, Any]]:
    kept_bytes = sum(size for _, size in curation["kept"].values())
    specs = {spec["name"]: spec for spec in curation["fingerprint"]["recipe"]["sources"]}
    reading = curation["tally"]["steps"].get("read", {"in": {}})
    rows = []
    for source, spec in specs.items():
        docs, size = curation["kept"].get(source, [0, 0])
        rows.append(
            {
                "source": source,
                "about": spec.get("about") or "", "licence": spec.get("licence") or "",
                "read": curation["tally"]["read"].get(source, 0),
                "bytes_in": reading["in"].get(source, [0, 0])[1],
                "docs": docs, "bytes": size,
                "share": size / kept_bytes if kept_bytes else 0.0,
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: -row["bytes"])


def removed_matrix(tally: Mapping[str, Any]) -> dict[str, Any]:
    """What each step dropped of each source: {"sources", "rows": [{"name", "cells": [{"docs",
    "of"} or None where the step saw none], "total"}], "totals"}."""
    sources = list(tally["read"])
    rows = []
    for name, entry in tally["steps"].items():
        cells = []
        for source in sources:
            seen = entry["in"].get(source, [0, 0])[0]
            left = entry["out"].get(source, [0, 0])[0]
            cells.append({"docs": seen - left, "of": seen} if seen else None)
        rows.append({"name": name, "cells": cells, "total": sum(c["docs"] for c in cells if c)})
    totals = [sum(row["cells"][i]["docs"] for row in rows if row["cells"][i])
              for i in range(len(sources))]  # fmt: skip
    return {"sources": sources, "rows": rows, "totals": totals}


def decision(summary: Mapping[str, Any]) -> dict[str, Any]:
    """{"numbers": [(words, value)], "sizes": [(interval, clusters)], "largest": [...]}."""
    numbers = [
        (WORDS.get(key, key.replace("_", " ")), number_text(value))
        for key, value in summary.items()
        if key not in CLUSTER_TABLES
    ]
    sizes = {int(size): count for size, count in summary.get("cluster_sizes", {}).items()}
    return {
        "numbers": numbers,
        "sizes": doubling(sizes),
        "largest": summary.get("largest_clusters", []),
    }


def doubling(counts: Mapping[int, int]) -> list[tuple[str, int]]:
    """Counts of whole numbers above 1 in intervals that double: 2, 3 to 4, 5 to 8, ..."""
    rows: dict[int, int] = {}
    for value, count in counts.items():
        power = (value - 1).bit_length()
        rows[power] = rows.get(power, 0) + count
    return [
        (f"{2 ** (p - 1) + 1:,} to {2**p:,}" if p > 1 else "2", rows.get(p, 0))
        for p in range(1, max(rows, default=0) + 1)
    ]


def cpu_table(tally: Mapping[str, Any]) -> list[tuple[str, float]]:
    return sorted(tally["cpu"].items(), key=lambda pair: -pair[1])


def label_tables(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    """The distribution of the kept documents over each label, and over their length in bytes; of
    whole numbers in their own order. Holds four bytes a document and label of real numbers."""
    lengths: list[np.ndarray] = []
    numbers: dict[str, list[np.ndarray]] = {}
    counts: dict[str, Counter[Any]] = {}
    known: Counter[str] = Counter()
    for batch in batches:
        lengths.append(text_bytes(batch).to_numpy(zero_copy_only=False).astype(np.uint32))
        for name in batch.schema.names[len(SCHEMA) :]:
            if name == LEAKS:
                continue
            column = batch[name].drop_null()
            known[name] += len(column)
            if pa.types.is_floating(column.type):
                values = column.to_numpy(zero_copy_only=False).astype(np.float32)
                numbers.setdefault(name, []).append(values)
            else:
                counts.setdefault(name, Counter()).update(value_counts(column))
    num_docs = sum(map(len, lengths))
    sizes = np.concatenate([np.empty(0, np.uint32), *lengths])
    tables = [{"name": "bytes of a document", "missing": 0, **histogram(sizes, log=True)}]
    for name in sorted({*numbers, *counts}):
        shown = (
            histogram(np.concatenate(numbers[name]))
            if name in numbers
            else {"rows": most_common(counts[name]), "quantiles": {}}
        )
        tables.append({"name": name, "missing": num_docs - known[name], **shown})
    return tables


def most_common(counts: Mapping[Any, int]) -> list[tuple[str, int]]:
    if all(isinstance(key, int) for key in counts) and len(counts) <= NUM_VALUES:
        return [(str(key), counts[key]) for key in sorted(counts)]
    rows = by_number({str(key): number for key, number in counts.items()})
    rest = sum(count for _, count in rows[NUM_VALUES:])
    return [*rows[:NUM_VALUES], *([("others", rest)] if rest else [])]


def histogram(values: np.ndarray, log: bool = False) -> dict[str, Any]:
    """{"rows": [(interval, count)], "quantiles": {"5 %": ..}}; log: intervals grow by powers of
    two."""
    values = values[np.isfinite(values)]
    if not len(values):
        return {"rows": [], "quantiles": {}}
    low, high = float(values.min()), float(values.max())
    if log:
        edges = 2.0 ** np.arange(
            np.floor(np.log2(max(low, 1))), np.floor(np.log2(max(high, 1))) + 2
        )
    else:
        edges = np.linspace(low, high if high > low else low + 1, NUM_BINS + 1)
    counts, edges = np.histogram(values, edges)
    rows = [
        (f"{edge_text(a)} to {edge_text(b)}", int(count))
        for a, b, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    shares = (5, 25, 50, 75, 95)
    quantiles = {f"{p} %": float(np.percentile(values, p)) for p in shares}
    return {"rows": rows, "quantiles": quantiles}


def store_tables(folder: Path, values: Mapping[str, str | int | None]) -> list[dict[str, Any]]:
    """What is in each token store below `folder`; values: what `store.by` is there, by place."""
    rows = []
    for manifest in sorted(folder.glob("*/*/manifest.json")):
        store = TokenStore.open(manifest.parent)
        rows.append(
            {
                "path": manifest.parent.relative_to(folder.parent).as_posix(),
                "part": manifest.parent.parent.name,
                "name": manifest.parent.name,
                "value": values[manifest.parent.relative_to(folder).as_posix()],
                "docs": store.num_docs,
                "tokens": store.num_tokens,
            }
        )
    return rows


def total(volumes: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    docs = sum(volume[0] for volume in volumes.values())
    return docs, sum(volume[1] for volume in volumes.values())


def by_number(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def edge_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def number_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def size_text(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.2f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:,.1f} kB"


def share_text(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""
