"""Three roads to one policy: with a reward r and a leash beta, the best is pi* ~ ref exp(r / beta).

Two answers of one token to one prompt, reference 1/2 each, r = (1, 0), beta 0.5: sigmoid(2) =
0.880797 for the first. The models are tables, so expectations are sums over both answers and
nothing is left to chance; rewards, advantages and losses are those that runs are trained with.
"""

import math

import numpy as np
import pytest
import torch

from stepwell.models.transformer import TokenOutputs
from stepwell.posttrain.answers import Answer, packed
from stepwell.posttrain.policy.kl import kl_estimate
from stepwell.posttrain.ppo.critic import value_sums
from stepwell.posttrain.ppo.loss import policy_sums
from stepwell.posttrain.ppo.targets import with_targets
from stepwell.posttrain.preference.losses import PairLogps, pair_losses
from stepwell.posttrain.preference.pairing import NoPair, best_and_worst
from stepwell.sections.methods import PPO
from stepwell.sections.preference import PreferenceLoss

OPTIMUM, BETA, REWARDS = 0.880797, 0.5, (1.0, 0.0)
STREAMS = ("advantages", "returns", "old_logprobs", "old_values", "sampler_logprobs")


def table() -> torch.Tensor:
    """Logits of the two answers, at the reference."""
    return torch.zeros(2, dtype=torch.float64, requires_grad=True)


def first(logits: torch.Tensor) -> float:
    return logits.softmax(-1)[0].item()


def descend(parameters: list[torch.Tensor], loss: torch.Tensor, rate: float) -> None:
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        with torch.no_grad():
            parameter -= rate * gradient


def test_the_closed_form():
    tilted = np.array([0.5 * math.exp(r / BETA) for r in REWARDS])
    assert tilted[0] / tilted.sum() == pytest.approx(OPTIMUM, abs=5e-7)


def test_exact_policy_gradient():
    """Of E[r] - beta KL(pi || ref), by autograd."""
    logits, rewards = table(), torch.tensor(REWARDS, dtype=torch.float64)
    for _ in range(2000):
        logprobs = logits.log_softmax(-1)
        value = (logprobs.exp() * (rewards - BETA * (logprobs - math.log(0.5)))).sum()
        descend([logits], -value, 0.5)
    assert first(logits) == pytest.approx(OPTIMUM, abs=1e-6)


def trained_by_ppo(method: PPO, coef: float = BETA, num_rollouts: int = 150) -> tuple[float, float]:
    """The first answer's probability and the critic's value at the end."""
    logits = table()
    value = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for _ in range(num_rollouts):
        old = logits.detach().log_softmax(-1)
        answers = []
        for i, reward in enumerate(REWARDS):
            streams = {
                "old_logprobs": np.array([0, old[i].item()]),
                "sampler_logprobs": np.array([0, old[i].item()]),
                "reference_logprobs": np.array([0, math.log(0.5)]),
                "old_values": np.array([0, value.item()]),
            }
            answers.append(Answer((2, i), np.array([0, 1.0]), reward, False, streams))
        answers, _ = with_targets(answers, method, coef)
        # Each answer as often as the policy says it.
        chances = old.exp().tolist()
        batch = packed(answers, 2, 2, chances, (*STREAMS, "reference_logprobs"))
        for _ in range(method.updates_per_rollout):
            logprobs_BT = logits.log_softmax(-1).take(batch.targets_BT.clamp(max=1))
            entropy = -(logits.log_softmax(-1).exp() * logits.log_softmax(-1)).sum()
            outputs = TokenOutputs(
                logprobs_BT=logprobs_BT,
                entropy_BT=entropy.expand_as(logprobs_BT),
                scores_BTC=value.expand(*logprobs_BT.shape, 1),
            )
            policy = policy_sums(method, coef, outputs, batch).sums["tokens"]
            descend([logits], policy, 2.0)
        for answer, chance in zip(answers, chances, strict=True):
            alone = packed([answer], 2, 2, [1.0], STREAMS)
            found = TokenOutputs(scores_BTC=value.expand(1, 2, 1))
            error = value_sums(method, found, alone).sums["values"] / method.value_coef
            descend([value], chance * error, 0.5)
    return first(logits), value.item()


@pytest.mark.parametrize("updates", [1, 3])
def test_ppo_with_the_leash_in_the_reward(updates):
    """k1, clipped steps, a critic that learns: its value is the best one's, beta log Z."""
    method = PPO(whiten=False, updates_per_rollout=updates, importance_cap=0.0)
    chance, value = trained_by_ppo(method, num_rollouts=150)
    assert chance == pytest.approx(OPTIMUM, abs=1e-5)
    best = BETA * math.log(0.5 * sum(math.exp(r / BETA) for r in REWARDS))
    assert value == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("estimator", ["k2", "unbiased"])
def test_ppo_with_the_leash_in_the_loss(estimator):
    """Estimators with the reverse KL's gradient arrive at the same policy."""
    method = PPO(whiten=False, kl_in="loss", kl_estimator=estimator, importance_cap=0.0)
    assert trained_by_ppo(method)[0] == pytest.approx(OPTIMUM, abs=1e-5)


