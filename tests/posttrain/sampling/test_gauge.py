"""The gauge against numbers worked out by hand and drawn from known distributions."""

import math

import pytest
import torch

from stepwell.generate import Sampling
from stepwell.parallel.mesh import init_distributed
from stepwell.posttrain.sampling.gauge import (
    Agreement,
    Gauge,
    check_replayable,
    importance_weights,
)
from stepwell.sections.layout import LayoutConfig
from stepwell.types import ConfigError
from tests.parallel.ranks import run_ranks

NAN = float("nan")


def read(gauge: Gauge) -> Agreement:
    return gauge.read(init_distributed(LayoutConfig()))


def test_importance_weights_are_cut_off_above_and_carry_no_gradient():
    logprobs = torch.tensor([-1.0, -1.0, -3.0, -0.5], requires_grad=True)
    sampler = torch.tensor([-1.0, -3.0, -1.0, -60.0])
    weights = importance_weights(logprobs, sampler, 2.0)
    assert weights.tolist() == pytest.approx([1, 2, math.exp(-2), 2])
    assert not weights.requires_grad
    assert importance_weights(logprobs, sampler, 8.0)[1].item() == pytest.approx(math.exp(2))
    assert importance_weights(logprobs, sampler, 0.0).tolist() == [1, 1, 1, 1]
    # The gradient of a weighted loss is the weight times the plain one.
    (importance_weights(logprobs, sampler, 2.0) * -logprobs).sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -weights)


def test_a_step_by_hand():
    gauge = Gauge()
    gauge.add(
        torch.tensor([[-1.0, -2.0, NAN]]),
        torch.tensor([[-1.5, -2.0, 0.0]]),
        torch.tensor([[0.5, 1.0, 0.0]]),
    )
    gauge.add(torch.tensor([[-3.0]]), torch.tensor([[-2.0]]), torch.ones(1, 1))
    gauge.add(torch.tensor([[NAN]]), torch.tensor([[0.0]]), torch.zeros(1, 1))
    got, d = read(gauge), [0.5, 0.0, -1.0]
    w = [math.exp(x) for x in d]
    assert got.num_tokens == 3
    assert got.max_abs == 1
    assert got.mean_abs == pytest.approx(0.5)
    assert got.kl == pytest.approx(sum(r - 1 - x for r, x in zip(w, d, strict=True)) / 3)
    assert got.ratio == pytest.approx(sum(w) / 3)
    assert got.sample_share == pytest.approx(sum(w) ** 2 / sum(x * x for x in w) / 3)
    assert set(got.metrics()) == {
        f"sampler/{name}" for name in ("max_abs", "mean_abs", "kl", "ratio", "sample_share")
    }
    assert read(gauge) == Agreement(0, 0.0, 0.0, 0.0, 1.0, 1.0), "a step begins anew"


def share_of(layout: LayoutConfig) -> Agreement:
    mesh = init_distributed(layout)
    gauge = Gauge()
    if mesh.rank == 0:
        gauge.add(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), torch.ones(1, 2))
    else:
        gauge.add(torch.tensor([[-3.0]]), torch.tensor([[-2.0]]), torch.ones(1, 1))
    return gauge.read(mesh)


def test_ranks_see_one_number():
    first, second = run_ranks(share_of, 2, LayoutConfig())
    assert first == second
    assert (first.num_tokens, first.max_abs) == (3, 1.0)
    assert first.mean_abs == pytest.approx(0.5)


def drawn(sampler_V: torch.Tensor, trainer_V: torch.Tensor, count: int = 4000) -> Agreement:
    """The gauge on tokens from one distribution and the log-probabilities of another."""
    tokens = torch.multinomial(
        sampler_V, count, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    gauge = Gauge()
    gauge.add(trainer_V.log()[tokens], sampler_V.log()[tokens], torch.ones(count))
    return read(gauge)


def test_warnings_name_the_reason():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    whole = logits.softmax(-1)
    assert drawn(whole, whole).warning(0) is None
    assert drawn(whole, whole).warning(3) is None

    top = torch.where(whole >= whole.sort(descending=True).values[9], whole, 0)
    truncated = drawn(top / top.sum(), whole)
    assert "Likely support" in (truncated.warning(0) or "")

    noise = 0.3 * torch.randn(50, generator=torch.Generator().manual_seed(2))
    other = drawn(whole, (logits + noise).softmax(-1))
    assert other.ratio == pytest.approx(1, abs=0.05)
    assert "Likely precision" in (other.warning(0) or "")
    assert "lag 2 updates behind" in (other.warning(2) or "")
    assert other.warning(0, max_kl=other.kl) is None, "the bound itself is allowed"
    assert other.warning(0, max_kl=other.kl * 0.999) is not None


def test_a_number_that_is_none_warns():
    gauge = Gauge()
    gauge.add(torch.tensor([NAN]), torch.tensor([-1.0]), torch.ones(1))
    assert read(gauge).warning(0) is not None


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(temperature=0), "temperature=0"),
        (Sampling(top_k=5), "top_k=5"),
        (Sampling(top_p=0.9), "top_p=0.9"),
    ],
)
def test_support_that_the_trainer_cannot_replay(sampling, message):
    with pytest.raises(ConfigError, match=message):
        check_replayable(sampling)
    check_replayable(Sampling(temperature=0.7, top_p=1.0, top_k=0))
