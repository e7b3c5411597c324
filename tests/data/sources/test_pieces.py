import gzip
import json
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stepwell.data.sources import opening
from stepwell.data.sources import pieces as pieces_module
from stepwell.data.sources.pieces import (
    open_source,
    plan_source,
    read_piece,
    read_source,
    split_of,
)
from stepwell.data.sources.rows import lines
from stepwell.data.sources.spec import SourceSpec
from stepwell.data.sources.trees import source_tree
from stepwell.types import DataError, Document, Dropped

PROSE = "The boats lay still while the rain came in from the west."


def write(root: Path, files: Mapping[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def row(text: str, **values) -> str:
    return json.dumps({"text": text, **values}) + "\n"


def outcome(*paths: Path | str, **options) -> list[tuple[str, str]]:
    """(id, text, or why there is none) of everything in a source."""
    spec = SourceSpec(name="s", path=tuple(map(str, paths)), **options)
    items = [item for piece in plan_source(spec) for item in read_piece(piece, spec)]
    return [
        (item.id, item.text if isinstance(item, Document) else f"!{item.reason}") for item in items
    ]


def test_a_folder_of_mixed_files(tmp_path):
    write(
        tmp_path,
        {
            "b/rows.jsonl": row("one") + row("two", id="own"),
            "a.txt": "text",
            "code.py": "x = 1",
            "picture.png": b"\x89PNG",
            ".hidden/c.txt": "not seen",
            "node_modules/d.js": "not seen",
        },
    )
    pq.write_table(pa.table({"text": ["three"]}), tmp_path / "b" / "t.parquet")
    assert outcome(tmp_path) == [
        ("a.txt", "text"),
        ("code.py", "x = 1"),
        ("picture.png", "!unknown_kind"),
        ("b/rows.jsonl@0", "one"),
        ("own", "two"),
        ("b/t.parquet:0.1", "three"),
    ]
    assert outcome(tmp_path, kind="code")[1] == ("code.py", "x = 1")
    assert [text for _, text in outcome(tmp_path, kind="code")].count("!other_kind") == 3


def test_globs_files_and_their_names(tmp_path):
    write(tmp_path, {"x/1.jsonl": row("a"), "y/1.jsonl": row("b"), "y/2.txt": "c", "mail/9": "d"})
    assert outcome(f"{tmp_path}/*/1.jsonl") == [("x/1.jsonl@0", "a"), ("y/1.jsonl@0", "b")]
    assert outcome(f"{tmp_path}/**/*.txt") == [("y/2.txt", "c")]
    assert outcome(f"{tmp_path}/mail/*", kind="text") == [("9", "d")]
    both = outcome(tmp_path / "x/1.jsonl", tmp_path / "y/1.jsonl")
    assert both == [(f"{tmp_path}/x/1.jsonl@0", "a"), (f"{tmp_path}/y/1.jsonl@0", "b")]
    once = outcome(tmp_path / "x/1.jsonl", f"{tmp_path}/x/*")
    assert once == [("1.jsonl@0", "a")]
    with pytest.raises(DataError, match=r"nothing to read at .*z/\*"):
        outcome(f"{tmp_path}/z/*")
    with pytest.raises(DataError, match="of no known kind: set kind"):
        outcome(tmp_path / "mail" / "9")
    with pytest.raises(DataError, match="holds no file to read as html: 1 files, none that ends"):
        outcome(tmp_path / "mail", kind="html")


def test_links_are_read_once_and_never_followed_into_folders(tmp_path):
    """As in a cache of the Hugging Face hub, where a snapshot links to blobs without suffix."""
    write(tmp_path, {"blobs/0af": row("a"), "out/b.txt": "b", "snapshots/1/c.txt": "c"})
    snapshot = tmp_path / "snapshots" / "1"
    (snapshot / "data.jsonl").symlink_to("../../blobs/0af")
    (snapshot / "same.txt").symlink_to("c.txt")
    (snapshot / "folder").symlink_to(tmp_path / "out")
    assert outcome(snapshot) == [
        ("c.txt", "c"), ("data.jsonl@0", "a"), ("folder", "!linked_folder"),
    ]  # fmt: skip


HUB = {
    "README.md": "a card",
    "data/train-00000-of-00002.jsonl": row("t0"),
    "data/train-00001-of-00002.jsonl": row("t1"),
    "data/test-00000-of-00001.jsonl": row("e"),
}


def test_splits_of_a_hugging_face_folder(tmp_path):
    write(tmp_path, HUB)
    with pytest.raises(DataError, match="holds the splits test, train; name one with split"):
        outcome(tmp_path)
    with pytest.raises(DataError, match=r"no split 'trian' \(did you mean 'train'\?\)"):
        outcome(tmp_path, split="trian")
    train = outcome(tmp_path, split="train")
    assert [text for _, text in train] == ["!not_rows", "!other_split", "t0", "t1"]
    assert [text for _, text in outcome(tmp_path, split="all")] == ["!not_rows", "e", "t0", "t1"]
    assert [t for _, t in outcome(f"{tmp_path}/data/*", split="test")] == ["e"]
    (tmp_path / "data/test-00000-of-00001.jsonl").unlink()
    assert [text for _, text in outcome(tmp_path)] == ["!not_rows", "t0", "t1"]


def test_a_folder_that_only_resembles_one_is_read_whole(tmp_path):
    write(tmp_path, {"a.jsonl": row("a"), "training-notes.txt": "notes", "test/b.jsonl": row("b")})
    assert [text for _, text in outcome(tmp_path)] == ["a", "notes", "b"]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("data/train-00000-of-00005.parquet", "train"),
        ("data/train-00000-of-00001-a1b2c3d4e5f60718.parquet", "train"),
        ("en/science.qa-00000-of-00001.jsonl", "science.qa"),
        ("dev.jsonl", "validation"),
        ("my_val_set.json", "validation"),
        ("test/part0.jsonl", "test"),
        ("contest.jsonl", None),
        ("rows.jsonl", None),
    ],
)
def test_split_names(name, split):
    assert split_of(name) == split


