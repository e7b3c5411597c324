import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.data.dedup.shingles import (
    UNSPACED,
    ngram_hashes,
    set_digests,
    shingle_sets,
    shingles_of,
    slices,
    words,
)


def plain_words(text: str) -> Sequence[str]:
    """The definition, a character at a time."""
    folded = unicodedata.normalize("NFKC", text).lower() if not text.isascii() else text.lower()
    spaced = []
    for char in folded:
        if any(first <= ord(char) <= last for first, last in UNSPACED):
            spaced.append(f" {char} " if unicodedata.category(char)[0] in "LNM" else " ")
        else:
            spaced.append(char if unicodedata.category(char)[0] in "LNM" else " ")
    return "".join(spaced).split()


def plain_shingles(text: str, ngram: int) -> set[tuple[str, ...]]:
    found = plain_words(text)
    if len(found) < ngram:
        return {tuple(found)} if found else {("", " ".join(text.split()))}
    return {tuple(found[i : i + ngram]) for i in range(len(found) - ngram + 1)}


# Characters that both Arrow's and Python's Unicode tables know alike.
CHARACTERS = st.sampled_from(
    list("abAB01 .,-_'\n\t") + list("éÉßжЖ中文字かなカไทย“”—…٣हि\U0001f600\U00020000")
)
TEXTS = st.text(CHARACTERS, max_size=40)


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXTS, max_size=6), st.integers(1, 6))
def test_sets_resemble_each_other_as_the_definition_says(texts, ngram):
    sets = shingle_sets(pa.array(texts, pa.large_string()), ngram)
    arrays = [np.array(row, np.uint64) for row in sets.to_pylist()]
    plain = [plain_shingles(text, ngram) if text.strip() else set() for text in texts]
    assert [len(a) for a in arrays] == [len(p) for p in plain]
    for i, a in enumerate(arrays):
        assert (np.diff(a.astype(object)) > 0).all()
        for j, b in enumerate(arrays):
            assert len(np.intersect1d(a, b)) == len(plain[i] & plain[j])


@settings(max_examples=50, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_a_text_has_the_same_shingles_alone_and_among_others(texts):
    together = shingle_sets(pa.array(texts, pa.large_string()), 3).to_pylist()
    assert together == [shingles_of(text, 3).tolist() for text in texts]


def test_case_punctuation_and_white_space_do_not_count():
    assert (
        shingles_of("The cat, sat\n on a MAT.", 5) == shingles_of("the cat sat on a mat", 5)
    ).all()
    assert (
        shingles_of("\uff21\uff22\uff23 caf\u00e9", 2) == shingles_of("abc cafe\u0301", 2)
    ).all()


def test_words_of_every_length_are_told_apart():
    for size in range(1, 40):
        for place in range(size):
            word = "a" * size
            other = word[:place] + "b" + word[place + 1 :]
            assert shingles_of(word, 1) != shingles_of(other, 1)
    assert shingles_of("a" * 8, 1) != shingles_of("a" * 16, 1)
    long = "abcdefgh12345678"
    assert shingles_of(long, 1) != shingles_of(long[8:] + long[:8], 1)


def test_texts_end_words():
    hashes, places = words(pa.array(["ab", "cd", "", "ef gh"], pa.large_string()))
    assert places.tolist() == [0, 1, 2, 2, 4]
    assert len(set(hashes.tolist())) == 4


def test_ngrams_are_those_of_each_text():
    hashes = np.arange(1, 9, dtype=np.uint64)
    flat, places = ngram_hashes(hashes, np.array([0, 5, 5, 7, 8]), 3)
    assert places.tolist() == [0, 3, 3, 4, 5]
    assert len(np.unique(flat)) == 5


@pytest.mark.parametrize("ngram", [1, 5])
def test_scripts_without_blanks_are_shingled_by_character(ngram):
    text = "今日は良い天気ですね"
    assert len(shingles_of(text, ngram)) == len(set(text)) - ngram + 1
    # A change at the end leaves the shingles of the beginning.
    a, b = shingles_of(text, 3), shingles_of(text[:-1] + "よ", 3)
    assert len(np.intersect1d(a, b)) == len(text) - 3
    assert len(shingles_of("สวัสดีครับ", 1)) == len(set("สวัสดีครับ"))
    # Korean has blanks.
    assert len(shingles_of("안녕하세요 세계", 1)) == 2


def test_short_texts_have_one_shingle_of_their_own():
    texts = ["a b", "a b c", "A, b!", "a", "b", "...", "!!!", "... ", "", " \n", "\U0001f600"]
    sets = [shingles_of(text, 5).tolist() for text in texts]
    assert [len(s) for s in sets] == [1] * 8 + [0, 0, 1]
    assert sets[0] == sets[2]
    assert sets[5] == sets[7]
    assert len({s[0] for s in sets if s}) == 7
    # Four words are short, five are not: both sides.
    assert shingles_of("a b c d", 5) != shingles_of("a b c d e", 5)


def test_equal_sets_have_equal_digests():
    texts = pa.array(["a b c a b c a b c", "a b c a b c", "b c a", ""], pa.large_string())
    digests = set_digests(shingle_sets(texts, 3)).to_pylist()
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_slices_hold_all_texts_in_order():
    texts = pa.array(["aaaa", "", "bb", "c" * 100, "d", "e"], pa.large_string()).slice(1)
    for size in (1, 3, 4, 1000):
        parts = list(slices(texts, size))
        assert [t for part in parts for t in part.to_pylist()] == texts.to_pylist()
        assert all(len(p) == 1 or sum(map(len, p.to_pylist())) <= size for p in parts)


def test_any_arrow_column_of_text():
    expected = shingle_sets(pa.array(["a b", "", "c"], pa.large_string()), 1).to_pylist()
    assert shingle_sets(pa.array(["x", "a b", None, "c"]).slice(1), 1).to_pylist() == expected
    assert shingle_sets(pa.chunked_array([["a b"], ["", "c"]]), 1).to_pylist() == expected
    assert len(shingle_sets(pa.array([], pa.large_string()), 5)) == 0


def test_definition_of_a_word():
    assert plain_words("Don't STOP_me 3.14") == re.findall(r"[a-z0-9]+", "don t stop me 3 14")
