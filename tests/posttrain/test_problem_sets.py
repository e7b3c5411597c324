"""Problems for training, sampling and measuring: true answers, and nothing in common."""

import json

import pytest

from stepwell.posttrain.problem_sets import Sizes, chain_sums, gym_problems
from stepwell.posttrain.verifiers.exact import exact
from stepwell.posttrain.verifiers.gym import gym
from stepwell.types import ConfigError

SIZES = Sizes(sft=60, prompts=40, heldout=20)


def questions(rows):
    return [row["prompt"][0]["content"] for row in rows]


def numbers(question):
    """What a chain is made of, whatever its order: signed terms."""
    words = question.rpartition(":")[2].replace("=", "").split()
    signed = [words[0], *("".join(words[i : i + 2]) for i in range(1, len(words), 2))]
    return tuple(sorted(int(word) for word in signed))


def test_chain_sums_are_true_and_in_one_part_only():
    parts = chain_sums(SIZES, (3, 5), 0.33, seed=1)
    assert {part: len(rows) for part, rows in parts.items()} == {
        "sft": 60,
        "prompts": 40,
        "heldout": 20,
    }
    keys = [numbers(question) for rows in parts.values() for question in questions(rows)]
    assert len(set(keys)) == len(keys) == 120
    for rows in parts.values():
        for row in rows:
            assert sum(numbers(questions([row])[0])) == int(row["answer"])
    for row in parts["sft"]:
        text = row["completion"][0]["content"]
        assert exact([""], [text], answer=[row["answer"]]) == [1.0]
    for part in ("prompts", "heldout"):
        assert not any("completion" in row for row in parts[part])
    assert parts == chain_sums(SIZES, (3, 5), 0.33, seed=1)
    assert parts != chain_sums(SIZES, (3, 5), 0.33, seed=2)


@pytest.mark.parametrize(("worked", "shown"), [(0.0, 0), (0.33, 19), (0.5, 30), (1.0, 60)])
def test_the_share_of_worked_completions(worked, shown):
    rows = chain_sums(SIZES, (3, 5), worked, seed=0)["sft"]
    assert sum("\n" in row["completion"][0]["content"] for row in rows) == shown


def test_what_is_no_number_is_near_no_share():
    with pytest.raises(ConfigError, match="worked=nan must be a share from 0 to 1$"):
        chain_sums(SIZES, (3, 5), float("nan"), seed=0)


@pytest.mark.parametrize("worked", [-0.01, 1.01])
def test_no_share_beyond_all_or_none(worked):
    with pytest.raises(ConfigError, match="nearest legal value"):
        chain_sums(SIZES, (3, 5), worked, seed=0)


def test_the_question_takes_the_chain_once():
    rows = chain_sums(SIZES, (2, 3), 1.0, 0, "What is {}?")["sft"]
    assert all(question.startswith("What is ") for question in questions(rows))
    for question in ("What is this?", "{} or {}"):
        with pytest.raises(ConfigError, match="one {} where"):
            chain_sums(SIZES, (2, 3), 1.0, 0, question)


def test_problems_of_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    parts = gym_problems("gcd", SIZES, seed=0)
    assert [len(parts[part]) for part in ("sft", "prompts", "heldout")] == [60, 40, 20]
    asked = [question for rows in parts.values() for question in questions(rows)]
    assert len(set(asked)) == 120
    for row in json.loads(json.dumps(parts["sft"])):  # as the file has it
        (score,) = gym("gcd")([""], [row["completion"][0]["content"]], entry=[row["entry"]])
        assert score == 1.0
    with pytest.raises(ConfigError, match="not on the list"):
        gym_problems("game_of_life_halting", SIZES, seed=0)
