"""Web archives: the pages and texts in WARC files (ISO 28500)."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from stepwell.data.sources.html import MAX_HTML_BYTES, decode_page, page_document
from stepwell.data.sources.opening import (
    ChunkStream,
    FileFault,
    chunks_of,
    without_magic,
)
from stepwell.data.sources.spec import MIB, Piece, SourceSpec
from stepwell.data.sources.texts import Item, checked, text_codec, unix_lines
from stepwell.types import Dropped

if TYPE_CHECKING:
    from warcio.recordloader import ArcWarcRecord

MAX_HEADER_BYTES = MIB
# What holds content; the others (requests, revisits, metadata) are about it.
CONTENT_RECORDS = ("response", "resource", "conversion")
HTML_TYPES = ("text/html", "application/xhtml+xml")
TEXT_TYPES = ("text/plain", "text/markdown")
CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w:.-]{1,40})", re.I)
# zlib's window bits: deflate comes with a header or, from some servers, without.
INFLATE = {"gzip": (31,), "x-gzip": (31,), "deflate": (15, -15)}


def read_warc(piece: Piece, spec: SourceSpec) -> Iterator[Item]:
    """A document for each record of HTML or text; url and date go into its meta. A record is named
    by its WARC-Record-ID, else by its number.

    Raises FileFault where the file ends or is damaged; what came before was handed out.
    """
    number = num_read = 0
    try:
        for number, record in enumerate(_records(piece, spec), 1):
            if record.rec_type in CONTENT_RECORDS:
                num_read += 1
                yield _document(record, f"{piece.name}:{number}", piece, spec)
    except _faults() as error:
        detail = f"can't be read after record {number}: {error}"[:300]
        raise FileFault(piece.path, "damaged_file", detail) from error
    if number == 0:
        if not piece.size_bytes:
            raise FileFault(piece.path, "empty_file", "is empty")
        raise FileFault(piece.path, "damaged_file", "holds no WARC record")
    if num_read == 0:
        detail = f"none of its {number:,} records is one of {', '.join(CONTENT_RECORDS)}"
        raise FileFault(piece.path, "warc_no_content", detail)


def _records(piece: Piece, spec: SourceSpec) -> Iterator[ArcWarcRecord]:
    from warcio.archiveiterator import ArchiveIterator
    from warcio.bufferedreaders import BufferedReader

    class BoundedReader(BufferedReader):
        """Headers of any length would be read whole."""

        header_bytes = 0

        def readline(self, length: int | None = None) -> bytes:
            limit = MAX_HEADER_BYTES - self.header_bytes
            line = super().readline(limit if length is None else min(length, limit))
            self.header_bytes = self.header_bytes + len(line) if line.strip() else 0
            if self.header_bytes >= MAX_HEADER_BYTES:
                detail = f"has headers of more than {MAX_HEADER_BYTES:,} bytes"
                raise FileFault(piece.path, "damaged_file", detail)
            return line

    chunks = without_magic(piece.path, chunks_of(piece.path, spec.max_compression_ratio))
    stream: Any = ChunkStream(chunks)
    iterator = ArchiveIterator(stream)
    iterator.reader = cast(Any, BoundedReader(stream))
    yield from iterator


def _document(record: ArcWarcRecord, place: str, piece: Piece, spec: SourceSpec) -> Item:
    header = record.rec_headers.get_header
    doc_id = header("WARC-Record-ID") or place
    http = record.http_headers
    status = (http.get_statuscode() or "") if http is not None else "200"
    kind = (http.get_header("Content-Type") if http is not None else record.content_type) or ""
    mime = kind.partition(";")[0].strip().lower()
    limit = min(spec.max_document_bytes, MAX_HTML_BYTES) if mime in HTML_TYPES else (
        spec.max_document_bytes)  # fmt: skip
    if status != "200":
        return Dropped(doc_id, spec.name, "http_status", f"{status[:20]}; only 200 is read")
    if mime not in HTML_TYPES + TEXT_TYPES:
        return Dropped(doc_id, spec.name, "not_text", f"its type is {mime[:80] or 'not given'}")
    if header("WARC-Truncated"):
        detail = f"the crawler cut it off ({header('WARC-Truncated')[:40]})"
        return Dropped(doc_id, spec.name, "truncated_record", detail)
    content = _content(record, limit, piece)
    if content is None:
        return Dropped(doc_id, spec.name, "too_large", f"above {limit:,} bytes")
    if isinstance(content, str):
        return Dropped(doc_id, spec.name, "undecodable", content)
    charset = CHARSET.search(kind)
    meta = {"url": header("WARC-Target-URI"), "date": header("WARC-Date")}
    meta = {name: value for name, value in meta.items() if value}
    label = text_codec(charset.group(1)) if charset else None
    page = decode_page(content, label)
    if mime in HTML_TYPES:
        return page_document(doc_id, spec.name, page, meta)
    return checked(doc_id, unix_lines(page), spec.name, meta)


def _content(record: ArcWarcRecord, limit: int, piece: Piece) -> bytes | str | None:
    """The payload; None: it is above the limit; text: why it can't be decoded. Raises FileFault
    where the file ends within the record."""
    from warcio.bufferedreaders import ChunkedDataReader

    parts: list[bytes] = []
    left = limit + 1
    while left > 0 and (part := record.raw_stream.read(min(left, MIB))):
        parts.append(part)
        left -= len(part)
    if left <= 0:
        return None
    if getattr(record.raw_stream, "limit", 0) > 0:
        raise FileFault(piece.path, "truncated_file", "ends in the middle of a record")
    content = b"".join(parts)
    if record.http_headers is None:
        return content
    get = record.http_headers.get_header
    if (get("Transfer-Encoding") or "").strip().lower() == "chunked":
        content = ChunkedDataReader(io.BytesIO(content)).read(limit + 1)
    packing = (get("Content-Encoding") or "identity").strip().lower()
    if packing in INFLATE:
        # Crawlers often store what they have unpacked under the header of before.
        unpacked = _inflate(content, packing, limit)
        if unpacked is None:
            return f"its {packing} stream ends too early"
        content = unpacked
    elif packing == "br" and b"<" not in content[:1000]:
        return "compressed with Brotli, which is not read"
    return content if len(content) <= limit else None


def _inflate(content: bytes, packing: str, limit: int) -> bytes | None:
    """Unpacked (more than `limit` up to a byte), or as it is where it isn't packed; None where it
    ends too early."""
    for bits in INFLATE[packing] if content else ():
        unpacker = zlib.decompressobj(bits)
        try:
            unpacked = unpacker.decompress(content, limit + 1)
        except zlib.error:
            continue
        if unpacker.eof or len(unpacked) > limit:
            return unpacked
        if bits > 0:  # it has the header of such a stream
            return None
    return content


def _faults() -> tuple[type[Exception], ...]:
    from warcio.exceptions import ArchiveLoadFailed

    return (ArchiveLoadFailed, ValueError, EOFError, AttributeError, IndexError, TypeError)
