"""4-bit NormalFloat against its definition, and the product on it."""

import pytest
import torch
from scipy.stats import norm

from stepwell.models.quantize import (
    BLOCK,
    Nf4,
    dequantise_nf4,
    nf4_levels,
    nf4_linear,
    quantise_nf4,
    quantising_error,
)
from stepwell.plan.memory.ledger import nf4_bytes_per_parameter


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_levels_are_normal_quantiles_of_both_halves():
    """2305.14314, equation 4: evenly spaced in probability, eight above zero and seven below."""
    end = (29 / 30 + 31 / 32) / 2
    above = [norm.ppf(0.5 + (end - 0.5) * i / 8) for i in range(9)]
    below = [-norm.ppf(0.5 + (end - 0.5) * i / 7) for i in range(1, 8)]
    wanted = torch.tensor(sorted(float(level / above[-1]) for level in above + below)).double()
    assert torch.allclose(nf4_levels().double(), wanted, atol=1e-6)
    assert nf4_levels()[7] == 0
    assert nf4_levels()[[0, 15]].tolist() == [-1.0, 1.0]
    # as printed in the paper's appendix E
    assert nf4_levels()[[1, 8, 14]].tolist() == pytest.approx([-0.6961928, 0.0795803, 0.7229568])


@pytest.mark.parametrize("shape", [(8, 64), (3, 50), (1, 1), (7, 9)])
def test_each_value_becomes_the_nearest_level_times_its_blocks_scale(shape):
    weight = random(*shape)
    found = dequantise_nf4(quantise_nf4(weight, double=False), torch.float32).flatten()
    flat = weight.flatten()
    for start in range(0, flat.numel(), BLOCK):
        block = flat[start : start + BLOCK]
        choices = nf4_levels() * block.abs().max()
        nearest = (block[:, None] - choices).abs().min(dim=1)
        assert torch.allclose(found[start : start + BLOCK], choices[nearest.indices], atol=1e-6)


def test_levels_themselves_come_back_exactly():
    weight = nf4_levels().repeat(4, 8) * 0.25
    assert torch.equal(dequantise_nf4(quantise_nf4(weight, False), torch.float32), weight)
    zeros = torch.zeros(4, 32)
    for double in (False, True):
        assert torch.equal(dequantise_nf4(quantise_nf4(zeros, double), torch.float32), zeros)


def test_double_quantisation_keeps_scales_as_8_bit_floats_about_their_mean():
    weight = random(512, 256)
    plain, double = quantise_nf4(weight, False), quantise_nf4(weight, True)
    assert double.scales.dtype == torch.float8_e4m3fn
    assert double.scale_scales is not None
    assert double.mean is not None
    assert double.mean == pytest.approx(plain.scales.mean().item())
    assert double.scale_scales.numel() == plain.scales.numel() // 256
    rest = (plain.scales - double.mean).view(-1, 256)
    assert torch.allclose(double.scale_scales, rest.abs().amax(1) / 448)
    error = double.scales.float() * double.scale_scales.repeat_interleave(256) - rest.flatten()
    assert error.abs().max() <= rest.abs().max() / 16  # three bits of mantissa
    assert quantising_error(weight, True) == pytest.approx(
        quantising_error(weight, False), rel=0.05
    )
    assert 0.05 < quantising_error(weight) < 0.12


@pytest.mark.parametrize("double", [False, True])
def test_bytes_are_the_closed_form(double):
    weight = random(512, 512)
    wanted = nf4_bytes_per_parameter(double_quantised=double)
    assert quantise_nf4(weight, double).num_bytes / weight.numel() == pytest.approx(
        wanted, abs=1e-4
    )
    assert wanted == pytest.approx(0.516 if double else 0.5625, abs=1e-3)


def test_an_exponent_of_four_is_a_better_grid_for_normal_weights_than_even_steps():
    weight = random(64, 256)
    blocks = weight.view(-1, BLOCK)
    step = blocks.abs().amax(1, keepdim=True) / 7
    even = ((blocks / step).round() * step - blocks).norm() / blocks.norm()
    assert quantising_error(weight) < 0.9 * even


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(bad):
    weight = random(4, 8)
    weight[2, 3] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantise_nf4(weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_product_and_its_gradient_are_those_of_the_restored_matrix(dtype):
    quantised = quantise_nf4(random(6, 10))
    x = random(5, 10, seed=1).to(dtype).requires_grad_()
    grad = random(5, 6, seed=2).to(dtype)
    restored = dequantise_nf4(quantised, dtype)
    y = nf4_linear(x, quantised)
    (found,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(y, x @ restored.t())
    assert torch.equal(found, grad @ restored)


def test_the_backward_pass_holds_no_restored_matrix():
    quantised = quantise_nf4(random(64, 96))
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        nf4_linear(random(5, 96, seed=1).requires_grad_(), quantised)
    kept = sum(tensor.nbytes for tensor in saved)
    assert 0 < kept <= quantised.num_bytes
    assert {t.data_ptr() for t in saved} <= {p.data_ptr() for p in tensors(quantised)}


def tensors(weight: Nf4) -> list[torch.Tensor]:
    return [part for part in weight[:4] if isinstance(part, torch.Tensor)]
