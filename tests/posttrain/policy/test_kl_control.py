import pytest

from stepwell.posttrain.policy.kl_control import adapted, kept_coef, next_coef
from stepwell.sections.methods import GRPO, PPO


def test_known_answer():
    """Error clipped to +-0.2: 256 answers, horizon 10,000 multiply by 1.00512."""
    assert adapted(1.0, 60.0, 6.0, 1e4, 256) == pytest.approx(1.00512, abs=1e-12)
    assert adapted(1.0, 0.0, 6.0, 1e4, 256) == pytest.approx(1 - 0.00512, abs=1e-12)


def test_the_error_is_proportional_within_its_bounds():
    at = [adapted(2.0, 6.0 * (1 + e), 6.0, 1e4, 100) for e in (-0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.3)]
    wanted = [2 * (1 + e * 0.01) for e in (-0.2, -0.2, -0.1, 0, 0.1, 0.2, 0.2)]
    assert at == pytest.approx(wanted, abs=1e-12)


def test_it_never_changes_sign():
    assert adapted(0.5, 0.0, 6.0, 10.0, 49) == pytest.approx(0.01)
    assert adapted(0.5, 0.0, 6.0, 10.0, 50) == 0
    assert adapted(0.5, 0.0, 6.0, 10.0, 51) == 0


def test_the_controllers():
    fixed, adaptive = PPO(), PPO(kl_controller="adaptive", kl_target=3.0, kl_horizon=1000.0)
    assert next_coef(fixed, 0.07, 99.0, 256) == 0.07
    assert next_coef(adaptive, 0.07, 99.0, 256) == pytest.approx(0.07 * 1.0512)
    assert next_coef(adaptive, 0.07, 3.0, 256) == 0.07


def test_it_settles_at_the_target():
    """A policy whose divergence falls as the coefficient rises is led to the target."""
    coef = 0.01
    for _ in range(4000):
        coef = adapted(coef, 0.6 / coef, 6.0, 1e3, 32)
    assert coef == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("method", [PPO(kl_coef=0.2), GRPO(kl_coef=0.2)])
def test_a_run_goes_on_with_its_coefficient_and_a_branch_begins_with_its_own(method):
    assert kept_coef({}, method) == kept_coef({"kl_coef": None}, method) == 0.2
    assert kept_coef({"kl_coef": 0.3, "method_kl_coef": 0.2}, method) == 0.3
    assert kept_coef({"kl_coef": 0.3, "method_kl_coef": 0.05}, method) == 0.2
