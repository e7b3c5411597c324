"""The value loss against its definition, and over every split."""

import pytest
import torch

from stepwell.posttrain.ppo.critic import value_error


@pytest.mark.parametrize(
    ("value", "loss", "slope", "clipped"),
    [
        (0.5, 0.125, -0.5, False),  # from an old value of 0.4, towards a return of 1
        (0.7, 0.08, 0.0, True),  # further than 0.2: no more pull
        (0.1, 0.405, -0.9, False),  # wrong way: the true error is the larger one
        (1.9, 0.405, 0.9, False),  # past the return, and worse than held
        (1.3, 0.08, 0.0, True),  # past it, but held is further from it
    ],
)
def test_clipping(value, loss, slope, clipped):
    value = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    old, target = (torch.tensor(x, dtype=torch.float64) for x in (0.4, 1.0))
    found, binds = value_error(value, old, target, 0.2)
    found.backward()
    assert value.grad is not None
    assert found.item() == pytest.approx(loss)
    assert value.grad.item() == pytest.approx(slope)
    assert bool(binds) == clipped


def test_without_a_clip_it_is_half_the_squared_error():
    values = torch.linspace(-3, 3, 13, dtype=torch.float64)
    found, binds = value_error(values, torch.zeros(13), torch.ones(13), 0.0)
    assert torch.equal(found, (values - 1) ** 2 / 2)
    assert not binds.any()
