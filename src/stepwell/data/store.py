"""Token stores: tokenised documents in flat, memory-mapped files with a manifest.

A store is a folder: `tokens-00000.bin` (uint16 or uint32 by vocabulary size), `docs-00000.idx`
(uint64: where each document starts in its shard, then the shard's length), optionally
`mask-00000.bin` (uint8, 1 where a token is trained on) and `scores-00000.bin` (float32: how good
each document is), and `manifest.json` with the sizes and sha256 of all of them. Documents never
cross shards.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stepwell.data.files import (
    allow_open_files,
    begin_folder,
    clean_disk_errors,
    finish_folder,
    sync,
)
from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError, Document, Dropped

FORMAT = 1
MANIFEST = "manifest.json"
SHARD_TOKENS = 1 << 28
READ_BYTES = 1 << 22
MAX_SCORE = float(np.finfo(np.float32).max)
VERIFIED_BYTES = 4 << 30  # a few seconds at the 1 to 2 GB/s of sha256


class StoreWriter:
    """Writes a store. As a context manager it closes at the end and leaves nothing on an error.

    Raises DataError for an existing folder, a full disk, ids outside the vocabulary, a mask whose
    length differs from its document's, and a score that is not finite in float32.
    """

    def __init__(
        self,
        folder: str | Path,
        tokenizer_fingerprint: str,
        vocab_size: int,
        with_mask: bool = False,
        shard_tokens: int = SHARD_TOKENS,
        with_scores: bool = False,
    ):
        self.folder = Path(folder)
        self.vocab_size = vocab_size
        self.with_mask = with_mask
        self.with_scores = with_scores
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self.num_docs = 0
        self.num_tokens = 0
        self._fingerprint = tokenizer_fingerprint
        self._shard_tokens = shard_tokens
        self._shards: list[dict[str, Any]] = []
        self._files: dict[str, dict[str, Any]] = {}
        self._shard: _OpenShard | None = None
        self._temporary = begin_folder(self.folder)
        self._open = True

    def add(
        self,
        ids: Sequence[int] | np.ndarray,
        mask: Sequence[int] | np.ndarray | None = None,
        score: float | None = None,
    ) -> None:
        """Appends one document; mask: 1 for each token that is trained on; score: its quality, on
        any scale, the higher the better."""
        values = np.asarray(ids)
        if values.size == 0:
            raise DataError(f"document {self.num_docs} of {self.folder} has no tokens")
        if values.min() < 0 or values.max() >= self.vocab_size:
            worst = values.max() if values.max() >= self.vocab_size else values.min()
            raise DataError(
                f"document {self.num_docs} holds id {worst}, outside the vocabulary of "
                f"{self.vocab_size} (ids 0 to {self.vocab_size - 1})"
            )
        if (mask is not None) != self.with_mask:
            raise DataError(
                f"document {self.num_docs} comes {'with' if mask is not None else 'without'} a "
                f"mask, but the store was made with with_mask={self.with_mask}"
            )
        if (score is not None) != self.with_scores:
            raise DataError(
                f"document {self.num_docs} comes {'with' if score is not None else 'without'} a "
                f"score, but the store was made with with_scores={self.with_scores}"
            )
        if score is not None and not abs(score) <= MAX_SCORE:
            raise DataError(
                f"document {self.num_docs} has the score {score}, which is not a finite float32; "
                "give those that cannot be scored the lowest score"
            )
        mask_array = None if mask is None else np.asarray(mask, dtype=np.uint8)
        if mask_array is not None and len(mask_array) != len(values):
            raise DataError(
                f"document {self.num_docs} has {len(values)} tokens but a mask of "
                f"{len(mask_array)}; they must be equal"
            )
        with clean_disk_errors(self.folder):
            try:
                self._write(values.astype(self.dtype), mask_array, score)
            except OSError:
                self.abort()
                raise
        self.num_docs += 1
        self.num_tokens += len(values)

    def close(self) -> None:
        """Writes the manifest and gives the folder its name. Raises DataError for no documents."""
        if not self._open:
            return
        if self.num_docs == 0:
            self.abort()
            raise DataError(f"no documents for the store {self.folder}; nothing was written")
        with clean_disk_errors(self.folder):
            try:
                self._finish_shard()
                self._write_manifest()
                finish_folder(self._temporary, self.folder)
            except OSError:
                self.abort()
                raise
        self._open = False

    def abort(self) -> None:
        """Removes everything that was written."""
        self._open = False
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None
        shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._open:
            self.abort()

    def _write(self, values: np.ndarray, mask: np.ndarray | None, score: float | None) -> None:
        full = self._shard is not None and (
            self._shard.num_tokens + len(values) > self._shard_tokens
        )
        if full:
            self._finish_shard()
        if self._shard is None:
            self._shard = _OpenShard(
                self._temporary, len(self._shards), self.with_mask, self.with_scores
            )
        self._shard.add(values, mask, score)

    def _finish_shard(self) -> None:
        if self._shard is None:
            return
        shard, self._shard = self._shard, None
        files = shard.close()
        self._files.update(files)
        self._shards.append(
            {
                "tokens": shard.num_tokens,
                "docs": len(shard.starts) - 1,
                "files": sorted(files),
            }
        )

    def _write_manifest(self) -> None:
        manifest = {
            "format": FORMAT,
            "dtype": self.dtype.name,
            "vocab_size": self.vocab_size,
            "tokenizer": self._fingerprint,
            "num_docs": self.num_docs,
            "num_tokens": self.num_tokens,
            "with_mask": self.with_mask,
            "with_scores": self.with_scores,
            "shards": self._shards,
            "files": self._files,
        }
        path = self._temporary / MANIFEST
        path.write_text(json.dumps(manifest, indent=1), "utf-8")
        sync(path)


class _HashedFile:
    def __init__(self, path: Path):
        self.path = path
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def write(self, array: np.ndarray) -> None:
        content = np.ascontiguousarray(array).data.cast("B")
        self._file.write(content)
        self._hash.update(content)
        self._num_bytes += len(content)

    def close(self) -> dict[str, Any]:
        self._file.close()
        sync(self.path)
        return {"bytes": self._num_bytes, "sha256": self._hash.hexdigest()}

    def abandon(self) -> None:
        """Closes without caring whether the last bytes reach a disk that may be full."""
        self._file.raw.close()  # type: ignore[attr-defined]


class _OpenShard:
    def __init__(self, folder: Path, number: int, with_mask: bool, with_scores: bool):
        self._tokens = _HashedFile(folder / f"tokens-{number:05d}.bin")
        self._mask = _HashedFile(folder / f"mask-{number:05d}.bin") if with_mask else None
        self._index_path = folder / f"docs-{number:05d}.idx"
        self._scores_path = folder / f"scores-{number:05d}.bin" if with_scores else None
        self.starts = [0]
        self._scores: list[float] = []

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    def add(self, values: np.ndarray, mask: np.ndarray | None, score: float | None) -> None:
        self._tokens.write(values)
        if score is not None:
            self._scores.append(score)
        if self._mask is not None and mask is not None:
            self._mask.write(mask)
        self.starts.append(self.num_tokens + len(values))

    def close(self) -> dict[str, dict[str, Any]]:
        index, scores = _HashedFile(self._index_path), None
        index.write(np.array(self.starts, dtype=np.uint64))
        if self._scores_path is not None:
            scores = _HashedFile(self._scores_path)
            scores.write(np.array(self._scores, dtype=np.float32))
        files = [f for f in (self._tokens, self._mask, index, scores) if f is not None]
        return {f.path.name: f.close() for f in files}

    def abandon(self) -> None:
        for file in (self._tokens, self._mask):
            if file is not None:
                file.abandon()


class TokenStore:
    """A store that was opened for reading; its arrays are memory maps."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder = folder
        self.manifest = manifest
        self.num_docs: int = manifest["num_docs"]
        self.num_tokens: int = manifest["num_tokens"]
        self.vocab_size: int = manifest["vocab_size"]
        self.with_mask: bool = manifest["with_mask"]
        self.with_scores: bool = manifest.get("with_scores", False)
        numbers = range(len(manifest["shards"]))
        dtype = np.dtype(manifest["dtype"])
        # A map keeps its file open.
        allow_open_files(len(manifest["files"]))
        self._tokens = [np.memmap(folder / f"tokens-{n:05d}.bin", dtype, "r") for n in numbers]
        self._starts = [
            np.memmap(folder / f"docs-{n:05d}.idx", np.int64, "r").view(np.ndarray) for n in numbers
        ]
        self._masks = (
            [np.memmap(folder / f"mask-{n:05d}.bin", np.uint8, "r") for n in numbers]
            if self.with_mask
            else []
        )
        self._scores = (
            [np.memmap(folder / f"scores-{n:05d}.bin", np.float32, "r") for n in numbers]
            if self.with_scores
            else []
        )
        self._first_token = _running_sum(s["tokens"] for s in manifest["shards"])
        self._first_doc = _running_sum(s["docs"] for s in manifest["shards"])

    @classmethod
    def open(
        cls, folder: str | Path, tokenizer: Tokenizer | None = None, verify: bool | None = None
    ) -> TokenStore:
        """Opens a store after checking the size of each file, its sha256, and that every id is in
        the vocabulary.

        verify: False leaves out what has to read the content; None does so for a store above
        VERIFIED_BYTES. An unchanged file is read once in a process.
        Raises DataError for a missing or damaged store, and for one that another tokenizer made.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        if tokenizer is not None and tokenizer.fingerprint != manifest["tokenizer"]:
            raise DataError(
                f"the store {folder} was made with another tokenizer (fingerprint "
                f"{manifest['tokenizer'][:12]}, this one is {tokenizer.fingerprint[:12]}); "
                "tokenise the text again with this one, or use the store's own"
            )
        files: dict[str, dict[str, Any]] = manifest["files"]
        if verify is None:
            verify = sum(expected["bytes"] for expected in files.values()) <= VERIFIED_BYTES
        for name, expected in files.items():
            _check_file(folder / name, expected)
            if verify:
                _check_content(folder / name, expected, manifest)
        return cls(folder, manifest)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that tell stores of different content apart, wherever they lie."""
        parts = (
            f"{name} {file['sha256']}\n" for name, file in sorted(self.manifest["files"].items())
        )
        return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]

    def doc(self, i: int) -> np.ndarray:
        """The ids of document `i`, a read-only view of dtype uint16 or uint32."""
        shard, local = self._locate_doc(i)
        start, stop = self._starts[shard][local : local + 2]
        return self._tokens[shard][start:stop].view(np.ndarray)

    def doc_mask(self, i: int) -> np.ndarray:
        """The loss mask of document `i` (uint8); all ones in a store without masks."""
        shard, local = self._locate_doc(i)
        start, stop = self._starts[shard][local : local + 2]
        if not self.with_mask:
            return np.ones(int(stop - start), np.uint8)
        return self._masks[shard][start:stop].view(np.ndarray)

    def doc_lengths(self) -> np.ndarray:
        """int64 (num_docs,): tokens of each document."""
        return np.concatenate([np.diff(starts) for starts in self._starts])

    def doc_scores(self) -> np.ndarray:
        """float32 (num_docs,): the quality of each document. Raises DataError for a store that was
        written without."""
        if not self.with_scores:
            raise DataError(
                f"the store {self.folder} has no scores of its documents; write it anew with them "
                '(scores = "quality" under [store] of a curation recipe, or StoreWriter(..., '
                "with_scores=True)), or read it in another order"
            )
        return np.concatenate([scores.view(np.ndarray) for scores in self._scores])

    def trained_tokens(self, max_length: int) -> np.ndarray:
        """int64 (num_docs,): trained tokens of each document's first `max_length`, without the
        first token, which is never predicted."""
        lengths = self.doc_lengths()
        if not self.with_mask:
            return np.minimum(lengths, max_length) - 1
        counts = [
            np.add.reduceat(mask, starts[:-1], dtype=np.int64) - mask[starts[:-1]]
            for mask, starts in zip(self._masks, self._starts, strict=True)
        ]
        out = np.concatenate(counts)
        for i in np.flatnonzero(lengths > max_length).tolist():
            out[i] = self.doc_mask(i)[1:max_length].sum()
        return out

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` of all documents strung together."""
        return self._slice(self._tokens, start, stop)

    def read_mask(self, start: int, stop: int) -> np.ndarray:
        if not self.with_mask:
            return np.ones(stop - start, np.uint8)
        return self._slice(self._masks, start, stop)

    def doc_starts(self, start: int, stop: int) -> np.ndarray:
        """int64: where the documents begin that hold tokens `start` to `stop` of the stream; the
        first one begins at or before `start`."""
        first = _find(self._first_token, start)
        last = _find(self._first_token, stop - 1)
        parts = []
        for shard in range(first, last + 1):
            offset, starts = self._first_token[shard], self._starts[shard]
            low = int(np.searchsorted(starts, start - offset, "right")) - 1
            high = int(np.searchsorted(starts, stop - offset, "left"))
            parts.append(starts[max(low, 0) : min(high, len(starts) - 1)] + offset)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _slice(self, arrays: Sequence[np.ndarray], start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of a store of {self.num_tokens}")
        parts = []
        for shard in range(_find(self._first_token, start), len(arrays)):
            offset = self._first_token[shard]
            if offset >= stop:
                break
            parts.append(arrays[shard][max(start - offset, 0) : stop - offset].view(np.ndarray))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _locate_doc(self, i: int) -> tuple[int, int]:
        if not 0 <= i < self.num_docs:
            raise IndexError(f"document {i} of a store of {self.num_docs}")
        shard = _find(self._first_doc, i)
        return shard, i - self._first_doc[shard]


def build_store(
    docs: Iterable[Document | Dropped],
    tokenizer: Tokenizer,
    folder: str | Path,
    batch_bytes: int = 1 << 22,
    shard_tokens: int = SHARD_TOKENS,
) -> TokenStore:
    """Tokenises documents: one bos if the tokenizer uses one, the text, one eos.

    Names of special tokens inside a text stay plain text. Dropped documents are passed over.
    Raises DataError as StoreWriter does.
    """
    head = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    tail = [tokenizer.eos_id]
    with StoreWriter(
        folder, tokenizer.fingerprint, tokenizer.vocab_size, shard_tokens=shard_tokens
    ) as writer:
        for texts in _batches(docs, batch_bytes):
            for ids in tokenizer.encode_batch(texts, special=False):
                writer.add(np.array(head + ids + tail))
    return TokenStore.open(folder)


def _batches(docs: Iterable[Document | Dropped], batch_bytes: int) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for doc in docs:
        if isinstance(doc, Dropped):
            continue
        batch.append(doc.text)
        size += len(doc.text)
        if size >= batch_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(f"{folder} is not a token store: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"the manifest {path} cannot be read: {error}") from error
    needed = {
        "format", "dtype", "vocab_size", "tokenizer", "num_docs", "num_tokens", "with_mask",
        "shards", "files",
    }  # fmt: skip
    if not isinstance(manifest, dict) or not needed <= manifest.keys():
        raise DataError(f"the manifest {path} lacks {sorted(needed - set(manifest))}")
    if manifest["format"] != FORMAT:
        raise DataError(
            f"the store {folder} has format {manifest['format']}; this version reads {FORMAT}"
        )
    return manifest


def _check_file(path: Path, expected: dict[str, Any]) -> None:
    if not path.is_file():
        raise DataError(f"the store is incomplete: {path} is missing")
    num_bytes = path.stat().st_size
    if num_bytes != expected["bytes"]:
        raise DataError(f"{path} is damaged: {num_bytes} bytes where {expected['bytes']} belong")


def _check_content(path: Path, expected: dict[str, Any], manifest: dict[str, Any]) -> None:
    holds_ids = path.name.startswith("tokens-")
    state = path.stat()
    digest, largest = _sha256_and_largest(
        path.absolute(), state.st_size, state.st_mtime_ns, manifest["dtype"] if holds_ids else None
    )
    if digest != expected["sha256"]:
        raise DataError(
            f"{path} is damaged: its sha256 differs from the manifest's; make the store again"
        )
    if holds_ids and largest >= manifest["vocab_size"]:
        raise DataError(
            f"{path} holds id {largest}, outside the vocabulary of {manifest['vocab_size']} (ids 0 "
            f"to {manifest['vocab_size'] - 1}) that its manifest names; make the store again"
        )


@lru_cache(maxsize=1024)
def _sha256_and_largest(
    path: Path, size_bytes: int, mtime_ns: int, dtype: str | None
) -> tuple[str, int]:
    """sha256, and the largest of the file's values where it holds ids of `dtype` (else 0); size and
    time tell a changed file from the one that was read."""
    digest = hashlib.sha256()
    largest = 0
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            if dtype is not None:
                largest = max(largest, int(np.frombuffer(chunk, dtype).max()))
    return digest.hexdigest(), largest


def _running_sum(values: Iterable[int]) -> list[int]:
    """[0, a, a+b, ...] without the last sum."""
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums[:-1]


def _find(firsts: list[int], value: int) -> int:
    """The last of `firsts` that is at most `value`."""
    return bisect_right(firsts, value) - 1
