"""Group-relative policy optimisation with verifiable rewards (2402.03300, 2501.12948).

A flat loop: sample a group of answers to each prompt on the training weights, score them, take the
advantage within each group, make policy-gradient steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from stepwell.config import Run
from stepwell.eval.grade import Prompt
from stepwell.generate import Sampling
from stepwell.metrics import LineFile
from stepwell.parallel.mesh import Mesh
from stepwell.posttrain.answers import answers_of
from stepwell.posttrain.dynamic_sampling import Drawn, draw_alive
from stepwell.posttrain.placement import Reference, check_reference, open_reference
from stepwell.posttrain.policy_batch import (
    minibatches,
    num_parts,
    num_trained,
    scored,
    with_advantages,
)
from stepwell.posttrain.policy_loss import OLD, REFERENCE, denominators, policy_loss
from stepwell.posttrain.rewards import Rewards, open_rewards, reward_metrics, reward_terms
from stepwell.posttrain.rollout import Group, Rollouts, collect
from stepwell.posttrain.sampled import (
    all_shares,
    check_failures,
    dealt,
    fixed_prompts,
    open_samples,
    prompt_numbers,
    rollout_metrics,
    rollout_seed,
)
from stepwell.posttrain.sampled import step_prompts as step_prompts
from stepwell.posttrain.sampling.gauge import Gauge
from stepwell.sections.methods import GRPO, RewardTerm
from stepwell.tokenizer import Tokenizer
from stepwell.train.session import Session, open_session
from stepwell.train.weights import check_tokenizer, require_model
from stepwell.types import ConfigError


@dataclass(frozen=True)
class Place:
    """How many rollouts were trained on, and how many prompts were drawn for them."""

    rollouts: int = 0
    prompts: int = 0


def grpo(
    run: Run,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    dropped: Mapping[str, int] | None = None,
    rewards: Rewards | None = None,
) -> int:
    """Trains to `train.steps` optimiser steps; goes on where a stopped run was. Returns the number
    of steps done. Every completion with its reward goes to `samples.jsonl`.

    dropped: prompts that the caller left out, by reason; noted in `events.jsonl`. rewards: instead
    of those that the method names.
    Raises ConfigError for a run that cannot be (`check_grpo`); DataError for prompts without a
    column that a reward requires; TrainingError when the graders fail on every answer of the first
    rollout.
    """
    method = run.method
    assert isinstance(method, GRPO)
    check_grpo(run, prompts, tokenizer, weights)
    if weights is not None and method.kl_coef:
        weights = list(weights)  # the reference has them too
    with open_session(run, weights, tokenizer=tokenizer.fingerprint) as session:
        mesh = session.engine.mesh
        opened = rewards or open_rewards(with_overlong(method), tokenizer, mesh, run)
        try:
            opened.check_columns(prompts)
            reference = None
            if method.kl_coef:
                reference = open_reference(run, session.engine, mesh, weights)
            if session.extra is None:
                counts = dict(dropped or {})
                total = len(prompts) + sum(counts.values())
                session.log.event(
                    "data", path=run.data.path, rows=total, kept=len(prompts), dropped=counts
                )
            return _train(session, prompts, tokenizer, opened, reference)
        finally:
            opened.close()


def check_grpo(
    run: Run, prompts: Sequence[Prompt], tokenizer: Tokenizer, weights: object = None
) -> None:
    """Raises ConfigError without a model to start from, with another tokenizer than the model's,
    for a reference that cannot be had, and for fewer prompts than a step takes."""
    method = run.method
    assert isinstance(method, GRPO)
    require_model(run, weights)
    if run.model.init is not None:
        check_tokenizer(run.model.init, tokenizer, run.data.tokenizer)
    if method.kl_coef:
        check_reference(run)
    if len(prompts) < method.prompts_per_step:
        raise ConfigError(
            f"method.prompts_per_step={method.prompts_per_step} but there are only "
            f"{len(prompts)} prompts; the nearest legal value is {len(prompts)}"
        )


def _train(
    session: Session,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    rewards: Rewards,
    reference: Reference | None,
) -> int:
    run, engine, mesh = session.run, session.engine, session.engine.mesh
    method, pad_id = run.method, tokenizer.pad_id
    assert isinstance(method, GRPO)
    sampler = Sampler(session, prompts, tokenizer, rewards)
    start, place, fresh = engine.step, place_of(session.extra, method), session.extra is None
    samples = open_samples(session, fresh) if mesh.is_main else None
    if fresh:
        write(samples, start, sampler.greedy(), greedy=True)
    session.pause()
    while not session.finished:
        numbers = sampler.numbers(place.prompts, method.prompts_per_step)
        mine = numbers[mesh.data_rank :: mesh.data_world]
        if session.is_jumped("rollouts", place.rollouts + 1, mine):
            place = Place(place.rollouts + 1, place.prompts + len(numbers))
            continue
        drawn, place = sampler.draw(place)
        more = sampler.headline(drawn)
        if engine.step == start:
            check_failures(Rollouts(drawn.groups).rows())
        answers = answers_of(Rollouts(drawn.kept))
        if reference is not None:
            answers = scored(answers, REFERENCE, reference, run, pad_id, mesh)
        if method.updates_per_rollout * num_parts(answers, method) > 1:
            answers = scored(answers, OLD, engine, run, pad_id, mesh)
        answers = with_advantages(answers, method)
        lengths = [num_trained(answer, method) for answer in answers]
        divisors = denominators(method, lengths, num_parts(answers, method))
        seed, action = [run.train.seed, place.rollouts], ""
        for batch in minibatches(answers, method, run.data.seq_len, pad_id, mesh, seed):
            gauge = Gauge()
            info = session.step(
                batch,
                policy_loss(method, gauge),
                method.temperature,
                partial(numbers_of, more, gauge, mesh),
                divisors,
            )
            action = info.verdict.action
            if session.finished or action == "rewind":
                break
        if action == "rewind":
            found = session.rewind(method.updates_per_rollout * method.minibatches)
            place = place_of(found, method)
            if samples is not None:
                samples.close()
                samples = open_samples(session)
            continue
        write(samples, engine.step, drawn.kept, greedy=False, trained=True)
        write(samples, engine.step, drawn.thrown, greedy=False, trained=False)
        if session.finished:
            write(samples, engine.step, sampler.greedy(), greedy=True)
            session.pause()
        session.after_step({"rollouts": place.rollouts, "prompts": place.prompts})
    if samples is not None:
        samples.close()
    return engine.step - start


@dataclass(frozen=True)
class Sampler:
    """Draws groups of answers; every rank has those of all."""

    session: Session
    prompts: Sequence[Prompt]
    tokenizer: Tokenizer
    rewards: Rewards

    @property
    def method(self) -> GRPO:
        method = self.session.run.method
        assert isinstance(method, GRPO)
        return method

    def numbers(self, first: int, count: int) -> list[int]:
        return prompt_numbers(len(self.prompts), self.session.run.train.seed, first, count)

    def draw(self, place: Place) -> tuple[Drawn, Place]:
        """The groups of the next rollout, and the place after it."""
        method, drawn = self.method, place.prompts

        def take(count: int, refill: int) -> tuple[Group, ...]:
            nonlocal drawn
            chosen = [self.prompts[i] for i in self.numbers(drawn, count)]
            drawn += count
            seed = rollout_seed(self.session.run.train.seed, place.rollouts, refill)
            return self.answer(chosen, method.group_size, method.temperature, seed)

        if method.dynamic_sampling:
            found = draw_alive(take, method.prompts_per_step, method.max_refills)
        else:
            found = Drawn(take(method.prompts_per_step, 0))
        return found, Place(place.rollouts + 1, drawn)

    def greedy(self) -> tuple[Group, ...]:
        """The likeliest answers to a few fixed prompts."""
        return self.answer(fixed_prompts(self.prompts), 1, 0.0, 0)

    def answer(
        self, prompts: Sequence[Prompt], group_size: int, temperature: float, seed: int
    ) -> tuple[Group, ...]:
        mesh = self.session.engine.mesh
        sampling = Sampling(
            temperature=temperature,
            eos_ids=self.tokenizer.stop_ids,
            max_new_tokens=self.method.max_new_tokens,
        )
        rollouts = collect(
            self.session.engine,
            prompts[mesh.data_rank :: mesh.data_world],
            group_size,
            sampling,
            self.rewards,
            self.tokenizer,
            seed=seed,
        )
        return dealt(all_shares(rollouts, mesh), len(prompts)).groups

    def headline(self, drawn: Drawn) -> dict[str, float]:
        """What the rollout says of the policy, over all that were drawn."""
        method, terms = self.method, [dimension.term for dimension in self.rewards.dimensions]
        rollouts = Rollouts(drawn.groups)
        verdicts = [verdict for group in drawn.groups for verdict in group.verdicts]
        found = rollout_metrics([rollouts], rollouts.rows(), terms)
        found |= reward_metrics(self.rewards.names, verdicts)
        if method.dynamic_sampling:
            found["rollout/refills"] = drawn.refills
            found["rollout/thrown_groups"] = len(drawn.thrown)
            found["rollout/missing_groups"] = method.prompts_per_step - len(drawn.kept)
        return found


def numbers_of(more: Mapping[str, float], gauge: Gauge, mesh: Mesh) -> dict[str, float]:
    """What a step's line says besides the engine's numbers."""
    return {**more, **gauge.read(mesh).metrics()}


def place_of(extra: Mapping[str, Any] | None, method: GRPO) -> Place:
    """Where a checkpoint's loop was; those before dynamic sampling don't count prompts."""
    rollouts = (extra or {}).get("rollouts", 0)
    return Place(rollouts, (extra or {}).get("prompts", rollouts * method.prompts_per_step))


def with_overlong(method: GRPO) -> GRPO:
    """The method with the punishment of long answers among its rewards."""
    if not method.overlong_cache:
        return method
    source = f"overlong:{method.max_new_tokens}:{method.overlong_cache}"
    terms = (*reward_terms(method), RewardTerm(name="overlong", source=source))
    return method.model_copy(update={"rewards": terms})


def write(samples: LineFile | None, step: int, groups: Sequence[Group], **more: Any) -> None:
    """A line of `samples.jsonl` for each answer, on the rank that writes."""
    if samples is not None:
        for row in Rollouts(tuple(groups)).rows():
            samples.write({"step": step, **more, **row})
