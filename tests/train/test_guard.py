import json
import math

import pytest

from stepwell.config import GuardConfig
from stepwell.train.guard import Guard
from stepwell.types import TrainingError

CONFIG = GuardConfig(spike_factor=4.0, window=5, min_history=3, max_skips_in_a_row=2)


def _fed(norms, config=CONFIG):
    guard = Guard(config)
    assert all(guard.judge(1.0, norm).ok for norm in norms)
    return guard


@pytest.mark.parametrize(
    ("loss", "norm", "words"),
    [
        (math.nan, 1.0, "loss is nan"),
        (-math.inf, 1.0, "loss is -inf"),
        (1.0, math.inf, "gradient norm is inf"),
        (1.0, math.nan, "gradient norm is nan"),
    ],
)
def test_non_finite_steps_are_refused_from_the_first(loss, norm, words):
    guard = Guard(CONFIG)
    verdict = guard.judge(loss, norm)
    assert not verdict.ok
    assert words in verdict.reason
    assert list(guard.good_norms) == []


def test_a_spike_is_measured_against_the_median_of_good_norms():
    guard = _fed([1.0, 3.0, 2.0])
    assert guard.judge(1.0, 8.0).ok
    verdict = _fed([1.0, 3.0, 2.0]).judge(1.0, 8.001)
    assert not verdict.ok
    assert "8.001" in verdict.reason
    assert "median 2" in verdict.reason


def test_spikes_are_allowed_before_min_history_and_never_enter_the_history():
    assert _fed([1.0, 1.0]).judge(1.0, 1000.0).ok
    guard = _fed([1.0, 1.0, 1.0])
    assert not guard.judge(1.0, 100.0).ok
    assert list(guard.good_norms) == [1.0, 1.0, 1.0]


def test_the_window_forgets():
    guard = _fed([1.0, 1.0, 1.0, 3.9, 3.9, 3.9, 3.9, 3.9])
    assert guard.judge(1.0, 15.0).ok


def test_spike_factor_has_an_effect():
    wide = GuardConfig(spike_factor=50.0, window=5, min_history=3)
    assert _fed([1.0] * 3, wide).judge(1.0, 30.0).ok
    assert not _fed([1.0] * 3).judge(1.0, 30.0).ok


def test_too_many_in_a_row_stop_with_advice_and_a_good_step_resets_the_count():
    guard = _fed([1.0] * 3)
    for _ in range(3):
        assert not guard.judge(math.nan, 1.0).ok
        assert not guard.judge(1.0, 99.0).ok
        assert guard.judge(1.0, 1.0).ok
    assert guard.num_skips == 6
    guard.judge(math.nan, 1.0)
    guard.judge(math.nan, 1.0)
    with pytest.raises(TrainingError, match=r"3 steps in a row.*optim\.lr"):
        guard.judge(math.nan, 1.0)


def test_advice_for_spikes_names_the_knob():
    guard = _fed([1.0] * 3)
    guard.judge(1.0, 99.0)
    guard.judge(1.0, 99.0)
    with pytest.raises(TrainingError, match=r"guard\.spike_factor"):
        guard.judge(1.0, 99.0)


def test_state_round_trips_through_json():
    guard = _fed([0.1, 0.7, 1 / 3])
    guard.judge(math.nan, 1.0)
    other = Guard(CONFIG)
    other.load(json.loads(json.dumps(guard.state())))
    assert other.state() == guard.state()
    for norm in (0.5, 9.0, 0.2, 0.2, 0.2, 0.9):
        assert other.judge(1.0, norm) == guard.judge(1.0, norm)


def test_steps_without_a_gradient_are_fine_and_measure_nothing():
    """Rollouts of dead groups have a norm of exactly zero."""
    guard = _fed([1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 3.0, *[0.0] * 9, 2.5])
    assert list(guard.good_norms) == [1.0, 2.0, 3.0, 2.5]
    assert not guard.judge(1.0, 9.1).ok
    assert guard.judge(1.0, 0.0).ok
    assert guard.skips_in_a_row == 0
    again = Guard(CONFIG)
    again.load({"good_norms": [0.0, 0.0, 0.0, 1.0], "skips_in_a_row": 0, "num_skips": 0})
    assert again.judge(1.0, 100.0).ok
