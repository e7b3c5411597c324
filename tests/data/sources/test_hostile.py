"""A curation goes on whatever it is given: every file is read or dropped with a reason."""

import io
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.data.sources.hostile import GOOD, GOOD_ROWS, page, record, write_closed, write_hostile

from stepwell.data.batches import documents, removed_batch, to_batch
from stepwell.data.sources.pieces import SUFFIXES, plan_source, read_piece, read_source
from stepwell.data.sources.spec import SourceSpec
from stepwell.types import DataError, Document, Dropped

PEAK_BYTES = 400 * 2**20
# Everything a child process reads, as lines of: file, documents, reasons.
CHILD = """
import json, os, sys
from collections import Counter
from stepwell.data.batches import removed_batch, to_batch
from stepwell.data.sources.pieces import plan_source, read_piece
from stepwell.data.sources.spec import SourceSpec
from stepwell.types import Document
spec = SourceSpec.model_validate(json.loads(sys.argv[1]))
if sys.argv[2] == "nobody" and os.geteuid() == 0:  # root may read everything
    b"x".decode("utf-8-sig")  # what Python loads late, nobody may not read
    os.setuid(65534)
for piece in plan_source(spec):
    reasons, num_docs = Counter(), 0
    for item in read_piece(piece, spec):
        if isinstance(item, Document):
            num_docs += 1
            to_batch([item], 0)
        else:
            reasons[item.reason] += 1
            removed_batch([item], "read")
    print(json.dumps([piece.name, piece.start, num_docs, reasons]))
# Not getrusage's, which begins with what the parent had.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) * 1024)
"""


def read_in_child(spec: dict, user: str = "") -> tuple[dict[str, tuple[int, dict]], int]:
    command = [sys.executable, "-c", CHILD, json.dumps(spec), user]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    *lines, peak = done.stdout.splitlines()
    found: dict[str, tuple[int, dict]] = {}
    for name, _, num_docs, reasons in map(json.loads, lines):
        earlier = found.get(name, (0, {}))
        found[name] = (earlier[0] + num_docs, dict(Counter(earlier[1]) + Counter(reasons)))
    return found, int(peak)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    write_hostile(root)
    return root


@pytest.fixture(scope="module")
def outcome(hostile) -> tuple[dict[str, tuple[int, dict]], int]:
    return read_in_child({"name": "hostile", "path": str(hostile), "max_document_bytes": 4 * 2**20})


def test_every_file_is_read_or_dropped_with_a_reason(hostile, outcome):
    found, _ = outcome
    there = {
        os.fsencode(Path(folder, name).relative_to(hostile)).decode("utf-8", "backslashreplace")
        for folder, subfolders, files in os.walk(hostile)
        for name in [*files, *(s for s in subfolders if Path(folder, s).is_symlink())]
    }
    assert set(found) == there
    assert len(found) > 120
    for name, (num_docs, reasons) in found.items():
        assert num_docs or reasons, name


def test_what_becomes_of_each_file(outcome):
    found, _ = outcome
    expected = {
        "rows/good.jsonl": (20, {}),
        "rows/mark.jsonl": (20, {}),
        "rows/crlf.jsonl": (20, {}),
        "rows/cut.jsonl": (19, {"broken_json": 1}),
        "rows/empty.jsonl": (0, {"empty_file": 1}),
        "rows/long-line.jsonl": (21, {"too_large": 1}),
        "rows/surrogate-in-id.jsonl": (0, {"undecodable": 1}),
        "rows/surrogate-in-meta.jsonl": (0, {"undecodable": 1}),
        "rows/surrogate-in-key.jsonl": (0, {"undecodable": 1}),
        "rows/less-deep.jsonl": (0, {"broken_json": 1}),
        "rows/utf16.jsonl": (0, {"undecodable": 1}),
        "rows/is-gzip.jsonl": (0, {"packed_content": 1}),
        "rows/array.json": (0, {"not_json_lines": 1}),
        "rows/object.json": (0, {"not_json_lines": 1}),
        "packed/members.jsonl.gz": (21, {}),
        "packed/padded.jsonl.gz": (20, {}),
        "packed/frames.jsonl.zst": (21, {}),
        "packed/garbage-after.jsonl.gz": (20, {"damaged_file": 1}),
        "packed/nested.jsonl.gz": (0, {"packed_content": 1}),
        "packed/nested.jsonl.zst": (0, {"packed_content": 1}),
        "packed/nested.txt.gz.gz": (0, {"unknown_kind": 1}),
        "packed/bomb.jsonl.gz": (20, {"decompression_bomb": 1}),
        "packed/bomb.jsonl.zst": (20, {"decompression_bomb": 1}),
        "packed/bomb.txt.gz": (0, {"too_large": 1}),
        "packed/cut.jsonl.zst": (0, {"truncated_file": 1}),
        "texts/crlf.txt": (1, {}),
        "texts/utf16.txt": (1, {}),
        "texts/utf32.md": (1, {}),
        "texts/latin.txt": (0, {"undecodable": 1}),
        "texts/large.txt": (0, {"too_large": 1}),
        "texts/image.png": (0, {"unknown_kind": 1}),
        "pages/good.html": (1, {}),
        "pages/nothing.html": (0, {"html_no_text": 1}),
        "pages/nested.html": (0, {"html_too_complex": 1}),
        "pages/many.html": (0, {"html_too_complex": 1}),
        "pages/binary.html": (0, {"undecodable": 1}),
        "archives/good.warc": (2, {}),
        "archives/good.warc.gz": (3, {}),
        "archives/cut.warc": (1, {"truncated_file": 1}),
        "archives/status.warc": (0, {"http_status": 1}),
        "archives/image.warc": (2, {"not_text": 1}),
        "archives/bomb.warc": (0, {"too_large": 1}),
        "archives/truncated.warc": (0, {"truncated_record": 1}),
        "archives/endless-header.warc": (0, {"damaged_file": 1}),
        "tables/good.parquet": (1000, {}),
        "tables/flipped.parquet": (900, {"damaged_file": 1}),
        "tables/zeroed-group.parquet": (900, {"damaged_file": 1}),
        "tables/cut.parquet": (0, {"damaged_file": 1}),
        "tables/invalid.parquet": (1, {"undecodable": 1}),
        "tables/no-text.parquet": (0, {"missing_column": 1}),
        "tables/no-rows.parquet": (0, {"empty_file": 1}),
        "inodes/pipe.jsonl": (0, {"not_a_file": 1}),
        "inodes/device.txt": (0, {"not_a_file": 1}),
        "inodes/loop.jsonl": (0, {"broken_link": 1}),
        "inodes/again": (0, {"linked_folder": 1}),
        "inodes/folder.jsonl/in.jsonl": (20, {}),
        "inodes/b\\xffd.jsonl": (0, {"undecodable_name": 1}),
    }
    assert {name: found[name] for name in expected} == expected


