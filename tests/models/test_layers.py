"""Hand-written backward passes against autograd's."""

import pytest
import torch

from stepwell.models import layers


def leaf(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


def by_autograd(function, inputs, grad):
    out = function(*inputs)
    return out, *torch.autograd.grad((out * grad).sum(), [x for x in inputs if x.requires_grad])


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 4, 8)])
def test_rms_norm(shape):
    x, weight, grad = leaf(*shape), leaf(8, seed=1), leaf(*shape, seed=2).detach()
    found = by_autograd(lambda a, b: layers.rms_norm(a, b, 1e-5), (x, weight), grad)
    wanted = by_autograd(lambda a, b: layers._rms_norm(a, b, 1e-5)[0], (x, weight), grad)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_rms_norm_saves_its_input_and_one_scale_a_row():
    saved = []
    x, weight = leaf(64, 32, dtype=torch.float32), leaf(32, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        layers.rms_norm(x.bfloat16(), weight, 1e-5)
    assert sum(saved) == 64 * 32 + 32 + 64


def test_rope_rotates_and_its_gradient_rotates_back():
    cos, sin = layers.rope_angles(torch.arange(7), torch.tensor([1.0, 0.1, 0.01, 0.5]))
    cos, sin = cos.double(), sin.double()
    x, grad = leaf(7, 3, 8), leaf(7, 3, 8, seed=1).detach()

    def plain(x, cos, sin):
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    found = by_autograd(lambda a: layers.apply_rope(a, cos, sin), (x,), grad)
    wanted = by_autograd(lambda a: plain(a, cos, sin), (x,), grad)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gradient_the_values_are_the_same_bits(dtype):
    x, weight = leaf(6, 2, 8, dtype=torch.float32).to(dtype), leaf(8, dtype=torch.float32)
    cos, sin = layers.rope_angles(torch.arange(6), torch.tensor([1.0, 0.1, 0.01, 0.5]))
    with torch.no_grad():
        normed, turned = layers.rms_norm(x, weight, 1e-5), layers.apply_rope(x, cos, sin)
    assert torch.equal(normed, layers.rms_norm(x, weight, 1e-5))
    assert torch.equal(turned, layers.apply_rope(x, cos, sin))
