import copy

import numpy as np
import pytest

from stepwell.labs import grpo


def test_the_claim_holds_and_the_check_can_fail():
    numbers = grpo.measure(small=True)
    assert grpo.check(numbers) == []
    memory = numbers["memory"]
    for models in memory.values():
        for row in models.values():
            assert row["measured"] == row["predicted"]
    assert list(memory["grpo"]) == ["policy"]
    assert list(memory["ppo"]) == ["policy", "critic"]
    assert 0 < numbers["peak"]["grpo"] < numbers["peak"]["ppo"]
    assert set(numbers["noise"]) == {"first", "last"}
    for method in grpo.METHODS:
        assert all(np.isfinite(row[method]["mean"]) for row in numbers["noise"].values())
        assert len(numbers["rewards"][method][0]) == grpo.SMALL.steps
    assert len(grpo.plot(numbers).axes) == 4
    for change, said in (
        (lambda n: n["gain"].update(mean=-0.2, low=-0.3, high=-0.1), "grpo is worse: -0.200"),
        (lambda n: n["accuracy"]["ppo"].update(by_seed=[0.0]), "ppo is no better"),
        (lambda n: n["memory"]["ppo"]["critic"].update(measured=10), "ppo's critic holds 10"),
        (lambda n: n["memory"]["ppo"].pop("critic"), "grpo holds 1.00"),
    ):
        off = copy.deepcopy(numbers)
        change(off)
        assert said in "\n".join(grpo.check(off))


def test_the_relative_variance_is_that_of_the_draws():
    """Of gradients of a known mean and variance: squared mean 12.5, variance 50."""
    rng = np.random.default_rng(0)
    found = [grpo.relative_variance(0.5 + rng.normal(size=(60, 50))) for _ in range(500)]
    assert np.mean(found) == pytest.approx(4.0, rel=0.03)
