import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.global_steps import run_step

from stepwell.data.batches import EDITS, REMOVED, to_batch
from stepwell.data.decontam.benchmarks import Benchmark, Item
from stepwell.data.decontam.index import build_index
from stepwell.data.decontam.step import Decontaminate
from stepwell.data.dedup.explain import differences, explain
from stepwell.data.dedup.fuzzy import FuzzyDedup
from stepwell.data.dedup.lines import LineDedup
from stepwell.types import DataError, Document

WORDS = [f"w{i}" for i in range(60)]
TEXT = " ".join(WORDS)
NEAR = " ".join([*WORDS[:-1], "other"])


def write(folder: Path, removed: list[dict], kept: list[dict], texts: bool = True) -> Path:
    (folder / "removed").mkdir(parents=True)
    (folder / "documents").mkdir()
    table = pa.Table.from_pylist(removed, REMOVED)
    table = table if texts else table.drop_columns(["text"])
    pq.write_table(table, folder / "removed" / "part-00000.parquet")
    pq.write_table(pa.Table.from_pylist(kept), folder / "documents" / "part-00000.parquet")
    return folder


@pytest.fixture
def curated(tmp_path) -> Path:
    docs = [
        Document("a", TEXT + " and a longer end", "web"),
        Document("b", NEAR, "web"),
        Document("b", "quite another text of this source", "books"),
        Document("c", " \n", "web"),
    ]
    result = run_step(FuzzyDedup(), docs)
    return write(tmp_path / "out", result.removed, result.rows)


def test_a_duplicate_is_explained_by_what_it_repeats(curated):
    text = explain(curated, "web/b")
    assert text.splitlines()[:5] == [
        "web/b was removed by fuzzy-dedup: fuzzy_duplicate (J = 0.902)",
        "it repeats web/a",
        "which was kept",
        "as both are stored, J = 0.902 on 5-grams of words",
        "- web/b",
    ]
    assert "- other\n" in text + "\n"
    assert "+ w59 and a longer end\n" in text + "\n"
    both = explain(curated, "b")
    assert both.startswith(f"2 documents have the id 'b':\n\n{text}\n\nbooks/b was kept; nothing")


def test_the_similarity_is_computed_from_the_texts(tmp_path):
    gone = {"id": "b", "source": "s", "step": "x", "reason": "fuzzy_duplicate", "detail": "J = 9",
            "witness": "s/a", "text": NEAR}  # fmt: skip
    out = write(tmp_path / "out", [gone], [{"id": "a", "source": "s", "text": TEXT}])
    assert "J = 0.965 on 5-grams" in explain(out, "b")  # 55 of 57
    (out / "recipe.toml").write_text('[[steps]]\nkind = "fuzzy-dedup"\nngram = 1\n')
    assert "J = 0.967 on 1-grams" in explain(out, "b")  # 59 of 61


def test_other_reasons(curated):
    assert explain(curated, "c") == "web/c was removed by fuzzy-dedup: blank"


def test_a_kept_document_tells_what_it_stands_for(curated):
    assert explain(curated, "a") == (
        "web/a was kept; 1 removed documents repeat it:\n  web/b by fuzzy-dedup (J = 0.902)"
    )
    assert "nothing was removed" in explain(curated, "books/b")


def test_a_witness_that_went_later_or_lies_elsewhere(tmp_path):
    row = {"source": "s", "step": "fuzzy-dedup", "reason": "fuzzy_duplicate", "detail": "",
           "text": TEXT}  # fmt: skip
    removed = [
        {**row, "id": "1", "witness": "s/2"},
        {**row, "id": "2", "step": "gopher", "reason": "gopher_x", "witness": ""},
        {**row, "id": "3", "witness": "index/9"},
    ]
    out = write(tmp_path / "out", removed, [{"id": "5", "source": "s", "text": "x"}])
    assert "removed later by gopher: gopher_x" in explain(out, "1")
    assert "(the same words)" in explain(out, "1")
    assert "is not in this folder (nor in an index of its recipe" in explain(out, "3")
    assert "it begins: w0 w1" in explain(out, "2")


def test_without_texts(tmp_path):
    row = {"id": "1", "source": "s", "step": "x", "reason": "r", "detail": "", "witness": "s/2"}
    out = write(tmp_path / "out", [row], [{"id": "2", "source": "s", "text": "x"}], texts=False)
    assert "can't be compared" in explain(out, "1")


