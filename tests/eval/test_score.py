import math

import numpy as np
import pytest

from stepwell.eval.score import accuracy, bits_per_byte, bootstrap_interval, pass_at_k, pick
from stepwell.types import ConfigError


def test_pass_at_k_known_answers():
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 3, 5) == pytest.approx(0.916667, abs=1e-6)
    assert pass_at_k(5, 0, 5) == 0
    assert pass_at_k(5, 1, 5) == 1
    assert pass_at_k(5, 5, 1) == 1


def test_pass_at_k_equals_the_share_of_all_subsets():
    import itertools

    n, c, k = 7, 2, 3
    subsets = list(itertools.combinations(range(n), k))
    share = sum(any(i < c for i in s) for s in subsets) / len(subsets)
    assert pass_at_k(n, c, k) == pytest.approx(share)


@pytest.mark.parametrize(("n", "c", "k"), [(5, 6, 1), (5, -1, 1), (5, 2, 6), (5, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(n, c, k):
    with pytest.raises(ConfigError, match=r"pass@k"):
        pass_at_k(n, c, k)


def test_bits_per_byte():
    assert bits_per_byte(-8 * math.log(2), 4) == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="at least 1"):
        bits_per_byte(-1.0, 0)


def test_bootstrap_interval_of_a_binary_score():
    values = [1.0] * 60 + [0.0] * 40
    low, high = bootstrap_interval(values, seed=1)
    half = 1.96 * math.sqrt(0.6 * 0.4 / 100)
    assert low == pytest.approx(0.6 - half, abs=0.015)
    assert high == pytest.approx(0.6 + half, abs=0.015)
    assert bootstrap_interval(values, seed=1) == (low, high)
    narrow = bootstrap_interval(values, seed=1, level=0.5)
    assert low < narrow[0] < narrow[1] < high
    assert bootstrap_interval([0.5] * 9) == (0.5, 0.5)


def test_bootstrap_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    inside = 0
    for i in range(200):
        low, high = bootstrap_interval(rng.normal(0, 1, 60).tolist(), seed=i, num_resamples=300)
        inside += low <= 0 <= high
    assert 0.88 <= inside / 200 <= 0.985


def test_a_paired_difference_uses_the_pairing():
    rng = np.random.default_rng(0)
    before = rng.normal(0, 10, 50)
    after = before + 1 + rng.normal(0, 0.1, 50)
    low, high = bootstrap_interval(after.tolist(), other=before.tolist())
    assert 0.9 < low < 1 < high < 1.1
    with pytest.raises(ConfigError, match="50 and 3"):
        bootstrap_interval(after.tolist(), other=[1, 2, 3])
    with pytest.raises(ConfigError, match="no values"):
        bootstrap_interval([])
    with pytest.raises(ConfigError, match="level"):
        bootstrap_interval([1.0], level=95)


def test_pick_and_accuracy():
    assert pick([-10.0, -12.0]) == 0
    assert pick([-10.0, -12.0], [10, 24]) == 1
    assert pick([-1.0, -1.0]) == 0
    assert accuracy([True, False, None, 0.0, 1.0]) == 0.5
    assert math.isnan(accuracy([None]))
