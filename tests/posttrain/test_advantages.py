import pytest

from stepwell.posttrain.advantages import dead_share, group_advantages, token_weight
from stepwell.types import ConfigError


@pytest.mark.parametrize(
    ("rewards", "kind", "expected"),
    [
        ([1, 0, 0, 0], "std", [1.5, -0.5, -0.5, -0.5]),
        ([1, 0, 0, 0], "none", [0.75, -0.25, -0.25, -0.25]),
        ([0, 1], "std", [-(0.5**0.5), 0.5**0.5]),
        ([2.0, 4.0, 6.0], "std", [-1, 0, 1]),
        ([2.0, 4.0, 6.0], "none", [-2, 0, 2]),
    ],
)
def test_known_answers(rewards, kind, expected):
    assert group_advantages(rewards, kind) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["std", "none"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e-30, None])
def test_equal_rewards_give_exactly_zero(kind, reward):
    """Also those whose mean rounds: 0.1 three times has a mean of not quite 0.1."""
    assert group_advantages([reward] * 3, kind) == [0.0, 0.0, 0.0]


def test_none_is_left_out_and_zero_is_a_score():
    assert group_advantages([1.0, None, 0.0], "none") == [0.5, 0.0, -0.5]
    assert group_advantages([None, 1.0, None], "std") == [0.0, 0.0, 0.0]
    assert group_advantages([1, 0, 0, 0, None], "std") == pytest.approx([1.5, -0.5, -0.5, -0.5, 0])


def test_advantages_sum_to_zero_and_have_unit_sample_deviation():
    values = group_advantages([0.3, 1.7, -2.0, 0.9, 5.5], "std")
    assert sum(values) == pytest.approx(0, abs=1e-12)
    assert sum(v * v for v in values) / 4 == pytest.approx(1)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="a group has 1 answers"):
        group_advantages([1.0], "std")
    with pytest.raises(ConfigError, match="'population' is unknown"):
        group_advantages([1.0, 0.0], "population")
    with pytest.raises(ConfigError, match="'row' is unknown"):
        token_weight(3, "row")


def test_token_weights():
    assert token_weight(4, "token") == 1.0
    assert token_weight(4, "sequence") == 0.25


def test_dead_groups_are_those_that_teach_nothing():
    assert dead_share([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [None, 1.0]]) == 0.75
    assert dead_share([]) == 0.0
