import pytest

from stepwell.posttrain.verifiers.exact import exact, regex
from stepwell.posttrain.verifiers.find import find_verifier
from stepwell.posttrain.verifiers.gym import gym, gym_rows
from stepwell.types import ConfigError


@pytest.mark.parametrize(
    ("text", "truth", "reward"),
    [
        ("steps\nanswer: 42", "42", 1.0),
        ("answer: 41\nno, wait\nanswer: 42", "42", 1.0),
        ("answer: 42\nanswer: 41", "42", 0.0),
        ("The answer is 1,204.0.", "1204", 1.0),
        ("Answer = -7", "-7", 1.0),
        ("answer: 7", "-7", 0.0),
        ("3 + 4 gives 7", "7", 1.0),
        ("answer: 3+4=7", "7", 1.0),
        ("answer: 7 or 8", "7", 0.0),
        ("answer: 7 apples", "7", 1.0),
        ("The answer is  Paris. ", "paris", 1.0),
        ("answer: Lyon", "Paris", 0.0),
        ("", "0", 0.0),
        ("answer:", "0", 0.0),
        ("answer: 007", "7", 1.0),
        ("answer: $3.50", "3.5", 1.0),
        ("answer: 4" + "2" * 40, "42", 0.0),
    ],
)
def test_exact(text, truth, reward):
    assert exact([""], [text], answer=[truth]) == [reward]


def test_not_applicable_is_not_zero():
    assert exact(["", ""], ["1", "2"], answer=[None, "1"]) == [None, 0.0]


def test_regex():
    assert regex("<think>.*</think>")(["", ""], ["<think>\nx</think>", "x"]) == [1.0, 0.0]
    with pytest.raises(ConfigError, match="not a regular expression"):
        find_verifier("regex:(")


def test_find_verifier_names_the_nearest():
    assert find_verifier("exact") is exact
    assert find_verifier("regex:^a")([""], ["ab"]) == [1.0]
    with pytest.raises(ConfigError, match="did you mean 'exact'"):
        find_verifier("exakt")
    with pytest.raises(ConfigError, match="did you mean 'chain_sum'"):
        find_verifier("gym:chainsum")
    with pytest.raises(ConfigError, match="credit"):
        find_verifier("gym:game_of_life_halting")


def test_gym_gives_all_or_nothing():
    pytest.importorskip("reasoning_gym")
    rows = gym_rows("chain_sum", 5, seed=1)
    assert rows == gym_rows("chain_sum", 5, seed=1)
    verify, entries = gym("chain_sum"), [r["entry"] for r in rows]
    prompts = [r["prompt"] for r in rows]
    right = [f"so the answer is {r['answer']}" for r in rows]
    assert verify(prompts, right, entry=entries) == [1.0] * 5
    junk = [f"{r['answer']} or 5 or 6" for r in rows]  # some scorers give this a part
    assert verify(prompts, junk, entry=entries) == [0.0] * 5
    assert verify(prompts, [""] * 5, entry=entries) == [0.0] * 5
