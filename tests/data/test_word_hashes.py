import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.data.word_hashes import WORD_BYTES, hash_words, ngrams, normalise, word_spans

TEXTS = st.text(max_size=60) | st.text("ab'’.,-_ \n\r\t\\n日本ß\u0301\u200b", max_size=60)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("...", ""),
        ("A.", "a"),
        ("Don’t stop; DON'T `stop`!", "dont stop dont stop"),
        ("two\r\nlines, re-\nwrapped\tand_cut", "two lines re wrapped and cut"),
        (r'{"a": "x\nB. y\ttab"}', "a x b y tab"),
        ("ﬁne Ⅻ ｗｉｄｅ Straße STRASSE x\u00ad\u200by", "fine xii wide strasse strasse xy"),
        ("don\u00b4t cafe\u0301 café", "dont café café"),
        ("\u0390 \u03aa\u0301 \u1fd3", "\u0390 \u0390 \u0390"),
        ("日本語 und ไทย", "日 本 語 und ไ ท ย"),
        ("3.14 + $5,000", "3 14 5 000"),
        ("a\ud800b", "a b"),
    ],
)
def test_what_a_word_is(text, words):
    assert normalise(text) == words


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(TEXTS, max_size=6))
def test_hashes_belong_to_words(texts):
    """The hashes of a text are those of its words one by one, whatever stands beside it."""
    words = hash_words(texts)
    assert len(words.bounds) == len(texts) + 1
    for i, text in enumerate(texts):
        alone = [int(hash_words([word]).hashes[0]) for word in normalise(text).split()]
        assert words.of(i).tolist() == alone


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TEXTS)
def test_normalising_is_idempotent_and_blind_to_case_and_line_ends(text):
    once = normalise(text)
    assert normalise(once) == once
    assert normalise(text.replace("\n", "\r\n")) == once
    assert normalise(text.casefold()) == once


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TEXTS)
def test_every_word_has_its_place(text):
    spans = list(word_spans(text))
    words = normalise(text).split()
    assert len(spans) == len(words)
    for (start, stop), word in zip(spans, words, strict=True):
        assert word in normalise(text[start:stop]).split()


def test_hashes_tell_words_apart():
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefgh01"))
    words = {"".join(rng.choice(letters, n)) for n in rng.integers(1, 40, 20_000)}
    hashes = hash_words([" ".join(sorted(words))]).hashes
    assert len(set(hashes.tolist())) == len(words)
    bits = np.unpackbits(hashes.view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 0.03


def test_long_words_are_told_by_their_beginning_and_length():
    long = "x" * WORD_BYTES
    hashes = hash_words([f"{long}a {long}b {long}ab {long} {'x' * (WORD_BYTES - 1)}y"]).hashes
    assert hashes[0] == hashes[1]
    assert len(set(hashes.tolist())) == 4


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_ngrams_stay_within_a_text(n):
    texts = ["a b c", "", "a b c d", "c d"]
    words = hash_words(texts)
    hashes, places = ngrams(words, n)
    split = [text.split() for text in texts]
    grams = [tuple(w[i : i + n]) for w in split for i in range(len(w) - n + 1)]
    assert len(hashes) == len(grams)
    assert len(set(hashes.tolist())) == len(set(grams))
    starts = [
        f + i for f, w in zip([0, 3, 3, 7], split, strict=True) for i in range(len(w) - n + 1)
    ]
    assert places.tolist() == starts


def test_ngrams_of_other_lengths_have_other_hashes():
    words = hash_words(["a a a a a a"])
    assert len({int(ngrams(words, n)[0][0]) for n in range(1, 7)}) == 6
