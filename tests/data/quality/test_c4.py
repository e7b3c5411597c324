import re
import sys
import unicodedata

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.data.batches import to_batch
from stepwell.data.quality.c4 import C4, clean_page, clean_pages, num_sentences
from stepwell.data.quality.words import SENTENCE_ENDS
from stepwell.types import DataError, Document

GOOD = "\n".join(f"This is the line of number {i}." for i in range(6))


def reasons(text: str, limits: C4 | None = None) -> list[str]:
    return [reason for reason, _, _ in clean_page(text, limits).cuts]


def test_a_good_page_stays_as_it_is():
    page = clean_page(GOOD)
    assert (page.text, page.verdict, page.cuts) == (GOOD, None, ())


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("A line without an end", "c4_no_terminal_punctuation"),
        ("A line that trails off...", "c4_no_terminal_punctuation"),
        ("Two words.", "c4_few_words"),
        ("Please turn on JavaScript here.", "c4_javascript"),
        ("Read our Privacy Policy now.", "c4_policy"),
        ("A word of a thousand and one " + "x" * 1000 + ".", "c4_long_word"),
    ],
)
def test_each_line_rule_has_its_reason_and_place(line, reason):
    page = clean_page(f"{GOOD}\n{line}\n\nThe last line stays.")
    assert page.verdict is None
    assert page.text == f"{GOOD}\nThe last line stays."
    start = len(GOOD) + 1
    assert page.cuts == ((reason, start, start + len(line) + 2),)


@pytest.mark.parametrize(
    "line",
    ["Three words here.", 'He said "yes we do"', "It's the dogs'", "Is it so?", "Yes it is!",
     "A word of a thousand " + "x" * 999 + "."],
)  # fmt: skip
def test_lines_at_the_limit_stay(line):
    assert clean_page(f"{GOOD}\n{line}").text == f"{GOOD}\n{line}"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (GOOD + "\nHere is Lorem Ipsum dolor sit.", ("c4_lorem_ipsum", "")),
        (GOOD + "\nint main { return 0. }.", ("c4_curly_bracket", "")),
        ("\n".join(GOOD.split("\n")[:4]), ("c4_few_sentences", "4 < 5")),
        ("\n".join(GOOD.split("\n")[:5]), None),
        ("This is one. This is two! Is it three? It is four. Five it is.", None),
        ("This is one. This is two! Is it three? It is four.", ("c4_few_sentences", "4 < 5")),
        ("", ("c4_few_sentences", "0 < 5")),
        # Rules of pages ask only the lines that have come that far.
        (GOOD + "\nlorem ipsum without an end", None),
        (GOOD + "\nfunction() {", None),
    ],
)
def test_each_page_rule_has_its_reason(text, verdict):
    assert clean_page(text).verdict == verdict


def test_citations_are_cut_out():
    text = f"{GOOD}\nAs Wikipedia says.[12][edit]"
    page = clean_page(text)
    assert page.text == f"{GOOD}\nAs Wikipedia says."
    assert [text[a:b] for _, a, b in page.cuts] == ["[12]", "[edit]"]
    assert reasons(text, C4(citations=False)) == ["c4_no_terminal_punctuation"]
    hidden = f"{GOOD}\nTurn on java[1]script here."
    assert reasons(hidden) == ["c4_javascript"]


@pytest.mark.parametrize(
    ("text", "knobs", "expected"),
    [
        (GOOD, {"min_sentences": 7}, "c4_few_sentences"),
        (GOOD + "\nlorem ipsum here too.", {"lorem_ipsum": False}, ""),
        (GOOD + "\nint main { return 0. }.", {"curly_brackets": False}, ""),
    ],
)
def test_knobs_of_pages(text, knobs, expected):
    before, after = clean_page(text).verdict, clean_page(text, C4(**knobs)).verdict
    assert (before is None) != (after is None)
    assert (after or ("",))[0] == expected


