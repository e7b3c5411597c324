from contextlib import nullcontext

import pytest

from stepwell.posttrain.grpo import check_signs
from stepwell.posttrain.rollout import Rollouts
from stepwell.posttrain.sampled import (
    accuracy,
    check_failures,
    check_sampled,
    dealt,
    fixed_prompts,
    prompt_numbers,
    rollout_metrics,
)
from stepwell.sections.methods import GRPO, PPO
from stepwell.sections.rewards import RewardTerm
from stepwell.types import ConfigError, TrainingError
from tests.posttrain.policy_cases import some_rollouts

TERMS = [
    RewardTerm(name="right", source="exact"),
    RewardTerm(name="form", source="regex:x"),
    RewardTerm(name="style", source="model:folder"),
]


def test_prompts_come_in_permutations():
    """Whatever the rollout's size: 7 prompts, each once an epoch, in another order each."""
    numbers = prompt_numbers(7, seed=3, first=0, count=21)
    epochs = [numbers[:7], numbers[7:14], numbers[14:]]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    parts = [n for first in (0, 5, 10, 15, 20) for n in prompt_numbers(7, 3, first, 5)]
    assert parts[:21] == numbers
    assert prompt_numbers(7, seed=4, first=0, count=7) != epochs[0]


def test_groups_are_dealt_back_in_their_order():
    groups = some_rollouts().groups
    shares = [Rollouts(groups[0::2]), Rollouts(groups[1::2])]
    assert dealt(shares, 3).groups == groups
    assert dealt([Rollouts(groups)], 3).groups == groups


def test_fixed_prompts_are_spread():
    prompts: list = list(range(20))
    assert fixed_prompts(prompts, 4) == [0, 5, 10, 15]
    assert fixed_prompts(prompts[:3], 4) == [0, 1, 2]
    assert fixed_prompts(prompts[:9], 4) == [0, 2, 4, 6]


def test_accuracy_counts_what_can_be_verified():
    """Right in all verifiable dimensions that apply; 0.0 is wrong, None does not apply."""
    scores = [
        {"right": 1.0, "form": 1.0, "style": -3.0},
        {"right": 1.0, "form": 0.0, "style": 9.0},
        {"right": 0.0, "form": None, "style": 9.0},
        {"right": 1.0, "form": None, "style": 0.0},
        {"right": None, "form": None, "style": 1.0},
    ]
    rows = [{"scores": row} for row in scores]
    assert accuracy(rows, TERMS) == 2 / 4
    assert accuracy(rows, TERMS[2:]) is None
    assert accuracy(rows, TERMS[:1]) == 3 / 4


def test_metrics_of_a_rollout():
    rollouts = some_rollouts()
    found = rollout_metrics([rollouts], rollouts.rows(), [])
    rewards = [1, 0, 0, 0, 0.5, 2, 0.25, 1, 1, 1, 1]
    assert found["reward/mean"] == pytest.approx(sum(rewards) / 11)
    rows = [{**row, "failure": ""} for row in rollouts.rows()]
    assert rollout_metrics([rollouts], rows)["reward/not_applicable"] == 1
    late = [{**row, "failure": "timeout" if row["reward"] is None else ""} for row in rows]
    apart = rollout_metrics([rollouts], late)
    assert (apart["reward/not_applicable"], apart["rollout/timeouts"]) == (0, 1)
    assert found["reward/dead_groups"] == pytest.approx(1 / 3)
    lengths = [len(c.token_ids) for g in rollouts.groups for c in g.completions]
    assert found["rollout/length"] == pytest.approx(sum(lengths) / 12)
    assert found["rollout/truncated"] == sum(n > 6 for n in lengths) / 12
    assert "reward/accuracy" not in found
    rows = [{**row, "reward": None} for row in rollouts.rows()]
    assert "reward/mean" not in rollout_metrics([rollouts], rows)


def test_a_grader_that_always_fails_is_an_error_and_one_that_sometimes_does_is_not():
    rows = [{"failure": "timeout", "detail": "took 10 s"}, {"failure": "error", "detail": "x"}]
    with pytest.raises(TrainingError, match="every one of the 2 answers.*timeout: took 10 s"):
        check_failures(rows)
    check_failures([*rows, {"failure": "", "detail": ""}])


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        (
            ["environment_error"] * 2,
            r"environment \(method.environment\) failed in every one of the",
        ),
        (
            ["environment_timeout", "error"],
            "verifier failed on 1 and the environment in all others",
        ),
    ],
)
def test_an_environment_that_always_fails_is_named(failures, message):
    rows = [{"failure": failure, "detail": "RuntimeError: no"} for failure in failures]
    with pytest.raises(TrainingError, match=f"{message}.*{failures[-1]}: RuntimeError: no"):
        check_failures(rows)
    check_failures([*rows, {"failure": "", "detail": ""}])


TERM = {"name": "a", "source": "exact"}
LONG = {"name": "long", "source": "overlong:8:2"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"environment": "calculater"}, "did you mean 'calculator'"),
        ({"environment": "calculator", "rewards": [TERM | {"name": "environment"}]}, "own reward"),
        ({"rewards": [TERM | {"weight": 0.0}]}, "a weight of 1 for 'a'"),
        ({"advantage": "maxrl", "rewards": [TERM, LONG]}, "'long' takes away"),
        ({"advantage": "maxrl", "rewards": [TERM | {"weight": -1.0}]}, "'a' takes away"),
        ({"advantage": "maxrl", "overlong_cache": 2}, "'overlong' takes away"),
        ({"advantage": "maxrl", "kl_coef": 0.1, "kl_in": "reward"}, "kl_in='reward' does"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "'unbiased', or method.kl_in='reward'"),
        ({"rewards": [TERM, TERM | {"name": "b", "weight": 0.0}]}, None),
        ({"environment": "calculator", "rewards": [TERM | {"weight": 0.0}]}, None),
        ({"rewards": [TERM | {"name": "environment"}]}, None),
        ({"advantage": "maxrl", "rewards": [TERM, LONG | {"low": 0.0}]}, None),
        ({"advantage": "std", "rewards": [TERM, LONG]}, None),
        ({"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}, None),
    ],
)
def test_methods_that_cannot_learn_are_refused(values, message):
    terms = tuple(RewardTerm(**term) for term in values.pop("rewards", []))
    method = GRPO(**values, rewards=terms)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        check_sampled(method)
        check_signs(method)


def test_a_leash_that_holds_nothing_is_refused_in_ppo_too():
    keys = {"kl_coef": 0.1, "kl_estimator": "k1"}
    with pytest.raises(ConfigError, match="holds the policy by nothing"):
        check_sampled(PPO(**keys, kl_in="loss"))
    check_sampled(PPO(**keys, kl_in="reward"))
    check_sampled(PPO(**{**keys, "kl_estimator": "k2"}, kl_in="loss"))
