"""The main text of raw web pages, as trafilatura finds it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stepwell.data.sources.opening import content_of
from stepwell.data.sources.spec import MIB, Piece, SourceSpec
from stepwell.data.sources.texts import MARKS, Item, checked, text_codec
from stepwell.types import Dropped

if TYPE_CHECKING:
    from lxml.html import HtmlElement

# Extraction takes some 0.1 ms an element; a page of more would hold up the others.
MAX_ELEMENTS = 100_000
# Where libxml2 stops parsing: what lies deeper, and all behind it, would be lost unseen.
MAX_DEPTH = 255
MAX_TAG_BYTES = 100_000
# Above this share of control and replacement characters a page was no text, or of another encoding.
MAX_STRANGE = 0.01
MAX_ATTRIBUTE_BYTES = 1_000
MAX_HTML_BYTES = 16 * MIB
# HTML's encoding sniffing looks for a declaration in so many bytes (WHATWG, prescan).
PRESCAN_BYTES = 1024
DECLARED = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([a-zA-Z0-9_:.-]{1,40})""", re.I)
LONG_TAG = re.compile(rf"<[a-zA-Z!/?][^<>]{{{MAX_TAG_BYTES},}}(?:>|\Z)")
# Not allowed in XML, and so not by lxml.
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
SPACES = re.compile("[ \t\n\r\f]+")
# Texts whose white space is more than single blanks, but for those where it counts.
SPACED = (
    "//text()[(contains(., '\n') or contains(., '\t') or contains(., '  '))"
    " and not(ancestor::pre or ancestor::textarea)]"
)
BLOCKS = (
    "p", "div", "section", "article", "main", "header", "footer", "aside", "blockquote", "li", "dt",
    "dd", "td", "th", "caption", "figcaption", "h1", "h2", "h3", "h4", "h5", "h6", "summary",
    "details", "body",
)  # fmt: skip
META = {
    "title": ("//meta[@property='og:title']/@content", "//title//text()"),
    "url": ("//link[@rel='canonical']/@href", "//meta[@property='og:url']/@content"),
    "date": (
        "//meta[@property='article:published_time']/@content",
        "//meta[@name='date' or @name='dc.date' or @name='DC.date.issued']/@content",
        "//time/@datetime",
    ),
    "html_lang": ("/html/@lang",),
}


def read_html(piece: Piece, spec: SourceSpec) -> Iterator[Item]:
    """The document of one page. Raises FileFault."""
    limit = min(spec.max_document_bytes, MAX_HTML_BYTES)
    content = content_of(piece.path, limit, spec.max_compression_ratio)
    yield page_document(piece.name, spec.name, decode_page(content), {"path": piece.name})


def page_document(
    doc_id: str, source: str, page: str, meta: Mapping[str, Any] | None = None
) -> Item:
    """The main text of a page, without navigation, comments and repeated parts of the site. Its
    title, url, date and language (`html_lang`), as far as it declares them, join the meta.

    Reasons: `undecodable` (above MAX_STRANGE), `html_too_complex` (above MAX_ELEMENTS, or deeper
    than MAX_DEPTH), `html_no_text`.
    Extraction favours precision, as for FineWeb (Penedo et al. 2024, arXiv 2406.17557, section 3).
    """
    import trafilatura

    num_strange = len(CONTROL.findall(page)) + page.count("\ufffd")
    if num_strange > MAX_STRANGE * len(page):
        detail = f"{num_strange:,} of {len(page):,} characters are none of a text"
        return Dropped(doc_id, source, "undecodable", detail)
    num_marks = page.count("<")
    if num_marks > 4 * MAX_ELEMENTS:
        return Dropped(doc_id, source, "html_too_complex", f"{num_marks:,} tags")
    tree = parse_page(page)
    if tree is None:
        return Dropped(doc_id, source, "html_no_text", "nothing that parses as HTML")
    num_elements, depth = tree_size(tree)
    if num_elements > MAX_ELEMENTS or depth >= MAX_DEPTH:
        detail = f"{num_elements:,} elements, {depth} deep; at most {MAX_ELEMENTS:,} and"
        return Dropped(doc_id, source, "html_too_complex", f"{detail} {MAX_DEPTH - 1}")
    found = page_meta(tree)
    try:
        main = trafilatura.bare_extraction(tree, favor_precision=True, include_comments=False)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        return Dropped(doc_id, source, "html_no_text", f"extraction failed: {error!r}"[:300])
    text = "\n".join(line.rstrip() for line in (getattr(main, "text", None) or "").split("\n"))
    if not text.strip():
        return Dropped(doc_id, source, "html_no_text", "the page has no main text")
    return checked(doc_id, text, source, {**found, **(meta or {})})


