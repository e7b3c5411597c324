import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.data.dedup.clusters import KEPT, star_clusters
from stepwell.data.dedup.verify import jaccard


def agreeing(num_docs: int) -> np.ndarray:
    """Signatures that rule nothing out."""
    return np.zeros((num_docs, 16), np.uint32)


def sets_of(*sets) -> list[np.ndarray]:
    return [np.array(sorted(s), np.uint64) for s in sets]


def one_bucket(num_docs: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(num_docs, np.uint32), np.arange(num_docs + 1)


def test_clusters_do_not_grow_past_verified_edges():
    """Candidates 1-2-3-4 of which only 1~3 and 2~4 are true: two clusters."""
    a, b = set(range(10)), set(range(100, 110))
    sets = sets_of(a, b, a | {10}, b | {110})
    # Each pair of neighbours shares a bucket, as do 1, 3 and 2, 4.
    numbers = np.array([0, 3, 0, 1, 4, 1, 2, 3, 2, 4], np.uint32)
    found = star_clusters(sets, agreeing(4), numbers, np.array([0, 2, 5, 8, 10]), 0.8, 32)
    assert found.witness.tolist() == [KEPT, KEPT, 0, 1]
    assert found.similarity[2:] == pytest.approx([10 / 11] * 2)


def test_a_witness_is_kept():
    """A~B, B~C, not A~C: C stays, because B is gone."""
    sets = sets_of(range(10), range(1, 11), range(2, 12))
    numbers, places = one_bucket(3)
    found = star_clusters(sets, agreeing(3), numbers, places, 0.8, 32)
    assert found.witness.tolist() == [KEPT, 0, KEPT]


def test_threshold_is_reached_at_equality():
    sets = sets_of(range(10), range(8))
    numbers, places = one_bucket(2)
    assert star_clusters(sets, agreeing(2), numbers, places, 0.8, 32).witness.tolist() == [KEPT, 0]
    assert star_clusters(sets, agreeing(2), numbers, places, 0.81, 32).counts.matched == 0
    for large in range(1, 60):
        for small in range(1, large + 1):
            sets = sets_of(range(large), range(small))
            exact = jaccard(*sets)
            found = star_clusters(sets, agreeing(2), numbers, places, exact, 32)
            assert found.witness.tolist() == [KEPT, 0]


def test_those_without_a_common_bucket_are_not_compared():
    sets = sets_of(range(5), range(5))
    found = star_clusters(sets, agreeing(2), np.array([0, 1], np.uint32), np.arange(3), 0.8, 32)
    assert found.witness.tolist() == [KEPT, KEPT]
    assert found.counts.candidates == 0


def test_fixed_documents_stay():
    sets = sets_of(range(5), range(5), range(5))
    numbers, places = one_bucket(3)
    found = star_clusters(sets, agreeing(3), numbers, places, 0.8, 32, num_fixed=2)
    assert found.witness.tolist() == [KEPT, KEPT, 0]


def test_a_crowded_bucket_is_bounded_and_counted():
    """40 documents without a common shingle, and one that repeats the last."""
    sets = sets_of(*(range(10 * i, 10 * i + 10) for i in range(40)), range(390, 400))
    numbers, places = one_bucket(41)
    whole = star_clusters(sets, agreeing(41), numbers, places, 0.8, bucket_cap=41)
    assert whole.witness.tolist() == [KEPT] * 40 + [39]
    assert whole.counts.not_compared == 0
    bounded = star_clusters(sets, agreeing(41), numbers, places, 0.8, bucket_cap=39)
    assert bounded.witness.tolist() == [KEPT] * 41
    assert bounded.counts.not_compared == 1
    assert star_clusters(sets, agreeing(41), numbers, places, 0.8, 40).witness[40] == 39
    few = star_clusters(sets, agreeing(41), numbers, places, 0.8, bucket_cap=4)
    assert few.counts.compared <= 4 * 41


def test_a_bucket_of_duplicates_costs_one_comparison_each():
    sets = sets_of(*([*range(100), 1000 + i] for i in range(500)))
    numbers, places = one_bucket(500)
    found = star_clusters(sets, agreeing(500), numbers, places, 0.8, 32)
    assert found.witness.tolist() == [KEPT] + [0] * 499
    assert found.counts.compared == found.counts.candidates == 499


def test_signatures_and_sizes_spare_comparisons():
    sets = sets_of(range(10), range(10), range(5))
    signature_DS = agreeing(3)
    signature_DS[1] = 1
    numbers, places = one_bucket(3)
    found = star_clusters(sets, signature_DS, numbers, places, 0.8, 32)
    assert (found.counts.candidates, found.counts.plausible) == (3, 0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 6), min_size=1), min_size=1, max_size=12),
    st.sampled_from([0.3, 0.5, 0.8, 1.0]),
)
def test_survivors_are_a_maximal_independent_set(plain, threshold):
    sets = sets_of(*plain)
    numbers, places = one_bucket(len(sets))
    found = star_clusters(sets, agreeing(len(sets)), numbers, places, threshold, 32)
    kept = [i for i in range(len(sets)) if found.witness[i] == KEPT]
    for i, own in enumerate(sets):
        better = [k for k in kept if k < i and jaccard(sets[k], own) >= threshold]
        assert (found.witness[i] != KEPT) == bool(better)
        if found.witness[i] != KEPT:
            assert found.witness[i] in better
            assert found.similarity[i] == jaccard(sets[found.witness[i]], own)
