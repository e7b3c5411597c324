import gzip
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stepwell.data.sources import python_library
from stepwell.data.sources.python_library import docstrings, stdlib_code, stdlib_prose
from stepwell.data.sources.rows import records, rows
from stepwell.data.sources.texts import text_files
from stepwell.data.sources.trees import source_tree
from stepwell.types import DataError, Document, Dropped


def jsonl(path, *lines: bytes | dict):
    content = b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def reasons(items) -> list[str]:
    return [item.reason if isinstance(item, Dropped) else "" for item in items]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson"])
def test_json_lines_with_every_fault(tmp_path, name):
    path = jsonl(
        tmp_path / name,
        b'\xef\xbb\xbf{"text": "starts with a byte order mark"}',
        {"id": 0, "text": "integer id zero", "language": "en"},
        b'{"text": "cut off',
        {"txt": "misnamed"},
        {"text": 5},
        {"text": None},
        b'{"text": "caf\xe9"}',
        {"text": "a\x00b"},
        {"text": " \n"},
        b"",
        b"[1, 2]",
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        {"text": "fine", "source": "web"},
    )
    items = list(rows(path))
    assert reasons(items) == [
        "", "", "broken_json", "missing_column", "wrong_type", "wrong_type", "undecodable",
        "nul_character", "empty", "blank_line", "wrong_type", "undecodable", "broken_json", "",
    ]  # fmt: skip
    first, zero, last = (item for item in items if isinstance(item, Document))
    assert first == Document(f"{name}:1", "starts with a byte order mark", "a")
    assert zero == Document("0", "integer id zero", "a", {"language": "en"})
    assert last.source == "web"
    assert isinstance(items[3], Dropped)
    assert "did you mean 'txt'?" in items[3].detail
    assert items[2].id == f"{name}:3"


def test_parquet(tmp_path):
    path = tmp_path / "p.parquet"
    table = pa.table({"body": ["one", None, "", "two"] * 300, "n": list(range(1200))})
    pq.write_table(table, path)
    items = list(rows(path, text_column="body", source="s"))
    assert reasons(items) == ["", "wrong_type", "empty", ""] * 300
    assert items[3] == Document("p.parquet:4", "two", "s", {"n": 3})
    with pytest.raises(DataError, match=r"no column 'bodi' \(did you mean 'body'\?\); it has body"):
        list(rows(path, text_column="bodi"))


def test_files_that_cannot_be_used(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    no_rows = tmp_path / "none.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), no_rows)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 no")
    cut = jsonl(tmp_path / "cut.jsonl.gz", {"text": "x" * 50})
    cut.write_bytes(cut.read_bytes()[:-12])
    plain = tmp_path / "plain.jsonl.gz"
    plain.write_bytes(b"not gzip")
    empty_gzip = tmp_path / "empty.jsonl.gz"
    empty_gzip.write_bytes(gzip.compress(b""))
    other = tmp_path / "x.csv"
    other.write_text("a,b")
    for path, message in (
        (tmp_path / "missing.jsonl", "no file"),
        (tmp_path / "missing.parquet", "no file"),
        (empty, "is empty"),
        (empty_gzip, "is empty"),
        (no_rows, "no rows"),
        (broken, "not a Parquet file"),
        (cut, "cannot be read after line"),
        (plain, "cannot be read after line 0"),
        (other, "no known kind"),
    ):
        with pytest.raises(DataError, match=message):
            list(rows(path))
        with pytest.raises(DataError, match=message):
            list(records(path))


def test_text_files(tmp_path):
    (tmp_path / "a.txt").write_text("zwölf", "utf-8")
    (tmp_path / "b.txt").write_bytes("zwölf".encode("latin-1"))
    items = list(text_files([tmp_path / "a.txt", tmp_path / "b.txt"]))
    assert reasons(items) == ["", "undecodable"]
    (tmp_path / "c.txt").touch()
    with pytest.raises(DataError, match=r"c\.txt is empty"):
        list(text_files([tmp_path / "c.txt"]))
    with pytest.raises(DataError, match="cannot read"):
        list(text_files([tmp_path / "d.txt"]))


def test_source_tree(tmp_path):
    for name, content in {
        "b.py": b"x = 1\n",
        "a/declared.py": "# coding: latin-1\ns = 'é'\n".encode("latin-1"),
        "a/wrong.py": b"s = '\xe9'\n",
        "a/nothing.py": b"",
        "a/read.me": b"no code",
        ".git/c.py": b"hidden = 1",
        "__pycache__/d.py": b"skipped = 1",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link.py").symlink_to(tmp_path / "b.py")
    items = list(source_tree(tmp_path, "code"))
    assert [item.id for item in items] == ["b.py", "a/declared.py", "a/nothing.py", "a/wrong.py"]
    assert reasons(items) == ["", "", "empty", "undecodable"]
    assert isinstance(items[1], Document)
    assert "é" in items[1].text
    with pytest.raises(DataError, match="no folder"):
        list(source_tree(tmp_path / "missing"))
    with pytest.raises(DataError, match="no files that end in"):
        list(source_tree(tmp_path, suffixes=(".rs",)))


def test_stdlib_code_is_the_library_without_tests():
    items = list(stdlib_code())
    docs = {item.id: item for item in items if isinstance(item, Document)}
    assert len(docs) == len({item.id for item in items if isinstance(item, Document)}) > 400
    assert "def dedent" in docs["textwrap.py"].text
    assert "json/decoder.py" in docs
    assert not any(
        "site-packages" in i or "/test/" in f"/{i}" or "/tests/" in f"/{i}" for i in docs
    )
    assert sum(len(doc.text) for doc in docs.values()) > 5_000_000


def test_stdlib_prose_holds_topics_and_docstrings():
    docs = {item.id: item for item in stdlib_prose() if isinstance(item, Document)}
    assert "iterable" in docs["topics/for"].text
    text = docs["docstrings/textwrap"].text
    assert text.startswith("textwrap\n\nText wrapping and filling.")
    assert "textwrap.TextWrapper.wrap\n\n" in text
    assert "docstrings/json" in docs
    assert sys.modules["textwrap"].dedent.__doc__.split("\n")[0] in text


def test_docstrings_are_named_in_order():
    code = '"""Top."""\nclass A:\n    """Aa."""\n    def f(self):\n        """Ff."""\n'
    code += 'def g():\n    "Gg"\n'
    assert docstrings(code, "m") == "m\n\nTop.\n\n\nm.A\n\nAa.\n\n\nm.A.f\n\nFf.\n\n\nm.g\n\nGg"
    assert docstrings("x = 1", "m") == ""
    with pytest.raises(SyntaxError):
        docstrings("def", "m")


def test_docstrings_of_a_file_that_cannot_be_read_are_dropped_with_its_reason(
    tmp_path, monkeypatch
):
    (tmp_path / "good.py").write_text('"""Something to say."""\n')
    (tmp_path / "odd.py").write_bytes(b'"""Caf\xe9."""\n')
    monkeypatch.setattr(python_library.sysconfig, "get_path", lambda name: str(tmp_path))
    items = [item for item in stdlib_prose("lib") if item.id.startswith("docstrings/")]
    assert [(item.id, item.source) for item in items] == [
        ("docstrings/good", "lib"),
        ("docstrings/odd.py", "lib"),
    ]
    assert isinstance(items[1], Dropped)
    assert items[1].reason == "undecodable"
