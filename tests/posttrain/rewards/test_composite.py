import pytest

from stepwell.eval.grade import Prompt, Verdict
from stepwell.posttrain.rewards.composite import (
    composite,
    open_rewards,
    reward_metrics,
    reward_terms,
)
from stepwell.sections.methods import GRPO
from stepwell.sections.rewards import RewardTerm
from stepwell.types import Completion, DataError


def answer(text: str, num_tokens: int = 1) -> Completion:
    return Completion(0, (1,), (2,) * num_tokens, (0.0,) * num_tokens, text, "stop")


def test_a_verifier_is_one_dimension_of_weight_1():
    rewards = open_rewards(GRPO(verifier="exact"))
    prompts = [Prompt("1+1=?", (1,), {"answer": "2"}), Prompt("?", (1,), {"answer": None})]
    verdicts = rewards.score([*prompts, prompts[0]], [answer(t) for t in ("2", "2", "3")])
    assert rewards.names == ("exact",)
    assert [v.reward for v in verdicts] == [1.0, None, 0.0]
    assert verdicts[0] == Verdict(1.0, scores={"exact": 1.0})
    assert verdicts[1] == Verdict(None, scores={"exact": None})
    rewards.check_columns(prompts)
    with pytest.raises(DataError, match=r"needs the column 'answer', which 1 of 2 rows lack"):
        rewards.check_columns([prompts[0], Prompt("?", (1,), {"anser": "1"})])


TERMS = [RewardTerm(name="a", source="exact", weight=2.0), RewardTerm(name="b", source="exact")]


@pytest.mark.parametrize(
    ("a", "b", "reward", "failure"),
    [
        (Verdict(0.5), Verdict(-1.0), 0.0, ""),
        (Verdict(0.5), Verdict(None), 1.0, ""),
        (Verdict(None), Verdict(0.0), 0.0, ""),
        (Verdict(None), Verdict(None), None, ""),
        (Verdict(0.5), Verdict(None, "timeout", "slow"), None, "timeout"),
        (Verdict(None, "error", "x"), Verdict(1.0), None, "error"),
    ],
)
def test_composite(a, b, reward, failure):
    got = composite(TERMS, [a, b])
    assert (got.reward, got.failure) == (reward, failure)
    assert got.scores == {"a": a.reward, "b": b.reward}
    assert got.failures == {n: v.failure for n, v in (("a", a), ("b", b)) if v.failure}


def test_bounds_are_before_the_weight():
    terms = tuple(
        RewardTerm(name=name, source="exact", weight=10.0, low=low, high=high)
        for name, low, high in (("none", None, None), ("low", 0.25, None), ("high", None, 0.75))
    )
    rewards = open_rewards(GRPO(rewards=terms))
    prompt = Prompt("", (1,), {"answer": "2"})
    wrong, right = rewards.score([prompt] * 2, [answer("1"), answer("2")])
    assert wrong.scores == {"none": 0.0, "low": 0.25, "high": 0.0}
    assert right.scores == {"none": 1.0, "low": 1.0, "high": 0.75}
    assert (wrong.reward, right.reward) == (2.5, 27.5)


def test_metrics_of_each_dimension():
    verdicts = [
        composite(TERMS, pair)
        for pair in (
            [Verdict(1.0), Verdict(None)],
            [Verdict(0.0), Verdict(None, "timeout")],
            [Verdict(None), Verdict(None, "error")],
        )
    ]
    assert reward_metrics(("a", "b"), verdicts) == {
        "reward/a/mean": 0.5,
        "reward/a/timeouts": 0,
        "reward/a/errors": 0,
        "reward/a/not_applicable": 1,
        "reward/b/timeouts": 1,
        "reward/b/errors": 1,
        "reward/b/not_applicable": 1,
    }


def test_terms_come_before_the_verifier():
    assert [t.name for t in reward_terms(GRPO(rewards=tuple(TERMS), verifier="exact"))] == [
        "a",
        "b",
    ]