contents = st.lists(st.sampled_from([b"", b"a", b"bb", b"\r", b"ccccccccc"]), max_size=12)


@settings(max_examples=200, deadline=None)
@given(parts=contents, size=st.integers(1, 9), ends=st.booleans())
def test_cut_files_give_every_line_exactly_once(tmp_path_factory, parts, size, ends):
    """Whatever the cutting, documents and ids are the same."""
    folder = tmp_path_factory.mktemp("cut")
    lines_ = [json.dumps({"text": f"{part.decode()}.{i}"}).encode() for i, part in enumerate(parts)]
    content = b"\n".join(lines_) + (b"\n" if ends and lines_ else b"")
    (folder / "a.jsonl").write_bytes(content or b"\n")
    whole = outcome(folder / "a.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "PIECE_BYTES", size)
        spec = SourceSpec(name="s", path=str(folder / "a.jsonl"))
        assert len(plan_source(spec)) >= len(content) // size - 1
        assert outcome(folder / "a.jsonl") == whole
    assert len(whole) == max(1, len(lines_))


def test_parquet_is_cut_in_row_groups(tmp_path, monkeypatch):
    table = pa.table({"text": [f"{PROSE} {i}" for i in range(100)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=10)
    whole = outcome(tmp_path / "t.parquet")
    assert whole[99] == ("t.parquet:9.10", f"{PROSE} 99")
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", 500)
    pieces = plan_source(SourceSpec(name="s", path=str(tmp_path / "t.parquet")))
    assert len(pieces) > 3
    assert sum(piece.size_bytes for piece in pieces) <= (tmp_path / "t.parquet").stat().st_size
    assert outcome(tmp_path / "t.parquet") == whole


def test_packed_files_are_not_cut(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(b"".join(row(f"{i}").encode() for i in range(99)))
    )
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", 10)
    assert len(plan_source(SourceSpec(name="s", path=str(tmp_path)))) == 1
    assert len(outcome(tmp_path)) == 99


def test_pieces_travel(tmp_path):
    write(tmp_path, HUB)
    for piece in plan_source(SourceSpec(name="s", path=str(tmp_path), split="train")):
        assert pickle.loads(pickle.dumps(piece)) == piece
        assert type(piece)(**json.loads(json.dumps(piece.__dict__))) == piece


def test_lines_hold_no_more_than_the_limit():
    chunks = [b"ab\nc", b"d" * 10, b"e\n", b"\nlast"]
    found = list(lines(iter(chunks), 5))
    assert [(line.offset, line.content, line.size_bytes) for line in found] == [
        (0, b"ab", 2), (3, None, 12), (16, b"", 0), (17, b"last", 4),
    ]  # fmt: skip


@pytest.mark.parametrize(("limit", "reason"), [(40, ""), (39, "!too_large")])
def test_max_document_bytes_of_lines_files_and_rows(tmp_path, limit, reason):
    line = json.dumps({"text": "x" * 28})
    assert len(line) == 40
    write(tmp_path, {"a.jsonl": line + "\n", "b.txt": "y" * 40})
    pq.write_table(pa.table({"text": ["z" * 40]}), tmp_path / "c.parquet")
    texts = [text for _, text in outcome(tmp_path, max_document_bytes=limit)]
    assert texts == ([reason] * 3 if reason else ["x" * 28, "y" * 40, "z" * 40])


def test_max_compression_ratio(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "FREE_BYTES", 100_000)
    text = row("a" * 2_000).encode() * 1_000
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(text))
    least = -(-(len(text) - 100_000) // path.stat().st_size)
    assert least > 50
    assert len(outcome(tmp_path, max_compression_ratio=least)) == 1_000
    cut = outcome(tmp_path, max_compression_ratio=least // 2)
    assert cut[-1] == ("a.jsonl.gz", "!decompression_bomb")
    assert 100 < len(cut) < 600


def test_max_docs_counts_documents_only(tmp_path):
    write(tmp_path, {"a.jsonl": "broken\n" + row("1") + row("2") + row("3"), "b.jsonl": row("4")})
    spec = SourceSpec(name="s", path=str(tmp_path), max_docs=2)
    assert [type(item) for item in read_source(spec)] == [Dropped, Document, Document]
    assert len(list(read_source(spec.model_copy(update={"max_docs": 4})))) == 5
    assert len(list(read_source(spec.model_copy(update={"max_docs": None})))) == 5


def test_encoding(tmp_path):
    write(tmp_path, {"a.txt": "café".encode("latin-1"), "b.txt": "café".encode("utf-16")})
    assert [text for _, text in outcome(tmp_path)] == ["!undecodable", "café"]
    assert [text for _, text in outcome(tmp_path, encoding="latin-1")] == ["café", "café"]


def test_columns(tmp_path):
    write(tmp_path, {"a.jsonl": json.dumps({"body": "b", "key": 7, "text": "t", "n": 1})})
    (doc,) = open_source(tmp_path / "a.jsonl", text_column="body", id_column="key")
    assert doc == Document("7", "b", "a", {"text": "t", "n": 1})
    (doc,) = open_source(tmp_path / "a.jsonl", name="named")
    assert (doc.source, doc.id) == ("named", "a.jsonl@0")


def test_a_row_keeps_the_source_it_names(tmp_path):
    write(tmp_path, {"a.jsonl": row("t", source="cc")})
    (doc,) = open_source(tmp_path / "a.jsonl", name="web")
    assert doc == Document("a.jsonl@0", "t", "web", {"source": "cc"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"encoding": "klingon"}, "'klingon' is no encoding that Python knows"),
        ({"kind": "html", "split": "train"}, "split = 'train' chooses among files of rows"),
        ({"max_docs": 0}, "greater than 0"),
        ({"kind": "txt"}, "'auto', 'text'"),
        ({"name": ""}, "at least 1 character"),
    ],
)
def test_a_spec_that_cannot_be(values, message):
    with pytest.raises(ValidationError, match=message):
        SourceSpec.model_validate({"name": "s", "path": "p", **values})


def test_pythons_own_library():
    spec = SourceSpec(name="lib", path="stdlib-code", max_docs=3)
    docs = list(read_source(spec))
    assert [doc.source for doc in docs if isinstance(doc, Document)] == ["lib"] * 3
    with pytest.raises(DataError, match=r"did you mean 'stdlib-code'\?"):
        plan_source(SourceSpec(name="lib", path="stdlib-cod"))


def test_a_folder_of_that_name_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, {"stdlib-code/a.txt": "mine"}))
    assert outcome("stdlib-code") == [("a.txt", "mine")]
    assert os.path.isdir("stdlib-code")


