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
    first so many survivors of each bucket, and compared exactly with the so many of these that
    agree most. It bounds the work in a bucket of pages that share a template without being
    duplicates; it can leave a duplicate in, never take out a document that is none.
    """
    num_docs, slots = signature_DS.shape
    floor = agreement_floor(threshold, slots)
    sizes = np.array([len(s) for s in sets], np.int64)
    witness, similarity = np.full(num_docs, KEPT, np.int64), np.zeros(num_docs)
    survivors: dict[int, list[int]] = {}
    unseen: dict[int, int] = {}
    candidates = plausible = compared = matched = not_compared = 0
    places = bucket_places.tolist()
    for doc in range(num_docs):
        own = bucket_numbers[places[doc] : places[doc + 1]].tolist()
        found = [survivors[b] for b in own if b in survivors] if doc >= num_fixed else []
        if found:
            others = np.array(sorted(set().union(*found)))
            candidates += len(others)
            close = _plausible(doc, others, signature_DS, sizes, threshold, floor)
            plausible += len(close)
            for other in close[:bucket_cap].tolist():
                compared += 1
                exact = jaccard(sets[doc], sets[other])
                if exact >= threshold:
                    matched += 1
                    witness[doc], similarity[doc] = other, exact
                    break
            if witness[doc] != KEPT:
                continue
            not_compared += max(len(close) - bucket_cap, 0) + sum(unseen.get(b, 0) for b in own)
        for bucket in own:
            members = survivors.setdefault(bucket, [])
            if len(members) < bucket_cap:
                members.append(doc)
            else:
                unseen[bucket] = unseen.get(bucket, 0) + 1
    counts = Counts(candidates, plausible, compared, matched, not_compared)
    return Clusters(witness, similarity, counts)


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
