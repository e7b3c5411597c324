import math

import numpy as np
import pytest

from stepwell.posttrain.overoptimisation.curves import first_fall, fit, gold, peak
from stepwell.types import ConfigError, DataError


def test_known_forms_and_peaks():
    assert gold("best-of-n", 2.0, 1.5, 0.25) == pytest.approx(2 * (1.5 - 0.25 * 2))
    assert gold("rl", 2.0, 1.5, 0.25) == pytest.approx(2 * (1.5 - 0.25 * math.log(2)))
    assert gold("rl", 0.0, 1.5, 0.25) == gold("best-of-n", 0.0, 1.5, 0.25) == 0
    assert peak("best-of-n", 1.5, 0.25) == 1.5 / 0.5
    assert peak("rl", 1.5, 0.25) == pytest.approx(math.exp(1.5 / 0.25 - 1))


@pytest.mark.parametrize("form", ["best-of-n", "rl"])
def test_nothing_is_higher_than_the_peak(form):
    top = peak(form, 0.9, 0.4)
    best = gold(form, top, 0.9, 0.4)
    assert all(gold(form, top * s, 0.9, 0.4) < best for s in (0.5, 0.99, 1.01, 2.0))


@pytest.mark.parametrize("form", ["best-of-n", "rl"])
def test_planted_coefficients_are_recovered(form):
    distances = np.linspace(0.2, 5, 12)
    exact = fit(form, distances, [gold(form, d, 1.2, 0.3) for d in distances])
    assert (exact.alpha, exact.beta) == pytest.approx((1.2, 0.3))
    assert exact.turns
    assert exact.peak == pytest.approx(peak(form, 1.2, 0.3))
    rng, inside = np.random.default_rng(0), np.zeros(2)
    for _ in range(400):
        noise = rng.normal(0, 0.3, len(distances))
        found = fit(
            form,
            distances,
            [gold(form, d, 1.2, 0.3) + e for d, e in zip(distances, noise, strict=True)],
        )
        inside += [
            found.alpha_low <= 1.2 <= found.alpha_high,
            found.beta_low <= 0.3 <= found.beta_high,
        ]
        assert found.residual_sd < 1
    # 95 % of 400; four standard errors are 4.4 %.
    assert (abs(inside / 400 - 0.95) < 0.044).all()


def test_a_higher_level_has_wider_intervals_and_no_bend_is_seen():
    rng = np.random.default_rng(1)
    distances = np.linspace(0.2, 3, 10)
    straight = 0.8 * distances + rng.normal(0, 0.2, 10)
    narrow, wide = (fit("best-of-n", distances, straight, level) for level in (0.5, 0.99))
    assert wide.alpha_high - wide.alpha_low > narrow.alpha_high - narrow.alpha_low
    assert not wide.turns
    assert fit("best-of-n", distances, distances + 0.1 * distances**2).peak is None


@pytest.mark.parametrize(
    ("distances", "golds", "message"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], "4 points are too few"),
        ([1, 2, 1, 2, 1], [1, 2, 3, 4, 5], "at 2 distances"),
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], "point 0 has distance 0"),
        ([1, 2, 3, 4, 5], [1, math.nan, 3, 4, 5], "point 1"),
        ([1, 2, 3, 4, 5], [1, 2], "one for each"),
    ],
)
def test_refusals(distances, golds, message):
    with pytest.raises(DataError, match=message):
        fit("rl", distances, golds)
    assert fit("rl", [1, 2, 3, 2, 1], [1, 2, 3, 2, 1]).num_points == 5


def test_words_and_limits():
    with pytest.raises(ConfigError, match="did you mean 'best-of-n'"):
        gold("best-of-m", 1.0, 1.0, 1.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="level=1"):
        fit("rl", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], level=1.0)
    with pytest.raises(DataError, match="no highest point"):
        peak("rl", 1.0, 0.0)
    with pytest.raises(DataError, match="below 0"):
        gold("rl", -0.1, 1.0, 1.0)
    with pytest.raises(ConfigError, match="share=1"):
        first_fall([0, 1], share=1.0)


def test_the_first_fall_that_lasts():
    assert first_fall([0, 5, 10, 9.6, 9.4, 9.8, 9.0, 8.0]) == 6  # 9.4 came back
    assert first_fall([0, 5, 10, 9.5]) is None  # 5 % and no more
    assert first_fall([0, 5, 10, 9.49]) == 3
    assert first_fall([3, 2, 1]) is None  # never rose
    assert first_fall([]) is None
    assert first_fall([-10, 0, -1]) == 2
    assert first_fall([0, 10, 7], share=0.3) is None
