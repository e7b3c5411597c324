"""The order of samples: a counter-based permutation and a low-discrepancy mixture.

Neither holds the order in memory, so a position in it is a few integers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

NUM_ROUNDS = 6


def permute(indices: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Where a pseudo-random permutation of range(size) sends `indices` (int64, any shape).

    A Feistel network over the next even number of bits, walked until it lands inside the range
    (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). key: integers
    such as seed and epoch; each combination gives another permutation.
    """
    indices = np.asarray(indices, dtype=np.int64)
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        raise IndexError(f"indices must lie in range({size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = _round_keys(key)
    out = _feistel(indices.astype(np.uint64), half_bits, round_keys)
    outside = out >= size
    while outside.any():
        out[outside] = _feistel(out[outside], half_bits, round_keys)
        outside = out >= size
    return out.astype(np.int64)


def _round_keys(key: tuple[int, ...]) -> np.ndarray:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * NUM_ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")


def _feistel(x: np.ndarray, half_bits: int, round_keys: np.ndarray) -> np.ndarray:
    shift = np.uint64(half_bits)
    low_mask = np.uint64((1 << half_bits) - 1)
    left, right = x >> shift, x & low_mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) & low_mask)
    return (left << shift) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def choose_sources(
    weights: Sequence[float], counts: Sequence[int], num_samples: int
) -> tuple[np.ndarray, list[int]]:
    """Deals the next samples to sources: each goes where the share falls most behind its weight.

    weights sum to 1; counts: samples dealt to each source so far. Returns the sources (int64) and
    the counts after. A source's count stays within 1 of weight * samples for two sources, and
    within the number of sources for more.
    """
    counts = list(counts)
    if len(counts) == 1:
        return np.zeros(num_samples, np.int64), [counts[0] + num_samples]
    dealt = sum(counts)
    sources = np.empty(num_samples, np.int64)
    numbers = range(len(counts))
    for j in range(num_samples):
        dealt += 1
        best = max(numbers, key=lambda k: weights[k] * dealt - counts[k])
        counts[best] += 1
        sources[j] = best
    return sources, counts
