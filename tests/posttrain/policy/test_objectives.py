"""Each objective against its formula written out with plain numbers, values and slopes."""

import math

import pytest
import torch

from stepwell.posttrain.policy.objectives import (
    MAX_LOG_RATIO,
    cispo,
    clipped,
    gspo_log_ratios,
    log_ratio,
)

LOW, HIGH = 0.2, 0.28
RATIOS = [0.05, 0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.0, 2.9, 3.1, 10.0]


def slope(fn, log_r):
    """(value, d value / d log p, binds) at policy / old policy = e^log_r, with log p = log_r."""
    logprob = torch.tensor(log_r, dtype=torch.float64, requires_grad=True)
    value, binds = fn(logprob)
    value.backward()
    assert logprob.grad is not None
    return value.item(), logprob.grad.item(), bool(binds)


def naive_clipped(ratio, advantage, c):
    """(value, slope) of PPO's objective by cases."""
    plain, bounded = ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage
    if advantage < 0 and c and min(plain, bounded) < c * advantage:
        return -c * advantage, 0.0
    if bounded < plain:
        return -bounded, 0.0
    return -plain, -plain


@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
@pytest.mark.parametrize("advantage", [2.0, 0.0, -1.0])
def test_clipping_equals_its_cases(advantage, dual_clip):
    for ratio in RATIOS:
        found = slope(
            lambda logprob: clipped(
                logprob, torch.tensor(advantage).double(), LOW, HIGH, dual_clip
            ),
            math.log(ratio),
        )
        assert found[:2] == pytest.approx(naive_clipped(ratio, advantage, dual_clip), abs=1e-12)
        moved = (advantage > 0 and ratio > 1 + HIGH) or (advantage < 0 and ratio < 1 - LOW)
        dual = advantage < 0 < dual_clip < ratio
        assert found[2] == (moved or dual)


def test_dual_clip_known_answer():
    """c = 3, A = -1, ratio 10: loss 3 and no gradient; without it 10 and 10."""
    advantage = torch.tensor(-1.0).double()
    found = slope(lambda lp: clipped(lp, advantage, LOW, HIGH, 3.0), math.log(10))
    assert found == (3.0, 0.0, True)
    found = slope(lambda lp: clipped(lp, advantage, LOW, HIGH), math.log(10))
    assert found == (pytest.approx(10), pytest.approx(10), False)
    # A positive advantage is not touched.
    one = torch.tensor(1.0).double()
    assert slope(lambda lp: clipped(lp, one, LOW, HIGH, 3.0), math.log(10))[0] == -1.28


def test_cispo_has_a_gradient_where_clipping_has_none():
    """-sg(clip(r)) A log p: its slope is -clip(r) A everywhere."""
    for advantage in (-1.0, 0.5):
        for ratio in RATIOS:
            log_r, a = math.log(ratio), torch.tensor(advantage).double()
            value, gradient, binds = slope(lambda lp, a=a: cispo(lp, lp, a, LOW, HIGH), log_r)
            weight = min(max(ratio, 1 - LOW), 1 + HIGH)
            assert gradient == pytest.approx(-weight * advantage, abs=1e-12)
            assert value == pytest.approx(-weight * advantage * log_r, abs=1e-12)
            assert binds == (not 1 - LOW < ratio < 1 + HIGH)
    # The paper's: no lower bound.
    a = torch.tensor(1.0).double()
    assert slope(lambda lp: cispo(lp, lp, a, 1.0, HIGH), math.log(0.05))[1:] == (
        pytest.approx(-0.05),
        False,
    )


def test_gspo_ratio_is_the_answers():
    """Token log-ratios +.2 and -.2: the sequence's ratio is 1 at both tokens."""
    old = torch.tensor([-1.2, -0.8], dtype=torch.float64)
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    mean = log_ratio(logprobs, old).mean()
    assert mean.item() == pytest.approx(0, abs=1e-15)
    ratios = gspo_log_ratios(logprobs, mean).exp()
    assert ratios.tolist() == pytest.approx([1, 1], abs=1e-15)
    ratios.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("advantage", [1.5, -0.5])
@pytest.mark.parametrize("shift", [0.0, 0.1, 0.4, -0.4])
def test_gspo_token_form_has_the_sequence_forms_gradient(advantage, shift):
    """min(s A, clip(s) A), s = exp(mean log-ratio), written as one number for the answer."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(7, generator=generator, dtype=torch.float64) - 1
    delta = 0.3 * torch.randn(7, generator=generator, dtype=torch.float64)
    logprobs = (old + delta - delta.mean() + shift).requires_grad_()
    s = (logprobs - old).mean().exp()
    wanted = -torch.minimum(s * advantage, s.clamp(1 - LOW, 1 + HIGH) * advantage)
    (wanted_gradient,) = torch.autograd.grad(wanted, logprobs)
    mean = log_ratio(logprobs, old).mean().expand(7)
    value, binds = clipped(
        gspo_log_ratios(logprobs, mean), torch.full((7,), advantage).double(), LOW, HIGH
    )
    (gradient,) = torch.autograd.grad(value.mean(), logprobs)
    assert value.mean().item() == pytest.approx(wanted.item(), abs=1e-14)
    assert torch.allclose(gradient, wanted_gradient, atol=1e-14, rtol=0)
    assert bool(binds.all()) == (abs(shift) == 0.4 and shift * advantage > 0)


def test_ratios_stay_finite():
    far = torch.tensor([500.0, -500.0, 19.0], requires_grad=True)
    held = log_ratio(far, torch.zeros(3))
    assert held.tolist() == [MAX_LOG_RATIO, -MAX_LOG_RATIO, 19.0]
    value, _ = clipped(held, torch.tensor([0.0, -1.0, -1.0]), LOW, HIGH)
    value.sum().backward()
    assert value.isfinite().all()
    assert far.grad is not None
    assert far.grad.isfinite().all()
    assert far.grad[:2].tolist() == [0, 0]
