import pytest

from stepwell.eval.grade import Verdict, columns_for, verify_each
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
        ("answer: .1", "1", 0.0),
        ("answer: .5", "5", 0.0),
        ("answer: 5", ".5", 0.0),
        ("answer: 0.5", ".5", 1.0),
        ("answer: -.5", "-0.50", 1.0),
        ("so it is .5.", "0.5", 1.0),
        ("answer: 1/2", "0.5", 1.0),
        ("answer: 0.5", "1/2", 1.0),
        ("answer: 1/2", "2", 0.0),
        ("1/2", "2", 0.0),
        ("answer: 1/0", "0", 0.0),
        ("so x = 1e3", "3", 0.0),
        ("so x = 1e3", "1000", 1.0),
        ("answer: 1.5e-3", "0.0015", 1.0),
        ("10^3", "3", 0.0),
        ("answer: 10^3", "3", 0.0),
        ("answer: 10^{-3}", "-3", 0.0),
        ("10^{-3}", "-3", 0.0),
        ("answer: \u22123", "-3", 1.0),
        ("answer: \u22123", "3", 0.0),
        ("so \u22123", "-3", 1.0),
        ("answer: 5-3", "-3", 0.0),
        ("5-3", "-3", 0.0),
        ("5 - 3", "3", 0.0),
        ("answer: 5 - x", "5", 0.0),
        ("answer: x - 3", "3", 0.0),
        ("answer: 2*x", "2", 0.0),
        ("answer: x2", "2", 0.0),
        ("answer: - 3", "-3", 1.0),
        ("answer: Paris or 5 or Paris", "5", 0.0),
        ("answer: either 5", "5", 0.0),
        ("answer: \\boxed{5}", "5", 1.0),
        ("so \\boxed{-5}.", "-5", 1.0),
        ("<answer>5</answer>", "5", 1.0),
        ("answer: **5**", "5", 1.0),
        ("answer: ** 5 **", "5", 1.0),
        ("answer: $5$", "5", 1.0),
        ("answer: about 5kg", "5", 1.0),
        ("answer: 50%", "50", 1.0),
        ("answer: 3x", "3", 0.0),
        ("answer: -$5", "-5", 1.0),
        ("3+4=7", "7", 1.0),
        ("3+4=7\n7-2=5\nanswer: 5", "5", 1.0),
        ("3+4=7\n7-2=5", "5", 1.0),
        ("answer: 1e99999", "1", 0.0),
        ("answer: " + "9" * 5000, "9", 0.0),
    ],
)
def test_exact(text, truth, reward):
    assert exact([""], [text], answer=[truth]) == [reward]


def test_not_applicable_is_not_zero():
    assert exact(["", ""], ["1", "2"], answer=[None, "1"]) == [None, 0.0]


def test_columns_may_be_named_like_what_a_verifier_takes():
    row = {"answer": "5", "prompts": "a", "completions": ["b"], "pattern": "c"}
    for verifier in (exact, regex("5")):
        assert verify_each(verifier, ["p"], ["answer: 5"], [row]) == [Verdict(1.0)]

    def own(questions, answers, completions):
        return [float(len(completions[0]))]

    assert verify_each(own, ["p"], ["5"], [row | {"questions": 1}])[0].failure == "error"
    assert columns_for(own, {"completions": 1, "answers": 2}) == {"completions": [1]}


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