def decode_page(content: bytes, charset: str | None = None) -> str:
    """By byte order mark, what the server said, what the page declares, UTF-8, or else
    windows-1252, in this order (WHATWG HTML, 13.2.3.2); bytes that fit none become U+FFFD."""
    for mark, encoding in MARKS:
        if content.startswith(mark):
            return content[len(mark) :].decode(encoding, "replace")
    match = DECLARED.search(content[:PRESCAN_BYTES])
    declared = match.group(1).decode("ascii") if match else None
    codec = text_codec(charset) or text_codec(declared)
    if codec in ("iso8859-1", "ascii"):  # labels that mean windows-1252 on the web
        codec = "cp1252"
    if codec is not None and codec.startswith(("utf-16", "utf-32")) and charset is None:
        codec = "utf-8"  # a page whose declaration could be read is not in these
    if codec is not None:
        return content.decode(codec, "replace")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("cp1252", "replace")


def parse_page(page: str) -> HtmlElement | None:
    """The page as a tree, its white space as browsers show it (CSS Text 3, 4.1.1: the lines and
    indents of the markup are none of the text's), and without what would hold up the extraction:
    tags above MAX_TAG_BYTES and attributes above MAX_ATTRIBUTE_BYTES (pictures written into the
    page, mostly)."""
    import lxml.etree as etree
    from lxml import html

    # Line ends as in the first step of parsing HTML (WHATWG, 13.2.3.5).
    page = page.replace("\r\n", "\n").replace("\r", "\n")
    page = CONTROL.sub("", LONG_TAG.sub("", page))
    if not page.strip():
        return None
    parser = html.HTMLParser(
        encoding="utf-8", remove_comments=True, remove_pis=True, collect_ids=False
    )
    try:
        tree = html.document_fromstring(page.encode("utf-8", "replace"), parser=parser)
    except (etree.ParserError, etree.XMLSyntaxError, ValueError):
        return None
    for element in tree.iter(etree.Element):
        for name, value in element.attrib.items():
            if len(value) > MAX_ATTRIBUTE_BYTES:
                del element.attrib[name]
    for text in tree.xpath(SPACED):
        parent, shown = text.getparent(), SPACES.sub(" ", text)
        if text.is_text:
            parent.text = shown.lstrip(" ") if parent.tag in BLOCKS else shown
        else:
            parent.tail = shown
    return tree


def tree_size(tree: HtmlElement) -> tuple[int, int]:
    """Elements, and how deeply they are nested."""
    import lxml.etree as etree

    num_elements = depth = deepest = 0
    for event, _ in etree.iterwalk(tree, events=("start", "end")):
        if event == "start":
            num_elements += 1
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return num_elements, deepest


def page_meta(tree: HtmlElement) -> dict[str, str]:
    """What a page declares of itself."""
    found: dict[str, str] = {}
    for name, paths in META.items():
        values = (str(value) for path in paths for value in tree.xpath(path))
        value = next((v for v in (" ".join(value.split()) for value in values) if v), None)
        if value:
            found[name] = value[:MAX_ATTRIBUTE_BYTES]
    return found
