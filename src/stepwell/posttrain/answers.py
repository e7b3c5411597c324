"""Answers with what is known of each of their tokens, in and out of packed rows.

Scores of a rollout are gathered from all ranks before anything is made of them, so what follows is
plain arithmetic on the whole rollout, and no layout changes it. L tokens of a prompt and its
answer, B rows, T tokens a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from stepwell.data.batch import Batch
from stepwell.data.packing import best_fit, pack_rows
from stepwell.posttrain.rollout import Rollouts

Array = np.ndarray


@dataclass(frozen=True)
class Answer:
    """ids: prompt and answer. trained_L: 1 on tokens that the policy sampled. reward: None where
    no dimension applies, or its grader failed. truncated: cut off at the limit, before its end.
    streams: float64 arrays of L, 0 where a token is not trained, by name: `sampler_logprobs` as
    sampled, and what is added later. after: a critic's value of the state after the last token, for
    truncated ones."""

    ids: tuple[int, ...]
    trained_L: Array
    reward: float | None
    truncated: bool
    streams: Mapping[str, Array]
    after: float = 0.0

    @property
    def num_trained(self) -> int:
        return int(self.trained_L.sum())

    def adding(self, **streams: Array) -> Answer:
        return replace(self, streams={**self.streams, **streams})


def answers_of(rollouts: Rollouts) -> list[Answer]:
    """One for each completion, in order."""
    pairs = [
        (completion, verdict)
        for group in rollouts.groups
        for completion, verdict in zip(group.completions, group.verdicts, strict=True)
    ]
    return [
        Answer(
            tuple(ids),
            np.asarray(mask, np.float64),
            verdict.reward,
            completion.finish_reason == "length",
            {"sampler_logprobs": np.asarray(streams["sampler_logprobs"], np.float64)},
        )
        for (ids, mask, streams), (completion, verdict) in zip(
            rollouts.documents(), pairs, strict=True
        )
    ]


def packed(
    answers: Sequence[Answer],
    seq_len: int,
    pad_id: int,
    weights: Sequence[float] | None = None,
    names: Sequence[str] = (),
) -> Batch:
    """Rows with a loss on trained tokens; none without answers. weights: of each answer's tokens
    (default 1). names: the streams that the rows carry as float32."""
    scale = [1.0] * len(answers) if weights is None else weights
    return pack_rows(
        [(a.ids, a.trained_L * w) for a, w in zip(answers, scale, strict=True)],
        seq_len,
        pad_id=pad_id,
        extra={name: [a.streams[name].astype(np.float32) for a in answers] for name in names},
    )


def scoring_rows(
    answers: Sequence[Answer], seq_len: int, pad_id: int
) -> tuple[Batch, list[list[int]]]:
    """Rows for a pass without gradient, and which answers stand in which row. A truncated answer
    has one more token, so that a critic says what the state after its last token is worth."""
    docs = []
    for answer in answers:
        ids, mask = list(answer.ids), list(answer.trained_L)
        if answer.truncated:
            ids, mask = [*ids, pad_id], [*mask, 1.0]
        docs.append((ids, mask))
    rows = best_fit([len(ids) - 1 for ids, _ in docs], seq_len)
    return pack_rows(docs, seq_len, pad_id=pad_id, rows=rows), rows


def unpacked(
    values_BT: Tensor, answers: Sequence[Answer], rows: Sequence[Sequence[int]]
) -> tuple[list[Array], list[float]]:
    """What a pass over `scoring_rows` says of each answer's tokens (0 where they aren't trained),
    and of the state after a truncated one (0 for the others)."""
    found: list[Array] = [np.zeros(0)] * len(answers)
    after = [0.0] * len(answers)
    for row, numbers in zip(values_BT.double().numpy(), rows, strict=True):
        start = 0
        for number in numbers:
            answer = answers[number]
            length = len(answer.ids) - 1
            of_targets = row[start : start + length]
            values_L = np.concatenate([[0.0], of_targets])
            found[number] = np.where(answer.trained_L != 0, values_L, 0.0)
            start += length
            if answer.truncated:
                after[number] = float(row[start])
                start += 1
    return found, after


def split(count: int, parts: int, seed: Sequence[int]) -> list[list[int]]:
    """`count` answers in `parts` minibatches, drawn anew for each seed; sizes differ by at most
    one. The same on every rank."""
    order = np.random.default_rng(list(seed)).permutation(count)
    return [sorted(int(i) for i in part) for part in np.array_split(order, parts)]
