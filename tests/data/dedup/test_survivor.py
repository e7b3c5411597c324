import json
import math

import pyarrow as pa
import pytest
from tests.global_steps import plain_documents, run_step

from stepwell.data.batches import to_batch
from stepwell.data.dedup.exact import ExactDedup
from stepwell.data.dedup.fuzzy import FuzzyDedup
from stepwell.data.dedup.semantic import SemanticDedup
from stepwell.data.dedup.survivor import number, rank_columns, timestamp
from stepwell.types import DataError, Document

STEPS = (ExactDedup, FuzzyDedup, SemanticDedup)
TEXT = " ".join(f"w{i}" for i in range(60))
NEW_YEAR = 1704067200.0  # of 2024


def copies(*metas: dict) -> list[Document]:
    return [Document(str(i), TEXT, "s", meta) for i, meta in enumerate(metas)]


@pytest.mark.parametrize(
    "value",
    [2024, 2024.0, "2024", " 2024-01 ", "2024-01-01", "20240101", "2024-01-01T01:00+01:00",
     1704067200, "1704067200", "1704067200.0"],
)  # fmt: skip
def test_dates(value):
    assert timestamp(value) == NEW_YEAR


def test_years_and_seconds_part_at_1000_and_9999():
    assert (timestamp(999), timestamp(10_000)) == (999, 10_000)
    assert timestamp(1000) == timestamp("1000-01-01")
    assert timestamp(9999) == timestamp("9999-01-01")
    assert timestamp(2024.5) == 2024.5


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), "9" * 400, math.nan, math.inf, -math.inf, "nan", "inf", True, None, [],
     {}, "", "soon", "2024-13-01", "1_000"],
)  # fmt: skip
def test_what_is_no_date(value):
    assert timestamp(value) is None


def test_numbers():
    assert [number(v) for v in (3, 2.5, "0.75", "-1")] == [3, 2.5, 0.75, -1]
    assert [number(v) for v in (True, "high", math.nan, "nan", 10**400, None)] == [None] * 6


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_of_any_length_stops_nothing(digits):
    docs = to_batch(copies({"date": 0, "quality": 1}, {"date": 1, "quality": 2}), 0)
    meta = pa.array([f'{{"date": 1{"0" * digits}, "quality": 1{"0" * digits}}}', docs["meta"][1]])
    batch = docs.set_column(4, "meta", meta.cast(pa.string()))
    columns = rank_columns(batch, ("quality", "newest"))
    assert (columns["date"].to_pylist(), columns["quality"].to_pylist()) == ([None, 1], [None, 2])


@pytest.mark.parametrize("step", STEPS)
def test_a_year_is_newer_than_an_earlier_date(step):
    docs = copies({"date": "2023-06-01"}, {"date": 2024}, {"date": "1700000000"})
    assert run_step(step(survivor=("newest",)), docs).kept_ids == ["1"]
    assert run_step(step(survivor=("oldest",)), docs).kept_ids == ["0"]


@pytest.mark.parametrize("step", STEPS)
def test_quality_and_date_are_labels_or_of_the_input(step):
    docs = copies({"quality": 0.1}, {"quality": "0.9"}, {"quality": "high"}, {})
    assert run_step(step(), docs).kept_ids == ["1"]
    labels = {"quality": ([None, None, math.nan, 0.95], pa.float32())}
    assert run_step(step(), docs, labels=labels).kept_ids == ["3"]
    dated = {"date": (["2020", "2021", "2024", None], pa.string())}
    assert run_step(step(survivor=("newest",)), docs, labels=dated).kept_ids == ["2"]


@pytest.mark.parametrize("step", STEPS)
def test_what_no_document_has_is_refused_when_it_was_asked_for(step):
    docs = plain_documents(TEXT, TEXT)
    for knobs, name in (
        ({"quality": "nosuch"}, "nosuch"),
        ({"survivor": ("quality",)}, "quality"),
        ({"date": "nosuch"}, "nosuch"),
        ({"survivor": ("longest", "oldest")}, "date"),
    ):
        with pytest.raises(DataError, match=f"no document has a (number|date) in '{name}'"):
            run_step(step(**knobs), docs)
    assert run_step(step(), docs).kept_ids == ["0"]
    assert run_step(step(quality="nosuch", survivor=("longest",)), docs).kept_ids == ["0"]
    assert run_step(step(quality="nosuch"), []).rows == []


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("rules", "legal"),
    [
        (("longest", "shortest"), "['longest']"),
        (("oldest", "quality", "newest"), "['oldest', 'quality']"),
        (("quality", "quality"), "['quality']"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(step, rules, legal):
    with pytest.raises(ValueError, match="can't decide anything after") as error:
        step(survivor=rules)
    assert f"take {legal}" in str(error.value)
    assert step(survivor=tuple(json.loads(legal.replace("'", '"'))))


def test_white_space_makes_no_text_longer():
    padded = "\u00a0\n" * 40 + TEXT.replace(" ", " \n\t  ")
    docs = plain_documents(padded, TEXT, TEXT + "!")
    assert run_step(FuzzyDedup(), docs).kept_ids == ["2"]
    lengths = rank_columns(to_batch(docs, 0), ())["length"].to_pylist()
    assert lengths == [170, 170, 171]


def test_cluster_sizes_add_up_over_steps():
    near = TEXT + " end"
    docs = plain_documents(near, TEXT, TEXT + "\n", TEXT + "  ", near + "\n", "alone in the world")
    exact = run_step(ExactDedup(), docs, num_shards=2)
    assert {row["id"]: row["cluster_size"] for row in exact.rows} == {"0": 2, "1": 3, "5": 1}
    rest = [Document(row["id"], row["text"], "s") for row in exact.rows]
    for step in (FuzzyDedup(), SemanticDedup(threshold=0.9)):
        labels = {"cluster_size": ([row["cluster_size"] for row in exact.rows], pa.int32())}
        found = run_step(step, rest, labels=labels)
        assert {row["id"]: row["cluster_size"] for row in found.rows} == {"0": 5, "5": 1}
        alone = run_step(step, rest, labels={"cluster_size": ([2, None, 1], pa.int32())})
        assert {row["id"]: row["cluster_size"] for row in alone.rows} == {"0": 3, "5": 1}
    assert exact.rows[0].keys() >= set(ExactDedup().adds())
