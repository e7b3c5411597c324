"""Advantages with published closed forms, skipped tokens, and whitening over everything at once."""

import numpy as np
import pytest

from stepwell.posttrain.policy.gae import explained_variance, gae, whiten
from stepwell.types import ConfigError

REWARDS, VALUES = (0.0, 0.0, 1.0), (0.5, 0.6, 0.7)


def test_known_answers():
    advantages, returns = gae(REWARDS, VALUES, 0.9, 0.95)
    assert advantages == pytest.approx([0.284958, 0.2865, 0.3], abs=5e-7)
    assert returns == pytest.approx([0.784958, 0.8865, 1.0], abs=5e-7)
    assert gae(REWARDS, VALUES, 1.0, 0.95)[0] == pytest.approx([0.46575, 0.385, 0.3], abs=1e-12)


def test_its_two_ends():
    """lam 1: what is earned from here on less the value; lam 0: one step's surprise."""
    rewards, values = np.array([0.3, -0.2, 1.0]), np.array([0.5, 0.6, 0.7])
    advantages, returns = gae(rewards, values, 0.9, 1.0, bootstrap=2.0)
    earned = [0.3 - 0.9 * 0.2 + 0.81 + 0.729 * 2, -0.2 + 0.9 + 0.81 * 2, 1.0 + 0.9 * 2]
    assert returns == pytest.approx(earned, abs=1e-12)
    assert advantages == pytest.approx(np.array(earned) - values, abs=1e-12)
    surprise = [0.3 + 0.9 * 0.6 - 0.5, -0.2 + 0.9 * 0.7 - 0.6, 1.0 + 0.9 * 2 - 0.7]
    assert gae(rewards, values, 0.9, 0.0, bootstrap=2.0)[0] == pytest.approx(surprise, abs=1e-12)


def test_tokens_of_an_environment_are_no_time():
    """The policy's tokens get what they would get without the others; values there aren't read."""
    wanted, returns = gae(REWARDS, VALUES, 0.9, 0.95)
    mine = [True, False, False, True, False, True]
    nan = float("nan")
    found, found_returns = gae(
        (0.0, 0, 0, 0.0, 0, 1.0), (0.5, nan, nan, 0.6, nan, 0.7), 0.9, 0.95, from_policy_L=mine
    )
    assert found[mine] == pytest.approx(wanted, abs=1e-15)
    assert found_returns[mine] == pytest.approx(returns, abs=1e-15)
    assert not found[np.logical_not(mine)].any()


def test_a_reward_on_a_skipped_token_is_the_actions_before_it():
    late, _ = gae((0, 0, 1.0), VALUES, 0.9, 0.95, from_policy_L=(True, True, False))
    early, _ = gae((0, 1.0), VALUES[:2], 0.9, 0.95)
    assert late[:2] == pytest.approx(early, abs=1e-15)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="3 rewards, 2 values and 3 marks"):
        gae(REWARDS, VALUES[:2], 1.0, 1.0)
    with pytest.raises(ConfigError, match=r"gamma=1\.5 must be from 0 to 1.*legal value is 1"):
        gae(REWARDS, VALUES, 1.5, 1.0)
    with pytest.raises(ConfigError, match=r"lam=-0\.1 .*legal value is 0"):
        gae(REWARDS, VALUES, 1.0, -0.1)
    assert gae(REWARDS, VALUES, 1.0, 0.0)[0][0] == pytest.approx(0.1)
    assert gae(REWARDS, VALUES, 0.0, 1.0)[0][2] == pytest.approx(0.3)
    assert len(gae((), (), 1.0, 1.0)[0]) == 0


def test_whitening_is_over_all_answers_and_no_split_changes_it():
    rng = np.random.default_rng(0)
    parts = [rng.normal(3, 2, n) for n in (5, 1, 7)]
    masks = [np.ones(5), np.ones(1), np.array([1, 0, 0, 1, 1, 1, 1])]
    white = whiten(parts, masks)
    flat = np.concatenate([w[m != 0] for w, m in zip(white, masks, strict=True)])
    assert flat.mean() == pytest.approx(0, abs=1e-12)
    assert flat.std(ddof=1) == pytest.approx(1, abs=1e-12)
    assert not white[2][1:3].any()
    back = whiten(parts[::-1], masks[::-1])[::-1]
    for one, other in zip(white, back, strict=True):
        assert one == pytest.approx(other, abs=1e-12)
    # Each answer whitened alone would be something else.
    assert abs(whiten(parts[:1], masks[:1])[0] - white[0]).max() > 0.1


def test_whitening_without_spread_is_zero():
    for parts in ([], [np.array([2.0])], [np.array([0.1, 0.1]), np.array([0.1])]):
        for found in whiten(parts, [np.ones(len(p)) for p in parts]):
            assert not found.any()
    masked = [np.array([np.nan, 1.0, 3.0])]
    assert whiten(masked, [np.array([0, 1, 1])])[0] == pytest.approx([0, -(0.5**0.5), 0.5**0.5])


def test_explained_variance():
    returns = np.array([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(returns + 7, returns) == 1  # an offset is no spread
    assert explained_variance(np.full(4, 1.5), returns) == 0
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert explained_variance(returns, np.ones(4)) == 0
    assert explained_variance(np.array([]), np.array([])) == 0
