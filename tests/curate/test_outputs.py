import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from stepwell.curate import writing
from stepwell.curate.executors.local import LocalExecutor
from stepwell.curate.folders import task_folder
from stepwell.curate.outputs import task_files
from stepwell.curate.plan import make_plan
from stepwell.curate.recipe import Recipe
from stepwell.curate.run import curate, read_curation
from stepwell.curate.writing import file_name
from stepwell.data.store import TokenStore
from stepwell.tokenizer import Tokenizer
from stepwell.types import ConfigError
from tests.curate import corpus


def run(values, out):
    list(curate(make_plan(Recipe.parse(values)), out, LocalExecutor(1)))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A curation with stores, in all formats."""
    folder = tmp_path_factory.mktemp("outputs")
    corpus.write(folder / "raw", num_docs=60)
    store = {"vocab_size": 400, "heldout": 0.2}
    formats = ["megatron", "mds", "litdata"]
    values = corpus.recipe(folder / "raw", store=store, outputs={"formats": formats})
    values["steps"].append({"kind": "langid"})
    run(values, folder / "out")
    return folder / "out"


def test_stores_hold_every_kept_document_once(done):
    tokenizer = Tokenizer.load(done / "store" / "tokenizer")
    assert tokenizer.vocab_size <= 400
    found = []
    for part in ("train", "heldout"):
        for source in ("a", "b"):
            store = TokenStore.open(done / "store" / part / source, tokenizer)
            found += [(source, tokenizer.decode(store.doc(i)[:-1])) for i in range(store.num_docs)]
    kept = [(row["source"], row["text"]) for row in corpus.rows(done / "documents")]
    assert sorted(found) == sorted(kept)


def test_held_out_documents_are_the_same_in_another_run(done, tmp_path):
    sizes = {
        part: sum(TokenStore.open(p).num_docs for p in (done / "store" / part).iterdir())
        for part in ("train", "heldout")
    }
    assert 0.08 < sizes["heldout"] / sum(sizes.values()) < 0.35
    values = Recipe.load(done / "recipe.toml").to_dict()
    values["store"] = {"tokenizer": str(done / "store" / "tokenizer"), "heldout": 0.2}
    run({**values, "batch_bytes": 700}, tmp_path / "again")
    for source in ("a", "b"):
        one = TokenStore.open(done / "store" / "heldout" / source)
        other = TokenStore.open(tmp_path / "again" / "store" / "heldout" / source)
        assert np.array_equal(one.read(0, one.num_tokens), other.read(0, other.num_tokens))


def test_every_format_is_there(done):
    for source in ("a", "b"):
        assert (done / "store" / "megatron" / "train" / source / "tokens.idx").exists()
        assert (done / "store" / "mds" / "heldout" / source / "index.json").exists()
        assert (done / "store" / "litdata" / "train" / source / "index.json").exists()


def test_every_number_of_the_datasheet_is_a_count(done):
    page = (done / "datasheet.html").read_text()
    values = read_curation(done)
    removed, kept = corpus.rows(done / "removed"), corpus.rows(done / "documents")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    assert f"{len(removed) + len(kept)} records read" in text
    assert f"{len(kept)} documents kept" in text
    for reason in {row["reason"] for row in removed}:
        number = sum(row["reason"] == reason for row in removed)
        assert f"{number} {reason}" in text
    tokens = [row["tokens"] for row in values["stores"]]
    assert f"{sum(tokens):,} tokens" in text
    languages = {row["language"] for row in kept}
    for language in languages:
        number = sum(row["language"] == language for row in kept)
        assert re.search(rf"\b{language} {number}\b", text)


def test_tasks_are_in_reading_order_beyond_five_digits(tmp_path):
    plan = make_plan(Recipe.parse({"sources": [{"name": "a", "path": "stdlib-prose"}]}))
    for number in (100_000, 99_999, 2):
        folder = task_folder(tmp_path, 0, number)
        folder.mkdir(parents=True)
        (folder / "removed.parquet").touch()
    found = [path.parent.name for path in task_files(plan, tmp_path, "removed")]
    assert found == ["00002", "99999", "100000"]


def test_text_of_pages_is_no_markup(tmp_path):
    corpus.write(tmp_path / "raw")
    rows = [{"id": "<script>alert(1)</script>", "text": "<b>short</b>"}]
    with (tmp_path / "raw" / "a.jsonl").open("a") as file:
        file.write(json.dumps(rows[0]) + "\n")
    run(corpus.recipe(tmp_path / "raw"), tmp_path / "out")
    page = (tmp_path / "out" / "datasheet.html").read_text()
    assert "&lt;b&gt;short" in page
    assert "<script" not in page


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_what_was_curated_is_a_source_again(tmp_path, kind):
    corpus.write(tmp_path / "raw")
    values = corpus.recipe(tmp_path / "raw", outputs={"documents": kind})
    values["steps"].append({"kind": "langid"})
    run(values, tmp_path / "one")
    again = {"sources": [{"name": "all", "path": str(tmp_path / "one")}]}
    run({**again, "outputs": {"documents": "parquet"}}, tmp_path / "two")
    first = {r["id"]: r["text"] for r in documents(tmp_path / "one")}
    rows = corpus.rows(tmp_path / "two" / "documents")
    assert {r["id"]: r["text"] for r in rows} == first
    assert {json.loads(r["meta"])["source"] for r in rows} == {"a", "b"}
    assert json.loads(rows[0]["meta"])["language"]


def documents(out):
    files = sorted((out / "documents").iterdir())
    if files[0].suffix == ".parquet":
        return corpus.rows(out / "documents")
    return [json.loads(line) for path in files for line in path.open()]


def test_texts_of_the_removed_can_be_left_out(tmp_path):
    corpus.write(tmp_path / "raw")
    run(corpus.recipe(tmp_path / "raw", outputs={"removed_text": False}), tmp_path / "out")
    names = [pq.read_schema(p).names for p in (tmp_path / "out" / "removed").glob("*.parquet")]
    assert names
    assert not any("text" in columns for columns in names)


def test_stores_by_a_label_and_with_scores(tmp_path):
    corpus.write(tmp_path / "raw")
    store = {"vocab_size": 400, "by": "language", "scores": "language_score"}
    values = corpus.recipe(tmp_path / "raw", store=store)
    values["steps"] = [{"kind": "langid"}]
    run(values, tmp_path / "out")
    languages = {row["language"] for row in corpus.rows(tmp_path / "out" / "documents")}
    stores = {p.name: TokenStore.open(p) for p in (tmp_path / "out" / "store" / "train").iterdir()}
    assert set(stores) == {file_name(language) for language in languages}
    scores = np.concatenate([store.doc_scores() for store in stores.values()])
    found = [row["language_score"] for row in corpus.rows(tmp_path / "out" / "documents")]
    known = [score for score in found if score is not None]
    assert len(known) < len(found)  # one text is too short to tell; it counts as the worst
    expected = known + [min(known)] * (len(found) - len(known))
    assert np.allclose(np.sort(scores), np.sort(expected))


def test_a_label_that_no_step_adds_is_refused(tmp_path):
    corpus.write(tmp_path / "raw")
    store = {"vocab_size": 400, "by": "langage"}
    values = corpus.recipe(tmp_path / "raw", store=store)
    values["steps"] = [{"kind": "langid"}]
    with pytest.raises(ConfigError, match=r"'langage'.*did you mean 'language'"):
        run(values, tmp_path / "out")


VALUES = ["a b", "a-b", "a/b", "none", None, "..", "", "x" * 300, "x" * 301, "\u00e9", 3]


def test_every_value_has_a_folder_of_its_own():
    names = [file_name(value) for value in VALUES]
    assert len(set(names)) == len(VALUES)
    assert names[1] == "a-b"
    assert names[4] == "none"
    assert file_name("en") == "en"
    assert all(len(name.encode()) <= 255 and name.strip(".-") for name in names)
    assert not any("/" in name for name in names)


def test_sources_whose_names_look_alike_have_stores_of_their_own(tmp_path):
    corpus.write(tmp_path / "raw")
    values = corpus.recipe(tmp_path / "raw", store={"vocab_size": 300})
    for source, name in zip(values["sources"], ["a b", "a/b"], strict=True):
        source["name"] = name
    run(values, tmp_path / "out")
    stores = read_curation(tmp_path / "out")["stores"]
    assert {store["value"]: store["docs"] for store in stores} == {"a b": 40, "a/b": 37}
    page = (tmp_path / "out" / "datasheet.html").read_text()
    assert all(f"{store['path']} ({store['value']})" in page for store in stores)


def test_what_every_document_has_of_its_own_makes_no_stores(tmp_path, monkeypatch):
    corpus.write(tmp_path / "raw")
    store = {"vocab_size": 300, "by": "toxic_words"}
    (tmp_path / "en.txt").write_text("river\n")
    values = corpus.recipe(tmp_path / "raw", store=store)
    values["steps"] = [{"kind": "toxic-words", "lists": str(tmp_path / "en.txt")}]
    monkeypatch.setattr(writing, "MAX_STORES", 2)
    with pytest.raises(ConfigError, match="'toxic_words' has more than 2 values"):
        run(values, tmp_path / "out")
    monkeypatch.setattr(writing, "MAX_STORES", 20)
    run(values, tmp_path / "out")


def test_an_inputs_own_value_under_a_labels_name_is_kept_beside_it(tmp_path):
    (tmp_path / "raw").mkdir()
    rows = [
        {
            "id": "1",
            "text": "A sentence in plain English about the harbour. " * 3,
            "language": "xx",
        },
        {"id": "2", "text": "The same language as it says, plain English. " * 3, "language": "en"},
        {"id": "3", "text": "short", "language": "de"},
    ]
    (tmp_path / "raw" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "sources": [{"name": "a", "path": str(tmp_path / "raw" / "a.jsonl")}],
        "steps": [{"kind": "langid"}],
        "outputs": {"documents": "jsonl"},
    }
    run(values, tmp_path / "out")
    lines = (tmp_path / "out" / "documents" / "part-00000.jsonl").read_text().splitlines()
    metas = {row["id"]: row["meta"] for row in map(json.loads, lines)}
    assert (metas["1"]["language"], metas["1"]["input_language"]) == ("en", "xx")
    assert (metas["2"]["language"], metas["2"].get("input_language")) == ("en", None)
    assert metas["3"] == {"input_language": "de"}
