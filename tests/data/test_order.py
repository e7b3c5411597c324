import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.data.order import choose_sources, permute


@given(st.integers(1, 5000), st.integers(0, 2**63), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_permutation(size, seed, epoch):
    out = permute(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(out), np.arange(size))


def test_permute_needs_no_neighbours_and_works_on_huge_ranges():
    whole = permute(np.arange(1000), 1000, 7)
    assert permute(np.array([41]), 1000, 7)[0] == whole[41]
    far = permute(np.array([0, 10**15, 10**16 - 1]), 10**16, 7)
    assert ((far >= 0) & (far < 10**16)).all()
    assert len(set(far.tolist())) == 3


def test_permute_depends_on_each_part_of_the_key():
    orders = [permute(np.arange(100), 100, *key) for key in [(0, 0), (0, 1), (1, 0), (10,)]]
    assert len({tuple(o.tolist()) for o in orders}) == 4


def test_permute_looks_random():
    """Mean absolute displacement of a random permutation is n/3; a fixed point is expected once."""
    n = 20_000
    for seed in range(3):
        out = permute(np.arange(n), n, seed)
        assert abs(np.abs(out - np.arange(n)).mean() / n - 1 / 3) < 0.01
        assert (out == np.arange(n)).sum() < 8
        assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 0.03


def test_permute_is_equal_in_another_process():
    code = (
        "import numpy as np; from stepwell.data.order import permute;"
        "print(permute(np.arange(50), 50, 3, 4).tolist())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(permute(np.arange(50), 50, 3, 4).tolist())


def test_permute_refuses_indices_outside():
    with pytest.raises(IndexError):
        permute(np.array([5]), 5, 0)


def test_even_mixture_in_every_window():
    sources, _, _ = choose_sources([0.5, 0.5], [0, 0], 10_000)
    ones = np.convolve(sources, np.ones(1000), "valid")
    assert np.abs(ones - 500).max() <= 25


def test_rare_source_never_overruns():
    sources, counts, _ = choose_sources([0.001, 0.999], [0, 0], 100_000)
    rare = np.cumsum(sources == 0)
    quota = 0.001 * np.arange(1, 100_001)
    assert np.abs(rare - quota).max() <= 1
    assert counts == [100, 99_900]


@given(
    st.lists(st.integers(1, 1000), min_size=2, max_size=6),
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_dealing_in_any_pieces_is_dealing_at_once(parts, pieces):
    weights = [part / sum(parts) for part in parts]
    whole, counts, _ = choose_sources(weights, [0] * len(parts), sum(pieces))
    got, now = [], [0] * len(parts)
    for piece in pieces:
        sources, now, _ = choose_sources(weights, now, piece)
        got += sources.tolist()
    assert got == whole.tolist()
    assert now == counts
    n = np.arange(1, sum(pieces) + 1)
    for k, weight in enumerate(weights):
        assert np.abs(np.cumsum(whole == k) - weight * n).max() <= len(weights)
