import copy

import pytest

from stepwell.labs import anneal

# Bits per byte of books as the claim has them, of the first seed.
BOOKS = {
    "cosine, spread": 3.0,
    "cosine, at the end": 2.99,
    "WSD, spread": 3.01,
    "WSD, at the end": 2.9,
    "constant, at the end, averaged": 2.91,
}


@pytest.mark.slow
def test_the_claim_holds():
    numbers = anneal.measure(small=True)
    assert anneal.check(numbers) == []
    assert numbers["seeds"] >= 3
    they_differ_in_what_they_should(numbers["arms"])


def test_the_arms_differ_in_what_they_should(monkeypatch):
    """Also in a run too short for the claim."""
    monkeypatch.setattr(anneal, "SMALL", anneal.SMALL._replace(seeds=2, steps=30))
    monkeypatch.setattr(anneal, "NUM_AVERAGED", 4)
    numbers = anneal.measure(small=True)
    assert "bits per byte" in anneal.plot(numbers).axes[0].get_xlabel()
    they_differ_in_what_they_should(numbers["arms"])


def they_differ_in_what_they_should(arms):
    """The same rows of books; under a cosine next to nothing of the rate is left for the end."""
    assert len({tuple(arm["book_rows"]) for arm in arms.values()}) == 1
    shares = [arms[name]["tail_lr_share"] for name in ("cosine, at the end", "WSD, at the end")]
    assert shares[0] < 0.02 < 0.08 < shares[1]
    books = [value for arm in arms.values() for value in arm["books"]]
    assert len(set(books)) == len(books)


def test_the_check_can_fail():
    """Were the placements the same under WSD, a cosine's tail as good, or the arms fed differently,
    it would be said."""
    arms = {
        name: {"books": [book, book + 0.01, book - 0.01], "book_rows": [9, 9, 9]}
        for name, book in BOOKS.items()
    }
    arms["WSD, at the end"]["books"][1] -= 0.002
    assert anneal.check({"arms": arms, "gains": anneal.gains(arms)}) == []
    worse = copy.deepcopy(arms)
    worse["WSD, spread"]["books"] = worse["WSD, at the end"]["books"]
    worse["cosine, at the end"] = {**worse["WSD, at the end"], "book_rows": [1, 2, 3]}
    found = "\n".join(anneal.check({"arms": worse, "gains": anneal.gains(worse)}))
    for part in ("WSD less cosine: -", "end over spread, WSD: +0.0000", "at the end: +0.0000"):
        assert part in found
    assert "have read 1 to" in found
    assert "average over cosine" in found


def test_intervals_are_students():
    found = anneal._interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2
    assert found["high"] - 2 == pytest.approx(4.302653 / 3**0.5)
