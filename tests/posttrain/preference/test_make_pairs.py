import pytest

from stepwell.eval.grade import Prompt, Verdict
from stepwell.posttrain.preference.make_pairs import (
    Choice,
    Counts,
    load_sources,
    pair_rows,
    sft_rows,
)
from stepwell.posttrain.rollout import Group
from stepwell.tokenizer import Tokenizer
from stepwell.types import Completion, ConfigError, DataError
from tests import runs
from tests.runs import write_rows

COLUMNS = {"answer": "3", "score": 9, "system": "x", "input": "y"}


def group(*answers: tuple[str, float | None, str]) -> Group:
    """Of (text, score, finish reason or failure)."""
    completions, verdicts = [], []
    for text, score, end in answers:
        failed = end not in ("stop", "length")
        reason = "stop" if failed else end
        completions.append(Completion(0, (1,), (2,), (0.0,), text, reason))
        verdicts.append(Verdict(score, end if failed else ""))
    return Group(Prompt("1+2=", (1,), COLUMNS), tuple(completions), tuple(verdicts))


MIXED = group(
    ("cut", 1.0, "length"),
    ("wrong", 0.0, "stop"),
    ("right", 1.0, "stop"),
    (" ", 0.0, "stop"),
    ("slow", None, "timeout"),
    ("worse", -1.0, "length"),
    ("right", 1.0, "stop"),
    ("n/a", None, "stop"),
)


def test_the_best_with_the_worst_answer():
    counts = Counts()
    rows = list(pair_rows(MIXED, "1+2=", Choice(), counts))
    assert rows == [
        {
            "prompt": "1+2=",
            "chosen": "right",
            "rejected": "worse",
            "margin": 2.0,
            "score_chosen": 1.0,
            "score_rejected": -1.0,
            "answer": "3",
        }
    ]
    assert counts.summary() == {
        "rows": 1,
        "prompts": 1,
        "dropped_prompts": {},
        "prompts_without": {},
        "answers": 8,
        "unused_answers": {"cut_off": 2, "blank": 1, "timeout": 1, "not_applicable": 1},
        "mean_score": pytest.approx(2 / 6),
        "score_range": [-1.0, 1.0],
        "right": 0.5,
    }
    (row,) = pair_rows(MIXED, "1+2=", Choice(keep_cut=True), Counts())
    assert row["chosen"] == "cut"


def test_right_with_wrong_answers():
    choice = Choice("right-wrong")
    rows = list(pair_rows(MIXED, "1+2=", choice, Counts()))
    # Equal texts are one answer; a right one that was cut off is not a wrong one either.
    assert [(r["chosen"], r["rejected"]) for r in rows] == [("right", "wrong"), ("right", "worse")]
    rows = list(pair_rows(MIXED, "1+2=", Choice("right-wrong", most=1), Counts()))
    assert [(r["chosen"], r["rejected"]) for r in rows] == [("right", "wrong")]
    rows = list(pair_rows(MIXED, "1+2=", Choice("right-wrong", keep_cut=True), Counts()))
    assert {r["chosen"] for r in rows} == {"right", "cut"}
    rows = list(pair_rows(MIXED, "1+2=", Choice("right-wrong", right_at=0.0), Counts()))
    assert {(r["chosen"], r["rejected"]) for r in rows} == {("wrong", "worse"), ("right", "worse")}


@pytest.mark.parametrize(
    ("answers", "pairing", "reason"),
    [
        ([("a", 0.0, "stop"), ("b", 0.0, "stop")], "best-worst", "tie"),
        ([("a", 1.0, "stop"), ("b", None, "error")], "best-worst", "too_few"),
        ([("a", 1.0, "length"), ("b", 0.0, "stop")], "best-worst", "cut_off"),
        ([("a", 1.0, "stop"), ("a", 0.0, "stop")], "best-worst", "same_text"),
        ([("a", 0.5, "stop"), ("b", 0.0, "stop")], "right-wrong", "all_wrong"),
        ([("a", 1.0, "stop"), ("b", 1.0, "stop")], "right-wrong", "all_right"),
    ],
)
def test_a_prompt_without_a_pair_is_counted(answers, pairing, reason):
    counts = Counts()
    assert list(pair_rows(group(*answers), "p", Choice(pairing), counts)) == []
    assert counts.without == {reason: 1}
    assert counts.prompts == 1


def test_right_answers_alone():
    counts = Counts()
    messages = [{"role": "user", "content": "1+2="}]
    rows = list(sft_rows(MIXED, messages, Choice(), counts))
    right = [{"role": "assistant", "content": "right"}]
    assert rows == [{"prompt": messages, "completion": right, "score": 1.0, "answer": "3"}]
    assert counts.without == {}
    texts = [r["completion"] for r in sft_rows(MIXED, "p", Choice(keep_cut=True), counts)]
    assert texts == ["cut", "right"]
    (row,) = sft_rows(MIXED, "p", Choice(keep_cut=True, most=1), counts)
    assert row["completion"] == "cut"
    assert list(sft_rows(group(("a", 0.98, "stop")), "p", Choice(), counts)) == []
    assert list(sft_rows(group(("a", 1.0, "length")), "p", Choice(), counts)) == []
    assert counts.without == {"none_right": 1, "cut_off": 1}
    with pytest.raises(ConfigError, match="nearest value is 1"):
        Choice(most=0)


def test_prompts_that_cannot_be_sampled_from_are_counted(tmp_path):
    world = runs.make_world(tmp_path)
    tokenizer = Tokenizer.load(world / "tokenizer")
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": ""}, {"prompt": "1" * 50}, {"x": 1}]
    write_rows(path, rows)
    length = len(tokenizer.encode("1+2=", special=False)) + (tokenizer.bos_id is not None)
    found, dropped = load_sources(path, tokenizer, length)
    assert [(prompt.text, value) for prompt, value in found] == [("1+2=", "1+2=")]
    assert found[0][0].columns == {"answer": "3"}
    assert dropped == {"bad_prompt": 2, "too_long": 1}
    with pytest.raises(DataError, match="2 x bad_prompt; the first problem: .* leaves"):
        load_sources(path, tokenizer, length - 1)
    assert len(load_sources(path, tokenizer, 500, limit=1)[0]) == 1
