"""Online DPO: preference losses on pairs of the policy's own samples (2402.04792), and iterative
DPO, in which the reference follows the policy from time to time (2404.19733).

A flat loop: sample a group of answers to each prompt, score them, pair the best with the worst, ask
the reference, and make steps on the pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from stepwell.config import Run
from stepwell.eval.grade import Prompt
from stepwell.posttrain.answers import Answer, answers_of
from stepwell.posttrain.first_model import check_first_model
from stepwell.posttrain.overoptimisation.watch import Overopt
from stepwell.posttrain.policy.batch import scored
from stepwell.posttrain.policy.pairs import (
    REFERENCE_TOKENS,
    Chosen,
    Paired,
    denominators,
    divergence,
    gauged,
    minibatches,
    paired,
)
from stepwell.posttrain.ppo.placement import check_reference
from stepwell.posttrain.preference.displacement import Monitor, open_monitor, watch
from stepwell.posttrain.preference.moving_reference import MovingReference
from stepwell.posttrain.rewards.composite import Rewards
from stepwell.posttrain.rollout import Rollouts
from stepwell.posttrain.sampled import (
    Loop,
    Samples,
    all_shares,
    check_enough,
    check_failures,
    check_sampled,
    dealt,
    headline,
    open_loop,
    step_prompts,
)
from stepwell.posttrain.sampling.gauge import Agreement, Gauge
from stepwell.sections.methods import OnlineDPO
from stepwell.tokenizer import Tokenizer
from stepwell.train.session import Session
from stepwell.types import TrainingError


def online_dpo(
    run: Run,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    dropped: Mapping[str, int] | None = None,
    rewards: Rewards | None = None,
) -> int:
    """Trains to `train.steps` optimiser steps; goes on where a stopped run was. Returns the number
    of steps done. Every completion with its reward and its role goes to `samples.jsonl`.

    dropped: prompts that the caller left out, by reason; noted in `events.jsonl`. rewards: instead
    of those that the method names.
    Raises ConfigError for a run that cannot be (`check_online_dpo`); DataError for prompts without
    a column that a reward requires; TrainingError when the graders fail on every answer of the
    first rollout, when method.max_empty rollouts in a row make no pair, and when
    method.displacement='stop' sees displacement.
    """
    method = run.method
    assert isinstance(method, OnlineDPO)
    check_online_dpo(run, prompts, tokenizer, weights)
    if weights is not None:
        weights = list(weights)  # the reference has them too
    with open_loop(run, prompts, tokenizer, weights, dropped, rewards) as loop:
        reference = None
        if method.loss.needs_reference:
            reference = MovingReference(loop.session, weights)
        return _train(loop, len(prompts), tokenizer.pad_id, reference)


def check_online_dpo(
    run: Run, prompts: Sequence[Prompt], tokenizer: Tokenizer, weights: object = None
) -> None:
    """Raises ConfigError without a model to start from, with another tokenizer than the model's,
    for a reference that cannot be had, for fewer prompts than a step takes, and what
    `check_sampled` does."""
    method = run.method
    assert isinstance(method, OnlineDPO)
    check_sampled(method, tokenizer)
    check_first_model(run, tokenizer, weights)
    check_reference(run)
    check_enough(method, prompts)


def _train(loop: Loop, num_prompts: int, pad_id: int, reference: MovingReference | None) -> int:
    session, rewards, stream, greedy = loop
    run, engine, mesh = session.run, session.engine, session.engine.mesh
    method, start, warned = run.method, engine.step, False
    assert isinstance(method, OnlineDPO)
    state = first_state(session.extra)
    samples = Samples(session, state["rollouts"])
    overopt = Overopt(session, rewards, state["overopt"])
    overopt.check_stopped()
    if session.extra is None:
        samples.write(sampled_rows(greedy()), greedy=True)
    session.pause()
    while not session.finished:
        number = state["rollouts"]
        if reference is not None:
            reference.go_to(state["refreshed"])
        numbers = step_prompts(num_prompts, number, session)
        if session.is_jumped("rollouts", number + 1, numbers):
            state = {**state, "rollouts": number + 1}
            continue
        mine = stream.take(number, state)
        rollouts = dealt(all_shares(mine, mesh), method.prompts_per_step)
        if engine.step == start:
            check_failures(rollouts.rows())
        answers = answers_of(rollouts)
        found = paired(answers, method.group_size, run.data.seq_len)
        if not found.pairs:
            state = {**state, "rollouts": number + 1, "empty": state["empty"] + 1}
            samples.write(sampled_rows(rollouts), number)
            without_pairs(session, number, state["empty"], found)
            continue
        line = headline(rollouts, rewards) | found.metrics(answers) | stream.metrics(mine)
        if reference is not None:
            answers = scored(answers, REFERENCE_TOKENS, reference, run, pad_id, mesh)
            line |= divergence([a for a in answers if a.num_trained])
        line |= overopt.see(rollouts, line.get("kl/reference"))
        before = engine.step
        taken = take_steps(session, answers, found, line, state, pad_id, warned)
        warned = taken.warned
        if taken.action == "rewind":
            steps = method.updates_per_rollout * method.minibatches
            state = first_state(session.rewind(steps))
            overopt.load(state["overopt"])
            stream.rewind(state["rollouts"])
            samples.go_to(state["rollouts"])
            continue
        state = {**state, "rollouts": number + 1, "empty": 0, "monitor": taken.monitor.state()}
        state["overopt"] = overopt.state()
        samples.write(sampled_rows(rollouts, found.pairs), number)
        if reference is not None and refresh_is_due(method, before, engine.step):
            reference.refresh()
            state |= {"refreshed": engine.step, "monitor": {}}
        if session.finished:
            samples.write(sampled_rows(greedy()), number, greedy=True)
            session.pause()
        overopt.after_rollout(stream, state)
    samples.close()
    return engine.step - start


def first_state(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of a checkpoint or at the start: rollouts done; those of them without a pair since the last
    step; the step whose policy is the reference (0: the first weights); the monitor's, and that of
    the watch over the reward."""
    start = {"rollouts": 0, "empty": 0, "refreshed": 0, "monitor": {}, "overopt": {}}
    return start | dict(extra or {})


