"""Chunked token statistics against plain logits, and what they hold in memory."""

import pytest
import torch

from stepwell.models import logits
from stepwell.models.logits import token_stats

N, D, V = 23, 8, 31


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(0, V, (N,), generator=generator)


def reference(hidden, weight, targets, temperature):
    scaled = hidden @ weight.T / temperature
    logprobs = scaled.log_softmax(-1)
    return (
        logprobs[torch.arange(N), targets],
        scaled.logsumexp(-1),
        -(logprobs.exp() * logprobs).sum(-1),
        scaled.mean(-1),
    )


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 23, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_values_and_gradients_equal_plain_logits(keep, chunk, temperature):
    hidden, weight, targets = inputs()
    stats = token_stats(
        hidden, weight, targets, chunk_tokens=chunk, keep_logits=keep,
        inverse_temperature=1 / temperature, with_entropy=True, with_mean=True,
    )  # fmt: skip
    wanted = reference(hidden, weight, targets, temperature)
    mix = torch.randn(4, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for got, want in zip(stats, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    total = torch.stack([(m * s).sum() for m, s in zip(mix, stats, strict=True)]).sum()
    wanted_total = torch.stack([(m * s).sum() for m, s in zip(mix, wanted, strict=True)]).sum()
    for got, want in zip(
        torch.autograd.grad(total, (hidden, weight)),
        torch.autograd.grad(wanted_total, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def test_temperature_known_answer():
    """T = .5, logits [2, 0]: log p = -0.01815, not -0.12693."""
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[2.0], [0.0]])
    stats = token_stats(hidden, weight, torch.tensor([0]), inverse_temperature=2.0)
    assert stats.logprobs.item() == pytest.approx(-0.01815, abs=1e-5)
    assert torch.equal(weight, torch.tensor([[2.0], [0.0]]))


def test_compiled_arithmetic_equals_eager():
    """What a GPU runs with layout.compile, on the CPU."""
    hidden, weight, targets = (x.detach() for x in inputs())
    wanted = logits._Wanted(scale=0.5, entropy=False, mean=True, probs=True)
    grads = tuple(torch.ones(N) * k for k in (1.0, 2.0, 0.0, 3.0))
    results = []
    for stats, grad in (
        (logits._chunk_stats, logits._chunk_grad),
        (logits._compiled(logits._chunk_stats), logits._compiled(logits._chunk_grad)),
    ):
        values = (hidden @ weight.t()).float()
        found = stats(values, targets, wanted)
        probs = values.clone()
        by = logits._coefficients((*grads[:2], None, grads[3]), found[0], found[2], 0.5, V)
        grad(values, targets, found[1], found[2], by, 0.5, True)
        results.append((*found, probs, values))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    stats = token_stats(hidden, weight, torch.tensor([1]), with_entropy=True)
    assert stats.logprobs.item() == -2e4
    (grad,) = torch.autograd.grad(stats.logprobs.sum() + stats.entropy.sum(), hidden)
    assert grad.isfinite().all()


def test_empty_selection_has_a_zero_gradient():
    hidden = torch.zeros(0, D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    stats = token_stats(hidden, weight, torch.zeros(0, dtype=torch.int64))
    stats.logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_never_holds_all_logits_in_float32():
    """The largest float32 tensor that autograd keeps or makes is a chunk's, not N*V."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor):
                    self.bytes = max(self.bytes, x.numel() * x.element_size())
            return out

    hidden = torch.randn(512, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(2000, 16, requires_grad=True)
    with Largest() as largest:
        stats = token_stats(hidden, weight, torch.zeros(512, dtype=torch.int64), chunk_tokens=64)
        stats.logprobs.sum().backward()
    assert largest.bytes == 64 * 2000 * 4
