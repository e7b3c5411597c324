import copy
import random

import pytest

from stepwell.data.dedup.verify import jaccard_of_texts
from stepwell.labs import dedup
from stepwell.types import Document

TEXT = " ".join(f"word{i}" for i in range(300))


@pytest.fixture(scope="module")
def numbers():
    return dedup.measure(small=True)


def test_the_claim_holds(numbers):
    assert dedup.check(numbers) == []
    table, bars = dedup.plot(numbers).axes
    assert [label.get_text() for label in table.get_yticklabels()] == list(dedup.METHODS)
    assert len(bars.patches) == 4


def test_the_check_can_fail(numbers):
    worse = copy.deepcopy(numbers)
    worse["found"]["verified"]["near 0.7"] = 0.1
    worse["found"]["substrings"]["substring"] = 0.5
    worse["justified"]["real"]["verified"]["share"] = 0.99
    worse["justified"]["planted"]["MinHash"]["share"] = 1.0
    worse["contaminated"] |= {"flagged": 1, "flagged_beside": 3, "wrongly_flagged": 2}
    found = "\n".join(dedup.check(worse))
    for part in (
        "verified finds 10% of near 0.7",
        "substrings finds 50% of substring",
        "real: only 99.0% of verified",
        "planted: 100.0% of MinHash",
        "1 are flagged",
        "3 other items are flagged beside",
        "2 documents without an item",
    ):
        assert part in found


@pytest.mark.parametrize("similarity", dedup.NEAR)
def test_near_copies_are_as_near_as_they_say(similarity):
    other = dedup.near(TEXT, similarity, ["other"], random.Random(0))
    assert abs(jaccard_of_texts(TEXT, other) - similarity) < 0.015


def test_similarities_are_exact():
    texts = [
        TEXT,
        dedup.near(TEXT, 0.7, ["other"], random.Random(0)),
        "nothing of that at all here",
    ]
    matrix = dedup.similarities(texts).toarray()
    assert matrix[0, 1] == matrix[1, 0] == pytest.approx(jaccard_of_texts(texts[0], texts[1]))
    assert matrix[2].tolist() == [0, 0, 1]


def test_unverified_minhash_keeps_the_first_of_a_component():
    assert dedup.unverified(["a b c d e f", TEXT, "a b c d e f", TEXT]) == [0, 1]


def test_a_method_says_what_it_cut():
    shared = "Here is a paragraph that two documents have in common with each other."
    other = f"{shared}\n\n{TEXT[:999]}"
    docs = [
        Document("0", f"{TEXT}\n\n{shared}", "a"),
        Document("1", other, "b"),
    ]
    result = dedup.run_method(dedup.METHODS["paragraphs"], docs)
    assert result.cuts == {"b/1": [(0, len(shared) + 2)]}
    assert result.texts["b/1"] == TEXT[:999]
