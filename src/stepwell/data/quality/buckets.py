"""What is done with scores: a least one, the best so many per cent of all, buckets."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pydantic import Field, model_validator

from stepwell.data.batches import Outcome, Removal, split, with_column
from stepwell.data.quality.labels import Label, scores_of
from stepwell.data.steps import (
    DocumentStep,
    GlobalStep,
    Shard,
    read_batches,
    read_table,
    write_table,
)
from stepwell.schema import Flag

# Its functions are made at run time, out of sight of type checkers.
pc: Any = pyarrow.compute
NUM_LEVELS, NUM_BUCKETS = 6, 10
DECILES = tuple(i / 10 for i in range(11))
ALL = ""


class QualityThreshold(DocumentStep):
    """Removes documents whose label is below min_score; those without one stay."""

    kind: Literal["quality-threshold"] = "quality-threshold"
    min_score: Annotated[float, Field(strict=True)]
    label: Label = "quality"

    def needs(self) -> dict[str, Literal["number", "any"]]:
        return {self.label: "number"}

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        removals = [
            Removal("quality_below_threshold", f"{self.label} {score:.4g} < {self.min_score:g}")
            if score is not None and score < self.min_score
            else None
            for score in scores_of(batch, self.label, self.kind).to_pylist()
        ]
        return split(batch, self.kind, removals)


class QualityTop(GlobalStep):
    """Keeps the share `keep` of the documents that have the label, those with the highest values:
    exactly so many, rounded up. Of equal ones those go first whose source, id, then text comes
    first. Documents without the label stay. per_source: that share of each source.
    """

    kind: Literal["quality-top"] = "quality-top"
    keep: Annotated[float, Field(strict=True, gt=0, le=1)]
    per_source: Flag = False
    label: Label = "quality"

    def needs(self) -> dict[str, Literal["number", "any"]]:
        return {self.label: "number"}

    def sketch(self, batch: pa.RecordBatch) -> Mapping[str, pa.Array]:
        return {"score": scores_of(batch, self.label, self.kind)}

    def decide(self, shards: Sequence[Shard], folder: Path) -> None:
        pools = pools_of(shards, self.per_source)
        cuts, ties, rows = {}, [], {}
        for name, scores in pools.items():
            num_kept = num_of_share(len(scores), self.keep)
            cut = float(np.partition(scores, len(scores) - num_kept)[len(scores) - num_kept])
            cuts[name] = cut
            above = int(np.count_nonzero(scores > cut))
            ties += first_of_equal(shards, name, cut, num_kept - above, self.per_source)
            rows[name] = {
                "documents": len(scores), "kept": num_kept, "lowest_kept": cut,
                "deciles": deciles(scores),
            }  # fmt: skip
        (folder / "cuts.json").write_text(json.dumps(cuts), "utf-8")
        keys = pa.table({"key": pa.array(sorted(ties), pa.uint64())})
        write_table(keys, folder / "ties.arrow")
        write_summary(folder, rows, self.per_source)

    def apply(self, batch: pa.RecordBatch, folder: Path) -> Outcome:
        cuts = json.loads((folder / "cuts.json").read_text("utf-8"))
        ties = read_table(folder / "ties.arrow")["key"].combine_chunks()
        is_tie = pc.is_in(batch["key"], ties).to_pylist()
        names = batch["source"].to_pylist() if self.per_source else [ALL] * batch.num_rows
        removals: list[Removal | None] = []
        scores = scores_of(batch, self.label, self.kind).to_pylist()
        for score, name, is_kept in zip(scores, names, is_tie, strict=True):
            removal = None
            if score is not None and (score < cuts[name] or (score == cuts[name] and not is_kept)):
                removal = Removal(
                    "quality_below_top", f"{self.label} {score:.4g}, the top {100 * self.keep:g} % "
                    f"reach down to {cuts[name]:.4g}",
                )  # fmt: skip
            removals.append(removal)
        return split(batch, self.kind, removals)


class QualityBuckets(GlobalStep):
    """Adds a label with the number of each document's bucket, int32, the best in the highest one.

    by: `quantiles` (num buckets, 10 if it is not given, of as many documents each as equal scores
    allow, which share a bucket), `edges` (a score at an edge belongs to the bucket above it), or
    `levels` (scores from 0 to 5, rounded). per_source: quantiles of each source. num and per_source
    belong to quantiles alone.
    """

    kind: Literal["quality-buckets"] = "quality-buckets"
    by: Literal["quantiles", "edges", "levels"] = "quantiles"
    num: Annotated[int, Field(strict=True, ge=2)] | None = None
    edges: tuple[Annotated[float, Field(strict=True)], ...] = ()
    per_source: Flag = False
    label: Label = "quality"
    bucket: Label = "quality_bucket"

    @model_validator(mode="after")
    def _rules(self) -> QualityBuckets:
        if (self.by == "edges") != bool(self.edges):
            raise ValueError(
                f"edges={list(self.edges)} does not go with by={self.by!r}: give edges with "
                "by='edges', and only there"
            )
        if list(self.edges) != sorted(set(self.edges)):
            raise ValueError(
                f"edges={list(self.edges)} must grow; the nearest that do are "
                f"{sorted(set(self.edges))}"
            )
        if self.num is not None and self.by != "quantiles":
            number = len(self.edges) + 1 if self.by == "edges" else NUM_LEVELS
            raise ValueError(
                f"num={self.num} has no meaning with by={self.by!r}, which makes {number} buckets; "
                "leave it out, or take by='quantiles'"
            )
        if self.per_source and self.by != "quantiles":
            raise ValueError(
                f"per_source=True has no meaning with by={self.by!r}, whose buckets are the same "
                "for all; leave it out, or take by='quantiles'"
            )
        return self

    def needs(self) -> dict[str, Literal["number", "any"]]:
        return {self.label: "number"}

    def adds(self) -> dict[str, pa.DataType]:
        return {self.bucket: pa.int32()}

    def sketch(self, batch: pa.RecordBatch) -> Mapping[str, pa.Array]:
        return {"score": scores_of(batch, self.label, self.kind)}

    def decide(self, shards: Sequence[Shard], folder: Path) -> None:
        pools = pools_of(shards, self.per_source)
        edges = {name: self._edges(scores) for name, scores in pools.items()}
        rows = {
            name: {
                "documents": len(scores), "edges": edges[name], "deciles": deciles(scores),
                "buckets": np.bincount(
                    bucket_of(scores, edges[name]), minlength=len(edges[name]) + 1
                ).tolist(),
            }
            for name, scores in pools.items()
        }  # fmt: skip
        (folder / "edges.json").write_text(json.dumps(edges), "utf-8")
        write_summary(folder, rows, self.per_source)

    def apply(self, batch: pa.RecordBatch, folder: Path) -> Outcome:
        edges = json.loads((folder / "edges.json").read_text("utf-8"))
        names = batch["source"].to_pylist() if self.per_source else [ALL] * batch.num_rows
        scores = scores_of(batch, self.label, self.kind).to_pylist()
        buckets = [
            None if score is None else int(bucket_of(np.array([score]), edges[name])[0])
            for score, name in zip(scores, names, strict=True)
        ]
        return Outcome(with_column(batch, self.bucket, buckets, pa.int32()))

    def _edges(self, scores: np.ndarray) -> list[float]:
        if self.by == "edges":
            return list(self.edges)
        if self.by == "levels":
            return [level + 0.5 for level in range(NUM_LEVELS - 1)]
        return quantile_edges(scores, self.num or NUM_BUCKETS)


def quantile_edges(scores: np.ndarray, num: int) -> list[float]:
    """The lowest score of each of `num` buckets but the first."""
    ordered = np.sort(scores)
    return [float(ordered[len(ordered) * i // num]) for i in range(1, num)]


def bucket_of(scores: np.ndarray, edges: Sequence[float]) -> np.ndarray:
    return np.searchsorted(np.asarray(edges, np.float64), scores, side="right")


def num_of_share(num: int, share: float) -> int:
    """Rounded up, where share is meant as it is written: 0.1 of 30 is 3. At least 1."""
    return max(1, math.ceil(round(num * share, 6)))


def deciles(scores: np.ndarray) -> list[float]:
    return [float(x) for x in np.quantile(scores, DECILES, method="lower")]


def pools_of(shards: Sequence[Shard], per_source: bool) -> dict[str, np.ndarray]:
    """All scores, by source or under an empty name."""
    parts: dict[str, list[np.ndarray]] = {}
    for shard in shards:
        batches = zip(read_batches(shard.sketch), read_batches(shard.documents), strict=True)
        for sketch, documents in batches:
            sources = documents["source"].unique().to_pylist() if per_source else [ALL]
            for name in sources:
                scores = sketch["score"]
                if per_source:
                    scores = scores.filter(pc.equal(documents["source"], name))
                parts.setdefault(name, []).append(scores.drop_null().to_numpy())
    pools = {name: np.concatenate(found) for name, found in sorted(parts.items())}
    return {name: scores for name, scores in pools.items() if len(scores)}


def first_of_equal(
    shards: Sequence[Shard], name: str, cut: float, num: int, per_source: bool
) -> list[int]:
    """Keys of the first `num` documents, by (source, id, text), whose score is `cut`."""
    found: list[tuple[str, str, str, int]] = []
    for shard in shards:
        batches = zip(read_batches(shard.sketch), read_batches(shard.documents), strict=True)
        for sketch, documents in batches:
            is_equal = pc.equal(sketch["score"], cut)
            if per_source:
                is_equal = pc.and_(is_equal, pc.equal(documents["source"], name))
            rows = documents.filter(is_equal).select(["source", "id", "text", "key"])
            found += zip(*(rows[column].to_pylist() for column in rows.schema.names), strict=True)
            # Only the first ones are held; thrice as many at most in between.
            if len(found) > 3 * num + 1000:
                found = sorted(found)[:num]
    return [key for *_, key in sorted(found)[:num]]


def write_summary(folder: Path, rows: Mapping[str, Any], per_source: bool) -> None:
    """Numbers for the datasheet, of all documents or by source."""
    summary = {"by_source": rows} if per_source else rows.get(ALL, {"documents": 0})
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
