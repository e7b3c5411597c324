import random

import pytest
from tests.global_steps import plain_documents, run_step

from stepwell.data.dedup.exact import ExactDedup, exact_dedup, normalise
from stepwell.types import Document, Dropped


def run(*texts):
    return list(exact_dedup(Document(str(i), text, "s") for i, text in enumerate(texts)))


def kept(items) -> list[str]:
    return [item.id for item in items if isinstance(item, Document)]


def test_first_of_equals_stays():
    items = run("A", "A", "A", "B")
    assert kept(items) == ["0", "3"]
    assert items[1] == Dropped("1", "s", "exact_duplicate", "of 0")
    assert kept(run("Short text", "Short text")) == ["0"]


def test_integer_id_zero_survives():
    items = list(exact_dedup([Document(0, "x", "s"), Document(1, "x", "s")]))  # type: ignore[arg-type]
    assert items[0] == Document(0, "x", "s")  # type: ignore[arg-type]
    assert isinstance(items[1], Dropped)
    assert items[1].detail == "of 0"


def test_blank_documents_are_counted_apart():
    reasons = [item.reason for item in run("", " \n\t", "\u00a0") if isinstance(item, Dropped)]
    assert reasons == ["blank"] * 3


def test_what_counts_as_equal():
    assert kept(run("a  b\r\n", "a b", "A b", "cafe\u0301", "caf\u00e9", "ab")) == [
        "0",
        "2",
        "3",
        "5",
    ]
    assert normalise(" a\n\n b\u3000c ") == "a b c"


def test_three_paragraphs_of_one_document_stay():
    text = "one\n\none\n\none"
    assert run(text) == [Document("0", text, "s")]


def test_dropped_pass_through():
    gone = Dropped("x", "s", "why")
    assert list(exact_dedup([gone])) == [gone]


def test_lone_surrogates_do_not_stop_the_stream():
    assert kept(run("\ud800", "\ud800")) == ["0"]


def test_the_step_keeps_one_of_equals_and_names_it(tmp_path):
    result = run_step(ExactDedup(), plain_documents("A", "A", "A", "B", " \n"))
    assert result.kept_ids == ["0", "3"]
    assert {(r["id"], r["reason"], r["witness"]) for r in result.removed} == {
        ("1", "exact_duplicate", "s/0"),
        ("2", "exact_duplicate", "s/0"),
        ("4", "blank", ""),
    }
    assert {row["step"] for row in result.removed} == {"exact-dedup"}
    assert result.summary["num_removed"] == 2
    assert result.summary["num_blank"] == 1
    assert result.summary["cluster_sizes"] == {"3": 1}


def test_the_step_counts_as_equal_what_normalises_alike(tmp_path):
    docs = plain_documents("a  b\r\n", "a b", "A b", "cafe\u0301", "caf\u00e9", "ab")
    result = run_step(ExactDedup(), docs)
    # White space makes none of them longer; an accent of its own is a character.
    assert result.kept_ids == ["0", "2", "3", "5"]
    shortest = run_step(ExactDedup(survivor=("shortest",)), docs)
    assert shortest.kept_ids == ["0", "2", "4", "5"]


@pytest.mark.parametrize("num_shards", [1, 7, 64])
def test_the_step_gives_the_same_for_any_shards_and_order(tmp_path, num_shards):
    rng = random.Random(0)
    docs = [Document(str(i), f"text {rng.randrange(40)}", rng.choice("ab")) for i in range(100)]
    whole = run_step(ExactDedup(), docs, batch_docs=100)
    assert len(whole.rows) == len({doc.text for doc in docs})
    rng.shuffle(docs)
    other = run_step(ExactDedup(), docs, num_shards)
    assert other.removals == whole.removals
    assert other.summary == whole.summary


def test_no_documents(tmp_path):
    result = run_step(ExactDedup(), [])
    assert result.rows == result.removed == []
