"""The order of samples: a counter-based permutation, a low-discrepancy mixture, and by quality.

The first two hold no order in memory, so a position in them is a few integers; an order by quality
holds a number a row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from stepwell.types import DataError

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
    weights: Sequence[float],
    counts: Sequence[int],
    num_samples: int,
    caps: Sequence[int | None] | None = None,
    since: Sequence[int] | None = None,
) -> tuple[np.ndarray, list[int], list[int]]:
    """Deals the next samples to sources: each goes where the share falls most behind its weight.

    counts: samples dealt to each source so far. caps: how many it may be dealt in all; what has as
    many leaves its weight to the others, in proportion. since: the counts when that happened last
    (zeros where it has not), from which on shares are counted.
    Returns the sources (int64), the counts after and `since` after. Since then a source's count
    stays within 1 of its share of the samples for two sources, and within the number of sources for
    more. Raises DataError when all have reached their caps.
    """
    counts = list(counts)
    limits = [math.inf if cap is None else cap for cap in caps or [None] * len(counts)]
    since = list(since) if since is not None else [0] * len(counts)
    sources = np.empty(num_samples, np.int64)
    done = 0
    while done < num_samples:
        active = [k for k, count in enumerate(counts) if count < limits[k]]
        if not active:
            raise DataError(
                f"every source has been read max_epochs times, after {sum(counts):,} rows; raise "
                "max_epochs of one, or leave it out"
            )
        done = _deal(weights, active, counts, since, limits, sources, done)
        if any(counts[k] >= limits[k] for k in active):
            since = list(counts)
    return sources, counts, since


def _deal(
    weights: Sequence[float],
    active: Sequence[int],
    counts: list[int],
    since: Sequence[int],
    limits: Sequence[float],
    sources: np.ndarray,
    start: int,
) -> int:
    """Fills `sources` from `start` on, until one of the active sources reaches its limit; returns
    how far it has come."""
    stop = len(sources)
    if len(active) == 1:
        (only,) = active
        stop = int(min(stop, start + limits[only] - counts[only]))
        sources[start:stop] = only
        counts[only] += stop - start
        return stop
    total = sum(weights[k] for k in active)
    shares = [(k, weights[k] / total, since[k]) for k in active]
    dealt = sum(counts[k] - since[k] for k in active)
    for j in range(start, stop):
        dealt += 1
        best, most = -1, -math.inf
        for k, share, before in shares:
            behind = share * dealt - (counts[k] - before)
            if behind > most:
                best, most = k, behind
        counts[best] += 1
        sources[j] = best
        if counts[best] >= limits[best]:
            return j + 1
    return stop


def window_scores(
    doc_starts: np.ndarray, doc_scores: np.ndarray, num_rows: int, seq_len: int
) -> np.ndarray:
    """float64 (num_rows,): the mean score of the tokens of each window of seq_len, where document i
    holds the tokens doc_starts[i] to doc_starts[i + 1]."""
    sums = np.concatenate([[0.0], np.cumsum(np.diff(doc_starts) * doc_scores.astype(np.float64))])
    edges = np.arange(num_rows + 1) * seq_len
    return np.diff(np.interp(edges, doc_starts, sums)) / seq_len


def ascending(scores: np.ndarray, *key: int) -> np.ndarray:
    """int64: the indices of `scores` from the lowest to the highest; equal ones in a pseudo-random
    order that `key` (seed, epoch) decides."""
    return np.lexsort((permute(np.arange(len(scores)), len(scores), *key), scores))
