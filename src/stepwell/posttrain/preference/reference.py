"""A preference run's reference: what a batch's documents, and kto's mismatched ones, have of it.

D documents of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.posttrain.preference.kto import (
    Mismatch,
    MismatchSums,
    batch_kl,
    known_sums,
    mismatched_document,
    step_mismatches,
)
from stepwell.posttrain.preference.losses import KL, REFERENCE
from stepwell.posttrain.preference.rows import Rows
from stepwell.posttrain.preference.scored_references import (
    Score,
    cached_scores,
    document_totals,
    with_stream,
)
from stepwell.sections.methods import DPO
from stepwell.train.engine import Engine
from stepwell.train.losses import document_counts, per_document


@dataclass(frozen=True)
class Reference:
    """sums: float64 (D,) of a batch's documents; None where the loss has no reference.
    mismatches: the same of kto's mismatched ones. weights: the hash of the first weights, where
    they had to be known."""

    sums: Callable[[Batch], Tensor] | None = None
    mismatches: MismatchSums | None = None
    weights: str | None = None


def open_reference(
    run: Run,
    rows: Rows,
    numbers_of: Callable[[int], list[int]],
    first: Callable[[bool], Engine],
    policy: Engine,
    pad_id: int,
    weights: str | None,
) -> Reference:
    """numbers_of: the rows of each step. first: an engine with the first weights, a copy of them
    (True) or the policy itself where that still has them. weights: their hash, if a checkpoint
    knows it. Raises ConfigError where a step's rows cannot be mismatched, and as `cached_scores`.
    """
    method = run.method
    assert isinstance(method, DPO)
    if not method.loss.needs_reference:
        return Reference()
    foreseen = mismatches_of(run, rows, numbers_of) if rows.labelled else []
    if method.reference == "cached":
        docs = rows.documents()
        docs += [mismatched_document(rows.items, m, run.data.seq_len) for m in foreseen]
        sums, found = cached_scores(run, lambda: first(False), docs, pad_id, policy.mesh, weights)
        table = torch.from_numpy(sums)
        count = len(docs) - len(foreseen)
        known = dict(zip(foreseen, sums[count:].tolist(), strict=True))
        later = known_sums(known, lambda: first(True).logprobs)
        return Reference(looked_up(table[:count], rows.labelled), later, found)
    score: Score = policy.reference_logprobs
    if method.reference == "separate":
        score = first(True).logprobs
    return Reference(
        lambda batch: document_totals(score(batch), batch),
        lambda _, batch: document_totals(score(batch), batch),
    )


def mismatches_of(run: Run, rows: Rows, numbers_of: Callable[[int], list[int]]) -> list[Mismatch]:
    """Those of all steps and of the held-out rows, each once."""
    found: dict[Mismatch, None] = {}
    for step in range(run.train.steps):
        found |= dict.fromkeys(step_mismatches(rows.items, numbers_of(step)))
    if rows.heldout:
        found |= dict.fromkeys(step_mismatches(rows.items, rows.heldout))
    return list(found)


def looked_up(table: Tensor, labelled: bool) -> Callable[[Batch], Tensor]:
    """table: sums of all rows' documents, by the rows' numbers."""

    def sums(batch: Batch) -> Tensor:
        numbers = per_document(batch.extra["index"], batch)
        if not labelled:
            numbers = 2 * numbers + torch.arange(len(numbers)) % 2
        return table[numbers]

    return sums


def with_reference(
    batch: Batch,
    numbers: Sequence[int],
    rows: Rows,
    reference: Reference,
    policy: Engine,
    pad_id: int,
) -> Batch:
    """The batch with the streams that the loss reads. numbers: of the global batch's rows."""
    if reference.sums is None:
        return batch
    batch = with_stream(batch, REFERENCE, reference.sums(batch))
    if not rows.labelled:
        return batch
    assert reference.mismatches is not None
    mismatches = step_mismatches(rows.items, numbers)
    kl = batch_kl(
        policy.logprobs,
        reference.mismatches,
        rows.items,
        mismatches,
        policy.run,
        pad_id,
        policy.mesh,
    )
    return with_stream(batch, KL, torch.full_like(document_counts(batch), kl))
