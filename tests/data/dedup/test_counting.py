import os
import resource
from pathlib import Path

import numpy as np
import pytest

from stepwell.data.dedup.counting import repeated_hashes


def chunks_of(sizes, seed=0):
    rng = np.random.default_rng(seed)
    for rank, size in enumerate(sizes):
        yield rng.integers(0, 200, size).astype(np.uint64) << np.uint64(56), np.full(size, rank)


@pytest.mark.parametrize("part_entries", [1, 7, 64, 1000])
def test_parts_change_nothing(tmp_path: Path, part_entries):
    sizes = [0, 30, 1, 200, 0, 45]
    everything = list(chunks_of(sizes))
    values = np.concatenate([hashes for hashes, _ in everything])
    ranks = np.concatenate([ranks for _, ranks in everything])
    found = repeated_hashes(iter(everything), sum(sizes), tmp_path, part_entries)
    distinct, counts = np.unique(values, return_counts=True)
    assert found[0].tolist() == distinct[counts > 1].tolist()
    assert found[1].tolist() == counts[counts > 1].tolist()
    assert found[2].tolist() == [ranks[values == value].min() for value in found[0]]
    assert not list(tmp_path.iterdir())


def test_more_parts_than_a_process_may_open_files(tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, before[1]))
    try:
        hashes, counts, _ = repeated_hashes(chunks_of([400]), 400, tmp_path, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert counts.sum() > 200
    assert (np.diff(hashes.astype(object)) > 0).all()


def test_nothing(tmp_path: Path):
    assert [len(column) for column in repeated_hashes(iter([]), 0, tmp_path)] == [0, 0, 0]