def test_times_of_parquet_become_text(tmp_path):
    """Python's own end at microseconds and at the year 9999."""
    times = pa.array([1, 2**62, None], pa.timestamp("ns"))
    far = pa.array([2**60] * 3, pa.timestamp("us"))
    pq.write_table(
        pa.table({"text": ["a", "b", "c"], "t": times, "far": far}), tmp_path / "t.parquet"
    )
    docs = [item for item in open_source(tmp_path) if isinstance(item, Document)]
    assert [doc.meta["t"] for doc in docs] == [
        "1970-01-01 00:00:00.000000001", "2116-02-20 23:53:38.427387904", None,
    ]  # fmt: skip


def test_a_missing_library_is_named_before_anything_is_read(tmp_path, monkeypatch):
    write(tmp_path, {"a.html": "<p>x", "b.txt": "b"})
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    with pytest.raises(DataError, match=r"reading HTML needs trafilatura: pip install 'stepwell"):
        outcome(tmp_path)
    (tmp_path / "a.html").unlink()
    assert outcome(tmp_path) == [("b.txt", "b")]


def curated(root: Path, finished: bool = True) -> Path:
    write(
        root,
        {
            "documents/part.jsonl": row("kept"),
            "removed/part.jsonl": row("gone"),
            "datasheet.html": f"<html><body><p>{PROSE}</p></body></html>",
        }
        | ({"curation.json": "{}"} if finished else {".work/plan.json": "{}"}),
    )
    return root


