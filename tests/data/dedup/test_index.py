import json
from pathlib import Path

import pytest
from tests.global_steps import plain_documents, run_step

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
    run_step(FuzzyDedup(save_index=path), docs)
    return path


def test_what_repeats_an_index_goes_and_names_it(tmp_path, index):
    docs = plain_documents(TEXT, NEAR, FAR, FAR + " and more")
    result = run_step(FuzzyDedup(against=(index,)), docs)
    assert {row["id"]: row["witness"] for row in result.removed} == {
        "0": "first/again",
        "1": "first/again",
        "2": "s/3",
    }
    assert {row["id"]: row["cluster_size"] for row in result.rows} == {"3": 2}
    assert run_step(FuzzyDedup(), docs).summary["num_removed"] == 2


def test_documents_of_an_index_come_first_whatever_the_rule(tmp_path, index):
    docs = plain_documents(TEXT + " is longer than that of the index")
    result = run_step(FuzzyDedup(against=(index,), threshold=0.7), docs)
    assert result.rows == []


def test_an_index_holds_what_stayed(tmp_path, index):
    batches = load_index(index, FuzzyDedup().made_with())
    assert [name for batch in batches for name in batch["name"].to_pylist()] == ["first/again"]
    second = str(tmp_path / "second")
    step = FuzzyDedup(against=(index,), save_index=second)
    run_step(step, plain_documents(NEAR, FAR), num_shards=2)
    batches = load_index(second, step.made_with())
    assert [name for batch in batches for name in batch["name"].to_pylist()] == ["s/1"]
    both = FuzzyDedup(against=(index, second))
    result = run_step(both, plain_documents(NEAR, FAR, "new words are here"))
    assert result.kept_ids == ["2"]
    assert [row["witness"] for row in result.removed] == ["first/again", "s/1"]


def test_shards_and_order_change_nothing(tmp_path, index):
    docs = plain_documents(TEXT, NEAR, FAR, FAR + " and more", NEAR + " end")
    step = FuzzyDedup(against=(index,))
    whole = run_step(step, docs)
    other = run_step(step, docs[::-1], num_shards=4)
    assert other.removals == whole.removals


def test_saving_again_replaces_an_index_and_nothing_else(tmp_path, index):
    run_step(FuzzyDedup(save_index=index), plain_documents(FAR))
    batches = load_index(index, FuzzyDedup().made_with())
    assert [name for batch in batches for name in batch["name"].to_pylist()] == ["s/0"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious.txt").write_text("x")
    with pytest.raises(DataError, match="no dedup index"):
        save_index(other, [], {"slots": 8})
    assert (other / "precious.txt").exists()


def test_a_kill_while_the_old_index_goes_leaves_the_new_one(tmp_path, index, monkeypatch):
    made_with = FuzzyDedup().made_with()
    batches = load_index(index, made_with)

    def killed(folder, *_, **__):
        (Path(folder) / "index.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save_index(index, batches, made_with)
    assert load_index(index, made_with) == batches
    save_index(index, batches, made_with)
    assert load_index(index, made_with) == batches
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize(("knob", "value"), [("ngram", 4), ("seed", 2), ("bands", 43)])
def test_an_index_made_otherwise_is_refused(tmp_path, index, knob, value):
    step = FuzzyDedup.model_validate({"against": (index,), knob: value})
    key = "slots" if knob == "bands" else knob
    with pytest.raises(ConfigError, match=f"was made with {key} ="):
        run_step(step, plain_documents(TEXT))


def test_bands_of_as_many_slots_and_another_threshold_fit(tmp_path, index):
    step = FuzzyDedup(against=(index,), bands=16, rows=8, threshold=0.9)
    assert run_step(step, plain_documents(TEXT)).rows == []


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
    run_step(FuzzyDedup(save_index=path), plain_documents("", " "))
    result = run_step(FuzzyDedup(against=(path,)), plain_documents(TEXT, NEAR))
    assert len(result.rows) == 1


@pytest.mark.parametrize("new", ["index", "other/../index", "link", "index/inside", "."])
def test_an_index_is_not_written_over_what_it_is_compared_with(tmp_path, index, monkeypatch, new):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("index")
    with pytest.raises(ValueError, match="would write over the index against='index'.*'index-2'"):
        FuzzyDedup(against=("index",), save_index=new)
    (tmp_path / "index-2").mkdir()
    with pytest.raises(ValueError, match="e.g. 'index-3'"):
        FuzzyDedup(against=("index",), save_index=new)
    assert FuzzyDedup(against=("index",), save_index="index-3").save_index == "index-3"


def test_damage_is_told(tmp_path, index):
    made_with = FuzzyDedup().made_with()
    about, sketches = tmp_path / "index" / "index.json", tmp_path / "index" / "sketches.arrow"
    whole = {path: path.read_bytes() for path in (about, sketches)}
    changed = json.loads(whole[about])
    changed["made_with"]["seed"] = 2
    sketch = whole[sketches]
    for path, content, message in (
        (about, b"{", "index.json is damaged"),
        (about, b"[]", "index.json is damaged"),
        (about, b"\xff\xfe", "index.json is damaged"),
        (about, b'{"version": 1}', "is an index of version 1, this is version 2"),
        (about, b'{"version": 2}', "index.json is damaged"),
        (about, json.dumps(changed).encode(), "index.json is damaged"),
        (sketches, sketch[: len(sketch) // 2], "sketches.arrow is damaged"),
        (sketches, bytes(400), "sketches.arrow is damaged"),
        (sketches, b"", "sketches.arrow is damaged"),
        (sketches, sketch[:-1] + bytes([sketch[-1] ^ 1]), "sketches.arrow is damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_index(index, made_with)
        path.write_bytes(whole[path])
    assert load_index(index, made_with)