@pytest.mark.parametrize(
    ("line", "knobs"),
    [
        ("Two words.", {"min_line_words": 2}),
        ("A line without an end", {"terminal_punctuation": False}),
        ("A line that ends so;", {"line_ends": (";", ".")}),
        ("Turn on JavaScript here.", {"javascript": False}),
        ("Read our privacy policy.", {"policy_phrases": ("cookies",)}),
        ("A long word is " + "x" * 1000 + ".", {"max_word_chars": 1001}),
    ],
)
def test_knobs_of_lines(line, knobs):
    text = f"{GOOD}\n{line}"
    assert clean_page(text).text == GOOD
    assert clean_page(text, C4(**knobs)).text == text


def test_bad_words_by_list(tmp_path):
    path = tmp_path / "words.txt"
    limits = C4(bad_words=str(path))
    path.write_text("apples\n")
    clean_page(GOOD, limits)
    path.write_text("damn\nvery bad\n\n", "utf-8")  # what was read before counts no more
    assert clean_page(GOOD, limits).verdict is None
    assert clean_page(GOOD + "\nIt is a damned thing.", limits).verdict is None
    for line in ("This is a DAMN thing.", "It is very bad."):
        verdict = clean_page(f"{GOOD}\n{line}", limits).verdict
        assert verdict == ("c4_bad_word", f"a word of {path}")
    with pytest.raises(DataError, match=r"none\.txt"):
        clean_page(GOOD, C4(bad_words=str(tmp_path / "none.txt")))
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match="no word"):
        clean_page(GOOD, C4(bad_words=str(tmp_path / "empty.txt")))


CAPITALS = "".join(
    c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) == "Lu"
)
ENDS = "".join(sorted(SENTENCE_ENDS))
LAZY = re.compile(f"(?:[{CAPITALS}]\\.|.)+?[{re.escape(ENDS)}\n]+[\"'”]?")


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("aAÄ𝐀.!?。 \"'”x"), max_size=25))
def test_sentences_are_those_of_the_published_pattern(line):
    assert num_sentences(line) == max(1, len(LAZY.findall(line)))


def test_a_long_line_without_an_end_takes_linear_time():
    assert num_sentences("A.b" * 300_000) == 1
    assert clean_page('"' + "no end of it " * 100_000 + '"').verdict is not None


def test_lines_break_and_end_as_python_says():
    text = (
        GOOD.replace("\n", "\r\n")
        + "\u2028menu\x85One more here. \u3000\x0bmenu\u00a0\rÄ last one."
    )
    page = clean_page(text)
    assert page.text == f"{GOOD}\nOne more here.\nÄ last one."
    assert [text[a:b] for _, a, b in page.cuts] == ["menu\x85", "menu\u00a0\r"]


def test_blank_lines_go_with_what_is_cut_before_them():
    text = f"\n \n{GOOD}\n\nmenu\n\n  \nTwo words.\n\nThe last line stays.\n\n"
    cuts = [(reason, text[a:b]) for reason, a, b in clean_page(text).cuts]
    assert cuts == [
        ("c4_no_terminal_punctuation", "menu\n\n  \n"), ("c4_few_words", "Two words.\n\n"),
    ]  # fmt: skip


def test_a_page_does_not_depend_on_the_pages_beside_it():
    texts = [f"{GOOD}\nmenu[1]\nÜber uns.[2]\nYes, it is so.[3]", "", f"menu\n{GOOD}", "{x}. a b."]
    column = pa.array(texts, pa.large_string())
    assert clean_pages(column) == [clean_page(text) for text in texts]
    assert clean_pages(column[1:3]) == [clean_page(text) for text in texts[1:3]]
    assert clean_pages(column[:0]) == []


def test_the_step_changes_texts_and_lists_what_it_cut():
    texts = [f"{GOOD}\nmenu\nmore menu", "nothing here", GOOD]
    docs = [Document(str(i), text, "web") for i, text in enumerate(texts)]
    outcome = C4()(to_batch(docs, 0))
    assert outcome.kept["id"].to_pylist() == ["0", "2"]
    assert outcome.kept["text"].to_pylist() == [GOOD, GOOD]
    assert outcome.removed["text"].to_pylist() == ["nothing here"]
    assert outcome.edits.to_pylist() == [
        {
            "id": "0", "source": "web", "step": "c4", "reason": "c4_no_terminal_punctuation",
            "start": len(GOOD) + 1, "stop": len(texts[0]), "replacement": "",
        }
    ]  # fmt: skip
