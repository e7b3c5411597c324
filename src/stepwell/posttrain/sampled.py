"""What loops share that train on their own samples: how they are opened, which prompts come next,
one truth for all ranks, the headline numbers (reward, accuracy, length, dead groups), and
`samples.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from stepwell.config import Run
from stepwell.data.order import permute
from stepwell.eval.grade import Prompt
from stepwell.generate import Sampling
from stepwell.metrics import LineFile, cut_lines
from stepwell.parallel.mesh import Mesh, all_gather_objects
from stepwell.posttrain.policy.advantages import dead_share
from stepwell.posttrain.rewards.composite import (
    Rewards,
    check_models,
    open_rewards,
    reward_metrics,
    reward_terms,
)
from stepwell.posttrain.rewards.self_test import try_at_start
from stepwell.posttrain.rollout import Rollouts, Scorer, collect
from stepwell.posttrain.sampling.environments import Factory, find_environment, turns_of
from stepwell.posttrain.sampling.pipeline import RolloutStream, rollout_stream
from stepwell.sections.methods import GRPO, PPO, SampledMethod
from stepwell.sections.rewards import RewardTerm
from stepwell.tokenizer import Tokenizer
from stepwell.train.session import Session, Trained
from stepwell.train.start import join, open_session
from stepwell.types import ConfigError, TrainingError

# Sources that know whether an answer is right; others grade it.
VERIFIABLE = ("exact", "math", "regex", "json", "code", "tests", "gym")
RIGHT = 0.99
# Refills take their prompts in another order.
REFILL_SEED = 1 << 20
NUM_FIXED = 8
FIRST = -1  # the number of the rollout before the first
# Rollouts in a row without an answer to learn from that are borne, less one.
MAX_EMPTY = 3


# --- before a run ------------------------------------------------------------------------------


def check_sampled(method: SampledMethod, tokenizer: Tokenizer | None = None) -> None:
    """Raises ConfigError for an environment that cannot be had, or whose observations the
    tokenizer's template cannot render, for a dimension that is named like its reward, for rewards
    that all weigh nothing, for reward models that cannot be one reward, and for a divergence that
    holds nothing: k1's gradient in the loss is 0 on average; CheckpointError for a reward model
    that cannot be read."""
    terms = reward_terms(method)
    if (
        isinstance(method, GRPO | PPO)
        and method.kl_coef
        and (method.kl_in, method.kl_estimator) == ("loss", "k1")
    ):
        raise ConfigError(
            "method.kl_estimator='k1' in the loss holds the policy by nothing (the gradient of its "
            "mean is 0); the nearest legal values are 'unbiased', or method.kl_in='reward'"
        )
    check_models(method, tokenizer)
    if method.environment:
        environment = find_environment(method.environment)
        if tokenizer is not None:
            turns_of(environment, tokenizer, method.environment)
        if any(term.name == "environment" for term in terms):
            raise ConfigError(
                "method.rewards: the name 'environment' is that of the environment's own reward; "
                "the nearest legal value is 'environment-2'"
            )
    elif all(term.weight == 0 for term in terms):
        raise ConfigError(
            "method.rewards: all weights are 0, so there is nothing to learn; the nearest is a "
            f"weight of 1 for {terms[0].name!r}"
        )


def check_enough(method: SampledMethod, prompts: Sequence[Prompt]) -> None:
    """Raises ConfigError for fewer prompts than a step takes."""
    if len(prompts) < method.prompts_per_step:
        raise ConfigError(
            f"method.prompts_per_step={method.prompts_per_step} but there are only "
            f"{len(prompts)} prompts; the nearest legal value is {len(prompts)}"
        )


# --- a loop ------------------------------------------------------------------------------------


class Loop(NamedTuple):
    """What a loop works with. greedy: samples the likeliest answers to a few prompts, the same
    each time; every rank must call it together, and has those of all."""

    session: Session
    rewards: Rewards
    stream: RolloutStream
    greedy: Callable[[], Rollouts]


@contextmanager
def open_loop(
    run: Run,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    weights: Iterable[tuple[str, Tensor]] | None,
    dropped: Mapping[str, int] | None,
    rewards: Rewards | None = None,
    others: Mapping[str, Trained] | None = None,
) -> Iterator[Loop]:
    """Opens the rewards (unless they are given) and the run, and tries the rewards on junk before
    its first step. dropped: prompts that are left out, by reason. others: as in `open_session`.

    Raises what `open_session`, `open_rewards` and `try_at_start` do.
    """
    method, mesh = run.method, join(run)
    assert isinstance(method, SampledMethod)
    fingerprint = tokenizer.fingerprint
    with (
        closing(rewards or open_rewards(method, tokenizer, mesh, run)) as opened,
        open_session(run, weights, mesh=mesh, tokenizer=fingerprint, others=others) as session,
    ):
        try_at_start(session, opened, prompts, tokenizer)
        if session.extra is None:
            counts, kept = dict(dropped or {}), len(prompts)
            rows = kept + sum(counts.values())
            session.log.event("data", path=run.data.path, rows=rows, kept=kept, dropped=counts)
        environment = find_environment(method.environment) if method.environment else None
        mine = lambda number: [prompts[i] for i in step_prompts(len(prompts), number, session)]
        greedy = partial(greedy_answers, session, prompts, tokenizer, opened, environment)
        with rollout_stream(session, mine, opened, tokenizer, environment) as stream:
            yield Loop(session, opened, stream, greedy)


# --- prompts -----------------------------------------------------------------------------------


def step_prompts(num_prompts: int, num_rollouts: int, session: Session) -> list[int]:
    """Numbers of this rank's prompts of the next rollout."""
    method, mesh = session.run.method, session.engine.mesh
    assert isinstance(method, SampledMethod)
    first, count = num_rollouts * method.prompts_per_step, method.prompts_per_step
    chosen = prompt_numbers(num_prompts, session.run.train.seed, first, count)
    return chosen[mesh.data_rank :: mesh.data_world]


