"""The curation step that finds benchmark items in documents, and removes or labels these."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import pyarrow as pa
from pydantic import model_validator

from stepwell.data.batches import Outcome, Removal, split, texts_of, with_column
from stepwell.data.decontam.index import Index, open_index
from stepwell.data.decontam.rules import RULES, RuleName
from stepwell.data.decontam.scan import PARTS, Hit, find_hits
from stepwell.data.steps import DocumentStep
from stepwell.schema import Fraction

LABEL = "contaminated"
# What goes for each `on`.
REMOVING = {
    "question": ("question+answer", "question"),
    "question+answer": ("question+answer",),
    "any": PARTS,
}


class Decontaminate(DocumentStep):
    """Documents that contain items of the benchmarks in `index` (`stepwell decontam-index`).

    rule: when an item's text counts as contained (`decontam.rules`). min_share: in place of the
    rule's own; at 0 one n-gram is enough. on: what makes a document go; the rest is labelled only.
    A passage alone may be a public text that the benchmark quotes. action: "report" removes
    nothing.

    Reasons: contaminated_question_answer, contaminated_question, contaminated_answer,
    contaminated_passage; the witness is the strongest `benchmark/item`. The label `contaminated` of
    a kept document is a JSON list of {item, part, share}, behind what a step before found.
    """

    kind: Literal["decontaminate"] = "decontaminate"
    index: str
    rule: RuleName = "tulu3"
    min_share: Fraction | None = None
    on: Literal["question", "question+answer", "any"] = "question"
    action: Literal["drop", "report"] = "drop"

    @model_validator(mode="after")
    def _rules(self) -> Decontaminate:
        if not self.index.strip():
            raise ValueError(
                f"index={self.index!r} must be a folder that `stepwell decontam-index` has made"
            )
        return self

    def adds(self) -> dict[str, pa.DataType]:
        return {LABEL: pa.string()}

    def check(self) -> None:
        open_index(self.index)

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        index = open_index(self.index)
        found = find_hits(texts_of(batch), index, RULES[self.rule], self.min_share)
        earlier: list[str | None] = [None] * batch.num_rows
        if LABEL in batch.schema.names:
            earlier = batch[LABEL].to_pylist()
        labels = [label_of(index, hits, was) for hits, was in zip(found, earlier, strict=True)]
        labelled = with_column(batch, LABEL, labels, pa.string())
        if self.action == "report":
            return Outcome(labelled)
        return split(labelled, self.kind, [self._removal(index, hits) for hits in found])

    def _removal(self, index: Index, hits: Sequence[Hit]) -> Removal | None:
        if not hits or hits[0].part not in REMOVING[self.on]:
            return None
        first = hits[0]
        reason = f"contaminated_{first.part.replace('+', '_')}"
        return Removal(reason, _detail(hits), index.name_of(first.item))


def label_of(index: Index, hits: Sequence[Hit], earlier: str | None = None) -> str | None:
    """earlier: the label of a step before, whose items stay in it."""
    rows = json.loads(earlier) if earlier else []
    for hit in hits:
        row = {"item": index.name_of(hit.item), "part": hit.part, "share": round(hit.share, 4)}
        if row not in rows:
            rows.append(row)
    return json.dumps(rows, ensure_ascii=False) if rows else None


def _detail(hits: Sequence[Hit]) -> str:
    first = hits[0]
    text = f"{first.share:.0%} of the {first.part.partition('+')[0]} in {first.n}-grams of words"
    if first.part == "question+answer":
        text += ", and its answer"
    return text + (f"; {len(hits) - 1} more items" if len(hits) > 1 else "")
