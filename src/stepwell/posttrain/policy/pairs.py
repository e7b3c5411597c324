"""Pairs of a policy's own answers, token in and token out, and the batches of their updates.

Every rank knows all answers and trains on its share of the pairs, so nothing here depends on the
layout. L tokens of a prompt and its answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.packing import best_fit, pack_rows
from stepwell.models.transformer import TokenOutputs
from stepwell.parallel.mesh import Mesh
from stepwell.posttrain.answers import Answer, split
from stepwell.posttrain.preference.losses import REFERENCE, preference_loss
from stepwell.posttrain.preference.pairing import NoPair, best_and_worst
from stepwell.posttrain.preference.scored_references import row_length, with_stream
from stepwell.posttrain.sampling.gauge import Gauge
from stepwell.sections.methods import OnlineDPO
from stepwell.sections.preference import PreferenceLoss
from stepwell.train.losses import Loss, LossSums

SAMPLER, REFERENCE_TOKENS = "sampler_logprobs", "reference_logprobs"
# Why a group makes no pair, besides the reasons of `best_and_worst`: both answers have the same
# tokens; the two are longer than a row.
REASONS = ("tie", "too_few", "same_text", "too_long")


class Chosen(NamedTuple):
    """Numbers of the chosen and the rejected answer among all of a rollout's."""

    chosen: int
    rejected: int


@dataclass(frozen=True)
class Paired:
    """pairs: at most one a group. without: how many groups made none, by reason."""

    pairs: tuple[Chosen, ...]
    without: Counter[str]

    def metrics(self, answers: Sequence[Answer]) -> dict[str, float]:
        """How many pairs, and by how much the chosen ones scored more."""
        found: dict[str, float] = {"pairs/made": len(self.pairs)}
        found |= {f"pairs/{reason}": self.without[reason] for reason in REASONS}
        if self.pairs:
            gaps = [_gap(answers[p.chosen], answers[p.rejected]) for p in self.pairs]
            found["pairs/reward_gap"] = math.fsum(gaps) / len(gaps)
        return found


def paired(answers: Sequence[Answer], group_size: int, seq_len: int) -> Paired:
    """The best with the worst answer of each group. answers: group by group. An answer without a
    token of the policy's own is in no pair."""
    pairs, without = [], Counter[str]()
    for start in range(0, len(answers), group_size):
        group = answers[start : start + group_size]
        found = best_and_worst([a.reward if a.num_trained else None for a in group])
        if isinstance(found, NoPair):
            without[found.reason] += 1
            continue
        best, worst = (group[i] for i in found)
        if best.ids == worst.ids:
            without["same_text"] += 1
        elif len(best.ids) + len(worst.ids) - 2 > seq_len:
            without["too_long"] += 1
        else:
            pairs.append(Chosen(start + found[0], start + found[1]))
    return Paired(tuple(pairs), without)


def divergence(answers: Sequence[Answer]) -> dict[str, float]:
    """kl/reference: nats an answer of the sampling policy from the reference (the sum of k1, by its
    mean over all answers), kl/token: a token."""
    sums = [float((a.streams[SAMPLER] - a.streams[REFERENCE_TOKENS]).sum()) for a in answers]
    count = sum(a.num_trained for a in answers)
    total = math.fsum(sums)
    return {"kl/reference": total / len(answers), "kl/token": total / max(count, 1)}


def minibatches(
    answers: Sequence[Answer],
    pairs: Sequence[Chosen],
    run: Run,
    pad_id: int,
    mesh: Mesh,
    rollout: int,
) -> Iterator[Batch]:
    """This rank's share of each step's pairs, drawn anew for each update."""
    method = run.method
    assert isinstance(method, OnlineDPO)
    for update in range(method.updates_per_rollout):
        seed = [run.train.seed, rollout, update]
        for part in split(len(pairs), num_parts(pairs, method), seed):
            mine = [pairs[i] for i in part[mesh.data_rank :: mesh.data_world]]
            yield packed([(answers[p.chosen], answers[p.rejected]) for p in mine], run, pad_id)


def num_parts(pairs: Sequence[Chosen], method: OnlineDPO) -> int:
    return min(method.minibatches, len(pairs))


def denominators(pairs: Sequence[Chosen], method: OnlineDPO) -> dict[str, float]:
    """Of each of a rollout's minibatches: their gradients' mean is that of all pairs at once."""
    return {"pairs": len(pairs) / num_parts(pairs, method)}


def packed(pairs: Sequence[tuple[Answer, Answer]], run: Run, pad_id: int) -> Batch:
    """Rows in which pair k of a row is documents 2k (chosen) and 2k + 1 (rejected), with the
    sampler's log-probability at each token, and the reference's sum over an answer."""
    both = [answer for pair in pairs for answer in pair]
    lengths = [len(chosen.ids) + len(rejected.ids) - 2 for chosen, rejected in pairs]
    length = row_length(lengths, run)
    rows = [[2 * i + side for i in row for side in (0, 1)] for row in best_fit(lengths, length)]
    docs = [(a.ids, a.trained_L) for a in both]
    sampler = {SAMPLER: [a.streams[SAMPLER].astype(np.float32) for a in both]}
    batch = pack_rows(docs, length, pad_id=pad_id, extra=sampler, rows=rows)
    if not all(REFERENCE_TOKENS in a.streams for a in both):
        return batch
    sums = [float(both[i].streams[REFERENCE_TOKENS].sum()) for row in rows for i in row]
    return with_stream(batch, REFERENCE, torch.tensor(sums, dtype=torch.float64))


def gauged(config: PreferenceLoss, gauge: Gauge, compute: str | None = None) -> Loss:
    """`preference_loss`; the gauge sees the policy's and the sampler's log-probabilities."""
    plain = preference_loss(config, compute)

    def fn(outputs: TokenOutputs, batch: Batch) -> LossSums:
        assert outputs.logprobs_BT is not None
        logprobs_BT = outputs.logprobs_BT
        sampler_BT = batch.extra[SAMPLER].to(logprobs_BT.dtype)
        gauge.add(logprobs_BT, sampler_BT, batch.weights_BT, plain.whole_rows)
        return plain.fn(outputs, batch)

    return Loss(plain.needs, plain.denominators, fn, whole_rows=plain.whole_rows)


def _gap(chosen: Answer, rejected: Answer) -> float:
    assert chosen.reward is not None
    assert rejected.reward is not None
    return chosen.reward - rejected.reward
