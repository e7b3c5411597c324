"""Gopher's quality rules against their definitions, written down plainly."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stepwell.data.batches import to_batch
from stepwell.data.quality.gopher import GopherQuality, gopher_quality, gopher_quality_verdicts
from stepwell.data.quality.words import LETTER, MARK, MARKS, char_flags, groups, split_words
from stepwell.types import Document

SENTENCE = "The well is deep and the water that we have is cold with stones"
GOOD = "\n".join([SENTENCE] * 6)


def test_good_text_passes():
    assert gopher_quality(GOOD) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "gopher_too_few_words"),
        (" \n ", "gopher_too_few_words"),
        ("the of " * 24 + "water", "gopher_too_few_words"),
        ("the water of life " * 25_000 + "the", "gopher_too_many_words"),
        ("a of to be " * 30, "gopher_short_words"),
        ("incomprehensibilities the incomprehensibility " * 40, "gopher_long_words"),
        (GOOD + " #" * 10, "gopher_hashes"),
        (GOOD + " word..." * 12, "gopher_ellipses"),
        ("\n".join(["- " + SENTENCE] * 10), "gopher_bullet_lines"),
        ("\n".join([SENTENCE + "..."] * 2 + [SENTENCE] * 4), "gopher_ellipsis_lines"),
        (GOOD + " 12345" * 25, "gopher_few_letters"),
        ("water stones depth light " * 20, "gopher_stop_words"),
        ("the water stones depth light " * 20, "gopher_stop_words"),
        ("The Of And water stones depth light " * 20, "gopher_stop_words"),
    ],
)
def test_each_rule_has_its_reason(text, reason):
    verdict = gopher_quality(text)
    assert verdict is not None
    assert verdict[0] == reason


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        (("the water of life with " * 10).strip(), True),
        (" ".join(["the water of life with"] * 9 + ["the water of life"]), False),
        (" ".join(["the water of life with"] * 9 + ["the water of life -"]), False),
        ("the water of life " * 25_000, True),
        ("\n".join(["- " + SENTENCE] * 9 + [SENTENCE]), True),
        ("\n".join([SENTENCE + "…"] * 3 + [SENTENCE] * 7), True),
        (("water with the stone " * 20) + "1234 " * 20, True),
        (("water with the stone " * 20) + "1234 " * 21, False),
        (GOOD.replace("stones", "stones #"), True),
        ("the and " * 50, True),
        ("the and be of " * 50, False),
    ],
)
def test_limits_are_inclusive(text, passes):
    """Gopher: 50 words pass and 49 do not; 9 bullets of 10 lines pass; 80 % with a letter pass."""
    assert (gopher_quality(text) is None) == passes


@pytest.mark.parametrize(
    ("text", "knob", "legal"),
    [
        ("the water of life", "min_words", 4),
        (GOOD, "max_words", 77),
        ("a of to be " * 30, "min_mean_word_length", 1.5),
        ("incomprehensibilities incomprehensibility the and " * 40, "max_mean_word_length", 12.5),
        (GOOD + " #" * 10, "max_hashes_per_word", 0.2),
        (GOOD + " word..." * 12, "max_ellipses_per_word", 0.2),
        ("\n".join(["- " + SENTENCE] * 10), "max_bullet_lines", 1.0),
        ("\n".join([SENTENCE + "..."] * 2 + [SENTENCE] * 4), "max_ellipsis_lines", 0.4),
        (GOOD + " 12345" * 25, "min_words_with_letter", 0.5),
        ("the water stones depth light " * 20, "min_stop_words", 1),
        ("water stones depth light " * 20, "stop_words", ("water", "light")),
        ("\n".join(["- " + SENTENCE] * 10), "bullets", ("*",)),
    ],
)
def test_every_knob_changes_a_verdict(text, knob, legal):
    limits = GopherQuality(**{knob: legal})
    if knob == "max_words":
        assert gopher_quality(text) is None
        assert gopher_quality(text, limits) == ("gopher_too_many_words", "84 > 77")
    else:
        assert gopher_quality(text) is not None
        assert gopher_quality(text, limits) is None


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"min_words": 60, "max_words": 59}, "at most 59"),
        ({"min_mean_word_length": 11.0}, "at most 10"),
        ({"min_stop_words": 9}, "at most 8"),
    ],
)
def test_limits_that_nothing_passes_are_refused(knobs, message):
    with pytest.raises(ValidationError, match=message):
        GopherQuality(**knobs)
    GopherQuality(min_words=60, max_words=60, min_mean_word_length=10.0, min_stop_words=8)


ALPHABET = st.sampled_from(
    ["the", "of", "and", "be", "The", "water", "stone,", "-", "•", "—", "#", "...", "…", "12", "1a",
     "’tis", "ß", "水", "𝒳", "\u00a0", " ", "\n", "\r\n", "\u2028", "\t", "\x1c", "-x", "x…"]
)  # fmt: skip
TEXTS = st.lists(ALPHABET, max_size=60).map("".join) | st.lists(ALPHABET, max_size=90).map(" ".join)


def by_definition(text: str, limits: GopherQuality) -> str:
    words, lines = text.split(), text.splitlines()
    real = [w for w in words if not set(w) <= MARKS]
    mean = statistics.fmean(map(len, real)) if real else 0
    num, ellipses = len(words), text.count("...") + text.count("…")
    bullets = [s for s in lines if s.lstrip().startswith(limits.bullets)]
    cut_off = [s for s in lines if s.rstrip().endswith(("...", "…"))]
    letters = [w for w in words if any(c.isalpha() for c in w)]
    broken = {
        "gopher_too_few_words": len(real) < limits.min_words,
        "gopher_too_many_words": len(real) > limits.max_words,
        "gopher_short_words": mean < limits.min_mean_word_length,
        "gopher_long_words": mean > limits.max_mean_word_length,
        "gopher_hashes": text.count("#") / max(num, 1) > limits.max_hashes_per_word,
        "gopher_ellipses": num and ellipses / num > limits.max_ellipses_per_word,
        "gopher_bullet_lines": len(bullets) / max(len(lines), 1) > limits.max_bullet_lines,
        "gopher_ellipsis_lines": len(cut_off) / max(len(lines), 1) > limits.max_ellipsis_lines,
        "gopher_few_letters": len(letters) / max(num, 1) < limits.min_words_with_letter,
        "gopher_stop_words": len(set(limits.stop_words) & set(words)) < limits.min_stop_words,
    }
    return next((reason for reason, is_broken in broken.items() if is_broken), "")


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=6), st.integers(0, 9))
def test_verdicts_agree_with_the_definitions(texts, min_words):
    limits = GopherQuality(
        min_words=min_words, min_mean_word_length=1.0, max_ellipses_per_word=0.2,
        min_words_with_letter=0.4,
    )  # fmt: skip
    found = [v[0] if v else "" for v in gopher_quality_verdicts(texts, limits)]
    assert found == [by_definition(text, limits) for text in texts]


def test_a_step_drops_with_reason_and_doesnt_depend_on_the_batches():
    texts = [GOOD, "too short", GOOD + " #" * 20, "", GOOD]
    docs = [Document(str(i), text, "web") for i, text in enumerate(texts)]
    whole = GopherQuality()(to_batch(docs, 0))
    assert whole.kept["id"].to_pylist() == ["0", "4"]
    assert whole.removed.to_pylist()[0] == {
        "id": "1", "source": "web", "step": "gopher-quality", "reason": "gopher_too_few_words",
        "detail": "2 < 50", "witness": "", "text": "too short",
    }  # fmt: skip
    parts = [GopherQuality()(to_batch([doc], i)) for i, doc in enumerate(docs)]
    rows = [row for part in parts for row in part.removed.to_pylist()]
    assert rows == whole.removed.to_pylist()


def test_words_are_those_of_split_and_letters_those_of_isalpha():
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000)]))
    words = split_words([text, "", "a b"])
    joined = text + "\n\na b\n"
    spans = zip(words.start_W.tolist(), words.stop_W.tolist(), strict=True)
    assert [joined[a:b] for a, b in spans] == [*text.split(), "a", "b"]
    assert words.num_words.tolist() == [len(text.split()), 0, 2]
    flags = char_flags(words.chars_C)
    assert (flags & LETTER != 0).tolist() == [c.isalpha() for c in joined]
    # `kinds` takes a word that begins with a letter for one that has more than marks.
    assert not ((flags & LETTER != 0) & (flags & MARK != 0)).any()


def test_groups_keep_all_texts_in_order(monkeypatch):
    monkeypatch.setattr("stepwell.data.quality.words.GROUP_CHARS", 10)
    texts = ["a" * 6, "b" * 4, "c", "d" * 25, "", "e"]
    assert [list(g) for g in groups(texts)] == [texts[:2], texts[2:3], texts[3:4], texts[4:]]
    assert list(groups([])) == []
