"""The page says what is in the folder: its numbers are counted here anew, from the Parquet files
and token stores."""

import html
import json
import re
from collections import Counter

import numpy as np
import pytest

from stepwell.curate.datasheet import decision, doubling, histogram, most_common, removed_matrix
from stepwell.curate.executors.local import LocalExecutor
from stepwell.curate.plan import make_plan
from stepwell.curate.recipe import Recipe
from stepwell.curate.run import curate, read_curation
from stepwell.data.decontam.benchmarks import load_benchmark
from stepwell.data.decontam.index import build_index
from stepwell.data.store import TokenStore
from tests.curate import corpus

LONG_ID = "a" * 300 + "/<b>&"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A curation with duplicates, a leaked question, personal data and a hostile id."""
    folder = tmp_path_factory.mktemp("datasheet")
    corpus.write(folder / "raw")
    question = corpus.text(70, num_sentences=2)
    rows = [
        {"id": LONG_ID, "text": "<script>alert(1)</script>"},
        {"id": "leak", "text": corpus.text(71) + "\n" + question + "\n" + corpus.text(72)},
        {"id": "mail", "text": corpus.text(73) + " Write to jo.smith@web.de today."},
        *({"id": f"copy{i}", "text": corpus.text(1)} for i in range(4)),
    ]
    with (folder / "raw" / "a.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    (folder / "quiz.jsonl").write_text(json.dumps({"question": question, "answer": "yes"}) + "\n")
    build_index([load_benchmark(folder / "quiz.jsonl")], folder / "index")
    values = corpus.recipe(folder / "raw", store={"vocab_size": 300, "heldout": 0.2})
    values["sources"][0] |= {"about": "made of <words>", "licence": "CC0-1.0"}
    values["steps"] += [
        {"kind": "langid", "sources": ["b"]},
        {"kind": "pii"},
        {"kind": "decontaminate", "index": str(folder / "index")},
    ]
    list(curate(make_plan(Recipe.parse(values)), folder / "out", LocalExecutor(1)))
    return folder / "out"


@pytest.fixture(scope="module")
def page(done):
    return (done / "datasheet.html").read_text()


def section(page, name):
    """Its text, with a bar between cells."""
    found = re.search(rf'<section id="{name}">.*?</section>', page, re.DOTALL)
    assert found, name
    cells = re.sub(r"</t[dh]>", "|", found.group())
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", cells)).split())


def lines(page, name):
    """The rows of its tables as lists of cells."""
    found = re.search(rf'<section id="{name}">.*?</section>', page, re.DOTALL)
    assert found, name
    rows = re.findall(r"<tr>(.*?)</tr>", found.group(), re.DOTALL)
    return [
        [" ".join(html.unescape(re.sub(r"<[^>]+>", " ", cell)).split()) for cell in cells]
        for cells in (re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows)
    ]


def test_sources_are_counted_and_described(done, page):
    kept, removed = corpus.rows(done / "documents"), corpus.rows(done / "removed")
    rows = {cells[0]: cells for cells in lines(page, "sources") if len(cells) == 7}
    all_bytes = sum(len(row["text"].encode()) for row in kept)
    for source in ("a", "b"):
        mine = [row for row in kept if row["source"] == source]
        num_read = len(mine) + sum(row["source"] == source for row in removed)
        num_bytes = sum(len(row["text"].encode()) for row in mine)
        assert rows[source][1] == str(num_read)
        assert rows[source][3] == str(len(mine))
        assert rows[source][4] == f"{num_bytes / 1e3:,.1f} kB"
        assert rows[source][5] == f"{100 * num_bytes / all_bytes:.1f} %"
    assert ["a", "made of <words>", "CC0-1.0"] in lines(page, "sources")


def test_the_matrix_counts_what_was_removed_by_step_and_source(done, page):
    removed = Counter((row["source"], row["step"]) for row in corpus.rows(done / "removed"))
    rows = lines(page, "matrix")
    assert rows[0] == ["step", "a", "b", "all"]
    for name, *cells, total in rows[1:-1]:
        found = [int(cell.split()[0]) if cell != "–" else 0 for cell in cells]
        assert found == [removed["a", name], removed["b", name]], name
        assert int(total) == sum(found)
    assert [row[1] for row in rows if row[0] == "3. langid"] == ["–"]
    assert int(rows[-1][-1]) == sum(removed.values())


def test_the_funnel_follows_the_documents(done, page):
    removed = Counter(row["step"] for row in corpus.rows(done / "removed"))
    edited = {(row["source"], row["id"]) for row in corpus.rows(done / "edits")}
    for name, *cells in lines(page, "funnel")[1:]:
        num_in, dropped, num_out = map(int, cells[:3])
        assert dropped == removed[name]
        assert num_in - dropped == num_out
        assert cells[5] == (str(len(edited)) if name.endswith("pii") else "")
    assert edited == {("a", "mail")}


def test_reasons_have_numbers_and_examples(done, page):
    text = section(page, "removed")
    reasons = Counter(row["reason"] for row in corpus.rows(done / "removed"))
    for reason, number in reasons.items():
        assert f"{number} {reason} (" in text
    assert f"a/{LONG_ID}" in text
    assert "<script>" not in page
    assert "because of a/a1" in text
    assert "changed: 1 pii_email" in text


def test_clusters_of_duplicates(done, page):
    witnesses = Counter(
        row["witness"]
        for row in corpus.rows(done / "removed")
        if row["reason"] == "exact_duplicate"
    )
    rows = lines(page, "decisions")
    assert ["removed", str(sum(witnesses.values()))] in rows
    assert ["clusters", str(len(witnesses))] in rows
    sizes = Counter(number + 1 for number in witnesses.values())
    assert sizes == {2: 2, 5: 1}
    found = [row[:2] for row in rows if row[1:2] and row[1].isdecimal()]
    assert ["2", "2"] in found
    assert ["5 to 8", "1"] in found
    assert ["5", "a/a1", "a/copy0 a/copy1 a/copy2 a/copy3"] in rows


def test_contamination_is_told_by_benchmark(done, page):
    removed = [
        row for row in corpus.rows(done / "removed") if row["step"].endswith("decontaminate")
    ]
    assert [row["id"] for row in removed] == ["leak"]
    assert ["quiz", "1", "0", "1", "0", "0", "100.00%", "a 1"] in lines(page, "contamination")
    assert "in a/leak , which was removed" in section(page, "contamination")


def test_labels_and_stores(done, page):
    kept = corpus.rows(done / "documents")
    rows = lines(page, "labels")
    languages = Counter(row["language"] for row in kept if row["language"])
    for language, number in languages.items():
        assert [language, str(number)] in [row[:2] for row in rows]
    without = len(kept) - sum(languages.values())
    assert f"language ({without} documents without)" in section(page, "labels")
    lengths = [len(row["text"].encode()) for row in kept]
    between = sum(512 <= length < 1024 for length in lengths)
    assert ["512 to 1,024", str(between)] in [row[:2] for row in rows]
    stores = lines(page, "stores")
    for part in ("train", "heldout"):
        for source in ("a", "b"):
            store = TokenStore.open(done / "store" / part / source)
            name = f"store/{part}/{source}"
            assert [name, f"{store.num_docs:,}", f"{store.num_tokens:,}"] in [r[:3] for r in stores]
    store = TokenStore.open(done / "store" / "train" / "a")
    assert f'path = "out/store/train/a"\nweight = {store.num_tokens}.0\n' in page


def test_time_adds_up(done, page):
    cpu = read_curation(done)["tally"]["cpu"]
    assert f"{sum(cpu.values()):,.1f} seconds of one core" in section(page, "time")
    named = {"read", "other", "tokenizer", "tokenise", "write documents", "publish"}
    assert named <= cpu.keys()
    assert {"2. exact-dedup: sketch", "2. exact-dedup: decide", "2. exact-dedup"} <= cpu.keys()
    assert all(seconds >= 0 for seconds in cpu.values())


def test_intervals():
    assert doubling({2: 3, 3: 1, 4: 1, 5: 2, 9: 1}) == [
        ("2", 3), ("3 to 4", 2), ("5 to 8", 2), ("9 to 16", 1)
    ]  # fmt: skip
    assert doubling({}) == []
    values = np.array([0.0, 0.5, 1.0, np.nan])
    found = histogram(values)
    assert sum(count for _, count in found["rows"]) == 3
    assert found["quantiles"]["50 %"] == 0.5
    assert histogram(np.array([7.0]))["rows"][0][1] == 1
    assert histogram(np.array([]))["rows"] == []
    assert histogram(np.array([1, 2, 3, 4]), log=True)["rows"] == [
        ("1 to 2", 1), ("2 to 4", 2), ("4 to 8", 1)
    ]  # fmt: skip
    assert most_common({3: 1, 1: 9}) == [("1", 9), ("3", 1)]
    many = {f"v{i:02d}": 30 - i for i in range(30)}
    assert most_common(many)[-1] == ("others", sum(sorted(many.values())[:5]))


def test_numbers_of_a_step_that_the_page_does_not_know():
    found = decision({"num_docs": 1200, "own_number": 0.12345, "mode": "x"})
    assert found["numbers"] == [
        ("documents looked at", "1,200"), ("own number", "0.1235"), ("mode", "x")
    ]  # fmt: skip


def test_a_source_that_gave_nothing_has_a_column():
    steps = {"read": {"in": {"a": [2, 9]}, "out": {}}}
    found = removed_matrix({"read": {"a": 2, "b": 0}, "steps": steps})
    assert found["rows"][0]["cells"] == [{"docs": 2, "of": 2}, None]
    assert found["totals"] == [2, 0]
