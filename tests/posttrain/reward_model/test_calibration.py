"""Chances and what came true."""

import math

import numpy as np
import pytest

from stepwell.posttrain.reward_model.calibration import (
    calibration_error,
    fit_temperature,
    pair_chances,
    reliability_table,
)
from stepwell.types import ConfigError, DataError


def test_a_known_table():
    chances = [0.05, 0.1, 0.15, 0.9, 1.0, 0.0]
    table = reliability_table(chances, [0, 1, 0, 1, 1, 0])
    assert [row.count for row in table] == [3, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert table[0].chance == pytest.approx(0.05)
    assert table[0].frequency == pytest.approx(1 / 3)
    assert math.isnan(table[2].chance)
    wanted = (3 * (1 / 3 - 0.05) + 0.15 + 0.1 + 0.0) / 6
    assert calibration_error(table) == pytest.approx(wanted)
    assert calibration_error(reliability_table([0.5, 0.5], [0, 1])) == 0
    assert math.isnan(calibration_error(reliability_table([], [])))


def test_what_a_table_refuses():
    for chances in ([1.1], [-0.1], [math.nan]):
        with pytest.raises(DataError, match="lie in"):
            reliability_table(chances, [1])
    with pytest.raises(DataError, match="1 chances and 2 outcomes"):
        reliability_table([0.5], [1, 0])
    with pytest.raises(ConfigError, match="at least 1"):
        reliability_table([0.5], [1], num_bins=0)
    assert reliability_table([0.5], [1], num_bins=1)[0].count == 1


def test_the_temperature_that_made_the_pairs_is_found():
    """Winners drawn at temperature T make overconfident scores; the fit calibrates them."""
    rng = np.random.default_rng(0)
    for true in (0.5, 1.0, 3.0):
        gap = rng.normal(size=40_000) * 2
        first_wins = rng.random(len(gap)) < pair_chances(gap, true)
        margins = np.where(first_wins, gap, -gap)
        found = fit_temperature(margins)
        assert found == pytest.approx(true, rel=0.05)
        before, after = (
            calibration_error(reliability_table(pair_chances(gap, t), first_wins))
            for t in (1.0, found)
        )
        assert after < 0.01
        assert after < before or true == 1.0

        def loss(t, margins=margins):
            return np.logaddexp(0, -margins / t).mean()

        assert loss(found) < min(loss(found * 1.02), loss(found / 1.02))


def test_where_no_temperature_is_best():
    with pytest.raises(DataError, match="lower temperature"):
        fit_temperature([1.0, 2.0, 3.0])
    with pytest.raises(DataError, match="do not tell the chosen"):
        fit_temperature([1.0, -2.0])
    for margins in ([], [math.nan, 1.0]):
        with pytest.raises(DataError, match="finite margins"):
            fit_temperature(margins)
    assert fit_temperature([2.0, -1.0]) > 0
    with pytest.raises(ConfigError, match="above 0"):
        pair_chances([1.0], 0.0)
