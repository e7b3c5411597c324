"""From a rollout to the minibatches of its updates. Every rank knows all answers, and scores and
trains on its share, so nothing here depends on the layout. L tokens of a prompt and its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.parallel.mesh import Mesh, all_gather_objects
from stepwell.parallel.shared_prompts import sharing_step
from stepwell.posttrain.answers import Answer, packed, scoring_rows, split, unpacked
from stepwell.posttrain.policy.advantages import group_advantages
from stepwell.posttrain.policy.aggregation import token_weight
from stepwell.posttrain.policy.kl import kl_estimate
from stepwell.posttrain.policy.loss import ADVANTAGES, OLD, REFERENCE, SAMPLER, streams
from stepwell.sections.methods import GRPO, SampledMethod

Array = np.ndarray


class Model(Protocol):
    """An engine, or a reference wherever it is."""

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Tensor: ...


def scored(
    answers: Sequence[Answer], name: str, model: Model, run: Run, pad_id: int, mesh: Mesh
) -> list[Answer]:
    """The answers with a stream `name` of their tokens' log-probabilities under `model`, at the
    sampling temperature. Every rank must call it together."""
    method = run.method
    assert isinstance(method, SampledMethod)
    numbers = range(len(answers))[mesh.data_rank :: mesh.data_world]
    mine = [answers[i] for i in numbers]
    batch, rows = scoring_rows(mine, run.data.seq_len, pad_id, sharing_step(run))
    values, _ = unpacked(model.logprobs(batch, method.temperature), mine, rows)
    found: dict[int, Array] = {}
    pairs = dict(zip(numbers, values, strict=True)) if mesh.counts_rows else {}
    for part in all_gather_objects(pairs, mesh):
        found |= part
    return [answer.adding(**{name: found[i]}) for i, answer in enumerate(answers)]


def with_advantages(answers: Sequence[Answer], method: GRPO) -> list[Answer]:
    """Each answer with its advantage at its trained tokens. answers: group by group; where the KL
    is part of the reward, with the reference's log-probabilities."""
    rewards = [penalised(answer, method) for answer in answers]
    cuts = range(0, len(answers), method.group_size)
    groups = [rewards[start : start + method.group_size] for start in cuts]
    flat = [a for group in group_advantages(groups, method.advantage) for a in group]
    return [
        answer.adding(**{ADVANTAGES: answer.trained_L * advantage})
        for answer, advantage in zip(answers, flat, strict=True)
    ]


def penalised(answer: Answer, method: GRPO) -> float | None:
    """The reward less kl_coef times the answer's divergence from the reference, summed over its
    tokens, if that is part of the reward."""
    if answer.reward is None or not method.kl_coef or method.kl_in != "reward":
        return answer.reward
    sampler_L, reference_L = (torch.from_numpy(answer.streams[n]) for n in (SAMPLER, REFERENCE))
    kl_L = kl_estimate(sampler_L, reference_L, method.kl_estimator).numpy()
    return answer.reward - method.kl_coef * float(np.where(answer.trained_L != 0, kl_L, 0).sum())


def num_trained(answer: Answer, method: GRPO) -> int:
    """How many of its tokens carry a loss: none if it was cut off and method.overlong says so."""
    masked = method.overlong == "mask" and answer.truncated
    return 0 if masked else answer.num_trained


def minibatches(
    answers: Sequence[Answer],
    method: GRPO,
    seq_len: int,
    pad_id: int,
    mesh: Mesh,
    seed: Sequence[int],
    step: int = 0,
) -> Iterator[Batch]:
    """This rank's rows of each step's minibatch: updates_per_rollout passes over the answers, in
    `num_parts` steps each. At the first step the old log-probabilities are NaN (the current ones);
    later steps need them as a stream. step: as in `packed`."""
    for update in range(method.updates_per_rollout):
        parts = split(len(answers), num_parts(answers, method), [*seed, update])
        for number, part in enumerate(parts):
            chosen = [answers[i] for i in part[mesh.data_rank :: mesh.data_world]]
            if update == number == 0:
                chosen = [a.adding(**{OLD: np.full(len(a.ids), np.nan)}) for a in chosen]
            yield pack_answers(chosen, method, seq_len, pad_id, step)


def num_parts(answers: Sequence[Answer], method: GRPO) -> int:
    return min(method.minibatches, len(answers))


def pack_answers(
    answers: Sequence[Answer], method: GRPO, seq_len: int, pad_id: int, step: int = 0
) -> Batch:
    """Rows of prompts and answers with `policy_loss.streams`; weights are those of
    method.aggregate, 0 for tokens without a loss."""
    weights = [
        token_weight(num_trained(a, method), method.aggregate, method.max_new_tokens)
        for a in answers
    ]
    return packed(answers, seq_len, pad_id, weights, streams(method), step)
