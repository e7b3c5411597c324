"""Group-relative policy optimisation with verifiable rewards (2402.03300, 2501.12948).

A flat loop: sample a group of answers to each prompt on the training weights, score them, take the
advantage within each group, make policy-gradient steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from stepwell.config import Run
from stepwell.eval.grade import Prompt
from stepwell.parallel.mesh import Mesh
from stepwell.parallel.shared_prompts import sharing_step
from stepwell.posttrain.answers import answers_of
from stepwell.posttrain.first_model import check_first_model
from stepwell.posttrain.overoptimisation.watch import Overopt, divergence
from stepwell.posttrain.policy.batch import (
    minibatches,
    num_parts,
    num_trained,
    scored,
    with_advantages,
)
from stepwell.posttrain.policy.dynamic_sampling import Drawn, draw_alive
from stepwell.posttrain.policy.kl_control import kept_coef
from stepwell.posttrain.policy.loss import OLD, REFERENCE, denominators, policy_loss
from stepwell.posttrain.ppo.placement import Reference, check_reference, open_reference
from stepwell.posttrain.rewards.composite import Rewards, reward_terms, with_overlong
from stepwell.posttrain.rollout import Group, Rollouts
from stepwell.posttrain.sampled import (
    REFILL_SEED,
    Loop,
    Samples,
    all_shares,
    check_enough,
    check_failures,
    check_sampled,
    dealt,
    headline,
    open_loop,
    prompt_numbers,
    step_prompts,
    without_answers,
)
from stepwell.posttrain.sampling.gauge import Agreement, Gauge
from stepwell.posttrain.sampling.pipeline import RolloutStream
from stepwell.sections.methods import GRPO
from stepwell.tokenizer import Tokenizer
from stepwell.train.session import Session
from stepwell.types import ConfigError


@dataclass(frozen=True)
class Place:
    """How many rollouts were asked for, how many prompts were drawn to refill them, what the watch
    over the reward knows, and the divergence's coefficient, now and by the method."""

    kl_coef: float
    method_kl_coef: float
    rollouts: int = 0
    refilled: int = 0
    overopt: Mapping[str, Any] = field(default_factory=dict)


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
    with open_loop(run, prompts, tokenizer, weights, dropped, rewards) as loop:
        reference = None
        if method.kl_coef:
            engine = loop.session.engine
            reference = open_reference(run, engine, engine.mesh, weights)
        return _train(loop, prompts, tokenizer.pad_id, reference)


def check_grpo(
    run: Run, prompts: Sequence[Prompt], tokenizer: Tokenizer, weights: object = None
) -> None:
    """Raises ConfigError without a model to start from, with another tokenizer than the model's,
    for a reference that cannot be had, and for fewer prompts than a step takes."""
    method = run.method
    assert isinstance(method, GRPO)
    check_sampled(method, tokenizer)
    check_signs(method)
    check_first_model(run, tokenizer, weights)
    if method.kl_coef:
        check_reference(run)
    check_enough(method, prompts)


def check_signs(method: GRPO) -> None:
    """Raises ConfigError for maxrl, which divides by a mean, with rewards that may be below 0."""
    terms = reward_terms(with_overlong(method))
    penalties = [
        term.name
        for term in terms
        if term.source.partition(":")[0] in ("overlong", "repetition")
        and term.weight > 0
        and (term.low is None or term.low < 0)
    ]
    penalties += [term.name for term in terms if term.weight < 0]
    if method.advantage == "maxrl" and (penalties or (method.kl_coef and method.kl_in == "reward")):
        what = f"{penalties[0]!r} takes away from it" if penalties else "method.kl_in='reward' does"
        raise ConfigError(
            "method.advantage='maxrl' divides by a group's mean reward, which must not be below 0, "
            f"and {what}; the nearest legal value is 'none', or leave that out"
        )


