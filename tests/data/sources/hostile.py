"""Writes the files that a curation meets on a bad day."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

MIB = 2**20
GOOD = "The harbour was quiet and the boats lay still while the rain came in from the west."


def row(**values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


GOOD_ROWS = b"".join(row(id=f"good-{i}", text=f"{GOOD} {i}") for i in range(20))


def write_hostile(root: Path) -> None:
    """Some 120 files, pipes, links and folders below `root`."""
    _rows(root / "rows")
    _packed(root / "packed")
    _texts(root / "texts")
    _pages(root / "pages")
    _archives(root / "archives")
    _tables(root / "tables")
    _inodes(root / "inodes")


def _rows(folder: Path) -> None:
    folder.mkdir(parents=True)
    files = {
        "good": GOOD_ROWS,
        "empty": b"",
        "newlines": b"\n" * 1000,
        "nul": b"\0" * 100_000,
        "nul-in-text": row(text="a\0b"),
        "surrogate-in-text": b'{"text": "\\ud800 lone"}\n',
        "surrogate-in-id": b'{"text": "fine", "id": "\\udfff"}\n',
        "surrogate-in-meta": b'{"text": "fine", "note": {"a": ["\\uD800"]}}\n',
        "surrogate-in-key": b'{"text": "fine", "\\ud800": 1}\n',
        "latin": '{"text": "café"}\n'.encode("latin-1"),
        "utf16": '{"text": "wide"}\n'.encode("utf-16"),
        "mark": b"\xef\xbb\xbf" + GOOD_ROWS,
        "crlf": GOOD_ROWS.replace(b"\n", b"\r\n"),
        "deep": b'{"text": "fine", "a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n",
        "less-deep": b'{"text": "fine", "a": ' + b"[" * 900 + b"]" * 900 + b"}\n",
        "huge-number": b'{"text": "fine", "n": ' + b"9" * 10_000 + b"}\n",
        "not-a-number": b'{"text": "fine", "n": NaN, "m": 1e999}\n',
        "wrong-types": b'[1]\n"x"\n3\nnull\n{"text": {}}\n{"text": 1}\n{}\n',
        "twice": b'{"text": "one", "text": "two"}\n',
        "cut": GOOD_ROWS[:-30],
        "is-gzip": gzip.compress(GOOD_ROWS),
        "is-zip": b"PK\x03\x04" + bytes(100),
    }
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_bytes(content)
    (folder / "array.json").write_bytes(b'[{"text": "x"}, {"text": "y"}]')
    (folder / "object.json").write_bytes(b'{\n  "text": "x"\n}')
    with (folder / "long-line.jsonl").open("wb") as file:
        file.write(GOOD_ROWS + b'{"text": "')
        for _ in range(100):
            file.write(b"x" * MIB)
        file.write(b'"}\n' + row(id="after", text=GOOD))


def _packed(folder: Path) -> None:
    folder.mkdir()
    packed, zst = gzip.compress(GOOD_ROWS), zstandard.compress(GOOD_ROWS)
    sixteen_mib = gzip.compress(bytes(16 * MIB))
    one_mib = zstandard.compress(b"0" * MIB)
    files = {
        "good.jsonl.gz": packed,
        "members.jsonl.gz": packed + gzip.compress(row(text="second member")),
        "padded.jsonl.gz": packed + bytes(1000),
        "cut.jsonl.gz": gzip.compress(GOOD_ROWS + random.Random(1).randbytes(200_000))[:-100],
        "garbage-after.jsonl.gz": packed + b"garbage",
        "flipped.jsonl.gz": packed[:200] + bytes([packed[200] ^ 255]) + packed[201:],
        "nested.jsonl.gz": gzip.compress(packed),
        "nested.txt.gz.gz": gzip.compress(packed),
        "no-gzip.jsonl.gz": GOOD_ROWS,
        "empty.jsonl.gz": gzip.compress(b""),
        "nothing.jsonl.gz": b"",
        "bomb.jsonl.gz": packed + sixteen_mib * 40,
        "good.jsonl.zst": zst,
        "frames.jsonl.zst": zst + zstandard.compress(row(text="second frame")),
        "cut.jsonl.zst": zst[: len(zst) // 2],
        "flipped.jsonl.zst": zst[:9] + bytes([zst[9] ^ 255]) + zst[10:],
        "no-zstd.jsonl.zst": GOOD_ROWS,
        "nested.jsonl.zst": zstandard.compress(zst),
        "bomb.jsonl.zst": zst + one_mib * 1000,
        "text.txt.gz": gzip.compress(GOOD.encode()),
        "bomb.txt.gz": sixteen_mib * 10,
        "bomb.html.gz": gzip.compress(b"<p>" * (10 * MIB)),
        "page.html.zst": zstandard.compress(page()),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)


def page(body: str = "", paragraphs: int = 8) -> bytes:
    text = "".join(f"<p>{GOOD} Paragraph {i} says so.</p>" for i in range(paragraphs))
    head = "<!doctype html><html><head><title>A page</title></head><body><article>"
    return f"{head}{text}{body}</article></body></html>".encode()


def _texts(folder: Path) -> None:
    folder.mkdir()
    files = {
        "good.txt": GOOD.encode(),
        "empty.txt": b"",
        "blank.txt": b" \n\t\n",
        "latin.txt": "café".encode("latin-1"),
        "utf16.txt": "wide café".encode("utf-16"),
        "utf32.md": "wider café".encode("utf-32"),
        "mark.txt": "café".encode("utf-8-sig"),
        "crlf.txt": b"one\r\ntwo\r\n",
        "nul.txt": b"a\0b",
        "binary.txt": random.Random(2).randbytes(10_000),
        "lone.txt": b"\xed\xa0\x80",
        "punycode.py": b"# coding: punycode\n" + b"x" * 300_000,
        "unknown.py": b"# coding: klingon\n",
        "latin.py": "# coding: latin-1\nx = 'é'\n".encode("latin-1"),
        "image.png": b"\x89PNG\r\n",
        "no-suffix": b"what is this",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with (folder / "large.txt").open("wb") as file:
        file.truncate(300 * MIB)  # a hole: no disk is used


def _pages(folder: Path) -> None:
    folder.mkdir()
    files = {
        "good": page(),
        "empty": b"",
        "nothing": b"<html><body></body></html>",
        "nested": page("<div>" * 100_000),
        "soup": page("<b><i><p><table></b></td></i>" * 5_000),
        "less-than": page("<" * 1_000_000),
        "entities": page("&#0;&#xD800;&#x110000;&amp&lt;" * 1_000),
        "attribute": page(f'<img src="data:{"x" * MIB}">'),
        "attributes": page("<a " + " ".join(f"a{i}=1" for i in range(100_000)) + ">x</a>"),
        "open-comment": page("<!--" + "x" * 100_000),
        "open-script": page("<script>" + "<p>" * 10_000),
        "many": page("<p>word" * 150_000),
        "nul": page("\0" * 1_000),
        "latin": page("é").decode().encode("latin-1"),
        "declared": b'<html><meta charset="koi8-r"><body>'
        + "<p>слово слово</p>".encode("koi8-r") * 60,
        "wrongly-declared": b'<html><meta charset="punycode"><body>' + page(),
        "utf16": page().decode().encode("utf-16"),
        "binary": random.Random(3).randbytes(10_000),
        "xml": b'<?xml version="1.0" encoding="utf-7"?>' + page(),
    }
    for name, content in files.items():
        (folder / f"{name}.html").write_bytes(content)
    with (folder / "large.html").open("wb") as file:
        file.truncate(100 * MIB)


def record(
    content: bytes, kind: str = "text/html", http: str = "", length: int | None = None,
    rec_type: str = "response", status: str = "200 OK", extra: str = "",
) -> bytes:  # fmt: skip
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{http}\r\n".encode()
    body = head + content if rec_type == "response" else content
    size = len(body) if length is None else length
    return (
        f"WARC/1.0\r\nWARC-Type: {rec_type}\r\nWARC-Target-URI: http://example.org/\r\n"
        f"WARC-Date: 2024-05-01T00:00:00Z\r\nContent-Type: "
        f"{'application/http; msgtype=response' if rec_type == 'response' else kind}\r\n"
        f"{extra}Content-Length: {size}\r\n\r\n"
    ).encode() + body + b"\r\n\r\n"  # fmt: skip


def _archives(folder: Path) -> None:
    folder.mkdir()
    good = record(page()) + record(GOOD.encode(), "text/plain")
    zipped = gzip.compress(page())
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(page()), page())
    bomb = gzip.compress(bytes(32 * MIB))
    files = {
        "good.warc": good,
        "good.warc.gz": b"".join(gzip.compress(part) for part in (record(page()), good)),
        "cut.warc": good[:-50],
        "cut.warc.gz": gzip.compress(good)[:-40],
        "empty.warc": b"",
        "no.warc": b"what is this\n" * 1000,
        "packed-page.warc": record(zipped, http="Content-Encoding: gzip\r\n"),
        "unpacked-page.warc": record(page(), http="Content-Encoding: gzip\r\n"),
        "chunked.warc": record(chunked, http="Transfer-Encoding: chunked\r\n"),
        "bad-chunks.warc": record(page(), http="Transfer-Encoding: chunked\r\n"),
        "bomb.warc": record(bomb, http="Content-Encoding: gzip\r\n"),
        "brotli.warc": record(b"\x0b\x80", http="Content-Encoding: br\r\n"),
        "status.warc": record(page(), status="404 Not Found"),
        "no-status.warc": record(page(), status=""),
        "image.warc": record(b"\x89PNG", "image/png") + good,
        "short.warc": record(page(), length=10) + good,
        "long.warc": record(page(), length=10**9),
        "negative.warc": record(page(), length=-5) + good,
        "no-length.warc": good.replace(b"Content-Length: ", b"Content-Lengthy: "),
        "headers.warc": b"WARC/1.0\r\n" + b"a: b\r\n" * 400_000 + b"\r\n\r\n\r\n" + good,
        "endless-header.warc": b"WARC/1.0\r\nx: " + b"x" * (20 * MIB),
        "conversion.warc.wet": record(GOOD.encode(), "text/plain", rec_type="conversion"),
        "truncated.warc": record(page(), extra="WARC-Truncated: length\r\n"),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _tables(folder: Path) -> None:
    folder.mkdir()
    good = io.BytesIO()
    pq.write_table(
        pa.table({"text": [f"{GOOD} {i}" for i in range(1000)], "n": range(1000)}),
        good, row_group_size=100, compression="none", use_dictionary=False,
    )  # fmt: skip
    content = good.getvalue()
    middle = content.find(f"{GOOD} 450".encode())
    files = {
        "good": content,
        "empty": b"",
        "cut": content[: len(content) // 2],
        "no": b"PAR1 no PAR1",
        "footer": content[:-40] + bytes(32) + content[-8:],
        "flipped": content[: middle - 2000] + b"\xff" * 4000 + content[middle + 2000 :],
        "zeroed-group": content[:4] + bytes(5000) + content[5004:],
    }
    for name, data in files.items():
        (folder / f"{name}.parquet").write_bytes(data)
    (folder / "packed.parquet.gz").write_bytes(gzip.compress(content))
    pq.write_table(pa.table({"body": ["x"]}), folder / "no-text.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), folder / "no-rows.parquet")
    invalid = pa.array([b"\xff\xfe", b"fine"]).view(pa.string())
    pq.write_table(pa.table({"text": invalid}), folder / "invalid.parquet")
    odd = {
        "text": ["fine", None], "when": pa.array([10**18, None], pa.timestamp("ns")),
        "raw": [b"\xff", None], "deep": [[{"a": [1]}], []],
    }  # fmt: skip
    pq.write_table(pa.table(odd), folder / "odd.parquet")
    large = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), ["x" * (16 * MIB)])
    for codec in ("snappy", "zstd"):
        path = folder / f"bomb-{codec}.parquet"
        pq.write_table(pa.table({"text": large}), path, compression=codec)


def write_closed(root: Path) -> None:
    """What only its owner could open, and not even he does; root can."""
    (root / "secret.jsonl").write_bytes(GOOD_ROWS)
    (root / "secret.jsonl").chmod(0)
    (root / "closed").mkdir(mode=0)
    (root / "open.jsonl").write_bytes(GOOD_ROWS)
    root.chmod(0o755)


def _inodes(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "pipe.jsonl")
    os.mkfifo(folder / "pipe.parquet")
    (folder / "loop.jsonl").symlink_to(folder / "loop.jsonl")
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    (folder / "device.txt").symlink_to("/dev/zero")
    (folder / "again").symlink_to(folder)
    (folder / "folder.jsonl").mkdir()
    (folder / "folder.jsonl" / "in.jsonl").write_bytes(GOOD_ROWS)
    with open(os.fsencode(folder) + b"/b\xffd.jsonl", "wb") as file:
        file.write(GOOD_ROWS)