def test_documents_as_jsonl(curated):
    (curated / "documents" / "part-00000.parquet").unlink()
    rows = [{"id": "a", "source": "web", "text": TEXT, "meta": {}}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (curated / "documents" / "part-00000.jsonl").write_text(lines, "utf-8")
    assert "which was kept" in explain(curated, "b")


def test_what_cannot_be_explained(curated, tmp_path):
    with pytest.raises(DataError, match="has no folder `removed`"):
        explain(tmp_path, "b")
    (tmp_path / "more").mkdir()
    row = {"id": "page-17", "source": "s", "step": "", "reason": "", "detail": "", "witness": "",
           "text": ""}  # fmt: skip
    out = write(tmp_path / "o2", [row], [{"id": "2", "source": "s", "text": "x"}])
    with pytest.raises(DataError, match="'page-18' .did you mean 'page-17'"):
        explain(out, "page-18")


def test_differences_are_short():
    a = [f"w{i}" for i in range(1000)]
    b = list(a)
    for place in range(100, 1000, 50):
        b[place] = "x"
    lines = differences(" ".join(a), " ".join(b))
    assert lines[1:3] == ["- w100", "+ x"]
    assert lines[0] == "  w94 w95 w96 w97 w98 w99"
    assert lines[3] == "  w101 w102 w103 w104 w105 w106 [37 words] w144 w145 w146 w147 w148 w149"
    assert lines[-1] == "  (and more)"
    assert sum(line.startswith("-") for line in lines) == 6
    assert differences("a b", "a b c") == ["  a b", "+ c"]


def test_a_witness_of_an_index_is_named(tmp_path):
    index = str(tmp_path / "old")
    run_step(FuzzyDedup(save_index=index), [Document("x", TEXT, "first")])
    result = run_step(FuzzyDedup(against=(index,)), [Document("b", NEAR, "s")])
    out = write(tmp_path / "out", result.removed, [{"id": "5", "source": "s", "text": "x"}])
    (out / "recipe.toml").write_text(f'[[steps]]\nkind = "fuzzy-dedup"\nagainst = ["{index}"]\n')
    text = explain(out, "b")
    assert f"it repeats first/x\nwhich is not in this folder: it is of the index {index}" in text


def test_an_item_of_a_benchmark_is_shown(tmp_path):
    question = "Which of the seven rivers of the valley is the longest one in a dry summer?"
    build_index([Benchmark("mmlu", "sha", True, (Item("2814", question, ("a", "b")),))],
                tmp_path / "index")  # fmt: skip
    step = Decontaminate(index=str(tmp_path / "index"))
    removed = step(to_batch([Document("b", f"So: {question} Yes.", "s")], 0)).removed.to_pylist()
    out = write(tmp_path / "out", removed, [{"id": "5", "source": "s", "text": "x"}])
    assert explain(out, "b").endswith("it holds the item mmlu/2814 of a benchmark")
    recipe = f'[[steps]]\nkind = "decontaminate"\nindex = "{tmp_path / "index"}"\n'
    (out / "recipe.toml").write_text(recipe)
    assert explain(out, "b").endswith(f"its text: {question} a b")
    shutil.rmtree(tmp_path / "index")
    assert "(its text can't be shown: " in explain(out, "b")


def test_what_was_cut_is_told(tmp_path):
    shared = "A paragraph that stands in two documents, word for word, of some length."
    docs = [Document("a", f"{shared}\n\n{TEXT}", "s"), Document("b", f"{NEAR}\n\n{shared}", "s")]
    result = run_step(LineDedup(), docs)
    out = write(tmp_path / "out", result.removed, result.rows)
    (out / "edits").mkdir()
    more = [{**result.edits[0], "step": "pii", "reason": "pii_email", "start": i, "stop": i + 9,
             "replacement": "<mail>"} for i in range(60, 0, -10)]  # fmt: skip
    table = pa.Table.from_pylist(result.edits + more, EDITS)
    pq.write_table(table, out / "edits" / "part-00000.parquet")
    start = len(NEAR) + 2
    text = explain(out, "b")
    assert text.startswith("s/b was kept; nothing was removed for its sake\n\n")
    assert (
        f"s/b lost {len(shared)} characters by line-dedup: paragraph_duplicate (characters {start} "
        f"to {start + len(shared)} of its text then)"
    ) in text
    assert (
        "s/b lost 54 characters and got 36 instead by pii: pii_email (characters 10 to 19, 20 to "
        "29, 30 to 39, 40 to 49, 50 to 59 and 1 more of its text then)"
    ) in text
    assert "lost" not in explain(out, "a")


@pytest.mark.parametrize("order", [1, -1])
def test_an_id_that_several_documents_have(tmp_path, order):
    far = " ".join(f"v{i}" for i in range(60))
    row = {"source": "s", "step": "fuzzy-dedup", "reason": "fuzzy_duplicate", "detail": "J = 0.965",
           "witness": "s/same"}  # fmt: skip
    removed = [{**row, "id": "same", "text": NEAR}]
    kept = [{"id": "same", "source": "s", "text": text} for text in (TEXT, far)][::order]
    out = write(tmp_path / "out", removed, kept)
    text = explain(out, "same")
    assert text.startswith("3 documents have the id 'same':\n\ns/same was removed by")
    assert text.count("s/same was kept; 1 removed documents repeat it") == 2
    assert "of 2 documents with this id the one whose similarity fits best,\nwhich was kept" in text
    assert "as both are stored, J = 0.965" in text
    assert "+ w59\n" in text
