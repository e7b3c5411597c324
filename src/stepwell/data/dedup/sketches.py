"""What fuzzy dedup keeps of each document, read from memory-mapped files, never all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from stepwell.data.dedup.minhash import band_keys


class Sketches:
    """Rows of batches with the columns `signature` (fixed-size list of uint32), `shingles` (large
    list of uint64, ascending) and `set_digest` (16 bytes), numbered through."""

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        self.batches = [batch for batch in batches if batch.num_rows]
        self.first_row = np.cumsum([0, *(batch.num_rows for batch in self.batches)])
        self.offsets = [batch["shingles"].offsets.to_numpy() for batch in self.batches]
        self.flat_shingles = [batch["shingles"].values.to_numpy() for batch in self.batches]
        self._signatures = [_matrix(batch["signature"]) for batch in self.batches]

    def __len__(self) -> int:
        return int(self.first_row[-1])

    @property
    def num_shingles(self) -> np.ndarray:
        """Of each row; 0 for a blank document."""
        return np.concatenate([np.zeros(0, np.int64), *map(np.diff, self.offsets)])

    def signatures(self, rows: np.ndarray) -> np.ndarray:
        """(rows, slots) uint32, a copy."""
        taken = np.zeros(
            (len(rows), self._signatures[0].shape[1] if self.batches else 1), np.uint32
        )
        part = np.searchsorted(self.first_row, rows, "right") - 1
        for number, signature_DS in enumerate(self._signatures):
            here = part == number
            taken[here] = signature_DS[rows[here] - self.first_row[number]]
        return taken

    def bands(self, bands: int, rows_of_band: int, rows: np.ndarray) -> Iterator[np.ndarray]:
        """The keys of these rows, a band at a time."""
        for band in range(bands):
            keys = [
                band_keys(signature_DS, band, rows_of_band) for signature_DS in self._signatures
            ]
            yield np.concatenate([np.zeros(0, np.uint64), *keys])[rows]

    def set_digests(self) -> np.ndarray:
        """(rows, 2) uint64."""
        parts = [
            np.frombuffer(batch["set_digest"].buffers()[1], np.uint64).reshape(-1, 2)
            [batch["set_digest"].offset :][: batch.num_rows]
            for batch in self.batches
        ]  # fmt: skip
        return np.concatenate([np.zeros((0, 2), np.uint64), *parts])


class Sets(Sequence[np.ndarray]):
    """The shingle sets of some rows, each a view of a file."""

    def __init__(self, sketches: Sketches, rows: np.ndarray) -> None:
        self._shingles = sketches.flat_shingles
        self._part = np.searchsorted(sketches.first_row, rows, "right") - 1
        inner = rows - sketches.first_row[self._part]
        self._start, self._stop = np.zeros((2, len(rows)), np.int64)
        for number, offsets in enumerate(sketches.offsets):
            here = self._part == number
            self._start[here] = offsets[inner[here]]
            self._stop[here] = offsets[inner[here] + 1]

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, number):  # pyright: ignore[reportIncompatibleMethodOverride]
        flat = self._shingles[self._part[number]]
        return flat[self._start[number] : self._stop[number]]


def _matrix(signatures: pa.FixedSizeListArray) -> np.ndarray:
    slots = signatures.type.list_size
    return signatures.flatten().to_numpy().reshape(-1, slots)
