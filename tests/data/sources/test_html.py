import pytest

from stepwell.data.sources import html
from stepwell.data.sources.html import (
    MAX_DEPTH,
    decode_page,
    page_document,
    parse_page,
    tree_size,
)
from stepwell.types import Document, Dropped

TEXT = "The harbour was quiet, and the boats lay still while rain came in from the west."
MAIN = "".join(f"<p>{TEXT} This is paragraph {i}.</p>" for i in range(6))
PAGE = f"""<!doctype html><html lang="en-GB"><head><title>Harbour  news</title>
<link rel="canonical" href="https://example.org/harbour">
<meta property="article:published_time" content="2024-05-01T10:00:00Z"></head>
<body><nav><ul><li><a href="/">Home</a></li><li><a href="/about">About us</a></li></ul></nav>
<article><h1>Quiet day</h1>{MAIN}</article>
<footer><p>Copyright of somebody, all rights reserved</p></footer></body></html>"""


def test_main_text_and_meta():
    doc = page_document("a", "web", PAGE, {"path": "a.html"})
    assert isinstance(doc, Document)
    assert doc.text.count(TEXT) == 6
    assert "Home" not in doc.text
    assert "Copyright" not in doc.text
    assert doc.meta == {
        "title": "Harbour news", "url": "https://example.org/harbour",
        "date": "2024-05-01T10:00:00Z", "html_lang": "en-GB", "path": "a.html",
    }  # fmt: skip


def test_extraction_is_the_same_every_time():
    texts = {getattr(page_document(str(i), "web", PAGE), "text", None) for i in range(5)}
    assert len(texts) == 1


def test_white_space_is_as_browsers_show_it():
    wrapped = TEXT.replace(", and", ",\n\t\t and").replace("rain  came", "rain came")
    code = "<pre>def f():\n    return  1</pre>"
    page = PAGE.replace(TEXT, f"\n\t\t{wrapped}\n\t\t").replace("</article>", f"{code}</article>")
    doc = page_document("a", "web", page)
    assert isinstance(doc, Document)
    assert doc.text.count(TEXT) == 6
    assert "\t" not in doc.text
    lines = doc.text.split("\n")
    assert lines == [line.rstrip() for line in lines]
    assert [line for line in lines if line.startswith(" ")] == ["    return  1"]
    assert "def f():\n    return  1" in doc.text


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_line_ends_of_any_system(end):
    page = PAGE.replace("</article>", "<pre>def f():\n    return  1</pre></article>")
    doc, other = (page_document("a", "web", p) for p in (page, page.replace("\n", end)))
    assert isinstance(doc, Document)
    assert doc == other


def nested(depth: int) -> str:
    """A page of this depth, with html and body."""
    return f"<html><body>{'<div>' * (depth - 3)}{MAIN}{'</div>' * (depth - 3)}</body></html>"


def test_depth_limit():
    tree = parse_page(nested(MAX_DEPTH - 1))
    assert tree is not None
    assert tree_size(tree)[1] == MAX_DEPTH - 1
    below = page_document("a", "web", nested(MAX_DEPTH - 1))
    assert isinstance(below, Document) or below.reason == "html_no_text"
    above = page_document("a", "web", nested(MAX_DEPTH))
    assert isinstance(above, Dropped)
    assert above.reason == "html_too_complex"


def test_element_limit(monkeypatch):
    monkeypatch.setattr(html, "MAX_ELEMENTS", 100)

    def reason(num_elements: int) -> str | None:
        # html, body and p's
        page = "<html><body>" + "<p></p>" * (num_elements - 2) + "</body></html>"
        return getattr(page_document("a", "web", page), "reason", None)

    assert reason(100) == "html_no_text"
    assert reason(101) == "html_too_complex"
    assert reason(1000) == "html_too_complex"


def test_attributes_that_would_hold_up_the_extraction_go():
    page = PAGE.replace("<article>", f'<article><img src="data:{"x" * 300_000}" alt="a boat">')
    doc = page_document("a", "web", page)
    assert isinstance(doc, Document)
    assert doc.text.count(TEXT) == 6
    tree = parse_page(f'<html><body><img src="{"x" * 1001}" alt="{"y" * 1000}"><p>x</body></html>')
    assert tree is not None
    assert [sorted(e.attrib) for e in tree.iter("img")] == [["alt"]]


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("", "html_no_text"),
        ("<html><body></body></html>", "html_no_text"),
        ("\x01" * 50 + PAGE[:100], "undecodable"),
    ],
)
def test_pages_without_text(page, reason):
    item = page_document("a", "web", page)
    assert isinstance(item, Dropped)
    assert item.reason == reason


def test_strange_characters_limit():
    filler = "<p>" + "word " * 200 + "</p>"
    page = f"<html><body>{MAIN}{filler}"
    few, many = page + "\ufffd" * (len(page) // 101), page + "\ufffd" * (len(page) // 98)
    assert isinstance(page_document("a", "web", few), Document)
    assert getattr(page_document("a", "web", many), "reason", "") == "undecodable"


@pytest.mark.parametrize(
    ("content", "charset", "text"),
    [
        ("é".encode(), None, "é"),
        ("é".encode("latin-1"), None, "é"),
        (b"\x93quoted\x94", None, "“quoted”"),
        (b"\x93quoted\x94", "iso-8859-1", "“quoted”"),
        ("слово".encode("koi8-r"), "koi8-r", "слово"),
        ("\ufeffé".encode("utf-16-le"), None, "é"),
        ("é".encode("utf-8-sig"), "koi8-r", "é"),
        ("é".encode(), "no-such-charset", "é"),
        ("é".encode(), "punycode", "é"),
        (b"a\xff", "utf-8", "a\ufffd"),
    ],
)
def test_encodings(content, charset, text):
    assert decode_page(content, charset) == text


def test_what_a_page_declares_of_its_encoding():
    for declaration in (
        '<meta charset="koi8-r">',
        "<META http-equiv=Content-Type content='text/html; charset=koi8-r'>",
    ):
        page = f"<html>{declaration}<p>слово</p>"
        assert "слово" in decode_page(page.encode("koi8-r"))
        assert "слово" in decode_page(page.encode("utf-8"), "utf-8")
    assert "é" in decode_page('<meta charset="utf-16"><p>é</p>'.encode())
