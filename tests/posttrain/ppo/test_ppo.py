"""PPO: gradients of policy and critic against plain autograd, whatever the split; rewards of tokens
by hand; the numbers shown; real processes that are killed."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepwell.cli import main
from stepwell.config import Run
from stepwell.metrics import read_events, read_lines
from stepwell.models.transformer import ForwardOptions, TokenOutputs
from stepwell.plan.memory.models import predict_models
from stepwell.posttrain.answers import Answer, packed
from stepwell.posttrain.policy.batch import scored
from stepwell.posttrain.policy.gae import gae
from stepwell.posttrain.policy.kl_control import adapted
from stepwell.posttrain.ppo.critic import critic_run, value_loss
from stepwell.posttrain.ppo.loss import policy_loss, shared
from stepwell.posttrain.ppo.placement import other_models
from stepwell.posttrain.ppo.targets import (
    ask,
    passes,
    rollout_numbers,
    token_rewards,
    with_targets,
)
from stepwell.sections.methods import PPO
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.train.shadow import DIFFERENCE
from stepwell.train.weights import TOKENIZER
from stepwell.types import ConfigError
from tests import oracle, runs
from tests.oracle import assert_same, base_run
from tests.parallel.ranks import run_jobs
from tests.runs import final_weights, finish, killed, measured, words


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def ppo_run(**overrides: Any) -> Run:
    values = {"method.kind": "ppo", "method.max_new_tokens": 8, "optim.clip_norm": 0.0}
    values |= {"train.micro_batch_rows": 2, "method.importance_cap": 0.0}
    return base_run(**{**values, **overrides})


def method_of(run: Run) -> PPO:
    assert isinstance(run.method, PPO)
    return run.method


def some_answers(count: int = 7) -> list[Answer]:
    """Of very different lengths; the second has tokens of an environment in it, the third was cut
    off. Streams are drawn, as if another policy had sampled."""
    rng = np.random.default_rng(5)
    answers = []
    for number in range(count):
        length = 1 + (3 * number) % 8
        ids = rng.integers(0, oracle.VOCAB, 3 + number % 2 + length)
        trained_L = np.zeros(len(ids))
        trained_L[-length:] = 1
        if number == 1:
            trained_L[-3:-1] = 0
        names = ("sampler_logprobs", "old_logprobs", "reference_logprobs")
        streams = {name: trained_L * rng.normal(-4, 0.5, len(ids)) for name in names}
        streams["old_values"] = trained_L * rng.normal(0, 0.5, len(ids))
        reward = float(rng.normal())
        after = 0.3 if number == 2 else 0.0
        answers.append(Answer(tuple(ids.tolist()), trained_L, reward, number == 2, streams, after))
    return answers


# --- gradients -----------------------------------------------------------------------------------


def gradients(run: Run) -> dict[str, torch.Tensor]:
    """Runs in each rank: of all passes over the answers, by their mean."""
    method, alone = method_of(run), critic_run(run)
    engine = Engine(run)
    mesh = engine.mesh
    critic = None if alone is None else Engine(alone, mesh=mesh)
    answers = scored(some_answers(), "old_logprobs", engine, run, 0, mesh)
    answers, _ = with_targets(answers, method, method.kl_coef)
    loss, values = policy_loss(method, method.kl_coef), value_loss(method)
    parts = list(passes(answers, run, 1, mesh, 0))
    for batch, divisors in parts:
        engine.forward_backward(batch, loss, method.temperature, shared(divisors, loss, batch))
        if critic is not None:
            critic.forward_backward(batch, values, 1.0, shared(divisors, values, batch))
    found = {}
    for name, model in {"policy": engine, "critic": critic}.items():
        for key, parameter in model.named_parameters() if model is not None else ():
            assert parameter.grad is not None
            found[f"{name}/{key}"] = oracle.full(parameter.grad) / len(parts)
    return found


def naive_gradients(run: Run) -> dict[str, torch.Tensor]:
    """Plain autograd, each answer alone: -A log p and (V - R)^2 / 2, as at the first update."""
    method, alone = method_of(run), critic_run(run)
    policy: Any = Engine(run).decoder
    critic: Any = policy if alone is None else Engine(alone).decoder
    engine = Engine(run)
    answers = scored(some_answers(), "old_logprobs", engine, run, 0, engine.mesh)
    answers, _ = with_targets(answers, method, method.kl_coef)
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    errors, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for answer in answers:
        at = np.flatnonzero(answer.trained_L)
        streams = {k: torch.tensor(v[at]) for k, v in answer.streams.items()}
        logits = outputs_of(policy, answer, "logits").logits_BTV[0] / method.temperature
        ids = torch.tensor(answer.ids)
        all_logprobs = logits.log_softmax(-1)
        logprobs = all_logprobs[at - 1, ids[at]]
        objective = -streams["advantages"] * logprobs
        if method.kl_in == "loss":
            ratio = logprobs - streams["reference_logprobs"]
            k3 = (-ratio).exp() - 1 + ratio
            k = {
                "k1": ratio,
                "k2": ratio**2 / 2,
                "k3": k3,
                # On the policy's own samples: k3 times the score, besides k3's own gradient.
                "unbiased": k3.detach() * logprobs + k3,
            }[method.kl_estimator]
            objective = objective + method.kl_coef * k
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)[at - 1]
        objective = objective - method.entropy_coef * entropy
        weight = {
            "token": 1.0,
            "sequence": 1 / len(at),
            "constant": 1 / method.max_new_tokens,
        }[method.aggregate]
        total = total + weight * objective.sum()
        count += len(at) if method.aggregate == "token" else 1
        values = outputs_of(critic, answer, "scores").scores_BTC[0, at - 1, 0]
        old, returns = streams["old_values"], streams["returns"]
        held = old + (values - old).clamp(-method.value_clip, method.value_clip)
        errors = errors + torch.maximum((values - returns) ** 2, (held - returns) ** 2).sum() / 2
        num_tokens += len(at)
    (total / count + method.value_coef * errors / num_tokens).backward()
    found = {f"policy/{name}": p.grad for name, p in policy.named_parameters()}
    if alone is not None:
        found |= {f"critic/{name}": p.grad for name, p in critic.named_parameters()}
    return found


def outputs_of(decoder: Any, answer: Answer, need: str) -> Any:
    ids = torch.tensor(answer.ids)[None]
    length = ids.shape[1] - 1
    borders = torch.tensor([0, length], dtype=torch.int32)
    options = ForwardOptions(needs=frozenset({need}), dtype=torch.float64)
    return decoder(ids[:, :-1], torch.arange(length)[None], borders, ids[:, 1:], options=options)


CASES: dict[str, dict[str, Any]] = {
    "separate": {},
    "shared": {"method.critic": "shared", "method.value_coef": 0.5},
    "warm": {"method.temperature": 0.7, "method.critic": "shared"},
    "sequence": {"method.aggregate": "sequence", "method.entropy_coef": 0.1},
    "constant": {"method.aggregate": "constant", "method.whiten": False},
    "k1": {"method.kl_in": "loss", "method.kl_estimator": "k1", "method.kl_coef": 0.3},
    "k2": {"method.kl_in": "loss", "method.kl_estimator": "k2", "method.kl_coef": 0.3},
    "k3": {"method.kl_in": "loss", "method.kl_estimator": "k3", "method.kl_coef": 0.3},
    "unbiased": {"method.kl_in": "loss", "method.kl_estimator": "unbiased", "method.kl_coef": 0.3},
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_update_is_the_plain_gradient(case):
    run = ppo_run(**CASES[case])
    # Advantages, returns and values travel in float32.
    assert_same(gradients(run), naive_gradients(run), 2e-6, case)


def test_no_split_changes_a_gradient():
    """Micro-batches, ranks, and optimiser steps a rollout; of policy and critic, apart or not."""
    jobs = {}
    wanted = {}
    for critic in ("separate", "shared"):
        whole = ppo_run(**{"method.critic": critic, "train.micro_batch_rows": 100})
        wanted[critic] = gradients(whole)
        one = ppo_run(**{"method.critic": critic, "train.micro_batch_rows": 1})
        assert_same(gradients(one), wanted[critic], 1e-12, critic)
        three = ppo_run(**{"method.critic": critic, "method.minibatches": 3})
        # Later minibatches read their old log-probabilities, in float32, from the stream.
        assert_same(gradients(three), wanted[critic], 1e-6, critic)
        jobs[critic] = (gradients, ppo_run(**{"method.critic": critic}))
        jobs[f"{critic}, minibatches"] = (gradients, three)
    for name, found in run_jobs(2, **jobs).items():
        tolerance = 1e-6 if "minibatches" in name else 1e-12
        for rank in found:
            assert_same(rank, wanted[name.partition(",")[0]], tolerance, name)


def test_several_passes_see_every_answer_each_time():
    run = ppo_run(**{"method.minibatches": 3, "method.updates_per_rollout": 2})
    answers, _ = with_targets(some_answers(), method_of(run), 0.05)
    mesh = Engine(run).mesh
    seen = [
        sorted(
            tuple(row[(batch.docs_BT[i] == doc) & (batch.weights_BT[i] != 0)].tolist())
            for i, row in enumerate(batch.targets_BT)
            for doc in batch.docs_BT[i].unique()
            if doc >= 0
        )
        for batch, _ in passes(answers, run, 4, mesh, 0)
    ]
    every = sorted(tuple(np.array(a.ids)[a.trained_L != 0].tolist()) for a in answers)
    assert len(seen) == 6
    for half in (seen[:3], seen[3:]):
        assert sorted(answer for part in half for answer in part) == every
    assert seen[:3] != seen[3:]
    first, *later = (batch.extra["old_logprobs"] for batch, _ in passes(answers, run, 4, mesh, 0))
    assert first.isnan().any()
    assert not any(old.isnan().any() for old in later)


def test_temperature_is_of_log_probabilities_never_of_values():
    found = {}
    for temperature in (1.0, 0.5):
        keys = {"method.critic": "shared", "method.updates_per_rollout": 2}
        run = ppo_run(**keys, **{"method.temperature": temperature})
        engine = Engine(run)
        found[temperature] = ask(some_answers(), engine, None, None, 0)
    for one, other in zip(found[1.0], found[0.5], strict=True):
        assert np.array_equal(one.streams["old_values"], other.streams["old_values"])
        assert one.after == other.after
        at = one.trained_L != 0
        assert abs(one.streams["old_logprobs"] - other.streams["old_logprobs"])[at].max() > 0.1
        assert np.array_equal(one.streams["old_logprobs"], one.streams["reference_logprobs"])
    assert found[1.0][2].after != 0
    assert found[1.0][1].after == 0


@pytest.mark.parametrize("cap", [0.0, 1.2])
def test_bounds_and_importance_weights_of_the_loss(cap):
    """Old and sampler's policies other than the current one, by hand."""
    bounds = {"clip_low": 0.1, "clip_high": 0.3, "updates_per_rollout": 2}
    method = PPO(**bounds, importance_cap=cap, entropy_coef=0.2)
    answers, _ = with_targets(some_answers(), method, 0.0)
    names = ("advantages", "old_logprobs", "sampler_logprobs")
    batch = packed(answers, oracle.LENGTH, 0, None, names)
    generator = torch.Generator().manual_seed(2)
    noise = 0.3 * torch.randn(batch.weights_BT.shape, generator=generator)
    now = (batch.extra["old_logprobs"] + noise).requires_grad_()
    outputs = TokenOutputs(logprobs_BT=now, entropy_BT=torch.full_like(noise, 2.0))
    found = policy_loss(method, 0.0).fn(outputs, batch)
    total, binds = torch.zeros(()), 0
    for where in batch.weights_BT.nonzero():
        at = tuple(where.tolist())
        old, sampler, advantage = (
            batch.extra[name][at] for name in ("old_logprobs", "sampler_logprobs", "advantages")
        )
        ratio = (now[at] - old).exp()
        plain, held = ratio * advantage, ratio.clamp(0.9, 1.3) * advantage
        weight = (old - sampler).exp().clamp(max=cap) if cap else 1.0
        total = total - weight * torch.minimum(plain, held) - 0.2 * 2.0
        binds += bool(held < plain)
    assert found.sums["tokens"].item() == pytest.approx(total.item(), rel=1e-5)
    got, wanted = (torch.autograd.grad(x, now)[0] for x in (found.sums["tokens"], total))
    assert (got - wanted).abs().max() < 1e-5
    assert found.metrics["clipped_share"][0].item() == binds > 0