def prompt_numbers(num_prompts: int, seed: int, first: int, count: int) -> list[int]:
    """Of the prompts at places first, first + 1, ...: each epoch is a permutation of all."""
    found = []
    for ordinal in range(first, first + count):
        epoch, place = divmod(ordinal, num_prompts)
        found.append(int(permute(np.array([place]), num_prompts, seed, epoch)[0]))
    return found


def fixed_prompts(prompts: Sequence[Prompt], count: int = NUM_FIXED) -> list[Prompt]:
    """At most `count`, evenly spaced: the same at a run's start and end, so that their greedy
    answers compare like with like."""
    every = max(1, len(prompts) // count)
    return list(prompts[::every][:count])


# --- ranks -------------------------------------------------------------------------------------


def all_shares(rollouts: Rollouts, mesh: Mesh) -> list[Rollouts]:
    """What the first rank of each data share has, by the share's number.

    Its other ranks have had the same prompts answered and verified; where an answer depends on a
    device's last digit, or a verdict on the clock, theirs could differ, and one batch needs one
    truth.
    """
    parts = all_gather_objects(rollouts if mesh.counts_rows else None, mesh)
    firsts = [part for part in parts if part is not None]
    assert len(firsts) == mesh.data_world
    return firsts


def dealt(shares: Sequence[Rollouts], count: int) -> Rollouts:
    """`count` groups that were dealt to the shares one by one, in their order."""
    return Rollouts(tuple(shares[i % len(shares)].groups[i // len(shares)] for i in range(count)))


def greedy_answers(
    session: Session,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    rewards: Scorer,
    environment: Factory | None,
) -> Rollouts:
    """The likeliest answers to a few fixed prompts, scored; those of all ranks on every rank."""
    run, mesh, chosen = session.run, session.engine.mesh, fixed_prompts(prompts)
    method = run.method
    assert isinstance(method, SampledMethod)
    found = collect(
        session.engine,
        chosen[mesh.data_rank :: mesh.data_world],
        1,
        Sampling(0.0, eos_ids=tokenizer.stop_ids, max_new_tokens=method.max_new_tokens),
        rewards,
        tokenizer,
        environment=environment,
        max_turns=method.max_turns,
        max_len=min(run.data.seq_len, run.model.max_seq_len),
        timeout_s=method.reward_timeout_s,
    )
    return dealt(all_shares(found, mesh), len(chosen))


# --- numbers -----------------------------------------------------------------------------------


def check_failures(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises TrainingError if the verifier, or the environment, failed on every answer: nothing can
    be learnt so."""
    if not rows or not all(row["failure"] for row in rows):
        return
    others = [row for row in rows if not row["failure"].startswith("environment_")]
    first = (others or rows)[0]
    who = "the verifier failed on every one"
    if not others:
        who = "the environment (method.environment) failed in every one"
    elif len(others) < len(rows):
        who = f"the verifier failed on {len(others)} and the environment in all others"
    raise TrainingError(
        f"{who} of the {len(rows)} answers of the first rollout; the first failure is "
        f"{first['failure']}: {first['detail']}"
    )


def headline(rollouts: Rollouts, rewards: Rewards) -> dict[str, float]:
    """What a rollout says of the policy: reward as a whole and by dimension, lengths, failures."""
    terms = [dimension.term for dimension in rewards.dimensions]
    verdicts = [verdict for group in rollouts.groups for verdict in group.verdicts]
    return {
        **rollout_metrics([rollouts], rollouts.rows(), terms),
        **reward_metrics(rewards.names, verdicts),
    }


def rollout_metrics(
    shares: Sequence[Rollouts],
    rows: Sequence[Mapping[str, Any]],
    terms: Sequence[RewardTerm] = (),
) -> dict[str, float]:
    """Over all shares. There is no mean reward where no answer has one, and no accuracy without
    verifiable dimensions among `terms`."""
    groups = [group.rewards for share in shares for group in share.groups]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    right = accuracy(rows, terms)
    return {
        **({"reward/mean": sum(rewards) / len(rewards)} if rewards else {}),
        **({} if right is None else {"reward/accuracy": right}),
        # An answer alone is equal to all others of its group.
        **({"reward/dead_groups": dead_share(groups)} if any(len(g) > 1 for g in groups) else {}),
        "reward/not_applicable": sum(r["reward"] is None and not r["failure"] for r in rows),
        "rollout/length": sum(row["num_tokens"] for row in rows) / len(rows),
        "rollout/truncated": sum(row["finish_reason"] == "length" for row in rows) / len(rows),
        "rollout/errors": sum(row["failure"] == "error" for row in rows),
        "rollout/timeouts": sum(row["failure"] == "timeout" for row in rows),
    }


def accuracy(rows: Sequence[Mapping[str, Any]], terms: Sequence[RewardTerm]) -> float | None:
    """The share of answers that are right in every verifiable dimension that applies to them, among
    those to which one does."""
    names = [t.name for t in terms if t.source.partition(":")[0] in VERIFIABLE]
    scores = [[s for name in names if (s := row["scores"].get(name)) is not None] for row in rows]
    right = [min(found) >= RIGHT for found in scores if found]
    return sum(right) / len(right) if right else None


def without_answers(session: Session, num_rollouts: int, in_a_row: int) -> None:
    """Raises TrainingError for the third rollout in a row that teaches nothing."""
    session.log.event("empty_rollout", session.engine.step, rollout=num_rollouts)
    if in_a_row >= MAX_EMPTY:
        raise TrainingError(
            f"{in_a_row} rollouts in a row have no answer with a reward; mend the rewards: the "
            "same command goes on from the last checkpoint"
        )


# --- samples.jsonl -----------------------------------------------------------------------------


class Samples:
    """`samples.jsonl`, which rank 0 writes: a line for each answer.

    num_rollouts: how many are done. Lines of later ones go: these are about to be sampled again.
    """

    def __init__(self, session: Session, num_rollouts: int):
        self._session = session
        self._file: LineFile | None = None
        self.go_to(num_rollouts if session.extra is not None else FIRST)

    def go_to(self, num_rollouts: int) -> None:
        """Where the loop has gone back."""
        self.close()
        if self._session.engine.mesh.is_main:
            path = self._session.dir / "samples.jsonl"
            cut_lines(path, num_rollouts - 1, "rollout")
            self._file = LineFile(path)

    def write(
        self, rows: Iterable[Mapping[str, Any]], rollout: int = FIRST, greedy: bool = False
    ) -> None:
        """rollout: its number; of greedy answers that of the one before."""
        step = self._session.engine.step
        if self._file is not None:
            for row in rows:
                self._file.write({"step": step, "rollout": rollout, "greedy": greedy, **row})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
