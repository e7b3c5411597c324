"""Exact deduplication: documents whose normalised texts are equal."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from stepwell.data.batches import Outcome
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
from stepwell.data.dedup.survivor import SurvivorStep
from stepwell.data.steps import Shard, read_batches
from stepwell.types import Document, Dropped

DIGEST_BYTES = 16


def normalise(text: str) -> str:
    """Unicode NFC with every run of white space one blank and none at the ends; case counts."""
    text = text if text.isascii() else unicodedata.normalize("NFC", text)
    return " ".join(text.split())


def content_digest(normalised: str) -> bytes:
    """128 bits of blake2b; nobody makes two texts that share them."""
    content = normalised.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def exact_dedup(docs: Iterable[Document | Dropped]) -> Iterator[Document | Dropped]:
    """Keeps the first of equal documents, untouched; drops later ones (`exact_duplicate`, the
    detail names the first) and blank ones (`blank`).

    Remembers a 128-bit hash and an id for each kept document.
    """
    first_with: dict[bytes, str] = {}
    for doc in docs:
        if isinstance(doc, Dropped):
            yield doc
            continue
        text = normalise(doc.text)
        if not text:
            yield Dropped(doc.id, doc.source, "blank")
            continue
        digest = content_digest(text)
        if digest in first_with:
            yield Dropped(doc.id, doc.source, "exact_duplicate", f"of {first_with[digest]}")
        else:
            first_with[digest] = doc.id
            yield doc


class ExactDedup(SurvivorStep):
    """Keeps one of the documents whose `normalise`d texts are equal, untouched; blank ones go too.

    survivor: rules in order, of which the first that tells two documents apart decides who stays;
    `quality` and `date` are the labels or keys of meta that they read.

    Adds the label `cluster_size`: how many documents a kept one stands for.
    """

    kind: Literal["exact-dedup"] = "exact-dedup"

    def sketch(self, batch: pa.RecordBatch) -> Mapping[str, np.ndarray | pa.Array]:
        texts = [normalise(text or "") for text in batch["text"].to_pylist()]
        digests = [content_digest(text) for text in texts]
        return {
            "content_digest": pa.array(digests, pa.binary(DIGEST_BYTES)),
            **self.ranks(batch),
        }

    def decide(self, shards: Sequence[Shard], folder: Path) -> None:
        docs = ranked_documents(shards)
        digests = (
            np.array(
                [
                    digest
                    for shard in shards
                    for batch in read_batches(shard.sketch)
                    for digest in batch["content_digest"].to_pylist()
                ],
                "V16",
            )
            .view(np.uint64)
            .reshape(-1, 2)
        )
        order = self.best_first(docs)
        first = order[first_equals(digests[order])]
        is_blank = (digests == np.frombuffer(content_digest(""), np.uint64)).all(axis=1)
        gone = (first != order) & ~is_blank[order]
        keys, names = docs["key"].to_numpy(), Names([], docs)
        write_removed(
            folder,
            duplicates=keys[order[gone]],
            details=["equal once normalised"] * int(gone.sum()),
            witnesses=names.of(first[gone]),
            reason="exact_duplicate",
            blank=keys[is_blank],
        )
        write_sizes(folder, docs, order[gone], first[gone])
        summary = {
            "num_docs": docs.num_rows,
            "num_removed": int(gone.sum()),
            "num_blank": int(is_blank.sum()),
            **cluster_summary(order[gone], first[gone], names),
        }
        write_summary(folder, summary)

    def apply(self, batch: pa.RecordBatch, folder: Path) -> Outcome:
        return apply_removed(batch, folder, self.kind)