def test_a_single_step_on_fresh_samples_takes_the_samplers_word():
    for keys, is_asked in (
        ({}, False),
        ({"method.minibatches": 2}, True),
        ({"method.updates_per_rollout": 2}, True),
        ({"method.max_staleness": 1}, True),
    ):
        run = ppo_run(**{"method.critic": "shared", **keys})
        found = ask(some_answers(), Engine(run), None, None, 0)
        differs = [
            not np.array_equal(a.streams["old_logprobs"], a.streams["sampler_logprobs"])
            for a in found
        ]
        assert all(differs) if is_asked else not any(differs), keys


# --- a rollout's arithmetic ----------------------------------------------------------------------


def one_answer(**changes: Any) -> Answer:
    streams = {
        "old_logprobs": np.array([0, 0, -1.0, 0, -2.0]),
        "reference_logprobs": np.array([0, 0, -1.5, 0, -1.0]),
        "sampler_logprobs": np.array([0, 0, -1.0, 0, -2.0]),
        "old_values": np.array([0, 0, 0.5, 0, 0.25]),
    }
    answer = Answer((1, 2, 3, 4, 5), np.array([0, 0, 1.0, 0, 1.0]), 2.0, False, streams, 0.75)
    return replace(answer, **changes)


def test_rewards_of_tokens_by_hand():
    """The answer's own at its last token; k1 times the coefficient off at the policy's."""
    rewards_L, after = token_rewards(one_answer(), PPO(), 0.1)
    assert rewards_L == pytest.approx([0, 0, -0.05, 0, 2.1])
    assert after == 0
    k2 = token_rewards(one_answer(), PPO(kl_estimator="k2"), 0.1)[0]
    assert k2 == pytest.approx([0, 0, -0.0125, 0, 1.95])
    in_loss = token_rewards(one_answer(), PPO(kl_in="loss", kl_estimator="k3"), 0.1)[0]
    assert in_loss == pytest.approx([0, 0, 0, 0, 2.0])