def _train(loop: Loop, prompts: Sequence[Prompt], pad_id: int, reference: Reference | None) -> int:
    session, rewards, stream, greedy = loop
    run, engine, mesh = session.run, session.engine, session.engine.mesh
    method, start = run.method, engine.step
    assert isinstance(method, GRPO)
    place = place_of(session.extra, method)
    samples = Samples(session, place.rollouts)
    if session.extra is None:
        samples.write(greedy().rows(), greedy=True)
    warned, empty, overopt = False, 0, Overopt(session, rewards, place.overopt)
    overopt.check_stopped()
    session.pause()
    while not session.finished:
        numbers = step_prompts(len(prompts), place.rollouts, session)
        if session.is_jumped("rollouts", place.rollouts + 1, numbers):
            place = replace(place, rollouts=place.rollouts + 1)
            continue
        drawn = draw(stream, place, prompts)
        if engine.step == start:
            check_failures(Rollouts(drawn.groups).rows())
        more = {**drawn_numbers(drawn, rewards, method), **stream.metrics(Rollouts(drawn.kept))}
        answers = answers_of(Rollouts(drawn.kept))
        kl = None
        if reference is not None:
            answers = scored(answers, REFERENCE, reference, run, pad_id, mesh)
            kl = divergence(answers)
        more |= overopt.see(Rollouts(drawn.groups), kl)
        coef = place.kl_coef
        if method.over_budget == "raise":
            more["kl/coef"] = coef
        held = method.model_copy(update={"kl_coef": coef})
        # Without a reward there is no advantage, and no place in the denominator either.
        answers = [a for a in with_advantages(answers, held) if a.reward is not None]
        empty = 0 if answers else empty + 1
        if not answers:
            samples.write(sampled_rows(drawn, method), place.rollouts)
            without_answers(session, place.rollouts, empty)
            refilled = place.refilled + drawn.num_refilled
            place = replace(place, rollouts=place.rollouts + 1, refilled=refilled)
            continue
        if method.updates_per_rollout * num_parts(answers, method) > 1:
            answers = scored(answers, OLD, engine, run, pad_id, mesh)
        lengths = [num_trained(answer, method) for answer in answers]
        divisors = denominators(method, lengths, num_parts(answers, method))
        seed, action = [run.train.seed, place.rollouts], ""
        size, step = run.data.seq_len, sharing_step(run)
        for batch in minibatches(answers, method, size, pad_id, mesh, seed, step):
            gauge = Seen(Gauge(), mesh, more)
            loss = policy_loss(held, gauge.gauge)
            info = session.step(batch, loss, method.temperature, gauge.numbers, divisors)
            action = info.verdict.action
            warned = gauge.warn(session, int(more["rollout/staleness"]), warned)
            if session.finished or action == "rewind":
                break
        if action == "rewind":
            steps = method.updates_per_rollout * method.minibatches
            place = place_of(session.rewind(steps), method)
            overopt.load(place.overopt)
            stream.rewind(place.rollouts)
            samples.go_to(place.rollouts)
            continue
        samples.write(sampled_rows(drawn, method), place.rollouts)
        if session.finished:
            samples.write(greedy().rows(), place.rollouts, greedy=True)
            session.pause()
        place = replace(
            place,
            kl_coef=overopt.next_coef(coef),
            rollouts=place.rollouts + 1,
            refilled=place.refilled + drawn.num_refilled,
            overopt=overopt.state(),
        )
        overopt.after_rollout(stream, asdict(place))
    samples.close()
    return engine.step - start


def draw(stream: RolloutStream, place: Place, prompts: Sequence[Prompt]) -> Drawn:
    """The groups of the next rollout; every rank has those of all."""
    session, mesh = stream.session, stream.session.engine.mesh
    method, extra, refilled = session.run.method, asdict(place), place.refilled
    assert isinstance(method, GRPO)
    seed = session.run.train.seed

    def take(count: int, refill: int) -> tuple[Group, ...]:
        nonlocal refilled
        if refill == 0:
            rollouts = stream.take(place.rollouts, extra)
        else:
            # An order of their own: what a rollout begins with is fixed by its number.
            numbers = prompt_numbers(len(prompts), seed + REFILL_SEED, refilled, count)
            refilled += count
            chosen = [prompts[i] for i in numbers[mesh.data_rank :: mesh.data_world]]
            rollouts = stream.take_more(place.rollouts, refill, chosen, extra)
        return dealt(all_shares(rollouts, mesh), count).groups

    if not method.dynamic_sampling:
        return Drawn(take(method.prompts_per_step, 0))
    return draw_alive(take, method.prompts_per_step, method.max_refills)


def drawn_numbers(drawn: Drawn, rewards: Rewards, method: GRPO) -> dict[str, float]:
    """What a rollout says of the policy, over all groups that were drawn."""
    found = headline(Rollouts(drawn.groups), rewards)
    if method.dynamic_sampling:
        found["rollout/refills"] = drawn.refills
        found["rollout/thrown_groups"] = len(drawn.thrown)
        found["rollout/missing_groups"] = method.prompts_per_step - len(drawn.kept)
    return found


class Seen:
    """What a step's line says besides the engine's numbers: of the rollout, and how far its sampler
    is from the trainer."""

    def __init__(self, gauge: Gauge, mesh: Mesh, rollout: Mapping[str, float]):
        self.gauge, self.mesh, self.rollout = gauge, mesh, rollout
        self.agreement: Agreement | None = None

    def numbers(self) -> dict[str, float]:
        self.agreement = self.gauge.read(self.mesh)
        return {**self.rollout, **self.agreement.metrics()}

    def warn(self, session: Session, staleness: int, warned: bool) -> bool:
        """Whether sampler and trainer disagree; an event when that begins (warned: it has)."""
        assert self.agreement is not None
        message = self.agreement.warning(staleness)
        if message is not None and not warned:
            session.log.event("sampler", session.engine.step, message=message)
        return message is not None


def place_of(extra: Mapping[str, Any] | None, method: GRPO) -> Place:
    """Where a checkpoint's loop was."""
    found = {k: v for k, v in (extra or {}).items() if k in Place.__dataclass_fields__}
    coefs = {"kl_coef": kept_coef(found, method), "method_kl_coef": method.kl_coef}
    return Place(**{**found, **coefs})


def sampled_rows(drawn: Drawn, method: GRPO) -> Iterator[dict[str, Any]]:
    """What was sampled to train on; trained: whether an answer carried a loss."""
    for groups, kept in ((drawn.kept, True), (drawn.thrown, False)):
        for row in Rollouts(groups).rows():
            masked = method.overlong == "mask" and row["finish_reason"] == "length"
            yield {"trained": kept and row["reward"] is not None and not masked, **row}
