"""Draws follow the distribution, truncated as asked; log-probabilities are over all of it."""

from typing import Any

import numpy as np
import pytest
import torch

from stepwell.models.token_choice import sample, uniforms


def test_uniforms_are_uniform_and_fixed():
    values = np.stack([uniforms(seed, 0, 500) for seed in range(400)])
    assert values.min() > 0
    assert values.max() < 1
    counts = np.histogram(values, 50, (0, 1))[0]
    assert ((counts - 4000) ** 2 / 4000).sum() < 85.4  # chi-squared, 49 degrees, p = .001
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.01
    assert np.array_equal(uniforms(7, 10, 5), uniforms(7, 0, 15)[10:])
    assert not np.array_equal(uniforms(7, 0, 5), uniforms(-7, 0, 5))
    assert len({float(uniforms(s, 3, 1)[0]) for s in (0, 1, 2**63, 2**64 - 1)}) == 4


def frequencies(logits: torch.Tensor, count: int = 40_000, **how: Any) -> torch.Tensor:
    u = (torch.arange(count) + 0.5) / count
    tokens, _ = sample(logits.expand(count, -1), u, **how)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / count


def test_sampling_follows_the_distribution():
    logits = torch.randn(128, generator=torch.Generator().manual_seed(0)) * 3
    got = frequencies(logits, temperature=0.7)
    assert (got - (logits / 0.7).softmax(-1)).abs().max() < 1e-4


def test_top_k_and_top_p_keep_what_they_say():
    probs = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    logits = torch.full((64,), float("-inf"))
    logits[:5] = probs.log()
    top2 = frequencies(logits, top_k=2)
    assert torch.allclose(top2[:5], torch.tensor([4 / 7, 3 / 7, 0, 0, 0]), atol=1e-3)
    nucleus = frequencies(logits, top_p=0.65)
    assert torch.allclose(nucleus[:5], torch.tensor([4 / 7, 3 / 7, 0, 0, 0]), atol=1e-3)
    nucleus = frequencies(logits, top_p=0.75)
    assert torch.allclose(nucleus[:5], torch.tensor([4 / 9, 3 / 9, 2 / 9, 0, 0]), atol=1e-3)
    tiny = frequencies(logits, top_p=1e-9)
    assert tiny[0] == 1
    both = frequencies(logits, top_k=3, top_p=0.5)  # .4/.9 is short of .5
    assert torch.allclose(both[:5], torch.tensor([4 / 7, 3 / 7, 0, 0, 0]), atol=1e-3)


def test_log_probability_is_over_the_full_support_at_the_temperature():
    logits = torch.full((1, 64), float("-inf"))
    logits[0, :2] = torch.tensor([2.0, 0.0])
    _, lp = sample(logits, torch.tensor([0.5]), temperature=0.5, top_k=1)
    assert lp.item() == pytest.approx(-0.01815, abs=1e-5)
    assert logits[0, 0] == 2.0  # the temperature is never applied in place


def test_no_token_without_mass_is_ever_drawn():
    logits = torch.full((64,), float("-inf"))
    logits[[3, 40]] = 0.0
    u = torch.tensor([1e-12, 0.25, 0.5, 0.75, 1 - 6e-8])
    tokens, _ = sample(logits.expand(5, -1), u)
    assert set(tokens.tolist()) == {3, 40}


def test_truncation_agrees_with_a_plain_loop():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 320, generator=generator) * 2
    for k, p in [(0, 0.9), (0, 0.3), (10, 1.0), (40, 0.8), (320, 0.95)]:
        for row in logits:
            probs = row.softmax(-1)
            order = probs.argsort(descending=True)[: k or None]
            share = probs[order] / probs[order].sum()
            kept = order[(share.cumsum(0) - share < p)]
            got = frequencies(row, 20_000, top_k=k, top_p=p)
            expected = torch.zeros(320)
            expected[kept] = probs[kept] / probs[kept].sum()
            assert (got - expected).abs().max() < 2e-4
