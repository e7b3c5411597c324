import math

import pytest
import torch

from stepwell.models.neftune import Noise, noise_bounds, noisy, place_keys


def some_noise(num_rows=3, length=50, d_model=64, alpha=5.0, step=0, seed=1) -> torch.Tensor:
    keys_BT = place_keys(range(num_rows), length, seed, step)
    borders = torch.arange(0, num_rows * length + 1, length)
    bounds_N = noise_bounds(borders, alpha, d_model)
    return noisy(
        torch.zeros(num_rows * length, d_model, dtype=torch.float64),
        Noise(keys_BT.flatten(), bounds_N),
    )


def test_it_is_uniform_within_alpha_over_the_root_of_length_times_width():
    noise_ND = some_noise()
    bound = 5 / math.sqrt(50 * 64)
    assert noise_ND.abs().max() <= bound
    assert noise_ND.abs().max() > 0.999 * bound
    assert noise_ND.mean().abs() < 5 * bound / math.sqrt(3 * noise_ND.numel())
    assert noise_ND.var().item() == pytest.approx(bound**2 / 3, rel=0.02)
    flat = noise_ND.flatten()
    for lag in (1, 64, 64 * 50):
        assert (flat[lag:] * flat[:-lag]).mean().abs() < 5 * bound**2 / 3 / math.sqrt(len(flat))
    assert len(flat.unique()) > 0.999 * len(flat)


def test_a_step_a_seed_and_a_row_have_noise_of_their_own():
    first = some_noise()
    assert torch.equal(first, some_noise())
    assert not (first == some_noise(step=1)).any(1).all()
    assert not torch.equal(first, some_noise(seed=2))
    rows = first.view(3, 50, 64)
    assert not torch.equal(rows[0], rows[1])


def test_a_row_keeps_its_noise_wherever_it_stands():
    together = place_keys((7, 3, 9), 20, 1, 4)
    assert torch.equal(together[1:2], place_keys((3,), 20, 1, 4))


def test_the_length_is_the_documents_own():
    bounds_N = noise_bounds(torch.tensor([0, 4, 5]), 2.0, 16)
    assert bounds_N.tolist() == pytest.approx([2 / math.sqrt(64)] * 4 + [2 / math.sqrt(16)])


def test_the_gradient_passes_and_long_rows_are_done_in_parts():
    x_ND = torch.randn(2500, 4, dtype=torch.float64, requires_grad=True)
    keys_N = place_keys((0,), 2500, 1, 0).flatten()
    noise = Noise(keys_N, torch.full((2500,), 0.5))
    out_ND = noisy(x_ND, noise)
    out_ND.square().sum().backward()
    torch.testing.assert_close(x_ND.grad, 2 * out_ND.detach())
    tail = noisy(x_ND[2000:], noise.rows(2000, 2500))
    torch.testing.assert_close(tail, out_ND[2000:])
    half = noisy(torch.zeros(8, 4, dtype=torch.bfloat16), noise.rows(0, 8))
    assert half.dtype == torch.bfloat16
