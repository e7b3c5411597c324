"""Winnowing (Schleimer, Wilkerson and Aiken, SIGMOD 2003): a few positions of a text such that
equal windows of `width` bytes, wherever they stand, have equal anchors inside.

An anchor is the least hash among the window's k-grams, k = width // 2. So only texts around an
anchor that occurs twice can hold a repeat.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

BLOCK = 1 << 18
MULTIPLIER = 0x9E3779B97F4A7C15
INVERSE = pow(MULTIPLIER, -1, 1 << 64)
BYTE_VALUES = np.random.default_rng(2107).integers(0, 2**64, 256, dtype=np.uint64)


def gram_size(width: int) -> int:
    return width // 2


def find_anchors(data: np.ndarray, ends: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions (int64, ascending) and hashes (uint64) of the anchors of all windows of `width`
    bytes that lie within one document.

    data: (n,) uint8, documents after one another; ends: where each of them ends.
    """
    found = [
        _block(data, ends, width, start, min(start + BLOCK, len(data) - width + 1))
        for start in range(0, len(data) - width + 1, BLOCK)
    ]
    if not found:
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    positions, hashes = (np.concatenate(columns) for columns in zip(*found, strict=True))
    positions, first = np.unique(positions, return_index=True)
    return positions, hashes[first]


def _block(
    data: np.ndarray, ends: np.ndarray, width: int, start: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of the windows that begin in start..stop."""
    k = gram_size(width)
    num_grams = width - k + 1  # in a window
    hashes = _gram_hashes(data[start : stop + width - 1], k)
    least = _sliding(np.minimum, hashes, num_grams)
    for i in range(*np.searchsorted(ends, [start + 1, stop + width])):
        end = int(ends[i]) - start
        least[max(0, end - width + 1) : max(0, end)] = 0  # these windows reach over it
    padding = np.zeros(num_grams - 1, np.uint64)
    greatest = _sliding(np.maximum, np.concatenate([padding, least, padding]), num_grams)
    at = np.flatnonzero((hashes == greatest) & (greatest > 0))
    return at + start, hashes[at]


def _gram_hashes(data: np.ndarray, k: int) -> np.ndarray:
    """A polynomial of each k bytes modulo 2^64, mixed; never 0."""
    powers, inverses = _powers(len(data))
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum(BYTE_VALUES[data] * inverses, out=sums[1:])
    hashes = (sums[k:] - sums[:-k]) * powers[: len(data) - k + 1]
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(0xD6E8FEB86659FD93)
    hashes ^= hashes >> np.uint64(32)
    return hashes | np.uint64(1)


@lru_cache(maxsize=2)
def _all_powers(size: int) -> tuple[np.ndarray, np.ndarray]:
    both = []
    for base in (MULTIPLIER, INVERSE):
        factors = np.full(size, base, np.uint64)
        factors[0] = 1
        both.append(np.cumprod(factors))
    return both[0], both[1]


def _powers(size: int) -> tuple[np.ndarray, np.ndarray]:
    powers, inverses = _all_powers(1 << (size - 1).bit_length())
    return powers[:size], inverses[:size]


def _sliding(best: np.ufunc, values: np.ndarray, num: int) -> np.ndarray:
    """`best` of each `num` neighbours, by doubling."""
    size = 1
    while 2 * size <= num:
        values = best(values[:-size], values[size:])
        size *= 2
    rest = num - size
    return best(values[:-rest], values[rest:]) if rest else values
