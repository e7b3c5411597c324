"""Semantic deduplication (SemDeDup, 2303.09540): documents whose embeddings point the same way.

Embeddings are grouped by k-means, and only documents of one group are compared: a pair that
straddles two groups is not seen. Who goes has a kept witness of at least that cosine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from stepwell.data.batches import Outcome, texts_of
from stepwell.data.dedup.decision import (
    Names,
    apply_removed,
    cluster_summary,
    ranked_documents,
    write_removed,
    write_sizes,
    write_summary,
)
from stepwell.data.dedup.embed import WORDLLAMA, load_embedder
from stepwell.data.dedup.survivor import SurvivorStep
from stepwell.data.steps import Shard, read_batches
from stepwell.schema import NonNegative, Positive
from stepwell.types import DataError

SAMPLE_PER_CLUSTER = 256  # more doesn't move centroids (faiss draws as many)
BLOCK_ROWS = 4096
COMPARED_CHEAPLY = 1024
ROUNDING = 1e-6  # of a product of unit vectors in float32


class SemanticDedup(SurvivorStep):
    """threshold: the cosine from which documents say the same (with static vectors, two speeches
    of one genre reach .97). clusters: of k-means; none given: the square root of the number of
    documents, or so many that each has 1,024 of them, whichever is fewer. iterations: of k-means at
    most. embedder: `wordllama`, or a folder with static token vectors (`dedup.embed`).
    survivor: as in fuzzy-dedup: rules in order, then (source, id).

    Adds the label `cluster_size`, as fuzzy-dedup does.
    """

    kind: Literal["semantic-dedup"] = "semantic-dedup"
    threshold: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.98
    clusters: Positive | None = None
    iterations: Positive = 20
    seed: NonNegative = 1
    embedder: str = WORDLLAMA

    def check(self) -> None:
        load_embedder(self.embedder)

    def sketch(self, batch: pa.RecordBatch) -> Mapping[str, np.ndarray | pa.Array]:
        rows = load_embedder(self.embedder).embed(texts_of(batch))
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
        return {"embedding": vectors, **self.ranks(batch)}

    def decide(self, shards: Sequence[Shard], folder: Path) -> None:
        docs = ranked_documents(shards)
        order = self.best_first(docs)
        file = folder / "vectors"
        vectors = _gather(shards, order, load_embedder(self.embedder).num_dimensions, file)
        used = np.flatnonzero(np.any(vectors, axis=1))
        clusters = self._num_clusters(len(used))
        cluster = k_means(vectors, used, clusters, self.iterations, self.seed)
        witness, cosine = similar_documents(vectors, used, cluster, self.threshold)
        gone = np.flatnonzero(witness >= 0)
        removed, kept = order[gone], order[witness[gone]]
        names = Names([], docs)
        write_removed(
            folder,
            duplicates=docs["key"].to_numpy()[removed],
            details=[f"cosine = {value:.4f}" for value in cosine[gone].tolist()],
            witnesses=names.of(kept),
            reason="semantic_duplicate",
            blank=np.empty(0, np.uint64),
        )
        write_sizes(folder, docs, removed, kept)
        summary = {
            "num_docs": docs.num_rows,
            "num_removed": len(removed),
            "num_without_tokens": docs.num_rows - len(used),
            "k_means_clusters": clusters,
            "largest_k_means_cluster": int(np.bincount(cluster).max()) if len(used) else 0,
            **cluster_summary(removed, kept, names),
        }
        write_summary(folder, summary)
        del vectors
        file.unlink(missing_ok=True)

    def apply(self, batch: pa.RecordBatch, folder: Path) -> Outcome:
        return apply_removed(batch, folder, self.kind)

    def _num_clusters(self, num: int) -> int:
        """num: of documents that have a vector."""
        if self.clusters is None or not num:
            return auto_clusters(num)
        if self.clusters > num:
            raise DataError(
                f"semantic-dedup: clusters={self.clusters} is more than the {num} documents to "
                f"group; set it to {num} or less, or leave it out, which makes {auto_clusters(num)}"
            )
        return self.clusters


def auto_clusters(num: int) -> int:
    """Few documents are all compared with one another: that costs little and misses nothing."""
    return max(1, -(-num // max(COMPARED_CHEAPLY, math.isqrt(num))))


def k_means(
    vectors: np.ndarray, rows: np.ndarray, clusters: int, iterations: int, seed: int
) -> np.ndarray:
    """Spherical k-means: the cluster of each of `rows` of unit `vectors`. Centroids are found on a
    sample; one that nothing is near to stays where it was."""
    clusters = min(clusters, len(rows))
    if not clusters:
        return np.empty(0, np.int64)
    generator = np.random.default_rng(seed)
    drawn = generator.permutation(len(rows))[: clusters * SAMPLE_PER_CLUSTER]
    sample = rows[np.sort(drawn)]
    centroids = np.array(vectors[rows[np.sort(drawn[:clusters])]], np.float32)
    before = None
    for _ in range(iterations):
        nearest = nearest_centroid(vectors, sample, centroids)
        if before is not None and np.array_equal(before, nearest):
            break
        before = nearest
        sums = np.zeros(centroids.shape, np.float64)
        for start in range(0, len(sample), BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            np.add.at(sums, nearest[block], vectors[sample[block]])
        norms = np.linalg.norm(sums, axis=1)
        met = norms > 0
        centroids[met] = sums[met] / norms[met, None]
    return nearest_centroid(vectors, rows, centroids)


def nearest_centroid(vectors: np.ndarray, rows: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    blocks = [
        np.argmax(vectors[rows[start : start + BLOCK_ROWS]] @ centroids.T, axis=1)
        for start in range(0, len(rows), BLOCK_ROWS)
    ]
    return np.concatenate([np.empty(0, np.int64), *blocks])


def similar_documents(
    vectors: np.ndarray, rows: np.ndarray, cluster: np.ndarray, threshold: float
) -> tuple[np.ndarray, np.ndarray]:
    """For each vector the first one of its cluster that stays and has at least this cosine with
    it (to within ROUNDING: equal vectors have 1), or -1 if it stays itself; and that cosine.

    rows: of `vectors`, best first; cluster: of each of them."""
    witness = np.full(len(vectors), -1)
    cosine = np.zeros(len(vectors), np.float32)
    by_cluster = np.argsort(cluster, kind="stable")
    borders = np.flatnonzero(np.diff(cluster[by_cluster])) + 1
    for members in np.split(by_cluster, borders) if len(rows) else []:
        place = rows[members]
        inside = np.array(vectors[place])
        stays = np.ones(len(place), bool)
        for i in range(len(place)):
            if not stays[i]:
                continue
            later = np.flatnonzero(stays[i + 1 :]) + i + 1
            values = np.minimum(inside[i + 1 :] @ inside[i], 1)[later - i - 1]
            found = values >= threshold - ROUNDING
            stays[later[found]] = False
            witness[place[later[found]]] = place[i]
            cosine[place[later[found]]] = values[found]
    return witness, cosine


def _gather(shards: Sequence[Shard], order: np.ndarray, dimensions: int, file: Path) -> np.ndarray:
    """(documents, dimensions), best first, in a file so that memory needn't hold them."""
    shape = (len(order), dimensions)
    if not len(order):
        return np.empty(shape, np.float32)
    vectors = np.memmap(file, np.float32, "w+", shape=shape)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    row = 0
    for batch in [b for shard in shards for b in read_batches(shard.sketch)]:
        values = batch["embedding"].flatten().to_numpy().reshape(-1, dimensions)
        vectors[ranks[row : row + len(values)]] = values
        row += len(values)
    return vectors