def test_an_answer_that_was_cut_off():
    cut = one_answer(truncated=True)
    rewards_L, after = token_rewards(cut, PPO(), 0.0)
    assert (rewards_L[-1], after) == (1.0, 0)
    rewards_L, after = token_rewards(cut, PPO(truncation_penalty=0.0), 0.0)
    assert (rewards_L[-1], after) == (2.0, 0)
    bootstrap = PPO(truncated="bootstrap", gamma=0.9, lam=1.0, whiten=False)
    rewards_L, after = token_rewards(cut, bootstrap, 0.0)
    assert (rewards_L[-1], after) == (0.0, 0.75)
    (found,), _ = with_targets([cut], bootstrap, 0.0)
    assert found.streams["returns"] == pytest.approx([0, 0, 0.9 * 0.9 * 0.75, 0, 0.9 * 0.75])
    whole = one_answer()
    assert token_rewards(whole, bootstrap, 0.0)[0][-1] == 2.0


def test_targets_skip_the_environment_and_are_whitened_over_everything():
    answers = some_answers()
    plain, shown = with_targets(answers, PPO(whiten=False), 0.0)
    for answer, found in zip(answers, plain, strict=True):
        at = answer.trained_L != 0
        rewards_L, after = token_rewards(answer, PPO(), 0.0)
        values = answer.streams["old_values"][at]
        advantages, returns = gae(rewards_L[at], values, 1.0, 0.95, bootstrap=after)
        assert found.streams["advantages"][at] == pytest.approx(advantages)
        assert found.streams["returns"][at] == pytest.approx(returns)
        assert not found.streams["advantages"][~at].any()
    white, _ = with_targets(answers, PPO(), 0.0)
    flat = np.concatenate([a.streams["advantages"][a.trained_L != 0] for a in white])
    assert flat.mean() == pytest.approx(0, abs=1e-12)
    assert flat.std(ddof=1) == pytest.approx(1)
    returns = [a.streams["returns"] for a in plain]
    assert shown == rollout_numbers(answers, returns, 0.0)


