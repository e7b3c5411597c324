from stepwell.data.dedup.exact import exact_dedup, normalise
from stepwell.types import Document, Dropped


def run(*texts):
    return list(exact_dedup(Document(str(i), text, "s") for i, text in enumerate(texts)))


def kept(items) -> list[str]:
    return [item.id for item in items if isinstance(item, Document)]


def test_first_of_equals_stays():
    items = run("A", "A", "A", "B")
    assert kept(items) == ["0", "3"]
    assert items[1] == Dropped("1", "s", "exact_duplicate", "of 0")
    assert kept(run("Short text", "Short text")) == ["0"]


def test_integer_id_zero_survives():
    items = list(exact_dedup([Document(0, "x", "s"), Document(1, "x", "s")]))  # type: ignore[arg-type]
    assert items[0] == Document(0, "x", "s")  # type: ignore[arg-type]
    assert isinstance(items[1], Dropped)
    assert items[1].detail == "of 0"


def test_blank_documents_are_counted_apart():
    reasons = [item.reason for item in run("", " \n\t", "\u00a0") if isinstance(item, Dropped)]
    assert reasons == ["blank"] * 3


def test_what_counts_as_equal():
    assert kept(run("a  b\r\n", "a b", "A b", "cafe\u0301", "caf\u00e9", "ab")) == [
        "0",
        "2",
        "3",
        "5",
    ]
    assert normalise(" a\n\n b\u3000c ") == "a b c"


def test_three_paragraphs_of_one_document_stay():
    text = "one\n\none\n\none"
    assert run(text) == [Document("0", text, "s")]


def test_dropped_pass_through():
    gone = Dropped("x", "s", "why")
    assert list(exact_dedup([gone])) == [gone]


def test_lone_surrogates_do_not_stop_the_stream():
    assert kept(run("\ud800", "\ud800")) == ["0"]
