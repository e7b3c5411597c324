"""Exact Jaccard similarity of shingle sets (ascending arrays without repeats)."""

from __future__ import annotations

import numpy as np

from stepwell.data.dedup.shingles import shingles_of


def num_shared(a: np.ndarray, b: np.ndarray) -> int:
    both = np.concatenate((a, b))
    both.sort()
    return int(np.count_nonzero(both[1:] == both[:-1]))


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """|A and B| / |A or B|; 0 for two empty sets."""
    shared = num_shared(a, b)
    union = len(a) + len(b) - shared
    return shared / union if union else 0.0


def jaccard_of_texts(a: str, b: str, ngram: int = 5) -> float:
    return jaccard(shingles_of(a, ngram), shingles_of(b, ngram))
