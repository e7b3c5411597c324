"""Near-duplicates: MinHash-LSH proposes, exact Jaccard similarity decides.

Every document that goes has a kept witness whose shingle set resembles it at the threshold or
above; see `clusters` for how clusters are made and `survivor` for who stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from stepwell.data.batches import Outcome
from stepwell.data.dedup.clusters import KEPT, Clusters, Counts, star_clusters
from stepwell.data.dedup.decision import (
    Names,
    apply_removed,
    cluster_summary,
    first_equals,
    ranked_documents,
    write_removed,
    write_sizes,
    write_summary,
)
from stepwell.data.dedup.index import check_target, free_name, index_schema, load_index, save_index
from stepwell.data.dedup.minhash import buckets, num_slots, p_candidate, signatures
from stepwell.data.dedup.shingles import set_digests, shingle_sets
from stepwell.data.dedup.sketches import Sets, Sketches
from stepwell.data.dedup.survivor import SurvivorStep
from stepwell.data.steps import Shard, read_batches
from stepwell.schema import NonNegative, Positive

LEAST_P_CANDIDATE = 0.5


class FuzzyDedup(SurvivorStep):
    """threshold: the Jaccard similarity of shingle sets from which documents are duplicates.
    ngram: words of a shingle. bands, rows: a pair is looked at when all `rows` slots of one of
    `bands` bands agree, 1 - (1 - J^rows)^bands. bucket_cap: see `star_clusters`.
    survivor: rules in order, of which the first that tells two documents apart decides; `quality`
    and `date` are the labels or keys of meta that they read.
    against: folders of indexes whose documents stay, and before all others. save_index: where to
    leave an index of what stayed (without what it was compared against).

    Adds the label `cluster_size`: how many documents a kept one stands for, with
    those that the removed ones stood for.
    """

    kind: Literal["fuzzy-dedup"] = "fuzzy-dedup"
    threshold: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.8
    ngram: Annotated[int, Field(strict=True, ge=1, le=64)] = 5
    bands: Positive = 21
    rows: Positive = 6
    seed: NonNegative = 1
    bucket_cap: Positive = 16
    against: tuple[str, ...] = ()
    save_index: str | None = None

    @model_validator(mode="after")
    def _indexes_apart(self) -> FuzzyDedup:
        if self.save_index is None:
            return self
        new = Path(self.save_index).resolve()
        for path in self.against:
            old = Path(path).resolve()
            if new == old or new in old.parents or old in new.parents:
                raise ValueError(
                    f"save_index={self.save_index!r} would write over the index "
                    f"against={path!r}, but holds only what is new; choose another folder, e.g. "
                    f"{free_name(Path(path))!r}, and name both in the next `against`"
                )
        return self

    @model_validator(mode="after")
    def _rules(self) -> FuzzyDedup:
        chance = p_candidate(self.threshold, self.bands, self.rows)
        if chance < LEAST_P_CANDIDATE:
            p_band = max(self.threshold**self.rows, 1e-300)
            needed = math.ceil(math.log(1 - LEAST_P_CANDIDATE) / math.log1p(-p_band))
            raise ValueError(
                f"bands={self.bands}, rows={self.rows} find a pair at threshold={self.threshold} "
                f"with probability {chance:.3f}; it must be at least {LEAST_P_CANDIDATE}, which "
                f"takes bands={needed} at this many rows"
            )
        return self

    def made_with(self) -> dict[str, Any]:
        """What must be equal for sketches to be compared."""
        slots = num_slots(self.bands, self.rows)
        return {"ngram": self.ngram, "seed": self.seed, "slots": slots}

    def check(self) -> None:
        for path in self.against:
            load_index(path, self.made_with())
        if self.save_index is not None:
            check_target(self.save_index)

    def sketch(self, batch: pa.RecordBatch) -> Mapping[str, np.ndarray | pa.Array]:
        slots = num_slots(self.bands, self.rows)
        sets = shingle_sets(batch["text"], self.ngram)
        signature_DS = signatures(sets, slots, self.seed)
        return {
            "signature": pa.FixedSizeListArray.from_arrays(pa.array(signature_DS.ravel()), slots),
            "shingles": sets,
            "set_digest": set_digests(sets),
            **self.ranks(batch),
        }

    def decide(self, shards: Sequence[Shard], folder: Path) -> None:
        docs = ranked_documents(shards)
        sketched = [batch for shard in shards for batch in read_batches(shard.sketch)]
        known = [b for path in self.against for b in load_index(path, self.made_with())]
        sketches = Sketches([*known, *sketched])
        num_known = sum(batch.num_rows for batch in known)
        num_shingles = sketches.num_shingles
        ranks = self.best_first(docs) + num_known
        ranks = ranks[num_shingles[ranks] > 0]
        verdict = self._verdict(sketches, np.concatenate([np.arange(num_known), ranks]), num_known)
        names = Names([name for batch in known for name in batch["name"].to_pylist()], docs)
        blank = np.flatnonzero(num_shingles[num_known:] == 0)
        keys = docs["key"].to_numpy()
        write_removed(
            folder,
            duplicates=keys[verdict.removed - num_known],
            details=[f"J = {value:.3f}" for value in verdict.similarity.tolist()],
            witnesses=names.of(verdict.witness),
            reason="fuzzy_duplicate",
            blank=keys[blank],
        )
        own = verdict.witness >= num_known
        write_sizes(
            folder, docs, *(rows[own] - num_known for rows in (verdict.removed, verdict.witness))
        )
        write_summary(folder, _summary(verdict, names, len(blank), docs.num_rows))
        if self.save_index is not None:
            kept = np.ones(len(sketches), bool)
            kept[[*verdict.removed.tolist(), *(blank + num_known).tolist()]] = False
            rows = _kept_rows(sketches, kept, num_known, names)
            save_index(self.save_index, rows, self.made_with())

    def apply(self, batch: pa.RecordBatch, folder: Path) -> Outcome:
        return apply_removed(batch, folder, self.kind)

    def _verdict(self, sketches: Sketches, order: np.ndarray, num_known: int) -> Verdict:
        """order: row numbers, best first; those of indexes lead it."""
        first = first_equals(sketches.set_digests()[order])
        heads = np.flatnonzero(first == np.arange(len(order)))
        rows = order[heads]
        numbers, places = buckets(sketches.bands(self.bands, self.rows, rows), len(rows))
        busy = np.flatnonzero(np.diff(places))
        found = star_clusters(
            Sets(sketches, rows[busy]),
            sketches.signatures(rows[busy]),
            numbers,
            np.append(places[busy], places[-1]),
            self.threshold,
            self.bucket_cap,
            int((rows[busy] < num_known).sum()),
        )
        return _unfold(order, first, heads[busy], found, num_known)


@dataclass(frozen=True)
class Verdict:
    """removed: row numbers; witness, similarity: the kept row that each repeats, and how much."""

    removed: np.ndarray
    witness: np.ndarray
    similarity: np.ndarray
    counts: Counts
    num_equal: int


def _unfold(
    order: np.ndarray, first: np.ndarray, busy: np.ndarray, found: Clusters, num_known: int
) -> Verdict:
    """From clusters of distinct sets to all documents: one whose set equals another's shares its
    fate, and where that one stays it goes for its sake."""
    witness, similarity = np.arange(len(order)), np.ones(len(order))
    goes = found.witness != KEPT
    witness[busy[goes]] = busy[found.witness[goes]]
    similarity[busy[goes]] = found.similarity[goes]
    witness, similarity = witness[first], similarity[first]
    gone = np.flatnonzero(witness != np.arange(len(order)))
    gone = gone[order[gone] >= num_known]
    num_equal = int((first[gone] != gone).sum())
    return Verdict(order[gone], order[witness[gone]], similarity[gone], found.counts, num_equal)


def _summary(verdict: Verdict, names: Names, num_blank: int, num_docs: int) -> dict[str, Any]:
    counts = verdict.counts
    return {
        "num_docs": num_docs,
        "num_removed": len(verdict.removed),
        "num_equal": verdict.num_equal,
        "num_blank": num_blank,
        **cluster_summary(verdict.removed, verdict.witness, names),
        **{f"num_{key}": value for key, value in asdict(counts).items()},
        "precision_of_candidates": counts.matched / max(counts.candidates, 1),
        "precision_of_compared": counts.matched / max(counts.compared, 1),
    }


def _kept_rows(
    sketches: Sketches, kept: np.ndarray, num_known: int, names: Names
) -> Iterator[pa.RecordBatch]:
    """The rows of an index."""
    for batch, first in zip(sketches.batches, sketches.first_row.tolist(), strict=False):
        if first < num_known:
            continue
        rows = np.flatnonzero(kept[first : first + batch.num_rows])
        taken = batch.take(pa.array(rows))
        columns = {"name": pa.array(names.of(rows + first), pa.string())}
        columns |= {name: taken[name] for name in ("signature", "shingles", "set_digest")}
        schema = index_schema(taken["signature"].type.list_size)
        yield pa.RecordBatch.from_pydict(columns, schema)
