"""Cutting spans out of documents, as an outcome of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from stepwell.data.batches import EDITS, Outcome, Removal, split, texts_of, with_texts

Span = tuple[int, int]


@dataclass(frozen=True)
class Cuts:
    """What one document loses.

    spans: characters, ascending, apart. is_needed: others lost text because this one has it.
    witness: a kept document that has what was cut first.
    """

    spans: Sequence[Span]
    is_needed: bool
    witness: str


def cut_out(
    batch: pa.RecordBatch,
    step: str,
    unit: str,
    cuts: Sequence[Cuts | None],
    min_kept_characters: int,
) -> Outcome:
    """Cuts each row's spans (edits with the reason `{unit}_duplicate`). A document that is left
    with too few characters goes as a whole (`{unit}_duplicates`) unless others need it."""
    removals: list[Removal | None] = []
    texts, edits = [], []
    names = zip(batch["id"].to_pylist(), batch["source"].to_pylist(), strict=True)
    for text, cut, name in zip(texts_of(batch), cuts, names, strict=True):
        kept = text if cut is None else without(text, cut.spans)
        removal = None
        if cut is not None and cut.spans:
            left = len(kept.strip())
            if left < min_kept_characters and not cut.is_needed:
                detail = f"{left} characters left of {len(text)}, below {min_kept_characters}"
                removal = Removal(f"{unit}_duplicates", detail, cut.witness)
            else:
                rows = [(*name, step, f"{unit}_duplicate", *span, "") for span in cut.spans]
                edits += [dict(zip(EDITS.names, row, strict=True)) for row in rows]
        removals.append(removal)
        texts.append(text if removal else kept)
    outcome = split(with_texts(batch, texts), step, removals)
    return Outcome(outcome.kept, outcome.removed, pa.RecordBatch.from_pylist(edits, EDITS))


def merged(spans: Sequence[Span]) -> list[Span]:
    """Ascending spans with those that touch or overlap joined."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def without(text: str, spans: Sequence[Span]) -> str:
    """The text without ascending spans that don't overlap."""
    starts = [0, *(stop for _, stop in spans)]
    stops = [*(start for start, _ in spans), len(text)]
    return "".join(text[a:b] for a, b in zip(starts, stops, strict=True))
