"""Proximal policy optimisation (1707.06347) with a critic and a leash to a reference (1909.08593,
2203.02155).

A flat loop: sample answers on the training weights, score them, ask policy, critic and reference
about every token, estimate advantages, and make clipped steps. B rows, T tokens a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.eval.grade import Prompt
from stepwell.posttrain.answers import answers_of
from stepwell.posttrain.first_model import require_model
from stepwell.posttrain.overoptimisation.watch import Overopt
from stepwell.posttrain.policy.kl_control import kept_coef, next_coef
from stepwell.posttrain.ppo.critic import NAME as CRITIC
from stepwell.posttrain.ppo.critic import critic_run, value_loss
from stepwell.posttrain.ppo.loss import policy_loss, shared
from stepwell.posttrain.ppo.placement import (
    Reference,
    Weights,
    check_reference,
    gradient_bytes,
    measured,
    measured_reference,
    measured_rewards,
    open_reference,
)
from stepwell.posttrain.ppo.targets import ask, passes, with_targets
from stepwell.posttrain.rewards.composite import Rewards
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
    without_answers,
)
from stepwell.posttrain.sampling.gauge import Gauge
from stepwell.sections.methods import PPO
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.train.session import Session
from stepwell.train.weights import check_tokenizer, with_head


def ppo(
    run: Run,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    weights: Weights | None = None,
    dropped: Mapping[str, int] | None = None,
) -> int:
    """Trains to `train.steps` optimiser steps of the policy; goes on where a stopped run was.
    Returns the number of steps done. Every completion with its reward goes to `samples.jsonl`.

    weights: of the policy (and so of its reference and, without critic_init, its critic), by
    default those of model.init. dropped: prompts that the caller left out, by reason.
    Raises ConfigError for a run that cannot be (`check_ppo`); DataError for prompts without a
    column that a reward requires; TrainingError when scoring fails on every answer of the first
    rollout, or of three in a row.
    """
    method = run.method
    assert isinstance(method, PPO)
    check_ppo(run, prompts, tokenizer, weights)
    given = None if weights is None else list(weights)
    alone = critic_run(run)
    others = {} if alone is None else {CRITIC: (alone, _first(given, alone))}
    first = _first(given, run)
    with open_loop(run, prompts, tokenizer, first, dropped, others=others) as loop:
        reference = None
        if method.kl_coef:
            engine = loop.session.engine
            reference = open_reference(run, engine, engine.mesh, given)
        return _train(loop, len(prompts), tokenizer.pad_id, reference)


def check_ppo(
    run: Run, prompts: Sequence[Prompt], tokenizer: Tokenizer, weights: object = None
) -> None:
    """Raises ConfigError without a model to start from, with another tokenizer than a model's, for
    a reference that cannot be had, and for fewer prompts than a step takes."""
    method = run.method
    assert isinstance(method, PPO)
    check_sampled(method, tokenizer)
    require_model(run, weights)
    for init in (run.model.init, method.critic_init):
        if init is not None:
            check_tokenizer(init, tokenizer, run.data.tokenizer)
    if method.kl_coef:
        check_reference(run)
    check_enough(method, prompts)


def _train(loop: Loop, num_prompts: int, pad_id: int, reference: Reference | None) -> int:
    session, rewards, stream, greedy = loop
    run, engine, mesh = session.run, session.engine, session.engine.mesh
    method, critic, start = run.method, session.others.get(CRITIC), session.engine.step
    assert isinstance(method, PPO)
    state = _state(session.extra, method)
    samples = Samples(session, state["rollouts"])
    if session.extra is None:
        samples.write(greedy().rows(), greedy=True)
    empty, told, held = 0, False, dict[str, int]()
    overopt = Overopt(session, rewards, state["overopt"])
    overopt.check_stopped()
    session.pause()
    while not session.finished:
        number, coef = state["rollouts"], state["kl_coef"]
        if session.is_jumped("rollouts", number + 1, step_prompts(num_prompts, number, session)):
            state["rollouts"] += 1
            continue
        mine = stream.take(number, state)
        state["rollouts"] += 1
        rollouts = dealt(all_shares(mine, mesh), method.prompts_per_step)
        if engine.step == start:
            check_failures(rollouts.rows())
        answers = [a for a in answers_of(rollouts) if a.reward is not None and a.num_trained]
        empty = 0 if answers else empty + 1
        if not answers:
            samples.write(rollouts.rows(), number)
            without_answers(session, number, empty)
            continue
        more = headline(rollouts, rewards) | stream.metrics(mine)
        answers = ask(answers, engine, critic, reference, pad_id)
        answers, shown = with_targets(answers, method, coef)
        more |= overopt.see(rollouts, shown["kl/reference"] if reference is not None else None)
        action = ""
        for batch, denominators in passes(answers, run, number, mesh, pad_id):
            line = more | shown | critic_step(critic, method, batch, denominators, held)
            gauge = Gauge()  # of this step alone: checks of it ask the loss again
            loss = policy_loss(method, coef, gauge)

            def seen(line: dict[str, float] = line, gauge: Gauge = gauge) -> dict[str, float]:
                held.setdefault("policy", gradient_bytes(engine))
                return line | gauge.read(mesh).metrics()

            part = shared(denominators, loss, batch)
            info = session.step(batch, loss, method.temperature, seen, part)
            if not told:
                _tell_memory(session, critic, reference, rewards, held)
                told = True
            action = info.verdict.action
            if session.finished or action == "rewind":
                break
        if action == "rewind":
            found = session.rewind(method.updates_per_rollout * method.minibatches)
            state = _state(found, method)
            overopt.load(state["overopt"])
            stream.rewind(state["rollouts"])
            samples.go_to(state["rollouts"])
            continue
        coef = next_coef(method, coef, shown["kl/reference"], len(answers))
        state |= {"kl_coef": overopt.next_coef(coef), "overopt": overopt.state()}
        samples.write(rollouts.rows(), number)
        if session.finished:
            samples.write(greedy().rows(), number, greedy=True)
            session.pause()
        overopt.after_rollout(stream, state)
    samples.close()
    return engine.step - start


# --- around it ---------------------------------------------------------------------------------


def critic_step(
    critic: Engine | None,
    method: PPO,
    batch: Batch,
    denominators: Mapping[str, float],
    held: dict[str, int],
) -> dict[str, float]:
    """One step of a critic that is a model of its own, and what it says for the policy's line.
    held: gets the bytes of its gradients."""
    if critic is None:
        return {}
    loss = value_loss(method)
    stats = critic.forward_backward(batch, loss, denominators=shared(denominators, loss, batch))
    held.setdefault(CRITIC, gradient_bytes(critic))
    info = critic.optim_step()
    return {
        **{f"train/{name}": value for name, value in stats.metrics.items()},
        "critic/grad_norm": info.grad_norm,
        "critic/lr": info.lr,
        "critic/skipped": int(info.skipped),
    }


def _first(given: list[tuple[str, Tensor]] | None, run: Run) -> Iterable[tuple[str, Tensor]] | None:
    """The policy's first weights for a run that starts from them."""
    method = run.method
    assert isinstance(method, PPO)
    elsewhere = run.model.head == "score" and method.critic_init is not None
    return None if given is None or elsewhere else with_head(given, run.model, run.train.seed)


def _state(extra: Mapping[str, Any] | None, method: PPO) -> dict[str, Any]:
    """Rollouts done, the KL coefficient and what the watch over the reward knows, of a checkpoint
    or at the start."""
    found = {"rollouts": 0, "overopt": {}} | dict(extra or {})
    return found | {"kl_coef": kept_coef(found, method), "method_kl_coef": method.kl_coef}


def _tell_memory(
    session: Session,
    critic: Engine | None,
    reference: Reference | None,
    rewards: Rewards,
    gradients: Mapping[str, int],
) -> None:
    """What each model's tensors take, beside what the header said."""
    found = {"policy": measured(session.engine, gradients["policy"])}
    if critic is not None:
        found[CRITIC] = measured(critic, gradients[CRITIC])
    if reference is not None:
        found["reference"] = measured_reference(reference)
    found |= measured_rewards(rewards)
    step = session.engine.step
    session.log.event("memory", step, **{name: held.named() for name, held in found.items()})
