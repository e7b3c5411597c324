"""What is done with perplexities: limits, and the head, middle and tail of CCNet (Wenzek et al.
2019, 1911.00359, section 4.2). The scores come from a language model (`curate.perplexity`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pydantic import Field

from stepwell.data.batches import Outcome, with_column
from stepwell.data.quality.buckets import deciles
from stepwell.data.quality.labels import Label, scores_of
from stepwell.data.quality.verdicts import Verdict, detail
from stepwell.data.steps import GlobalStep, Shard, read_batches

pc: Any = pyarrow.compute
BUCKETS = ("head", "middle", "tail")
# A group of documents whose language is unknown, or all documents.
UNKNOWN = ""
Limit = Annotated[float, Field(strict=True, gt=0)] | None


class PerplexityBuckets(GlobalStep):
    """Adds the label `perplexity_bucket`: head (the lowest values, nearest to what the model was
    trained on), middle or tail. by: a label such as `language`, whose every value has thirds of its
    own; with none, all documents have the same. Documents without a perplexity have no bucket.
    """

    kind: Literal["perplexity-buckets"] = "perplexity-buckets"
    by: Label | None = None
    label: Label = "perplexity"
    bucket: Label = "perplexity_bucket"

    def needs(self) -> dict[str, Literal["number", "any"]]:
        return {**({self.by: "any"} if self.by else {}), self.label: "number"}

    def adds(self) -> dict[str, pa.DataType]:
        return {self.bucket: pa.string()}

    def sketch(self, batch: pa.RecordBatch) -> Mapping[str, pa.Array]:
        return {
            "score": scores_of(batch, self.label, self.kind),
            "group": pa.array(self._groups(batch), pa.string()),
        }

    def decide(self, shards: Sequence[Shard], folder: Path) -> None:
        parts: dict[str, list[np.ndarray]] = {}
        for sketch in (batch for shard in shards for batch in read_batches(shard.sketch)):
            for group in sketch["group"].unique().to_pylist():
                scores = sketch["score"].filter(pc.equal(sketch["group"], group))
                parts.setdefault(group, []).append(scores.drop_null().to_numpy())
        pools = {group: np.concatenate(found) for group, found in sorted(parts.items())}
        cutoffs = {group: thirds(scores) for group, scores in pools.items() if len(scores)}
        summary = {
            group: {
                "documents": len(pools[group]), "head_up_to": low, "middle_up_to": high,
                "deciles": deciles(pools[group]),
                "buckets": {
                    name: int(np.count_nonzero(buckets_of(pools[group], (low, high)) == i))
                    for i, name in enumerate(BUCKETS)
                },
            }
            for group, (low, high) in cutoffs.items()
        }  # fmt: skip
        (folder / "cutoffs.json").write_text(json.dumps(cutoffs), "utf-8")
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")

    def apply(self, batch: pa.RecordBatch, folder: Path) -> Outcome:
        cutoffs = json.loads((folder / "cutoffs.json").read_text("utf-8"))
        scores = scores_of(batch, self.label, self.kind).to_pylist()
        names = [
            None if score is None else bucket_name(score, cutoffs[group])
            for score, group in zip(scores, self._groups(batch), strict=True)
        ]
        return Outcome(with_column(batch, self.bucket, names, pa.string()))

    def _groups(self, batch: pa.RecordBatch) -> list[str]:
        if self.by is None or self.by not in batch.schema.names:
            return [UNKNOWN] * batch.num_rows
        return [UNKNOWN if v is None else str(v) for v in batch[self.by].to_pylist()]


def thirds(scores: np.ndarray) -> tuple[float, float]:
    """The highest value of the lowest third, and of the lowest two thirds."""
    ordered = np.sort(scores)
    at = [max(-(-len(ordered) * i // 3) - 1, 0) for i in (1, 2)]
    return float(ordered[at[0]]), float(ordered[at[1]])


def buckets_of(scores: np.ndarray, cutoffs: Sequence[float]) -> np.ndarray:
    """0, 1 or 2; a value at a cutoff belongs below it."""
    return np.searchsorted(np.asarray(cutoffs, np.float64), scores, side="left")


def bucket_name(score: float, cutoffs: Sequence[float]) -> str:
    return BUCKETS[int(buckets_of(np.array([score]), cutoffs)[0])]


def out_of_limits(name: str, value: float, low: float | None, high: float | None) -> Verdict:
    """The verdict on a value that is not from low to high; None leaves an end open."""
    if low is not None and value < low:
        return (f"{name}_too_low", detail(value, "<", low))
    if high is not None and value > high:
        return (f"{name}_too_high", detail(value, ">", high))
    return None
