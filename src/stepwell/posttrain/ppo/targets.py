"""From a rollout's answers to what PPO's steps are made of: what the models say of each token, its
reward, advantages and returns, minibatches. Every rank has all answers and asks about its share, so
nothing here depends on the layout. L tokens of a prompt and its answer, B rows, T tokens a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.parallel.mesh import Mesh, all_gather_objects
from stepwell.parallel.shared_prompts import sharing_step
from stepwell.posttrain.answers import Answer, packed, scoring_rows, split, unpacked
from stepwell.posttrain.policy.aggregation import denominator, token_weight
from stepwell.posttrain.policy.batch import scored
from stepwell.posttrain.policy.gae import explained_variance, gae, whiten
from stepwell.posttrain.policy.kl import kl_estimate
from stepwell.posttrain.policy.loss import ADVANTAGES, OLD, REFERENCE, SAMPLER
from stepwell.posttrain.ppo.critic import OLD_VALUES, RETURNS, VALUES
from stepwell.posttrain.ppo.loss import TOKENS
from stepwell.posttrain.ppo.placement import Reference
from stepwell.sections.methods import PPO
from stepwell.train.engine import Engine


def ask(
    answers: Sequence[Answer],
    policy: Engine,
    critic: Engine | None,
    reference: Reference | None,
    pad_id: int,
) -> list[Answer]:
    """All ranks' answers with what the models say of their tokens before the first update:
    `old_logprobs`, `reference_logprobs` (without a reference the policy's own), `old_values`, and
    the value after those that were cut off. Every rank must call it together, and asks about its
    share.

    Log-probabilities are of the distribution that was sampled from, so the temperature applies to
    them, and never to values.
    """
    run, mesh = policy.run, policy.mesh
    method = run.method
    assert isinstance(method, PPO)
    found = [a.adding(**{OLD: a.streams[SAMPLER]}) for a in answers]
    if needs_old_logprobs(method):
        found = scored(answers, OLD, policy, run, pad_id, mesh)
    if reference is None:
        found = [a.adding(**{REFERENCE: a.streams[OLD]}) for a in found]
    else:
        found = scored(found, REFERENCE, reference, run, pad_id, mesh)
    return valued(found, critic or policy, pad_id)


def needs_old_logprobs(method: PPO) -> bool:
    """Whether the trainer's own are asked for. With a single step on fresh samples the step's are
    the current ones, and the divergence in the reward takes the sampler's, which differ from them
    by rounding (`sampler/mean_abs`): that saves a pass."""
    steps = method.updates_per_rollout * method.minibatches
    return steps > 1 or method.max_staleness > 0 or method.server is not None


def valued(answers: Sequence[Answer], critic: Engine, pad_id: int) -> list[Answer]:
    run, mesh = critic.run, critic.mesh
    numbers = range(len(answers))[mesh.data_rank :: mesh.data_world]
    mine = [answers[i] for i in numbers]
    batch, rows = scoring_rows(mine, run.data.seq_len, pad_id, sharing_step(run))
    values, after = unpacked(critic.scores(batch)[..., 0], mine, rows)
    pairs = zip(values, after, strict=True)
    known = dict(zip(numbers, pairs, strict=True)) if mesh.counts_rows else {}
    found = {i: pair for part in all_gather_objects(known, mesh) for i, pair in part.items()}
    return [
        replace(answer.adding(**{OLD_VALUES: found[i][0]}), after=found[i][1])
        for i, answer in enumerate(answers)
    ]


def token_rewards(answer: Answer, method: PPO, coef: float) -> tuple[np.ndarray, float]:
    """(L,) rewards: `coef` times the divergence from the reference is taken off each trained token
    (method.kl_in "reward"), the last one gets the answer's own; and the value after it.

    An answer that ended by itself has nothing after it. One that was cut off has, by
    method.truncated: (penalty) nothing, and its reward is lowered; (bootstrap) what the critic says
    is to come, in place of a reward that was not earned yet.
    """
    mine = answer.trained_L != 0
    rewards_L = np.zeros(len(mine))
    if coef and method.kl_in == "reward":
        divergence_L = kl_estimate(
            torch.from_numpy(answer.streams[OLD]),
            torch.from_numpy(answer.streams[REFERENCE]),
            method.kl_estimator,
        ).numpy()
        rewards_L[mine] -= coef * divergence_L[mine]
    assert answer.reward is not None
    earned, after = answer.reward, 0.0
    if answer.truncated and method.truncated == "bootstrap":
        earned, after = 0.0, answer.after
    elif answer.truncated:
        earned -= method.truncation_penalty
    rewards_L[np.flatnonzero(mine)[-1]] += earned
    return rewards_L, after


def with_targets(
    answers: Sequence[Answer], method: PPO, coef: float
) -> tuple[list[Answer], dict[str, float]]:
    """All ranks' answers with `advantages` (whitened over all of them) and `returns`; and what is
    shown of the rollout."""
    masks = [a.trained_L for a in answers]
    advantages, returns = [], []
    for answer in answers:
        rewards_L, after = token_rewards(answer, method, coef)
        advantages_L, returns_L = gae(
            rewards_L,
            answer.streams[OLD_VALUES],
            method.gamma,
            method.lam,
            from_policy_L=answer.trained_L != 0,
            bootstrap=after,
        )
        advantages.append(advantages_L)
        returns.append(returns_L)
    shown = rollout_numbers(answers, returns, coef)
    if method.whiten:
        advantages = whiten(advantages, masks)
    found = [
        answer.adding(**{ADVANTAGES: advantages_L, RETURNS: returns_L})
        for answer, advantages_L, returns_L in zip(answers, advantages, returns, strict=True)
    ]
    return found, shown


def rollout_numbers(
    answers: Sequence[Answer], returns: Sequence[np.ndarray], coef: float
) -> dict[str, float]:
    """kl/reference: nats an answer (the sum of k1, by its mean), kl/token: a token."""
    mask = np.concatenate([a.trained_L for a in answers]) != 0
    old, held, values = (
        np.concatenate([a.streams[k] for a in answers])[mask] for k in (OLD, REFERENCE, OLD_VALUES)
    )
    total = math.fsum(old - held)
    return {
        "kl/reference": total / len(answers),
        "kl/token": total / len(old),
        "kl/coef": coef,
        "critic/explained_variance": explained_variance(values, np.concatenate(returns)[mask]),
        "critic/return": float(np.concatenate(returns)[mask].mean()),
    }


def passes(
    answers: Sequence[Answer], run: Run, num_rollouts: int, mesh: Mesh, pad_id: int
) -> Iterator[tuple[Batch, dict[str, float]]]:
    """updates_per_rollout times over the answers, in `minibatches` drawn anew each time: this
    rank's rows, and denominators under which the mean of a pass's gradients is the gradient of all
    answers at once. In the first one the old log-probabilities are the current ones."""
    method = run.method
    assert isinstance(method, PPO)
    lengths = [a.num_trained for a in answers]
    num_parts = min(method.minibatches, len(answers))
    denominators = {
        TOKENS: denominator(lengths, method.aggregate) / num_parts,
        VALUES: sum(lengths) / num_parts,
    }
    names = [ADVANTAGES, RETURNS, OLD, OLD_VALUES, SAMPLER]
    if method.kl_coef and method.kl_in == "loss":
        names.append(REFERENCE)
    first = True
    for epoch in range(method.updates_per_rollout):
        for part in split(len(answers), num_parts, (run.train.seed, num_rollouts, epoch)):
            mine = [answers[i] for i in part][mesh.data_rank :: mesh.data_world]
            if first:
                mine = [a.adding(**{OLD: np.full(len(a.ids), np.nan)}) for a in mine]
            first = False
            weights = [
                token_weight(a.num_trained, method.aggregate, method.max_new_tokens) for a in mine
            ]
            seq_len, step = run.data.seq_len, sharing_step(run)
            yield packed(mine, seq_len, pad_id, weights, names, step), denominators