class Taken(NamedTuple):
    """What the monitor knows after a rollout's steps, what the guard wants done, and whether the
    sampler disagreed with the trainer."""

    monitor: Monitor
    action: str
    warned: bool


def take_steps(
    session: Session,
    answers: Sequence[Answer],
    found: Paired,
    line: Mapping[str, float],
    state: Mapping[str, Any],
    pad_id: int,
    warned: bool,
) -> Taken:
    """The updates of one rollout. warned: whether an earlier rollout's sampler has been reported
    for a disagreement that goes on."""
    run, mesh = session.run, session.engine.mesh
    method = run.method
    assert isinstance(method, OnlineDPO)
    monitor = open_monitor(method, state["monitor"])
    gauge, seen = Gauge(), list[Agreement]()

    def more() -> dict[str, float]:
        seen.append(gauge.read(mesh))
        return {**line, **seen[0].metrics()}  # later steps are of other weights

    loss, action = gauged(method.loss, gauge, run.precision.compute), ""
    divisors = denominators(found.pairs, method)
    for batch in minibatches(answers, found.pairs, run, pad_id, mesh, state["rollouts"]):
        info = session.step(batch, loss, method.temperature, more, divisors)
        action = info.verdict.action
        if action != "rewind":
            watch(session, monitor)
        if session.finished or action == "rewind":
            break
    message = seen[0].warning(int(line["rollout/staleness"]))
    if message is not None and not warned:
        session.log.event("sampler", session.engine.step, message=message)
    return Taken(monitor, action, message is not None)


def refresh_is_due(method: OnlineDPO, before: int, step: int) -> bool:
    """Whether the steps after `before` up to `step` have come to a multiple of refresh_every."""
    every = method.refresh_every
    return every > 0 and step // every > before // every


# --- around it ---------------------------------------------------------------------------------


def without_pairs(session: Session, rollout: int, in_a_row: int, found: Paired) -> None:
    """Raises TrainingError once method.max_empty rollouts in a row have taught nothing."""
    method = session.run.method
    assert isinstance(method, OnlineDPO)
    reasons = dict(found.without)
    session.log.event("no_pairs", session.engine.step, rollout=rollout, **reasons)
    if in_a_row >= method.max_empty:
        shown = ", ".join(f"{number} {reason}" for reason, number in reasons.items())
        raise TrainingError(
            f"{in_a_row} rollouts in a row have no pair (the last: {shown}); where all answers "
            "score the same there is nothing to learn: take easier or harder prompts, a larger "
            "method.group_size, or a reward that tells answers apart. The same command goes on "
            "from the last checkpoint and would stop here again; method.max_empty is how many are "
            "borne"
        )


def sampled_rows(rollouts: Rollouts, pairs: Sequence[Chosen] = ()) -> Iterator[dict[str, Any]]:
    """Answers with their roles in the pairs."""
    roles = {}
    for pair in pairs:
        roles |= {pair.chosen: "chosen", pair.rejected: "rejected"}
    for i, row in enumerate(rollouts.rows()):
        yield {"role": roles.get(i, ""), **row}