def test_a_curated_folder_is_what_it_kept(tmp_path):
    a = curated(tmp_path / "a")
    curated(tmp_path / "b")
    assert [text for _, text in outcome(a)] == ["kept"]
    assert [text for _, text in outcome(f"{tmp_path}/*")] == ["kept", "kept"]
    assert [text for _, text in outcome(a / "removed")] == ["gone"]
    assert [text for _, text in outcome(f"{a}/removed/*.jsonl")] == ["gone"]


def test_an_unfinished_curation_is_refused(tmp_path):
    folder = curated(tmp_path / "a", finished=False)
    for place in (folder, f"{tmp_path}/*"):
        with pytest.raises(DataError, match="unfinished curation.*finish it first"):
            outcome(place)
    (folder / "curation.json").write_text("{}")  # between publishing and tidying up
    assert [text for _, text in outcome(folder)] == ["kept"]


@pytest.mark.parametrize("place", ["{}", "{}/**/*.jsonl"])
def test_curated_folders_below_a_source_are_passed_over(tmp_path, place):
    write(tmp_path, {"own.jsonl": row("own"), "more/own.jsonl": row("too")})
    curated(tmp_path / "more" / "done")
    curated(tmp_path / "begun", finished=False)
    found = outcome(place.format(tmp_path))
    assert sorted(text for _, text in found) == ["!curated_folder"] * 2 + ["own", "too"]
    assert {name for name, text in found if "!" in text} == {"more/done", "begun"}


def test_trees_of_code_pass_over_curated_folders_too(tmp_path):
    write(tmp_path, {"a.py": "x = 1\n", "out/notes.py": "y = 2\n"})
    curated(tmp_path / "out")
    curated(tmp_path / "begun", finished=False)
    found = list(source_tree(tmp_path))
    assert [(i.id, getattr(i, "reason", "")) for i in found] == [
        ("a.py", ""),
        ("begun", "curated_folder"),
        ("out", "curated_folder"),
    ]
    with pytest.raises(DataError, match="finish it first"):
        list(source_tree(tmp_path / "begun"))


def test_a_glob_of_curated_files_only(tmp_path):
    curated(tmp_path / "a")
    with pytest.raises(DataError, match="those of curated folders"):
        outcome(f"{tmp_path}/*/*/*.jsonl")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("one\r\ntwo\r\n", "one\ntwo\n"),
        ("one\rtwo\r", "one\ntwo\n"),
        ("10%\r99%\ndone\n", "10%\r99%\ndone\n"),
        ("10%\r99%\r\n", "10%\r99%\n"),
    ],
)
def test_line_ends_become_those_of_unix(tmp_path, content, text):
    write(tmp_path, {"a.txt": content, "b.py": content, "c.jsonl": row(content)})
    assert [text for _, text in outcome(tmp_path)] == [text, text, content]
