import numpy as np
import pytest

from stepwell.data.decontam.rules import (
    RULES,
    covered_words,
    gpt3_length,
    is_found,
    own_words,
    share_of_ngrams,
    share_of_spans,
    share_of_words,
)
from stepwell.data.word_hashes import hash_words


def words(text: str) -> np.ndarray:
    return hash_words([text]).hashes


def count(first: int, stop: int) -> str:
    return " ".join(f"w{i}" for i in range(first, stop))


def test_gpt3_chooses_the_5th_percentile_within_8_to_13():
    assert gpt3_length([3] * 100) == 8
    assert gpt3_length([200] * 100) == 13
    assert gpt3_length([10] * 10 + [50] * 90) == 10
    assert gpt3_length([10] * 4 + [50] * 96) == 13
    assert gpt3_length([]) == 13


def test_shares():
    """Two 3-grams that overlap in one word cover five of ten words; they are 2 of 8."""
    assert covered_words([1, 3], 10, 3).tolist() == [0, 1, 1, 1, 1, 1, 0, 0, 0, 0]
    none = np.zeros(10, bool)
    assert share_of_words([1, 3, 3], own_words(none, 3), 3) == 0.5
    assert share_of_ngrams([1, 3, 3], none, 3) == 0.25
    assert share_of_words([], own_words(none, 3), 3) == 0


def test_what_is_a_template_alone_does_not_count():
    """The first five of the eight 3-grams are the template's: the last five words are left."""
    shared = np.arange(10) < 5
    own = own_words(shared, 3)
    assert own.tolist() == [False] * 5 + [True] * 5
    assert share_of_words([7], own, 3) == 0.6
    assert share_of_ngrams([7], shared, 3) == 1 / 3
    text = words(count(0, 10))
    assert share_of_spans([(7, 0)], text, words(count(7, 10)), own, 3) == 0.6
    assert own_words(np.ones(10, bool), 3).sum() == 0
    whole = words(count(0, 20))
    shared = np.arange(20) < 9
    for name in ("tulu3", "ngram-share", "llama3"):
        found = [
            is_found(RULES[name], whole, words(part), 8, shared=shared)
            for part in (count(0, 15), count(9, 20))
        ]
        assert found == [False, True]
        assert is_found(RULES[name], whole, words(count(0, 19)), 8)


def test_a_span_may_differ_in_four_words():
    """2307.09288 A.6: the first ten words are equal, then four may differ, and the last may not."""
    text = words(count(0, 20))

    def share(other: str) -> float:
        return share_of_spans([(0, 0)], text, words(other), np.ones(20, bool), 10)

    skips = [f"w{i}" if i not in (11, 12, 14, 16) else f"x{i}" for i in range(20)]
    assert share(" ".join(skips)) == 1.0
    skips[18] = "x18"
    assert share(" ".join(skips)) == 0.9  # ends with w17: the fifth difference is not crossed
    assert share(count(0, 10) + " y " * 10) == 0.5
    assert share(count(0, 15)) == 0.75


QUESTION = count(0, 20)


@pytest.mark.parametrize(
    ("rule", "document", "n", "found"),
    [
        ("gpt3", "x " + count(0, 13) + " y", 13, True),
        ("gpt3", "x " + count(0, 12) + " y", 13, False),
        ("gpt3", "x " + count(3, 11) + " y", 8, True),
        ("tulu3", count(0, 10), 8, True),  # 10 of 20 words
        ("tulu3", count(0, 9), 8, False),
        ("ngram-share", count(0, 14), 8, True),  # 7 of 13
        ("ngram-share", count(0, 13), 8, False),  # 6 of 13
        ("llama3", count(0, 16), 8, True),
        ("llama3", count(0, 15), 8, False),
        ("llama2", count(0, 16), 10, True),
        ("llama2", count(0, 15), 10, False),
        ("tulu3", "", 8, False),
    ],
)
def test_both_sides_of_each_rule(rule, document, n, found):
    assert is_found(RULES[rule], words(QUESTION), words(document), n) == found


def test_a_text_shorter_than_n_is_found_as_a_whole():
    nine = words(count(0, 9))
    for rule in RULES.values():
        assert is_found(rule, nine, words("x " + count(0, 9) + " y"), 13)
    assert not is_found(RULES["gpt3"], nine, words(count(0, 8)), 13)


def test_min_share_replaces_the_rule_s_own():
    text, half = words(QUESTION), words(count(0, 10))
    assert is_found(RULES["tulu3"], text, half, 8, 0.5)
    assert not is_found(RULES["tulu3"], text, half, 8, 0.51)
    assert is_found(RULES["llama3"], text, half, 8, 0.0)


def test_repeated_words_are_no_evidence():
    """1 1 1 1 ...: at least four different words make an n-gram."""
    matrix = words("what is the rank of " + "1 " * 12)
    assert not is_found(RULES["tulu3"], matrix, words("1 " * 30), 8)
    assert not is_found(RULES["gpt3"], words("a b c " * 5), words("a b c " * 9), 8)
    assert is_found(RULES["gpt3"], words("a b c d " * 5), words("a b c d " * 9), 8)
