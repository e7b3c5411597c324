import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.data.decontam.test_scan import ITEMS, PASSAGE, QUESTION

from stepwell.data.batches import Outcome, to_batch
from stepwell.data.decontam.benchmarks import Benchmark, Item
from stepwell.data.decontam.index import build_index, open_index
from stepwell.data.decontam.report import contamination_report
from stepwell.data.decontam.step import LABEL, Decontaminate
from stepwell.types import DataError, Document

TEXTS = {
    "clean": "Nothing to see here, only a walk along the river and back home again.",
    "asked": QUESTION.upper().replace(" ", "\r\n"),
    "solved": f"{QUESTION} twelve barrels",
    "public": PASSAGE,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("index") / "index"
    build_index([Benchmark("set", "sha", True, ITEMS)], folder)
    return str(folder)


def batch(texts: dict[str, str] = TEXTS):
    return to_batch([Document(name, text, "web") for name, text in texts.items()], 5)


def reasons(outcome: Outcome) -> dict[str, str]:
    return {row["id"]: row["reason"] for row in outcome.removed.to_pylist()}


def test_questions_go_and_public_passages_stay(folder):
    outcome = Decontaminate(index=folder)(batch())
    assert reasons(outcome) == {
        "asked": "contaminated_question",
        "solved": "contaminated_question_answer",
    }
    asked = outcome.removed.to_pylist()[0]
    assert asked["witness"] == "set/q"
    assert asked["step"] == "decontaminate"
    assert asked["text"] == TEXTS["asked"]
    assert "100% of the question in 8-grams" in asked["detail"]
    kept = {row["id"]: row[LABEL] for row in outcome.kept.to_pylist()}
    assert kept["clean"] is None
    assert json.loads(kept["public"]) == [{"item": "set/p", "part": "passage", "share": 1.0}]


@pytest.mark.parametrize(
    ("on", "gone"),
    [
        ("question", {"asked", "solved"}),
        ("question+answer", {"solved"}),
        ("any", {"asked", "solved", "public"}),
    ],
)
def test_on(folder, on, gone):
    outcome = Decontaminate(index=folder, on=on)(batch())
    assert set(reasons(outcome)) == gone
    if on == "any":
        assert reasons(outcome)["public"] == "contaminated_passage"
    labelled = {row["id"] for row in outcome.kept.to_pylist() if row[LABEL]}
    assert labelled == {"asked", "solved", "public"} - gone


def test_action_report_only_labels(folder):
    outcome = Decontaminate(index=folder, action="report")(batch())
    assert outcome.removed.num_rows == 0
    rows = outcome.kept.to_pylist()
    assert [r["id"] for r in rows if r[LABEL]] == ["asked", "solved", "public"]


def test_a_second_step_keeps_what_the_first_one_labelled(folder, tmp_path):
    other = Item("o", "Which of the seven bridges over the river was built last of all?")
    build_index([Benchmark("other", "sha", True, (other,))], tmp_path / "other")
    texts = {**TEXTS, "both": f"{PASSAGE} {other.question}"}
    first = Decontaminate(index=folder, action="report")
    second = Decontaminate(index=str(tmp_path / "other"), action="report")
    kept = second(first(batch(texts)).kept).kept
    items = {
        row["id"]: [hit["item"] for hit in json.loads(row[LABEL] or "[]")]
        for row in kept.to_pylist()
    }
    assert items == {
        "clean": [], "asked": ["set/q"], "solved": ["set/q"], "public": ["set/p"],
        "both": ["set/p", "other/o"],
    }  # fmt: skip
    report = contamination_report([], open_index(folder), [kept])
    assert report["documents"]["kept"] == 4


def test_rule_and_min_share(folder):
    half = {"half": " ".join(QUESTION.split()[:14])}
    assert set(reasons(Decontaminate(index=folder)(batch(half)))) == {"half"}
    assert not reasons(Decontaminate(index=folder, rule="llama3")(batch(half)))
    assert not reasons(Decontaminate(index=folder, min_share=0.6)(batch(half)))
    loose = Decontaminate(index=folder, rule="llama3", min_share=0.5)
    assert set(reasons(loose(batch(half)))) == {"half"}


def test_what_is_refused(folder, tmp_path):
    with pytest.raises(ValidationError, match="must be a folder that"):
        Decontaminate(index=" ")
    with pytest.raises(ValidationError):
        Decontaminate(index=folder, min_share=1.5)
    with pytest.raises(DataError, match="decontam-index"):
        Decontaminate(index=str(tmp_path))(batch())


def test_empty_batches(folder):
    outcome = Decontaminate(index=folder)(batch().slice(0, 0))
    assert (outcome.kept.num_rows, outcome.removed.num_rows) == (0, 0)
    assert LABEL in outcome.kept.schema.names


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 40), max_size=6))
def test_batches_cut_anyhow_give_the_same(folder, seed, cuts):
    rng = random.Random(seed)
    docs = [Document(str(i), rng.choice(list(TEXTS.values())), "web") for i in range(40)]
    whole = to_batch(docs, 0)
    step = Decontaminate(index=folder)
    expected = step(whole)
    edges = sorted({0, 40, *cuts})
    parts = [step(whole.slice(a, b - a)) for a, b in pairwise(edges)]
    kept = [row for part in parts for row in part.kept.to_pylist()]
    removed = [row for part in parts for row in part.removed.to_pylist()]
    assert kept == expected.kept.to_pylist()
    assert removed == expected.removed.to_pylist()
    report = contamination_report([expected.removed], open_index(folder), [expected.kept])
    split = contamination_report(
        [p.removed for p in parts], open_index(folder), [p.kept for p in parts]
    )
    assert split == report