def test_numbers_of_a_rollout_by_hand():
    shown = rollout_numbers([one_answer()], [np.array([0, 0, 1.0, 0, 2.0])], 0.07)
    assert shown == {
        "kl/reference": pytest.approx(-0.5),
        "kl/token": pytest.approx(-0.25),
        "kl/coef": 0.07,
        # Errors 0.5 and 1.75: their variance is 0.390625, the returns' 0.25.
        "critic/explained_variance": pytest.approx(1 - 0.390625 / 0.25),
        "critic/return": pytest.approx(1.5),
    }


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"critic": "shared", "critic_lr": 1e-3}, "critic_lr=0.001 is a separate critic's"),
        ({"critic": "shared", "critic_init": "rm"}, "critic_init='rm' is a separate critic's"),
        ({"kl_estimator": "unbiased"}, "the nearest legal value is 'k1'"),
        ({"kl_controller": "adaptive", "kl_coef": 0.0}, "which is 0; set it to 0.05"),
        ({"truncated": "bootstrap", "truncation_penalty": 2.0}, "leave it out"),
    ],
)
def test_keys_that_exclude_each_other(values, message):
    with pytest.raises(ConfigError, match=message):
        Run.parse({"method": {"kind": "ppo", **values}})


def test_keys_that_go_together():
    for values in (
        {"critic": "separate", "critic_lr": 1e-3, "critic_init": "rm"},
        {"kl_estimator": "unbiased", "kl_in": "loss"},
        {"kl_controller": "adaptive", "kl_coef": 0.01},
        {"truncated": "penalty", "truncation_penalty": 2.0},
        {"truncated": "bootstrap"},
    ):
        run = Run.parse({"method": {"kind": "ppo", **values}})
        assert Run.model_validate(run.model_dump()) == run


