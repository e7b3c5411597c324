import json
import tracemalloc

import pytest

from stepwell.data.dedup.exact import exact_dedup
from stepwell.data.pipeline import Report, drop_if, run_pipeline, stream_pipeline
from stepwell.data.sources.rows import rows
from stepwell.types import DataError, Document, Dropped


def docs(*texts, source="s"):
    return [Document(str(i), text, source) for i, text in enumerate(texts)]


def too_short(text):
    return ("short", f"{len(text)} < 3") if len(text) < 3 else None


def test_counts_reasons_and_files(tmp_path):
    source = [Dropped("x", "s", "broken_json", "line 1"), *docs("abc", "a", "abc", "déf", "")]
    report = run_pipeline(
        source, [("exact", exact_dedup), ("length", drop_if(too_short))], tmp_path / "o"
    )
    assert report.read == 6
    assert report.volume_in.docs == 5
    assert (report.kept.docs, report.kept.characters, report.kept.bytes) == (2, 6, 7)
    assert report.dropped == 4
    assert {step: drops.by_reason for step, drops in report.steps.items()} == {
        "source": {"broken_json": 1},
        "exact": {"exact_duplicate": 1, "blank": 1},
        "length": {"short": 1},
    }
    assert list(report.steps) == ["source", "exact", "length"]
    assert report.by_reason == {"broken_json": 1, "exact_duplicate": 1, "blank": 1, "short": 1}
    assert report.steps["length"].examples["short"] == [
        {"id": "1", "source": "s", "detail": "1 < 3"}
    ]
    removed = [json.loads(line) for line in (tmp_path / "o/removed.jsonl").open()]
    assert sorted((r["step"], r["id"], r["reason"]) for r in removed) == [
        ("exact", "2", "exact_duplicate"), ("exact", "4", "blank"), ("length", "1", "short"),
        ("source", "x", "broken_json"),
    ]  # fmt: skip
    assert list(rows(tmp_path / "o/kept.jsonl")) == [source[1], source[4]]
    assert json.loads((tmp_path / "o/report.json").read_text())["dropped"] == 4


def test_kept_documents_come_back_with_their_meta(tmp_path):
    doc = Document("0", "text\u2028with\r\nbreaks", "web", {"path": "a/b", "score": 0.5})
    run_pipeline([doc], [], tmp_path / "o")
    assert list(rows(tmp_path / "o/kept.jsonl")) == [doc]


def test_a_rule_judges_only_its_sources():
    source = [Document("0", "a", "code"), Document("1", "b", "prose"), Dropped("2", "prose", "x")]
    items = list(drop_if(too_short, {"prose"})(source))
    assert items == [source[0], Dropped("1", "prose", "short", "1 < 3"), source[2]]


def test_few_examples_and_little_memory():
    """20 MB of documents go through in a fraction of that."""
    report = Report()
    source = (Document(str(i), f"{i} " * 2000, "s") for i in range(2000))
    tracemalloc.start()
    kept = sum(1 for _ in stream_pipeline(source, [("odd", drop_if(is_odd))], report))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kept == 1000
    assert report.steps["odd"].by_reason == {"odd": 1000}
    assert len(report.steps["odd"].examples["odd"]) == 3
    assert report.volume_in.bytes > 15_000_000
    assert peak_bytes < 1_000_000


def is_odd(text):
    return ("odd", "") if int(text.split(maxsplit=1)[0]) % 2 else None


def test_an_error_or_an_existing_folder_leaves_nothing_new(tmp_path):
    def failing():
        yield from docs("abc")
        raise DataError("the source broke")

    with pytest.raises(DataError, match="the source broke"):
        run_pipeline(failing(), [], tmp_path / "o")
    assert list(tmp_path.iterdir()) == []
    run_pipeline(docs("abc"), [], tmp_path / "o")
    with pytest.raises(DataError, match="exists already"):
        run_pipeline(docs("xyz"), [], tmp_path / "o")
    assert [d.id for d in rows(tmp_path / "o/kept.jsonl")] == ["0"]
