"""`datasheet.html`: what went in, what came out, and why everything else went.

Every number is one of `curation.json`, or counted here on the finished files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa

from stepwell.curate.tally import value_counts
from stepwell.data.batches import SCHEMA, text_bytes
from stepwell.data.store import TokenStore

NUM_BINS, NUM_VALUES = 20, 25
TEMPLATE = "datasheet.html.j2"


def render(curation: Mapping[str, Any], labels: Sequence[Mapping[str, Any]], out: Path) -> str:
    """The page. curation: the content of curation.json; labels: of `label_tables`."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(
        files("stepwell.curate").joinpath(TEMPLATE).read_text("utf-8")
    )
    return template.render(
        name=out.name,
        curation=curation,
        funnel=funnel(curation["tally"]),
        sources=sources_table(curation),
        labels=labels,
        stores=curation["stores"],
        size=size_text,
        share=share_text,
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
                "cpu_s": entry["cpu_s"],
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
    rows = []
    for source, num_read in curation["tally"]["read"].items():
        docs, size = curation["kept"].get(source, [0, 0])
        share = size / kept_bytes if kept_bytes else 0.0
        rows.append(
            {"source": source, "read": num_read, "docs": docs, "bytes": size, "share": share}
        )
    return sorted(rows, key=lambda row: -row["bytes"])


def label_tables(batches: Sequence[pa.RecordBatch]) -> list[dict[str, Any]]:
    """The distribution of the kept documents over each label, and over their length in bytes."""
    lengths = [text_bytes(batch).to_numpy(zero_copy_only=False) for batch in batches]
    tables = [{"name": "bytes of a document", **histogram(np.concatenate(lengths), log=True)}]
    names = sorted({name for batch in batches for name in batch.schema.names} - set(SCHEMA.names))
    for name in names:
        columns = [batch[name] for batch in batches if name in batch.schema.names]
        column = pa.chunked_array(columns)
        missing = column.null_count
        if pa.types.is_floating(column.type):
            numbers = column.drop_null().to_numpy()
            tables.append({"name": name, **histogram(numbers), "missing": missing})
        else:
            counts = value_counts(column.drop_null())
            shown = by_number({str(key): count for key, count in counts.items()})
            rest = sum(count for _, count in shown[NUM_VALUES:])
            rows = [*shown[:NUM_VALUES], *([("others", rest)] if rest else [])]
            tables.append({"name": name, "missing": missing, "rows": rows, "quantiles": {}})
    return tables


def histogram(values: np.ndarray, log: bool = False) -> dict[str, Any]:
    """{"rows": [(interval, count)], "quantiles": {"5 %": ..}}; log: intervals grow by powers of
    two."""
    values = values[np.isfinite(values)]
    if not len(values):
        return {"rows": [], "quantiles": {}, "missing": 0}
    low, high = float(values.min()), float(values.max())
    if log:
        edges = 2.0 ** np.arange(
            np.floor(np.log2(max(low, 1))), np.floor(np.log2(max(high, 1))) + 2
        )
    else:
        edges = np.linspace(low, high if high > low else low + 1, NUM_BINS + 1)
    counts, edges = np.histogram(values, edges)
    rows = [
        (f"{a:.4g} to {b:.4g}", int(count))
        for a, b, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    shares = (5, 25, 50, 75, 95)
    quantiles = {f"{p} %": float(np.percentile(values, p)) for p in shares}
    return {"rows": rows, "quantiles": quantiles, "missing": 0}


def store_tables(folder: Path) -> list[dict[str, Any]]:
    """What is in each token store below `folder`."""
    rows = []
    for manifest in sorted(folder.glob("*/*/manifest.json")):
        store = TokenStore.open(manifest.parent)
        rows.append(
            {
                "path": manifest.parent.relative_to(folder.parent).as_posix(),
                "part": manifest.parent.parent.name,
                "name": manifest.parent.name,
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


def size_text(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.2f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:,.1f} kB"


def share_text(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""
