import json

import pytest
from tests.data.dedup.drive import documents_of, run_step

from stepwell.data.dedup.fuzzy import FuzzyDedup
from stepwell.data.dedup.index import load_index, save_index
from stepwell.types import ConfigError, DataError, Document

WORDS = [f"w{i}" for i in range(60)]
TEXT = " ".join(WORDS)
NEAR = " ".join([*WORDS[:-1], "other"])
FAR = " ".join(f"v{i}" for i in range(60))


@pytest.fixture
def index(tmp_path) -> str:
    path = str(tmp_path / "index")
    docs = [Document("old", TEXT, "first"), Document("again", TEXT, "first"),
            Document("blank", "", "first")]  # fmt: skip
    run_step(FuzzyDedup(save_index=path), docs, tmp_path / "first")
    return path


def test_what_repeats_an_index_goes_and_names_it(tmp_path, index):
    docs = documents_of(TEXT, NEAR, FAR, FAR + " and more")
    result = run_step(FuzzyDedup(against=(index,)), docs, tmp_path / "run")
    assert {row["id"]: row["witness"] for row in result.removed} == {
        "0": "first/again",
        "1": "first/again",
        "2": "s/3",
    }
    assert {row["id"]: row["cluster_size"] for row in result.kept} == {"3": 2}
    assert run_step(FuzzyDedup(), docs, tmp_path / "alone").summary["num_removed"] == 2


def test_documents_of_an_index_come_first_whatever_the_rule(tmp_path, index):
    docs = documents_of(TEXT + " is longer than that of the index")
    result = run_step(FuzzyDedup(against=(index,), threshold=0.7), docs, tmp_path / "run")
    assert result.kept == []


def test_an_index_holds_what_stayed(tmp_path, index):
    batches = load_index(index, FuzzyDedup().made_with())
    assert [name for batch in batches for name in batch["name"].to_pylist()] == ["first/again"]
    second = str(tmp_path / "second")
    step = FuzzyDedup(against=(index,), save_index=second)
    run_step(step, documents_of(NEAR, FAR), tmp_path / "run", num_shards=2)
    batches = load_index(second, step.made_with())
    assert [name for batch in batches for name in batch["name"].to_pylist()] == ["s/1"]
    both = FuzzyDedup(against=(index, second))
    result = run_step(both, documents_of(NEAR, FAR, "new words are here"), tmp_path / "3")
    assert result.kept_ids == ["2"]
    assert [row["witness"] for row in result.removed] == ["first/again", "s/1"]


def test_shards_and_order_change_nothing(tmp_path, index):
    docs = documents_of(TEXT, NEAR, FAR, FAR + " and more", NEAR + " end")
    step = FuzzyDedup(against=(index,))
    whole = run_step(step, docs, tmp_path / "whole")
    other = run_step(step, docs[::-1], tmp_path / "other", num_shards=4)
    assert other.removals == whole.removals


def test_saving_again_replaces_an_index_and_nothing_else(tmp_path, index):
    run_step(FuzzyDedup(save_index=index), documents_of(FAR), tmp_path / "run")
    batches = load_index(index, FuzzyDedup().made_with())
    assert [name for batch in batches for name in batch["name"].to_pylist()] == ["s/0"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious.txt").write_text("x")
    with pytest.raises(DataError, match="no dedup index"):
        save_index(other, [], {"slots": 8})
    assert (other / "precious.txt").exists()


@pytest.mark.parametrize(("knob", "value"), [("ngram", 4), ("seed", 2), ("bands", 43)])
def test_an_index_made_otherwise_is_refused(tmp_path, index, knob, value):
    step = FuzzyDedup.model_validate({"against": (index,), knob: value})
    key = "slots" if knob == "bands" else knob
    with pytest.raises(ConfigError, match=f"was made with {key} ="):
        run_step(step, documents_of(TEXT), tmp_path / "run")


def test_bands_of_as_many_slots_and_another_threshold_fit(tmp_path, index):
    step = FuzzyDedup(against=(index,), bands=16, rows=8, threshold=0.9)
    assert run_step(step, documents_of(TEXT), tmp_path / "run").kept == []


def test_what_is_no_index(tmp_path, index):
    with pytest.raises(DataError, match="is no dedup index"):
        load_index(tmp_path, {})
    path = tmp_path / "index" / "index.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {"version": 99}))
    with pytest.raises(DataError, match="version 99"):
        load_index(index, {})


def test_an_empty_index(tmp_path):
    path = str(tmp_path / "index")
    run_step(FuzzyDedup(save_index=path), documents_of("", " "), tmp_path / "1")
    result = run_step(FuzzyDedup(against=(path,)), documents_of(TEXT, NEAR), tmp_path / "2")
    assert len(result.kept) == 1
