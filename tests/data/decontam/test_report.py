import json

import pyarrow as pa
import pytest
from tests.data.decontam.test_scan import ITEMS, PASSAGE, QUESTION

from stepwell.data.batches import Removal, split, to_batch
from stepwell.data.decontam.benchmarks import Benchmark, Item, keys_of
from stepwell.data.decontam.index import build_index, open_index
from stepwell.data.decontam.report import (
    contamination_report,
    excerpt,
    report_text,
    write_report,
)
from stepwell.data.decontam.step import Decontaminate
from stepwell.types import DataError, Document


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("index") / "index"
    other = Item("1", "which of the seven rivers of the valley is the longest one")
    build_index(
        [Benchmark("set", "sha", True, ITEMS), Benchmark("rivers", "sha2", False, (other,))], folder
    )
    return str(folder)


def documents() -> pa.RecordBatch:
    texts = [
        ("a", "web", f"Page one. {QUESTION} twelve barrels"),
        ("b", "web", f"Page two.\n{QUESTION}"),
        ("c", "wiki", PASSAGE),
        ("d", "wiki", f"{PASSAGE}\n\n{QUESTION}"),
        ("e", "books", "Which of the seven rivers of the valley is the longest one?"),
        ("f", "books", "A quiet evening by the fire."),
    ]
    return to_batch([Document(i, text, source) for i, source, text in texts], 0)


def test_what_leaked_and_where(folder):
    outcome = Decontaminate(index=folder)(documents())
    other = split(documents(), "c4", [Removal("c4_too_short")] * 6).removed
    report = contamination_report([other, outcome.removed], open_index(folder), [outcome.kept])
    assert report["documents"] == {"removed": 4, "kept": 1}
    assert report["rule"] == {"name": "tulu3", "min_share": 0.5}
    one, two = report["benchmarks"]
    assert (one["name"], one["sha256"], one["num_items"]) == ("set", "sha", 5)
    keys = [keys_of(item) for item in ITEMS]
    assert one["keys"] == "".join(key.whole for key in keys)
    assert one["question_keys"] == "".join(key.question for key in keys)
    assert one["leaked"] == {"question+answer": 1, "question": 0, "answer": 0, "passage": 1}
    assert one["share"] == 1 / 5
    assert one["items"] == {
        "q": {"number": 0, "part": "question+answer", "share": 1.0, "removed": 3, "kept": 0},
        "p": {"number": 1, "part": "passage", "share": 1.0, "removed": 1, "kept": 1},
    }
    assert one["sources"] == {"web": 2, "wiki": 2}
    assert two["leaked"]["question"] == 1
    assert two["sources"] == {"books": 1}
    first = one["examples"][0]
    assert first["document"] == "web/a"
    assert first["item"] == "q"
    assert first["excerpt"].startswith("A merchant who bought seventeen")
    assert json.loads(json.dumps(report)) == report
    few = contamination_report([outcome.removed], open_index(folder), num_examples=1)
    assert len(few["benchmarks"][0]["examples"]) == 1


def test_the_rule_of_the_report_is_the_step_s(folder):
    outcome = Decontaminate(index=folder, rule="gpt3", on="any")(documents())
    report = contamination_report([outcome.removed], open_index(folder), rule="gpt3", min_share=0.9)
    assert report["rule"] == {"name": "gpt3", "min_share": 0.9}


def test_as_text(folder):
    outcome = Decontaminate(index=folder)(documents())
    text = report_text(contamination_report([outcome.removed], open_index(folder), [outcome.kept]))
    assert "4 documents removed, 1 kept with a label" in text
    assert "set/q (question+answer, 100%) in web/a (removed): A merchant" in text
    line = next(line for line in text.splitlines() if line.startswith("rivers"))
    assert line.split() == ["rivers", "1", "0", "1", "0", "0", "100.0%", "books", "1"]


def test_an_excerpt_is_the_text_as_it_was():
    text = "Zero, one -- two!\r\nThree  'four' (five)... 日本語 six"
    assert excerpt(text, 1, 3) == "one -- two! Three"
    assert excerpt(text, 4, 2) == "'four' (five)..."
    assert excerpt(text, 6, 1) == "日本語"
    assert excerpt(text, 50, 3) == ""


def test_it_is_written_whole_or_not_at_all(folder, tmp_path):
    report = contamination_report([], open_index(folder))
    path = tmp_path / "contamination.json"
    write_report(report, path)
    write_report(report, path)
    assert json.loads(path.read_text()) == report
    assert [p.name for p in tmp_path.iterdir()] == ["contamination.json"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="cannot write"):
        write_report(report, tmp_path / "folder")
