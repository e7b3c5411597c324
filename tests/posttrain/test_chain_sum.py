"""The chain-sum task: right answers, and splits that cannot leak."""

import random

import pytest

from stepwell.posttrain.chain_sum import Problem, overlap, problems
from stepwell.posttrain.verifiers.exact import exact
from stepwell.types import ConfigError


def test_known_chain():
    problem = Problem((7, 5, -9, 3))
    assert problem.prompt == "7+5-9+3=?"
    assert problem.completion() == "7+5=12\n12-9=3\n3+3=6\nanswer: 6"
    assert problem.completion(worked=False) == "answer: 6"
    assert problem.answer == 6
    assert problem.row(worked=False)["completion"][0]["content"] == "answer: 6"


def test_every_step_and_answer_is_true():
    for problem in problems(300, "train", seed=0):
        *steps, last = problem.completion().splitlines()
        for step in steps:
            left, right = step.split("=")
            assert eval(left) == int(right) >= 0
        assert last == f"answer: {eval(problem.prompt.removesuffix('=?'))}"
        assert exact([problem.prompt], [problem.completion()], answer=[str(problem.answer)]) == [1]


def test_splits_do_not_meet_in_any_order_of_the_numbers():
    train, heldout = problems(3000, "train", 0), problems(300, "heldout", 1)
    assert overlap(train, heldout) == set()
    assert len({p.key for p in train}) == 3000
    shuffled = random.Random(0)
    for problem in heldout:
        terms = list(problem.terms)
        shuffled.shuffle(terms)
        assert Problem(tuple(terms)).split() == "heldout"
    assert overlap(train, [train[5]]) == {train[5].key}


def test_same_seed_same_problems_and_lengths_in_range():
    assert problems(50, "train", 3) == problems(50, "train", 3)
    assert problems(50, "train", 3) != problems(50, "train", 4)
    assert {len(p.terms) for p in problems(200, "train", 0, (2, 4))} == {2, 3, 4}


@pytest.mark.parametrize("num_terms", [(1, 3), (5, 4)])
def test_impossible_lengths_are_refused(num_terms):
    with pytest.raises(ConfigError, match="2 <= fewest"):
        problems(1, "train", 0, num_terms)


def test_too_many_problems_are_refused():
    with pytest.raises(ConfigError, match="found only"):
        problems(1000, "heldout", 0, (2, 2))