def test_other_estimators_in_the_loss_lead_elsewhere():
    """k3's gradient is the forward KL's: p (1 - p) = beta (p - 1/2). k1's is zero on average: there
    is no leash at all."""
    forward = (1 - BETA + math.sqrt((1 - BETA) ** 2 + 2 * BETA)) / 2
    assert forward * (1 - forward) == pytest.approx(BETA * (forward - 0.5))
    k3 = PPO(whiten=False, kl_in="loss", kl_estimator="k3", importance_cap=0.0)
    assert trained_by_ppo(k3)[0] == pytest.approx(forward, abs=1e-5)
    assert abs(forward - OPTIMUM) > 0.05
    k1 = PPO(whiten=False, kl_in="loss", kl_estimator="k1", importance_cap=0.0)
    assert trained_by_ppo(k1, num_rollouts=150)[0] > 0.98


def test_without_a_leash_the_best_answer_takes_all():
    free = PPO(whiten=False, kl_coef=0.0, importance_cap=0.0)
    assert trained_by_ppo(free, coef=0.0, num_rollouts=150)[0] > 0.98


def test_dpo_on_infinite_bradley_terry_data():
    """Pairs come as often as sigmoid(r0 - r1) says, both ways round."""
    logits, config = table(), PreferenceLoss(kind="dpo", beta=BETA)
    often = 1 / (1 + math.exp(REWARDS[1] - REWARDS[0]))
    one = torch.ones(1, dtype=torch.float64)
    half = PairLogps(one * math.log(0.5), one * math.log(0.5))
    for _ in range(2000):
        a, b = logits.log_softmax(-1).unsqueeze(1).unbind()
        ways = [
            pair_losses(config, pair, half, PairLogps(one, one)).sum()
            for pair in (PairLogps(a, b), PairLogps(b, a))
        ]
        descend([logits], often * ways[0] + (1 - often) * ways[1], 5.0)
    assert first(logits) == pytest.approx(OPTIMUM, abs=1e-6)


def test_the_expected_gradients_of_the_estimators():
    """At pi = (.7, .3): k1's is zero, k2's and unbiased's the reverse KL's, k3's the forward's."""
    logits = torch.tensor([math.log(0.7), math.log(0.3)], dtype=torch.float64, requires_grad=True)
    reference = torch.full((2,), math.log(0.5), dtype=torch.float64)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits)[0]

    logprobs = logits.log_softmax(-1)
    reverse = gradient((logprobs.exp() * (logprobs - reference)).sum())
    forward = gradient(-(reference.exp() * logits.log_softmax(-1)).sum())
    wanted = {"k1": 0 * reverse, "k2": reverse, "k3": forward, "unbiased": reverse}
    for kind, want in wanted.items():
        now = logits.log_softmax(-1)
        found = gradient((now.detach().exp() * kl_estimate(now, reference, kind)).sum())
        assert found == pytest.approx(want.tolist(), abs=1e-12), kind
    assert (reverse - forward).abs().max() > 0.01


@pytest.mark.parametrize("group_size", [2, 4])
def test_online_dpo_with_a_bradley_terry_labeller(group_size):
    """Groups come as often as the policy says them, and the labeller prefers the first of two
    different answers with chance sigmoid(r0 - r1): `best_and_worst` then pairs the two, and ties
    (equal answers) give none. Expectations are sums over groups and labels."""
    logits, config = table(), PreferenceLoss(kind="dpo", beta=BETA)
    often = 1 / (1 + math.exp(REWARDS[1] - REWARDS[0]))
    one = torch.ones(1, dtype=torch.float64)
    half = PairLogps(one * math.log(0.5), one * math.log(0.5))
    groups = [(0,) * n + (1,) * (group_size - n) for n in range(group_size + 1)]
    for _ in range(40):
        logprobs = logits.log_softmax(-1)
        chances = logprobs.detach().exp()
        total, count = torch.zeros((), dtype=torch.float64), 0.0
        for group in groups:
            n = group.count(0)
            weight = math.comb(group_size, n) * math.prod(chances[i].item() for i in group)
            for label, chance in ((0, often), (1, 1 - often)):
                found = best_and_worst([float(answer == label) for answer in group])
                if isinstance(found, NoPair):
                    continue
                policy = PairLogps(*(logprobs[group[i]].unsqueeze(0) for i in found))
                losses = pair_losses(config, policy, half, PairLogps(one, one))
                total = total + weight * chance * losses.sum()
                count += weight * chance
        descend([logits], total / count, 5.0)
    assert first(logits) == pytest.approx(OPTIMUM, abs=1e-6)


def test_iterative_dpo_walks_beyond_the_optimum():
    """Each time the reference becomes the policy, the tilt is applied once more: after n rounds
    logit(pi) = n (r0 - r1) / beta."""
    reference, config = (
        torch.tensor([0.5, 0.5], dtype=torch.float64).log(),
        PreferenceLoss(beta=2.0),
    )
    often = 1 / (1 + math.exp(REWARDS[1] - REWARDS[0]))
    one = torch.ones(1, dtype=torch.float64)
    for round_number in (1, 2, 3):
        logits = reference.clone().requires_grad_()
        held = [one * value for value in reference]
        for _ in range(100):
            a, b = logits.log_softmax(-1).unsqueeze(1).unbind()
            ways = [
                pair_losses(config, PairLogps(x, y), PairLogps(p, q), PairLogps(one, one)).sum()
                for x, y, p, q in ((a, b, *held), (b, a, *reversed(held)))
            ]
            descend([logits], often * ways[0] + (1 - often) * ways[1], 0.5)
        reference = logits.detach().log_softmax(-1)
        gap = (reference[0] - reference[1]).item()
        assert gap == pytest.approx(round_number * 1.0 / 2.0, abs=1e-6)
