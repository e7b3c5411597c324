"""Steps of an answer, their labels, and one reward of several scores."""

import random

import pytest

from stepwell.data.preference import IGNORED
from stepwell.posttrain.reward_model.prm import (
    aggregate,
    first_error,
    hard_labels,
    rollout_labels,
    split_steps,
)
from stepwell.types import ConfigError, DataError


@pytest.mark.parametrize(
    ("how", "wanted"), [("product", 0.36), ("min", 0.5), ("last", 0.5), ("mean", 0.7333333333)]
)
def test_aggregations_of_known_steps(how, wanted):
    assert aggregate([0.9, 0.8, 0.5], how) == pytest.approx(wanted)
    assert aggregate([0.4], how) == 0.4
    if how in ("product", "min", "mean"):
        assert aggregate([0.5, 0.8, 0.9], how) == pytest.approx(wanted)
    else:
        assert aggregate([0.5, 0.8, 0.9], how) == 0.9


def test_nothing_and_unknown_words_are_refused():
    with pytest.raises(DataError, match="without a step"):
        aggregate([], "min")
    with pytest.raises(ConfigError, match="did you mean 'product'"):
        aggregate([0.5], "produkt")  # type: ignore[arg-type]


def test_the_first_error():
    assert first_error([0.9, 0.5, 0.49, 0.1]) == 2
    assert first_error([0.9, 0.5]) is None
    assert first_error([0.9, 0.5], threshold=0.6) == 1


def test_hard_labels_judge_nothing_after_a_mistake():
    assert hard_labels(4, 1) == [1, 0, IGNORED, IGNORED]
    assert hard_labels(3, 2) == [1, 1, 0]
    assert hard_labels(3, None) == [1, 1, 1]
    for wrong, near in ((3, 2), (-1, 0)):
        with pytest.raises(DataError, match=f"the nearest is {near}"):
            hard_labels(3, wrong)


def test_labels_from_what_follows_a_step():
    outcomes = [[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert rollout_labels(outcomes) == [0.5, 0.25, 0.0]
    assert rollout_labels(outcomes, "hard") == [1.0, 1.0, 0.0]
    with pytest.raises(DataError, match="step 1 has no completions"):
        rollout_labels([[1], []])
    with pytest.raises(DataError, match=r"the outcome 1\.5"):
        rollout_labels([[1.5]])


def test_steps_joined_are_the_answer():
    assert split_steps("a\nb\n") == ["a\n", "b\n"]
    assert split_steps("a\n\n\nb", "\n") == ["a\n\n\n", "b"]
    assert split_steps("one\n\ntwo\nlines\n\n", "\n\n") == ["one\n\n", "two\nlines\n\n"]
    assert split_steps("\n\na\nb") == ["\n\na\n", "b"]
    assert split_steps("a.b", ".") == ["a.", "b"]
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("ab\n ") for _ in range(rng.randint(1, 12)))
        if not text.strip():
            with pytest.raises(DataError, match="blank"):
                split_steps(text)
            continue
        for separator in ("\n", "\n\n", "b"):
            steps = split_steps(text, separator)
            assert "".join(steps) == text
            assert all(step.strip() for step in steps)
    with pytest.raises(ConfigError, match="separator"):
        split_steps("a", "")