# --- runs ----------------------------------------------------------------------------------------


def settings(folder: str, **more: Any) -> dict[str, Any]:
    """Of a tiny run; about half of what an untrained model says is rewarded."""
    return {
        **runs.MODEL,
        "model.init": "base",
        "data.path": "problems.jsonl",
        "data.tokenizer": "tokenizer",
        "data.seq_len": 32,
        "method.prompts_per_step": 4,
        "method.group_size": 2,
        "method.max_new_tokens": 6,
        "method.verifier": "regex:[a-m]",
        "method.self_test": "false",  # anything meets the pattern
        "train.micro_batch_rows": 2,
        "train.steps": 4,
        "optim.lr": 0.01,
        "precision.compute": "fp32",
        "dir": folder,
        **more,
    }


def test_shown_numbers(world):
    """At the first rollout policy and reference are one; at the second pass the ratio has moved."""
    values = settings("shown", **{"method.updates_per_rollout": 2, "method.temperature": 0.7})
    values |= {"method.kl_controller": "adaptive", "method.kl_target": 0.05}
    values |= {"method.kl_horizon": 100.0, "method.gamma": 0.9, "train.steps": 6}
    assert main(words("ppo", values)) == 0
    lines, samples = measured(world / "shown"), read_lines(world / "shown" / "samples.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 7))
    drawn = [row for row in samples if not row["greedy"]]
    assert [row["step"] for row in drawn] == [step for step in (2, 4, 6) for _ in range(8)]
    assert {row["step"] for row in samples if row["greedy"]} == {0, 6}
    first, second = lines[:2]
    assert first["kl/reference"] == pytest.approx(0, abs=1e-5)
    assert first["train/clipped_share"] == first["train/kl_old"] == 0
    assert first["train/objective"] == pytest.approx(0, abs=1e-5)  # of whitened advantages
    assert second["train/kl_old"] > 1e-6
    assert lines[2]["kl/reference"] != pytest.approx(0, abs=1e-3)
    coef = PPO().kl_coef
    for rollout, (one, two) in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        rows = drawn[8 * rollout : 8 * rollout + 8]
        assert one["kl/coef"] == two["kl/coef"] == pytest.approx(coef)
        coef = adapted(coef, one["kl/reference"], 0.05, 100.0, 8)
        assert one["reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / 8)
        assert one["rollout/length"] == pytest.approx(sum(row["num_tokens"] for row in rows) / 8)
        assert one["train/loss_tokens"] == sum(row["num_tokens"] for row in rows)
        assert two["train/value_loss"] != one["train/value_loss"]
        assert one["critic/skipped"] == 0
    assert lines[0]["kl/coef"] != lines[2]["kl/coef"]


def test_a_check_of_the_precision_is_of_the_step_and_leaves_its_numbers_alone(world):
    """Minibatches of unequal lengths are divided by one denominator, in the check as in the step;
    and its pass is not among the tokens that sampler and trainer are compared on."""
    values = {"precision.fp8.recipe": "rowwise", "method.minibatches": 3, "train.steps": 2}
    values |= {"method.group_size": 1, "method.critic": "shared", "method.kl_coef": 0.0}
    assert main(words("ppo", settings("unchecked", **values))) == 0
    values["precision.fp8.shadow_every"] = 1
    assert main(words("ppo", settings("checked", **values))) == 0
    plain, checked = measured(world / "unchecked"), measured(world / "checked")
    for one, other in zip(plain, checked, strict=True):
        assert 0 < other[DIFFERENCE] < 0.2
        assert {key: value for key, value in other.items() if key in one} == one


def test_a_branch_has_its_own_leash(world):
    """The trunk's coefficient is what its controller made of another one."""
    values = {"method.kl_coef": 0.05, "train.steps": 1, "method.prompts_per_step": 2}
    assert main(words("ppo", settings("trunk", **values))) == 0
    values |= {"method.kl_coef": 0.2, "train.steps": 2, "checkpoint.branch_from": "trunk"}
    assert main(words("ppo", settings("held", **values))) == 0
    assert [line["kl/coef"] for line in measured(world / "held")] == [0.2]


def test_killed_twice_it_ends_as_if_undisturbed(world):
    """Rollouts, weights and numbers; the critic and the controller go on where they were."""
    values = {"train.steps": 16, "checkpoint.every_steps": 4, "method.minibatches": 2}
    values |= {"method.kl_controller": "adaptive", "method.kl_horizon": 1000.0}
    straight = words("ppo", settings("straight", **values))
    assert finish(straight, world, world / "log")[0] == 0
    broken = words("ppo", settings("broken", **values))
    for num_lines in (5, 10):
        killed(broken, world, world / "log", world / "broken", num_lines)
    assert finish(broken, world, world / "log")[0] == 0
    got, wanted = (measured(world / name) for name in ("broken", "straight"))
    assert got == wanted
    assert [line["step"] for line in got] == list(range(1, 17))
    samples = [read_lines(world / name / "samples.jsonl") for name in ("broken", "straight")]
    assert samples[0] == samples[1]
    runs.assert_equal(final_weights(world / "broken"), final_weights(world / "straight"))
    end = critic_weights(world / "broken")
    runs.assert_equal(end, critic_weights(world / "straight"))
    before = critic_weights(world / "broken", 12)
    assert not torch.equal(end["score.weight"], before["score.weight"])


def critic_weights(folder: Path, step: int = 16) -> dict[str, torch.Tensor]:
    from stepwell.models.flops import parameter_shapes
    from stepwell.train.checkpoint import load_weights

    alone = critic_run(Run.load(folder / "run.toml"))
    assert alone is not None
    path = folder / "critic" / "checkpoints" / f"step-{step:08}"
    return dict(load_weights(path, parameter_shapes(alone.model)))


def two_ranks(folder: Path, name: str, values: dict[str, Any]) -> int:
    os.chdir(folder)
    return main(words("ppo", settings(name, **values)))


def test_ranks_share_the_prompts_and_change_nothing(world):
    """Also where the sampler lags behind: it has the weights of the same step on all ranks."""
    values: dict[str, dict[str, Any]] = {
        critic: {"method.critic": critic, "method.minibatches": 2, "train.steps": 2}
        for critic in ("separate", "shared")
    }
    values["stale"] = {"method.minibatches": 2, "train.steps": 6, "method.max_staleness": 1}
    jobs = {c: (two_ranks, world, f"ranks-{c}", keys) for c, keys in values.items()}
    assert set(map(tuple, run_jobs(2, **jobs).values())) == {(0, 0)}
    for critic, keys in values.items():
        names = f"ranks-{critic}", f"alone-{critic}"
        assert main(words("ppo", settings(names[1], **keys))) == 0
        got, wanted = (read_lines(world / name / "samples.jsonl") for name in names)
        steps = keys["train.steps"]
        before = [
            [r for r in rows if r["step"] < steps or not r["greedy"]] for rows in (got, wanted)
        ]
        assert before[0] == before[1]
        for one, other in zip(*(measured(world / name) for name in names), strict=True):
            for key in SHOWN:
                assert one[key] == pytest.approx(other[key], abs=1e-4), key
            assert one["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-3)


SHOWN = ("reward/mean", "kl/reference", "critic/explained_variance", "train/loss_tokens")


def test_the_ledger_is_what_the_tensors_take(world):
    """All four models, predicted before the run, measured after its first step: within 5 %."""
    judge = Run.parse({"method": {"kind": "reward"}}, runs.MODEL)
    tokenizer = Tokenizer.load(world / "tokenizer")
    Engine(judge).save(world / "judge", {TOKENIZER: tokenizer.fingerprint}).wait()
    values = {"train.steps": 1, "precision.compute": "bf16"}
    judged = '[{name = "judge", source = "model:judge"}]'
    values |= {"method.rewards": judged, "method.verifier": "exact"}
    assert main(words("ppo", settings("ledger", **values))) == 0
    run = Run.load(world / "ledger" / "run.toml")
    (found,) = (e for e in read_events(world / "ledger") if e["event"] == "memory")
    predicted = predict_models(run, 1, *other_models(run))
    assert predicted.keys() == {"policy", "critic", "reference", "reward judge"}
    for name, wanted in predicted.items():
        for part, num_bytes in wanted.named().items():
            assert found[name][part] == pytest.approx(num_bytes, rel=0.05), (name, part)
    assert predicted["critic"].total > 16 * 25_000
    drawn = [r for r in read_lines(world / "ledger" / "samples.jsonl") if not r["greedy"]]
    assert len({row["scores"]["judge"] for row in drawn}) > 1


def test_a_reference_is_only_held_where_there_is_a_leash(world):
    assert main(words("ppo", settings("free", **{"train.steps": 1, "method.kl_coef": 0.0}))) == 0
    (found,) = (e for e in read_events(world / "free") if e["event"] == "memory")
    assert "reference" not in found
    assert measured(world / "free")[0]["kl/reference"] == 0


def test_a_critic_of_its_own_learns_at_its_own_rate_from_its_own_weights(world):
    """critic_init and critic_lr; and the score of a shared trunk starts the same everywhere."""
    values = {"train.steps": 2, "checkpoint.every_steps": 1, "checkpoint.keep_last": 9}
    assert main(words("ppo", settings("first", **values))) == 0
    values |= {"method.critic_init": "first/critic", "method.critic_lr": 1e-30}
    assert main(words("ppo", settings("second", **values))) == 0
    runs.assert_equal(critic_weights(world / "second", 2), critic_weights(world / "first", 2))
    assert [line["critic/lr"] for line in measured(world / "second")] == [
        pytest.approx(1e-30 * line["train/lr"] / 0.01) for line in measured(world / "second")
    ]


def test_graders_that_never_answer_end_the_run(world):
    (world / "none.py").write_text("def f(prompts, completions, **_):\n    return [None]\n")
    values = {"method.verifier": "python:none.py:f", "method.self_test": "false"}
    assert main(words("ppo", settings("none", **values))) == 5
    events = [e for e in read_events(world / "none") if e["event"] == "empty_rollout"]
    assert [e["rollout"] for e in events] == [0, 1, 2]
    samples = [row for row in read_lines(world / "none" / "samples.jsonl") if not row["greedy"]]
    assert [row["rollout"] for row in samples] == [0] * 8 + [1] * 8 + [2] * 8
