"""Clusters that never grow past verified edges: each is a kept document and those that resemble it.

Documents are taken best first. One goes when a kept document before it is a candidate and their
exact similarity reaches the threshold; otherwise it stays. So those that stay are a maximal
independent set of the graph of verified candidates (the lexicographically first one), and every
removed document has a kept witness. Transitive components have not: they chain A~B~C and remove C
for B's sake, which went for A's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stepwell.data.dedup.minhash import agreement, agreement_floor
from stepwell.data.dedup.verify import jaccard

KEPT = -1


@dataclass(frozen=True)
class Counts:
    """candidates: pairs that share a bucket and were looked at. plausible: of these, pairs whose
    sizes and signatures allow the threshold. compared: exactly. matched: at the threshold or above.
    not_compared: an upper bound of candidates that crowded buckets left unseen."""

    candidates: int = 0
    plausible: int = 0
    compared: int = 0
    matched: int = 0
    not_compared: int = 0


@dataclass(frozen=True)
class Clusters:
    """witness: for each document the kept one that it repeats, or KEPT. similarity: to it."""

    witness: np.ndarray
    similarity: np.ndarray
    counts: Counts = field(default_factory=Counts)


def star_clusters(
    sets: Sequence[np.ndarray],
    signature_DS: np.ndarray,
    bucket_numbers: np.ndarray,
    bucket_places: np.ndarray,
    threshold: float,
    bucket_cap: int,
    num_fixed: int = 0,
) -> Clusters:
    """Decides about documents in the order given, best first; the first num_fixed always stay.

    bucket_numbers, bucket_places: `minhash.buckets`. bucket_cap: a document is looked at beside the
    first so many survivors of each bucket. Where a bucket has more, it is compared exactly with
    those of them that agree most, so many in all (and with all of buckets that have no more). This
    bounds the work among pages that share a template without being duplicates; it can leave a
    duplicate in, never take out a document that is none.
    """
    num_docs, slots = signature_DS.shape
    floor = agreement_floor(threshold, slots)
    sizes = np.array([*map(len, sets)], np.int64)
    witness, similarity = np.full(num_docs, KEPT, np.int64), np.zeros(num_docs)
    survivors = _Survivors(bucket_cap)
    candidates = plausible = compared = matched = not_compared = 0
    places = bucket_places.tolist()
    for doc in range(num_docs):
        own = bucket_numbers[places[doc] : places[doc + 1]].tolist()
        others, sure, num_unseen = survivors.beside(own if doc >= num_fixed else [])
        if len(others):
            close = _plausible(doc, others, signature_DS, sizes, threshold, floor)
            chosen = [o for i, o in enumerate(close.tolist()) if i < bucket_cap or o in sure]
            found, similarity[doc], num_compared = _first_match(sets, doc, chosen, threshold)
            candidates, plausible = candidates + len(others), plausible + len(close)
            compared += num_compared
            if found != KEPT:
                witness[doc] = found
                matched += 1
                continue
            not_compared += len(close) - len(chosen) + num_unseen
        survivors.add(doc, own)
    counts = Counts(candidates, plausible, compared, matched, not_compared)
    return Clusters(witness, similarity, counts)


class _Survivors:
    """The first `cap` documents that stayed of each bucket, and how many more it has."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.first: dict[int, list[int]] = {}
        self.unseen: dict[int, int] = {}

    def add(self, doc: int, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            members = self.first.setdefault(bucket, [])
            if len(members) < self.cap:
                members.append(doc)
            else:
                self.unseen[bucket] = self.unseen.get(bucket, 0) + 1

    def beside(self, buckets: Sequence[int]) -> tuple[np.ndarray, set[int], int]:
        """The survivors of these buckets, those of buckets that have no more, and how many more
        the others have (counted once a bucket)."""
        met = [bucket for bucket in buckets if bucket in self.first]
        everyone: set[int] = set().union(*(self.first[bucket] for bucket in met))
        sure: set[int] = set().union(*(self.first[b] for b in met if b not in self.unseen))
        num_unseen = sum(self.unseen.get(bucket, 0) for bucket in met)
        return np.array(sorted(everyone), np.int64), sure, num_unseen


def _first_match(
    sets: Sequence[np.ndarray], doc: int, others: Sequence[int], threshold: float
) -> tuple[int, float, int]:
    """The first of the others that reaches the threshold (or KEPT), their similarity, and how many
    were compared."""
    own = sets[doc]
    for number, other in enumerate(others):
        exact = jaccard(own, sets[other])
        if exact >= threshold:
            return other, exact, number + 1
    return KEPT, 0.0, len(others)


def _plausible(
    doc: int,
    others: np.ndarray,
    signature_DS: np.ndarray,
    sizes: np.ndarray,
    threshold: float,
    floor: float,
) -> np.ndarray:
    """Those that may reach the threshold, the likeliest first, equals in order."""
    estimate = agreement(signature_DS[doc], signature_DS[others])
    small, large = np.minimum(sizes[others], sizes[doc]), np.maximum(sizes[others], sizes[doc])
    # Divided as `jaccard` does: rounding can't part a pair that is exactly at the threshold.
    may = (estimate >= floor) & (small / large >= threshold)
    others, estimate = others[may], estimate[may]
    return others[np.argsort(-estimate, kind="stable")]
