import math

import pytest

from stepwell.posttrain.policy.advantages import KINDS, dead_share, group_advantages, is_dead
from stepwell.types import ConfigError, DataError


@pytest.mark.parametrize(
    ("rewards", "kind", "expected"),
    [
        ([1, 0, 0, 0], "std", [1.5, -0.5, -0.5, -0.5]),
        ([1, 0, 0, 0], "population-std", [3**0.5, *[-(3**-0.5)] * 3]),
        ([1, 0, 0, 0], "none", [0.75, -0.25, -0.25, -0.25]),
        ([1, 0, 0, 0], "leave-one-out", [1, -1 / 3, -1 / 3, -1 / 3]),
        ([1, 0, 0, 0], "maxrl", [3, -1, -1, -1]),
        ([1, 1, 1, 0], "maxrl", [1 / 3, 1 / 3, 1 / 3, -1]),
        ([0, 1], "std", [-(0.5**0.5), 0.5**0.5]),
        ([2.0, 4.0, 6.0], "std", [-1, 0, 1]),
        ([2.0, 4.0, 6.0], "none", [-2, 0, 2]),
        ([2.0, 4.0, 6.0], "leave-one-out", [-3, 0, 3]),
    ],
)
def test_known_answers_within_a_group(rewards, kind, expected):
    assert group_advantages([rewards], kind)[0] == pytest.approx(expected, abs=1e-12)
    # Other groups of the rollout change nothing.
    assert group_advantages([[5, 2], rewards], kind)[1] == pytest.approx(expected, abs=1e-12)


def test_known_answers_over_the_batch():
    """All rewards 1,0,0,0,1,1,0,2: their mean is 5/8, their sample variance 31/56."""
    groups = [[1, 0, 0, 0], [1, 1, 0, 2]]
    deviation = math.sqrt(31 / 56)
    expected = [[(r - 5 / 8) / deviation for r in group] for group in groups]
    for found, wanted in zip(group_advantages(groups, "reinforce++"), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-12)
    expected = [[(r - sum(g) / 4) / deviation for r in g] for g in groups]
    for found, wanted in zip(group_advantages(groups, "batch-std"), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e-30, None])
def test_equal_rewards_give_exactly_zero(kind, reward):
    """Also those whose mean rounds: 0.1 three times has a mean of not quite 0.1."""
    assert group_advantages([[reward] * 3], kind) == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("kind", ["std", "population-std", "none", "batch-std", "leave-one-out"])
def test_a_dead_group_beside_a_living_one_gets_exactly_zero(kind):
    assert group_advantages([[0.1] * 3, [1, 0, 0]], kind)[0] == [0.0] * 3


def test_rounding_is_no_difference_and_a_small_difference_is():
    assert group_advantages([[0.1 + 0.2, 0.3]], "std") == [[0.0, 0.0]]
    assert group_advantages([[1.0, 1.0 + 1e-6]], "std")[0] == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_none_is_left_out_and_zero_is_a_score():
    assert group_advantages([[1.0, None, 0.0]], "none") == [[0.5, 0.0, -0.5]]
    assert group_advantages([[None, 1.0, None]], "std") == [[0.0, 0.0, 0.0]]
    found = group_advantages([[1, 0, 0, 0, None]], "std")[0]
    assert found == pytest.approx([1.5, -0.5, -0.5, -0.5, 0])
    assert group_advantages([[1, None], [0, None]], "reinforce++") == [
        pytest.approx([0.5**0.5, 0]),
        pytest.approx([-(0.5**0.5), 0]),
    ]


def test_advantages_sum_to_zero_and_have_unit_sample_deviation():
    values = group_advantages([[0.3, 1.7, -2.0, 0.9, 5.5]], "std")[0]
    assert sum(values) == pytest.approx(0, abs=1e-12)
    assert sum(v * v for v in values) / 4 == pytest.approx(1)


def test_what_cannot_be_is_refused():
    for kind in KINDS:
        if kind != "reinforce++":
            with pytest.raises(ConfigError, match="a group has 1 answers"):
                group_advantages([[1.0]], kind)
    assert group_advantages([[1.0], [0.0]], "reinforce++")[0] == [pytest.approx(0.5**0.5)]
    with pytest.raises(ConfigError, match="'population' is unknown .did you mean 'population-std'"):
        group_advantages([[1.0, 0.0]], "population")
    with pytest.raises(DataError, match="a reward is nan"):
        group_advantages([[1.0, math.nan]], "std")
    with pytest.raises(DataError, match="a reward of -0.5 cannot be"):
        group_advantages([[1.0, -0.5]], "maxrl")


def test_dead_groups_are_those_that_teach_nothing():
    assert dead_share([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [None, 1.0]]) == 0.75
    assert dead_share([]) == 0.0
    assert is_dead([None, None])
    assert not is_dead([0.0, None, 1.0])
