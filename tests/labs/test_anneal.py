import copy

import pytest

from stepwell.labs import anneal


@pytest.fixture(scope="module")
def numbers():
    return anneal.measure(small=True)


def test_the_claim_holds(numbers):
    assert anneal.check(numbers) == []
    assert "bits per byte" in anneal.plot(numbers).axes[0].get_xlabel()
    assert numbers["seeds"] >= 3


def test_the_arms_differ_in_what_they_should(numbers):
    """The same rows of books; under a cosine next to nothing of the rate is left for the end."""
    arms = numbers["arms"]
    assert len({tuple(arm["book_rows"]) for arm in arms.values()}) == 1
    shares = [arms[name]["tail_lr_share"] for name in ("cosine, at the end", "WSD, at the end")]
    assert shares[0] < 0.02 < 0.08 < shares[1]


def test_the_check_can_fail(numbers):
    """Were the placements the same under WSD, a cosine's tail as good, or the arms fed differently,
    it would be said."""
    worse = copy.deepcopy(numbers)
    arms = worse["arms"]
    arms["WSD, spread"]["books"] = arms["WSD, at the end"]["books"]
    arms["cosine, at the end"] = {**arms["WSD, at the end"], "book_rows": [1, 2, 3]}
    worse["gains"] = anneal.gains(arms)
    found = "\n".join(anneal.check(worse))
    for part in ("WSD less cosine: -", "end over spread, WSD: +0.0000", "at the end: +0.0000"):
        assert part in found
    assert "have read 1 to" in found
    assert "average over cosine" in found


def test_intervals_are_students():
    found = anneal._interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2
    assert found["high"] - 2 == pytest.approx(4.302653 / 3**0.5)
