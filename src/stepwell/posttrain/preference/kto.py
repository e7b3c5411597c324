"""The KL term of Kahneman-Tversky optimisation (2402.01306): answers that meet other prompts.

R rows of a global batch, D documents of this rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.loader import rank_rows
from stepwell.data.preference import Labelled, Rendering
from stepwell.parallel.mesh import Mesh, all_gather_objects
from stepwell.posttrain.preference.scored_references import (
    Score,
    document_totals,
    pack_in_order,
    row_length,
)
from stepwell.types import ConfigError

# (row whose prompt it is, row whose answer it is)
Mismatch = tuple[int, int]
# The reference's sums of documents, given which mismatches they are and their batch.
MismatchSums = Callable[[Sequence[Mismatch], Batch], Tensor]


def kl_term(log_ratios: Tensor) -> float:
    """z: the mean log-ratio of mismatched answers of the whole global batch, at least 0, a number
    without gradient (2402.01306, section 4.2). Raises ConfigError for fewer than two."""
    if log_ratios.numel() < 2:
        raise ConfigError(
            f"kto's KL term needs answers to other prompts, and the batch has {log_ratios.numel()} "
            "row; the fewest is 2"
        )
    return max(0.0, log_ratios.detach().double().mean().item())


def mismatched(prompts: Sequence[Hashable], answers: Sequence[Hashable]) -> list[int]:
    """For each row of a global batch the row whose answer its prompt meets in the KL term: the
    next one (after the last comes the first) of another prompt and with another answer.

    Raises ConfigError for a batch of one, and if a row has no such partner.
    """
    num_rows = len(prompts)
    if num_rows < 2:
        raise ConfigError(
            f"kto's KL term pairs each prompt with another row's answer, and the batch has "
            f"{num_rows} row; the fewest is 2"
        )
    partners = []
    for i in range(num_rows):
        others = ((i + shift) % num_rows for shift in range(1, num_rows))
        found = next(
            (j for j in others if prompts[j] != prompts[i] and answers[j] != answers[i]), None
        )
        if found is None:
            raise ConfigError(
                f"row {i} of a batch of {num_rows} finds no answer to another prompt for kto's KL "
                "term: all have its prompt or its answer; raise method.pairs_per_step"
            )
        partners.append(found)
    return partners


def step_mismatches(rows: Sequence[Labelled], numbers: Sequence[int]) -> list[Mismatch]:
    """Of a step's global batch, given by the numbers of its rows. Raises ConfigError as
    `mismatched` does."""
    chosen = [rows[i] for i in numbers]
    partners = mismatched([r.prompt_ids for r in chosen], [r.completion_ids for r in chosen])
    return [(numbers[i], numbers[j]) for i, j in enumerate(partners)]


def mismatched_document(rows: Sequence[Labelled], mismatch: Mismatch, seq_len: int) -> Rendering:
    """The prompt of one row with the answer of another, cut to seq_len tokens."""
    prompt, answer = rows[mismatch[0]].prompt_ids, rows[mismatch[1]]
    mask = answer.mask or (1,) * len(answer.completion_ids)
    ids = (*prompt, *answer.completion_ids)[:seq_len]
    return ids, ((0,) * len(prompt) + mask)[:seq_len]


def batch_kl(
    score: Score,
    reference: MismatchSums,
    rows: Sequence[Labelled],
    mismatches: Sequence[Mismatch],
    run: Run,
    pad_id: int,
    mesh: Mesh,
) -> float:
    """z under the policy's `score`, the same on every rank; each scores its share."""
    share = rank_rows(len(mismatches), mesh.data_rank, mesh.data_world)
    mine = mismatches[share.start : share.stop]
    docs = [mismatched_document(rows, mismatch, run.data.seq_len) for mismatch in mine]
    length = row_length([len(ids) - 1 for ids, _ in docs], run)
    batch, places = pack_in_order(docs, length, pad_id)
    ratios = document_totals(score(batch), batch) - reference([mine[p] for p in places], batch)
    parts = all_gather_objects(ratios.tolist() if mesh.counts_rows else [], mesh)
    return kl_term(torch.tensor([ratio for part in parts for ratio in part]))


def known_sums(sums: Mapping[Mismatch, float], more: Callable[[], Score]) -> MismatchSums:
    """Looks sums up. more: scores with the first weights, for mismatches that were not foreseen
    (a batch after one that the guard has left out)."""

    def of(mismatches: Sequence[Mismatch], batch: Batch) -> Tensor:
        if all(mismatch in sums for mismatch in mismatches):
            return torch.tensor([sums[m] for m in mismatches], dtype=torch.float64)
        return document_totals(more()(batch), batch)

    return of
