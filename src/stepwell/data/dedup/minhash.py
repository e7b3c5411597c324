"""MinHash signatures and the bands that make candidates of them (Broder 1997; Indyk and Motwani
1998). Signing is rensa's: fast similarity sketching (Dahlgaard, Knudsen, Thorup 2017, 1704.04370),
whose slots agree with probability J as those of plain MinHash do."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from stepwell.data.dedup.shingles import flat_of, mix

SIGN_DOCS = 1024


def p_candidate(similarity: float, bands: int, rows: int) -> float:
    """The probability that two sets of this Jaccard similarity share a band: 1 - (1 - s^r)^b."""
    return 1 - (1 - similarity**rows) ** bands


def num_slots(bands: int, rows: int) -> int:
    """The signature's length: the power of two (rensa's fast path) that holds all bands."""
    return 1 << (bands * rows - 1).bit_length()


def signatures(sets: pa.LargeListArray, slots: int, seed: int) -> np.ndarray:
    """(documents, slots) uint32; a function of each set and the seed alone."""
    from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

    parts = []
    for start in range(0, len(sets), SIGN_DOCS):
        flat, offsets = flat_of(sets.slice(start, SIGN_DOCS))
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            np.ascontiguousarray(flat), offsets.astype(np.uint64), slots, seed
        )
        parts.append(np.array(matrix.to_rows(), np.uint32).reshape(-1, slots))
    return np.concatenate(parts) if parts else np.zeros((0, slots), np.uint32)


def band_keys(signature_DS: np.ndarray, band: int, rows: int) -> np.ndarray:
    """A 64-bit key for each document: two share it when all of the band's slots agree."""
    keys = np.full(len(signature_DS), band, np.uint64)
    for slot in range(band * rows, (band + 1) * rows):
        keys = mix(keys ^ signature_DS[:, slot])
    return keys


def agreement(signature_S: np.ndarray, others_DS: np.ndarray) -> np.ndarray:
    """Estimates of J: the share of slots that agree."""
    return np.count_nonzero(others_DS == signature_S, axis=1) / len(signature_S)


def agreement_floor(threshold: float, slots: int, miss: float = 1e-9) -> float:
    """The least agreement worth an exact look: a pair at the threshold agrees in fewer slots with
    a probability of at most `miss` (binomial tail)."""
    from scipy.special import bdtr

    tails = bdtr(np.arange(slots + 1), slots, threshold)
    return int(np.searchsorted(tails, miss, side="right")) / slots


def buckets(bands: Iterable[np.ndarray], num_docs: int) -> tuple[np.ndarray, np.ndarray]:
    """The buckets of two or more documents that each document lies in.

    bands: keys of all documents, a band at a time. Returns the numbers of the buckets, document
    after document, and where each document's begin (and the last one's end).
    """
    docs, numbers, first = [], [], 0
    for keys in bands:
        order = np.argsort(keys, kind="stable")
        repeats = np.zeros(num_docs + 1, bool)
        repeats[1:-1] = keys[order[1:]] == keys[order[:-1]]
        shared = repeats[:-1] | repeats[1:]
        begins = shared & ~repeats[:-1]
        docs.append(order[shared].astype(np.uint32))
        numbers.append((first - 1 + np.cumsum(begins)[shared]).astype(np.uint32))
        first += int(begins.sum())
    if not docs:
        return np.zeros(0, np.uint32), np.zeros(num_docs + 1, np.int64)
    doc_of, number = np.concatenate(docs), np.concatenate(numbers)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(doc_of, minlength=num_docs))])
    return number[np.argsort(doc_of, kind="stable")], offsets
