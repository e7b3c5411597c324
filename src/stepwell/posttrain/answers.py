"""Answers with what is known of each of their tokens, in and out of packed rows.

Scores of a rollout are gathered from all ranks before anything is made of them, so what follows is
plain arithmetic on the whole rollout, and no layout changes it. L tokens of a prompt and its
answer, B rows, T tokens a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from stepwell.data.batch import Batch
from stepwell.data.packing import best_fit, pack_rows, shortest
from stepwell.posttrain.rollout import Rollouts

Array = np.ndarray


class Place(NamedTuple):
    """An answer in a row. skipped: how many of its first tokens the row has already."""

    number: int
    skipped: int


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
    step: int = 0,
) -> Batch:
    """Rows with a loss on trained tokens; none without answers. weights: of each answer's tokens
    (default 1). names: the streams that the rows carry as float32. step: if there is one
    (`sharing_step`), prompts that answers of a row have in common are there once, and rows are as
    short as they may be, in steps of so many tokens."""
    scale = [1.0] * len(answers) if weights is None else weights
    rows, length = places(answers, [len(a.ids) - 1 for a in answers], seq_len, step)
    return pack_rows(
        [(a.ids, a.trained_L * w) for a, w in zip(answers, scale, strict=True)],
        length,
        pad_id=pad_id,
        extra={name: [a.streams[name].astype(np.float32) for a in answers] for name in names},
        rows=[[number for number, _ in row] for row in rows],
        shared=left_out(rows, len(answers)),
    )


def places(
    answers: Sequence[Answer], lengths: Sequence[int], seq_len: int, step: int
) -> tuple[list[list[Place]], int]:
    """Which answers stand in which row, by best fit, and the rows' length. lengths: of each whole
    answer.

    With a step answers with one prompt stand together, as many as a row takes, and those after the
    first leave the prompt out but for its last token, whose target is each answer's own.
    """
    if not step:
        rows = best_fit(lengths, seq_len)
        return [[Place(i, 0) for i in row] for row in rows], seq_len
    units: list[list[Place]] = []
    for numbers in _groups(answers):
        prompt, room = max(0, _first_trained(answers[numbers[0]]) - 1), 0
        for i in numbers:
            own = lengths[i] - prompt
            if own > room:
                units.append([])
                own, room = lengths[i], seq_len
            room -= own
            units[-1].append(Place(i, prompt if units[-1] else 0))
    sizes = [sum(lengths[i] - skipped for i, skipped in unit) for unit in units]
    length = shortest(sizes, seq_len, step)
    rows = best_fit(sizes, length)
    return [[place for number in row for place in units[number]] for row in rows], length


def left_out(rows: Sequence[Sequence[Place]], num_answers: int) -> list[int]:
    """How many of each answer's tokens its row has already."""
    found = [0] * num_answers
    for number, skipped in (place for row in rows for place in row):
        found[number] = skipped
    return found


def _groups(answers: Sequence[Answer]) -> list[list[int]]:
    """Numbers of the answers that have one prompt, in order of their first."""
    found: dict[tuple[int, ...], list[int]] = {}
    for i, answer in enumerate(answers):
        alone = () if answer.num_trained else (-1, i)
        found.setdefault((*answer.ids[: _first_trained(answer)], *alone), []).append(i)
    return list(found.values())


def _first_trained(answer: Answer) -> int:
    return int((answer.trained_L != 0).argmax())


def scoring_rows(
    answers: Sequence[Answer], seq_len: int, pad_id: int, step: int = 0
) -> tuple[Batch, list[list[Place]]]:
    """Rows for a pass without gradient, and which answers stand in which row. A truncated answer
    has one more token, so that a critic says what the state after its last token is worth. step:
    see `packed`."""
    docs = []
    for answer in answers:
        ids, mask = list(answer.ids), list(answer.trained_L)
        if answer.truncated:
            ids, mask = [*ids, pad_id], [*mask, 1.0]
        docs.append((ids, mask))
    rows, length = places(answers, [len(ids) - 1 for ids, _ in docs], seq_len, step)
    numbers = [[number for number, _ in row] for row in rows]
    skipped = left_out(rows, len(answers))
    return pack_rows(docs, length, pad_id=pad_id, rows=numbers, shared=skipped), rows


def unpacked(
    values_BT: Tensor, answers: Sequence[Answer], rows: Sequence[Sequence[Place]]
) -> tuple[list[Array], list[float]]:
    """What a pass over `scoring_rows` says of each answer's tokens (0 where they aren't trained),
    and of the state after a truncated one (0 for the others)."""
    found: list[Array] = [np.zeros(0)] * len(answers)
    after = [0.0] * len(answers)
    for row, numbers in zip(values_BT.double().numpy(), rows, strict=True):
        start = 0
        for number, skipped in numbers:
            answer = answers[number]
            length = len(answer.ids) - 1 - skipped
            of_targets = row[start : start + length]
            values_L = np.concatenate([np.zeros(1 + skipped), of_targets])
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
