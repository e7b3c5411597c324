"""KL estimators over a distribution small enough to add up all of it."""

import pytest
import torch

from stepwell.posttrain.policy.kl import KINDS, kl_estimate
from stepwell.types import ConfigError

PI = torch.tensor([0.7, 0.3], dtype=torch.float64)
REFERENCE = torch.tensor([0.5, 0.5], dtype=torch.float64)
EXACT = 0.082283


@pytest.mark.parametrize(
    ("kind", "values", "mean"),
    [
        ("k1", [0.336472, -0.510826], EXACT),
        ("k2", [0.056607, 0.130471], 0.078766),
        ("k3", [0.050758, 0.155841], EXACT),
        ("unbiased", [0.050758, 0.155841], EXACT),
    ],
)
def test_known_values(kind, values, mean):
    found = kl_estimate(PI.log(), REFERENCE.log(), kind)
    assert found.tolist() == pytest.approx(values, abs=1e-6)
    assert (PI * found).sum().item() == pytest.approx(mean, abs=1e-6)
    assert kind == "k1" or (found >= 0).all()


def gradients(seed=0):
    """Logits of a policy of 5 choices, and a reference."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    return logits, reference


def expected_gradient(kind, logits, reference, sampler=None):
    """The mean gradient of the estimate as a loss, over all samples and their probabilities."""
    logprobs = logits.log_softmax(0)
    old = logprobs.detach() if sampler is None else sampler
    estimates = kl_estimate(logprobs, reference, kind, None if sampler is None else old)
    return torch.autograd.grad((old.exp() * estimates).sum(), logits)[0]


def reverse_and_forward(logits, reference):
    logprobs = logits.log_softmax(0)
    reverse = (logprobs.exp() * (logprobs - reference)).sum()
    forward = (reference.exp() * (reference - logprobs)).sum()
    return [torch.autograd.grad(kl, logits, retain_graph=True)[0] for kl in (reverse, forward)]


def test_gradients_as_a_loss():
    logits, reference = gradients()
    reverse, forward = reverse_and_forward(logits, reference)
    assert (reverse - forward).abs().max() > 0.01
    wanted = {
        "k1": torch.zeros_like(reverse),
        "k2": reverse,
        "k3": forward,
        "unbiased": reverse,
    }
    assert wanted.keys() == set(KINDS)
    for kind, gradient in wanted.items():
        found = expected_gradient(kind, logits, reference)
        assert torch.allclose(found, gradient, atol=1e-14, rtol=0), kind


def test_unbiased_is_so_on_another_policys_samples_too():
    logits, reference = gradients()
    sampler = torch.randn(5, generator=torch.Generator().manual_seed(9)).double().log_softmax(0)
    reverse, _ = reverse_and_forward(logits, reference)
    found = expected_gradient("unbiased", logits, reference, sampler)
    assert torch.allclose(found, reverse, atol=1e-14, rtol=0)
    stale = expected_gradient("k2", logits, reference, sampler)
    assert (stale - reverse).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_in_the_reward_only_k1_gives_the_reverse_kls_gradient(kind):
    """Policy gradient of the reward -estimate: sum of p * -estimate * grad log p."""
    logits, reference = gradients()
    reverse, _ = reverse_and_forward(logits, reference)
    logprobs = logits.log_softmax(0)
    reward = -kl_estimate(logprobs, reference, kind).detach()
    found = torch.autograd.grad((logprobs.exp().detach() * -reward * logprobs).sum(), logits)[0]
    assert torch.allclose(found, reverse, atol=1e-14, rtol=0) == (kind == "k1")


def test_equal_policies_have_no_divergence_and_far_ones_a_finite_one():
    for kind in KINDS:
        assert kl_estimate(PI.log(), PI.log(), kind).tolist() == [0, 0]
        far = torch.tensor([-500.0, 500.0], requires_grad=True)
        found = kl_estimate(far, torch.zeros(2), kind)
        found.sum().backward()
        assert found.isfinite().all()
        assert far.grad is not None
        assert far.grad.isfinite().all()


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ConfigError, match="'k4' is unknown"):
        kl_estimate(PI.log(), PI.log(), "k4")
