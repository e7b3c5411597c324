"""Steps with faults, as a user's own may have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from stepwell.data.batches import Outcome
from stepwell.data.steps import DocumentStep, GlobalStep, Shard


class Faulty(DocumentStep):
    """Raises on a document that holds `word`, and for `together` on batches of several documents,
    whatever they hold."""

    kind: Literal["faulty"] = "faulty"
    word: str = ""
    together: int = 10**9

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        texts = batch["text"].to_pylist()
        if len(texts) >= self.together or any(self.word and self.word in text for text in texts):
            raise ValueError("a fault")
        return Outcome(batch)


class FaultyGlobal(GlobalStep):
    kind: Literal["faulty-global"] = "faulty-global"
    at: str = "sketch"

    def sketch(self, batch: pa.RecordBatch) -> Mapping[str, np.ndarray | pa.Array]:
        if self.at == "sketch":
            raise KeyError("sketch")
        return {}

    def decide(self, shards: Sequence[Shard], folder: Path) -> None:
        if self.at == "decide":
            raise KeyError("decide")

    def apply(self, batch: pa.RecordBatch, folder: Path) -> Outcome:
        if self.at == "apply":
            raise KeyError("apply")
        return Outcome(batch)


class Lossy(DocumentStep):
    """Loses the first document of each batch."""

    kind: Literal["lossy"] = "lossy"

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        return Outcome(batch.slice(1))
