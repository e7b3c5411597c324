"""Documents as Arrow batches, and what a curation step makes of one.

A batch has the columns of SCHEMA and then one column for each label that a step has added
(`language`, `quality`, ...). `key` numbers the documents of a whole curation: it is unique, and
grows in reading order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from stepwell.types import Document, Dropped

# Its functions are made when it is imported, which a type checker cannot know.
pc: Any = pyarrow.compute

# id: unique within a source, as far as the input's own ids are. meta: a JSON object.
SCHEMA = pa.schema(
    [
        ("key", pa.uint64()),
        ("id", pa.string()),
        ("source", pa.string()),
        ("text", pa.large_string()),
        ("meta", pa.string()),
    ]
)
# What left. reason: a short stable key; detail: the value and the limit, for people; witness: the
# kept document (`source/id`) that a duplicate repeats, the item of a benchmark that leaked, else
# empty; text: as it was when it left.
REMOVED = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("step", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("witness", pa.string()),
        ("text", pa.large_string()),
    ]
)
# What was changed inside a document that stays: characters start to stop of its text before the
# step became `replacement`. The former text itself is not kept (it may be somebody's address).
EDITS = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("step", pa.string()),
        ("reason", pa.string()),
        ("start", pa.int64()),
        ("stop", pa.int64()),
        ("replacement", pa.string()),
    ]
)


@dataclass(frozen=True)
class Outcome:
    """What a step made of a batch: every document of it is either in `kept` (in the same order,
    perhaps with another text or further labels) or in `removed`."""

    kept: pa.RecordBatch
    removed: pa.RecordBatch = field(default_factory=lambda: empty(REMOVED))
    edits: pa.RecordBatch = field(default_factory=lambda: empty(EDITS))


@dataclass(frozen=True)
class Removal:
    """Why a document goes."""

    reason: str
    detail: str = ""
    witness: str = ""


def empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema)


def to_batch(docs: Sequence[Document], first_key: int) -> pa.RecordBatch:
    """Documents as a batch; their keys count up from first_key."""
    keys = np.arange(first_key, first_key + len(docs), dtype=np.uint64)
    columns = [
        pa.array(keys),
        pa.array([doc.id for doc in docs], pa.string()),
        pa.array([doc.source for doc in docs], pa.string()),
        pa.array([doc.text for doc in docs], pa.large_string()),
        pa.array([_json(doc.meta) for doc in docs], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def documents(batch: pa.RecordBatch) -> Iterator[Document]:
    """The batch's documents; labels join their meta. What the input has under a label's name stays
    beside another value of the label, as `input_NAME`."""
    labels = batch.schema.names[len(SCHEMA) :]
    for row in batch.to_pylist():
        meta = json.loads(row["meta"])
        for name in labels:
            _join(meta, name, row[name])
        yield Document(row["id"], row["text"], row["source"], meta)


def _join(meta: dict[str, Any], name: str, value: Any) -> None:
    if name in meta and meta[name] != value:
        own = f"input_{name}"
        while own in meta:
            own = f"input_{own}"
        meta[own] = meta.pop(name)
    if value is not None:
        meta[name] = value


def removed_batch(items: Iterable[Dropped], step: str) -> pa.RecordBatch:
    """What a source could not read."""
    rows = [
        {
            "id": item.id, "source": item.source, "step": step, "reason": item.reason,
            "detail": item.detail, "witness": "", "text": "",
        }
        for item in items
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(rows, REMOVED)


def split(batch: pa.RecordBatch, step: str, removals: Sequence[Removal | None]) -> Outcome:
    """Removes the documents for which `removals` (one a row) holds a reason."""
    gone = [i for i, removal in enumerate(removals) if removal is not None]
    if not gone:
        return Outcome(batch)
    reasons = [removals[i] or Removal("") for i in gone]
    rows = batch.take(pa.array(gone))
    columns = [
        rows["id"],
        rows["source"],
        pa.array([step] * len(gone), pa.string()),
        pa.array([r.reason for r in reasons], pa.string()),
        pa.array([r.detail for r in reasons], pa.string()),
        pa.array([r.witness for r in reasons], pa.string()),
        rows["text"],
    ]
    stays = np.ones(batch.num_rows, bool)
    stays[gone] = False
    removed = pa.RecordBatch.from_arrays(columns, schema=REMOVED)
    return Outcome(batch.filter(pa.array(stays)), removed)


def with_column(batch: pa.RecordBatch, name: str, values: Any, kind: pa.DataType) -> pa.RecordBatch:
    """The batch with a label, in place of one of the same name."""
    column = values if isinstance(values, pa.Array) else pa.array(values, kind)
    if name in batch.schema.names:
        return batch.set_column(batch.schema.get_field_index(name), pa.field(name, kind), column)
    return batch.append_column(pa.field(name, kind), column)


def with_texts(batch: pa.RecordBatch, texts: Sequence[str]) -> pa.RecordBatch:
    return with_column(batch, "text", texts, pa.large_string())


def texts_of(batch: pa.RecordBatch) -> list[str]:
    return batch["text"].to_pylist()


def text_bytes(batch: pa.RecordBatch) -> pa.Array:
    """The length of each text in UTF-8."""
    return pc.binary_length(batch["text"])


def name_of(source: str, doc_id: str) -> str:
    """How a witness is written."""
    return f"{source}/{doc_id}"


def _json(meta: Mapping[str, Any]) -> str:
    return json.dumps(dict(meta), ensure_ascii=False, default=str) if meta else "{}"