def test_what_was_read_before_the_damage_is_kept(outcome):
    num_docs, reasons = outcome[0]["packed/cut.jsonl.gz"]
    assert num_docs == 20
    assert reasons["truncated_file"] == 1


def test_memory_is_bounded(outcome):
    """100 MB lines, bombs of 600 MB and more, rows of 40 MB repeated, files of 300 MB."""
    assert outcome[1] < PEAK_BYTES


def test_what_may_not_be_read_is_dropped():
    with tempfile.TemporaryDirectory() as root:
        write_closed(Path(root))
        found, _ = read_in_child({"name": "h", "path": root}, "nobody")
        (Path(root) / "closed").chmod(0o700)
    assert found == {
        "secret.jsonl": (0, {"unreadable_file": 1}),
        "closed": (0, {"unreadable_file": 1}),
        "open.jsonl": (20, {}),
    }


def test_no_damage_to_the_metadata_of_a_table_ends_the_process(tmp_path):
    """Arrow has calls that abort for it."""
    target = io.BytesIO()
    pq.write_table(pa.table({"text": [GOOD] * 50, "nested": [[1], []] * 25}), target)
    content = target.getvalue()
    footer = int.from_bytes(content[-8:-4], "little")
    for i in range(0, footer, 9):
        flipped = bytearray(content)
        flipped[len(content) - 8 - footer + i] ^= 1 << i % 8
        (tmp_path / f"{i}.parquet").write_bytes(flipped)
    found, _ = read_in_child({"name": "h", "path": str(tmp_path)})
    assert len(found) == len(range(0, footer, 9))
    assert sum(bool(reasons) for _, reasons in found.values()) > 20


def all_of(path: Path, **options) -> list[Document | Dropped]:
    spec = SourceSpec(name="s", path=str(path), **options)
    return [item for piece in plan_source(spec) for item in read_piece(piece, spec)]


ENDS = sorted(
    f"{suffix}{packed}"
    for suffixes in SUFFIXES.values()
    for suffix in suffixes
    for packed in ("", ".gz", ".zst")
    if suffix != ".parquet" or not packed
)
SEEDS = [GOOD_ROWS[:400], page(), record(page()), GOOD.encode(), b"PAR1" + bytes(40) + b"PAR1"]


@st.composite
def damaged(draw) -> bytes:
    """Random bytes, or sound ones with some replaced, cut out or put in."""
    content = bytearray(draw(st.one_of(st.binary(max_size=300), st.sampled_from(SEEDS))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(content)))
        content[at : at + draw(st.integers(0, 20))] = draw(st.binary(max_size=20))
    return bytes(content)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=damaged(), end=st.sampled_from(ENDS))
@example(content=b"\xff\xfe", end=".json")
@example(content=b"WARC/1.0\r\n\r\n", end=".warc")
def test_no_bytes_under_any_suffix_crash(tmp_path, content, end):
    path = tmp_path / f"file{end}"
    path.write_bytes(content)
    items = all_of(path)
    assert items
    docs = [item for item in items if isinstance(item, Document)]
    dropped = [item for item in items if isinstance(item, Dropped)]
    assert len(docs) + len(dropped) == len(items)
    assert all(item.reason for item in dropped)
    batch = to_batch(docs, 0)
    assert [doc.text for doc in documents(batch)] == [doc.text for doc in docs]
    assert removed_batch(dropped, "read").num_rows == len(dropped)


def test_a_named_file_that_is_gone_ends_the_plan(tmp_path):
    with pytest.raises(DataError, match="nothing to read at"):
        list(read_source(SourceSpec(name="s", path=str(tmp_path / "gone.jsonl"))))
