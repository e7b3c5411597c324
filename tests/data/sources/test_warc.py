import gzip
import io
import zlib

import pytest
from tests.data.sources.hostile import GOOD, page, record
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from stepwell.data.sources.pieces import open_source
from stepwell.types import Document, Dropped


def read(tmp_path, content: bytes, name: str = "a.warc", **options) -> list[Document | Dropped]:
    (tmp_path / name).write_bytes(content)
    return list(open_source(tmp_path / name, name="crawl", **options))


def reasons(items: list[Document | Dropped]) -> list[str]:
    return [item.reason if isinstance(item, Dropped) else "" for item in items]


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_an_archive_as_warcio_writes_it(tmp_path, name):
    target = io.BytesIO()
    writer = WARCWriter(target, gzip=name.endswith(".gz"))
    writer.write_record(writer.create_warcinfo_record(name, {"software": "a test"}))
    for i, (kind, payload) in enumerate(
        [("text/html; charset=utf-8", page()), ("text/plain", GOOD.encode()), ("image/png", b"x")]
    ):
        headers = StatusAndHeaders("200 OK", [("Content-Type", kind)], protocol="HTTP/1.1")
        response = writer.create_warc_record(
            f"http://example.org/{i}", "response", payload=io.BytesIO(payload),
            http_headers=headers, warc_headers_dict={"WARC-Date": "2024-05-01T00:00:00Z"},
        )  # fmt: skip
        request = writer.create_warc_record(
            f"http://example.org/{i}", "request",
            http_headers=StatusAndHeaders("GET / HTTP/1.1", [], is_http_request=True),
        )  # fmt: skip
        writer.write_request_response_pair(request, response)
    items = read(tmp_path, target.getvalue(), name)
    assert reasons(items) == ["", "", "not_text"]
    first, second = (item for item in items if isinstance(item, Document))
    assert first.text.count(GOOD) == 8
    assert first.meta["url"] == "http://example.org/0"
    assert first.meta["date"] == "2024-05-01T00:00:00Z"
    assert first.meta["title"] == "A page"
    assert first.id.startswith("<urn:uuid:")
    assert second.text == GOOD


def deflated(content: bytes, bits: int) -> bytes:
    packer = zlib.compressobj(wbits=bits)
    return packer.compress(content) + packer.flush()


@pytest.mark.parametrize(
    ("payload", "header"),
    [
        (gzip.compress(page()), "Content-Encoding: gzip\r\n"),
        (deflated(page(), 15), "Content-Encoding: deflate\r\n"),
        (deflated(page(), -15), "Content-Encoding: deflate\r\n"),
        (page(), "Content-Encoding: gzip\r\n"),
        (page(), "Content-Encoding: deflate\r\n"),
        (b"5\r\n" + page()[:5] + b"\r\n%x\r\n" % len(page()[5:]) + page()[5:] + b"\r\n0\r\n\r\n",
         "Transfer-Encoding: chunked\r\n"),
    ],
)  # fmt: skip
def test_transfer_encodings(tmp_path, payload, header):
    (item,) = read(tmp_path, record(payload, http=header))
    assert isinstance(item, Document)
    assert item.text.count(GOOD) == 8


@pytest.mark.parametrize(
    ("packed", "packing"),
    [(gzip.compress(page()), "gzip"), (deflated(page(), 15), "deflate")],
)
def test_a_packed_page_that_ends_too_early_is_no_shorter_page(tmp_path, packed, packing):
    for left_out in (1, len(packed) // 2):
        content = record(packed[:-left_out], http=f"Content-Encoding: {packing}\r\n")
        (item,) = read(tmp_path, content)
        assert isinstance(item, Dropped)
        assert item.reason == "undecodable"
        assert item.detail == f"its {packing} stream ends too early"


def test_charset_of_the_header(tmp_path):
    content = "слово и дело".encode("koi8-r")
    (item,) = read(tmp_path, record(content, "text/plain; charset=KOI8-R"))
    assert isinstance(item, Document)
    assert item.text == "слово и дело"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (record(page(), status="301 Moved"), ["http_status"]),
        (record(b"a{}", "text/css"), ["not_text"]),
        (record(page(), extra="WARC-Truncated: time\r\n"), ["truncated_record"]),
        (record(GOOD.encode(), "text/plain", rec_type="conversion"), [""]),
        (record(GOOD.encode(), "text/plain", rec_type="metadata"), ["warc_no_content"]),
        (record(page()) + record(page())[:-100], ["", "truncated_file"]),
        (record(page()) + b"no record\r\n", ["", "damaged_file"]),
    ],
)
def test_what_is_no_document(tmp_path, content, found):
    assert reasons(read(tmp_path, content)) == found


LONG = GOOD * 20


@pytest.mark.parametrize(("limit", "found"), [(len(LONG), [""]), (len(LONG) - 1, ["too_large"])])
def test_max_document_bytes(tmp_path, limit, found):
    plain = record(LONG.encode(), "text/plain")
    assert reasons(read(tmp_path, plain, max_document_bytes=limit)) == found
    packed = record(gzip.compress(LONG.encode()), "text/plain", "Content-Encoding: gzip\r\n")
    assert reasons(read(tmp_path, packed, max_document_bytes=limit)) == found


def test_line_ends_of_plain_text(tmp_path):
    (item,) = read(tmp_path, record(f"{GOOD}\r\n{GOOD}\r".encode(), "text/plain"))
    assert isinstance(item, Document)
    assert item.text == f"{GOOD}\n{GOOD}\r"
    (item,) = read(tmp_path, record(f"{GOOD}\r{GOOD}\r".encode(), "text/plain"))
    assert isinstance(item, Document)
    assert item.text == f"{GOOD}\n{GOOD}\n"
