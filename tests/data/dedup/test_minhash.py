import subprocess
import sys
from itertools import pairwise
from math import comb

import numpy as np
import pyarrow as pa
import pytest

from stepwell.data.dedup.minhash import (
    agreement,
    agreement_floor,
    band_keys,
    buckets,
    num_slots,
    p_candidate,
    signatures,
)


def sets_of(*sets) -> pa.LargeListArray:
    return pa.array([np.unique(np.array(s, np.uint64)) for s in sets], pa.large_list(pa.uint64()))


def random_pair(similarity: float, union: int, rng: np.random.Generator):
    items = rng.choice(1 << 62, union, replace=False).astype(np.uint64)
    shared = round(similarity * union)
    half = (union - shared) // 2
    return items[: shared + half], np.concatenate([items[:shared], items[shared + half :]])


def test_mean_of_20_seeds():
    items = np.random.default_rng(0).integers(0, 1 << 63, 133_334, dtype=np.uint64)
    sets = sets_of(items[:100_000], items[33_334:])
    found = [agreement(s[0], s[1:])[0] for seed in range(20) for s in [signatures(sets, 128, seed)]]
    assert np.mean(found) == pytest.approx(0.5, abs=0.02)


def test_small_sets_agree_as_binomials_do():
    rng = np.random.default_rng(1)
    pairs = [random_pair(0.8, 10, rng) for _ in range(2000)]
    signature_DS = signatures(sets_of(*(s for pair in pairs for s in pair)), 128, 1)
    found = np.count_nonzero(signature_DS[::2] == signature_DS[1::2], axis=1) / 128
    assert found.mean() == pytest.approx(0.8, abs=0.005)
    assert found.std() < 1.15 * np.sqrt(0.8 * 0.2 / 128)
    assert found.min() > agreement_floor(0.8, 128)


def test_the_same_seed_gives_the_same_bytes_in_another_process():
    code = (
        "import sys, numpy as np, pyarrow as pa\n"
        "from stepwell.data.dedup.minhash import signatures\n"
        "sets = pa.array([np.arange(5, 500, dtype=np.uint64)], pa.large_list(pa.uint64()))\n"
        "sys.stdout.buffer.write(signatures(sets, 128, 7).tobytes())"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
        for _ in range(2)
    ]
    own = signatures(sets_of(np.arange(5, 500)), 128, 7)
    assert outputs == [own.tobytes()] * 2
    assert own.tobytes() != signatures(sets_of(np.arange(5, 500)), 128, 8).tobytes()


def test_a_signature_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(2)
    sets = [rng.integers(0, 1 << 63, n) for n in rng.integers(1, 300, 2500)]
    together = signatures(sets_of(*sets), 64, 1)
    assert (together[1500:1510] == signatures(sets_of(*sets[1500:1510]), 64, 1)).all()
    assert signatures(sets_of(), 64, 1).shape == (0, 64)


@pytest.mark.parametrize(
    ("similarity", "bands", "rows", "expected"),
    [
        (0.5, 14, 8, 0.053), (0.7, 14, 8, 0.565), (0.8, 14, 8, 0.924), (0.9, 14, 8, 0.9996),
        (0.8, 26, 11, 0.903), (0.8, 21, 6, 0.9983),
    ],
)  # fmt: skip
def test_banding_curve(similarity, bands, rows, expected):
    assert p_candidate(similarity, bands, rows) == pytest.approx(expected, abs=0.0006)


def test_bands_find_pairs_as_often_as_the_curve_says():
    rng = np.random.default_rng(3)
    pairs = [random_pair(0.7, 200, rng) for _ in range(1500)]
    signature_DS = signatures(sets_of(*(s for pair in pairs for s in pair)), 128, 1)
    keys = np.stack([band_keys(signature_DS, band, 8) for band in range(14)], axis=1)
    found = (keys[::2] == keys[1::2]).any(axis=1).mean()
    assert found == pytest.approx(p_candidate(0.7, 14, 8), abs=0.04)


def test_keys_differ_between_bands_and_slots():
    signature_DS = np.array([[1, 2, 1, 2], [2, 1, 2, 1]], np.uint32)
    keys = [*band_keys(signature_DS, 0, 2), *band_keys(signature_DS, 1, 2)]
    assert len(set(keys)) == 4


def test_num_slots_holds_all_bands():
    assert [num_slots(1, 1), num_slots(14, 8), num_slots(21, 6), num_slots(16, 8)] == [
        1,
        128,
        128,
        128,
    ]
    assert num_slots(43, 3) == 256


def test_buckets():
    bands = [np.array([5, 6, 5, 7, 6], np.uint64), np.array([1, 2, 3, 3, 3], np.uint64)]
    numbers, places = buckets(bands, 5)
    of_doc = [set(numbers[a:b].tolist()) for a, b in pairwise(places)]
    assert of_doc == [{0}, {1}, {0, 2}, {2}, {1, 2}]
    empty, places = buckets([], 2)
    assert len(empty) == 0
    assert places.tolist() == [0, 0, 0]


def test_floor_of_agreement():
    assert agreement_floor(1.0, 128) == 1.0
    floor = agreement_floor(0.8, 128)
    assert 0.5 < floor < 0.65
    assert agreement_floor(0.8, 128, miss=0.5) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("slots", [1, 8, 128])
@pytest.mark.parametrize("threshold", [0.3, 0.8, 1.0])
def test_the_floor_is_where_the_binomial_tail_exceeds_the_miss(slots, threshold):
    shares = [
        comb(slots, k) * threshold**k * (1 - threshold) ** (slots - k) for k in range(slots + 1)
    ]
    floor = next(k for k in range(slots + 1) if sum(shares[: k + 1]) > 1e-9)
    assert agreement_floor(threshold, slots) == floor / slots


def test_the_floor_of_refinedweb_s_9000_hashes():
    """450 bands of 20 (2306.01116, section 3.3): binomial coefficients that no float holds."""
    assert agreement_floor(0.8, num_slots(450, 20)) == pytest.approx(0.8, abs=0.02)
