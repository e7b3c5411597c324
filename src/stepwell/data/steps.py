"""What a curation is made of: steps that are values, each with its knobs as fields.

A per-document step is called with a batch. A global step needs all documents: a small sketch of
each batch is made beside it, `decide` reads all sketches in one process, and `apply` carries the
decision out on each batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from stepwell.data.batches import Outcome
from stepwell.schema import Section


class StepConfig(Section):
    """sources: the only ones whose documents the step sees (none given: all). Documents of other
    sources pass, with no value in the labels that the step adds."""

    kind: str
    sources: tuple[str, ...] = ()

    def adds(self) -> Mapping[str, pa.DataType]:
        """The labels that documents have after the step."""
        return {}

    def needs(self) -> Mapping[str, Literal["number", "any"]]:
        """The labels that earlier steps must have added, and of which type."""
        return {}

    def check(self) -> None:
        """Opens the models, lists and indexes that the step reads. Called before a curation begins.

        Raises StepwellError for one that isn't there, is damaged, or doesn't fit the step.
        """


class DocumentStep(StepConfig, ABC):
    """A pure function of a batch; the result doesn't depend on how documents are cut into batches.

    What is expensive to load (a model, a word list) is loaded on first use and kept by path, not in
    the step, which travels between processes."""

    @abstractmethod
    def __call__(self, batch: pa.RecordBatch) -> Outcome: ...


@dataclass(frozen=True)
class Shard:
    """A file of documents (Arrow IPC, uncompressed, of one or more batches) and, in the same row
    order, what `sketch` made of them (Arrow IPC)."""

    documents: Path
    sketch: Path


class GlobalStep(StepConfig, ABC):
    """A decision about all documents.

    It must not depend on how documents are spread over shards, nor on their order: ties go by
    (source, id), then by text.
    """

    @abstractmethod
    def sketch(self, batch: pa.RecordBatch) -> Mapping[str, np.ndarray | pa.Array]:
        """Columns with an entry for each document, e.g. `{"signature": FixedSizeListArray}`."""

    @abstractmethod
    def decide(self, shards: Sequence[Shard], folder: Path) -> None:
        """Writes what `apply` needs into `folder`, which exists and is empty. Must not hold all
        texts in memory. Numbers for the datasheet go into `folder/summary.json`."""

    @abstractmethod
    def apply(self, batch: pa.RecordBatch, folder: Path) -> Outcome: ...


def read_batches(path: Path) -> list[pa.RecordBatch]:
    """The batches of an Arrow IPC file, memory-mapped: nothing is copied."""
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]


def read_table(path: Path) -> pa.Table:
    """A whole Arrow IPC file, memory-mapped and kept; for decisions that `apply` looks up."""
    state = path.stat()
    return _read_table(path, state.st_ino, state.st_mtime_ns)


@lru_cache(maxsize=8)
def _read_table(path: Path, _inode: int, _mtime_ns: int) -> pa.Table:
    """The number and the time tell a file made anew from the one that was read."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def write_table(table: pa.Table | pa.RecordBatch, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write(table)
