"""Token stores as other trainers read them: Megatron-LM, MosaicML Streaming (MDS) and LitData.

Each keeps documents whole and in the store's order. The formats are those that megatron-core 0.16,
mosaicml-streaming 0.13 and litdata 0.2 read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.data.files import new_folder
from stepwell.data.store import TokenStore
from stepwell.types import ConfigError

SHARD_BYTES = 1 << 26
# Megatron's number of each type of token.
MEGATRON_DTYPES = {"uint16": (8, "<u2"), "uint32": (4, "<i4")}
# LitData's, of torch's types.
LITDATA_DTYPES = {"uint16": (20, "<u2"), "uint32": (15, "<i4")}


def write_megatron(store: TokenStore, folder: str | Path, name: str = "tokens") -> None:
    """`name.bin` and `name.idx` (an indexed data set, a document a sequence) in a new folder; give
    Megatron the path folder/name. Raises ConfigError as `_signed`."""
    code, dtype = MEGATRON_DTYPES[_signed(store)]
    lengths = store.doc_lengths().astype(np.int64)
    pointers = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    with new_folder(folder) as temporary:
        with (temporary / f"{name}.bin").open("wb") as file:
            for ids in _documents(store, dtype):
                file.write(ids.tobytes())
        with (temporary / f"{name}.idx").open("wb") as file:
            file.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, code))
            file.write(struct.pack("<QQ", store.num_docs, store.num_docs + 1))
            file.write(lengths.astype("<i4").tobytes())
            file.write(pointers.astype("<i8").tobytes())
            file.write(np.arange(store.num_docs + 1, dtype="<i8").tobytes())


def write_mds(store: TokenStore, folder: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Shards of samples with one column, `tokens` (ndarray:int32), a document a sample."""
    config = {
        "version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": shard_bytes,
        "column_names": ["tokens"], "column_encodings": ["ndarray:int32"], "column_sizes": [None],
    }  # fmt: skip
    header = json.dumps(config, sort_keys=True).encode()
    samples = map(_mds_sample, _documents(store, "<i4"))
    shards: list[dict[str, Any]] = []
    with new_folder(folder) as temporary:
        for number, group in enumerate(_grouped(samples, shard_bytes - len(header) - 8, 4)):
            content = _offsets(group, extra=len(header), between=header)
            name = f"shard.{number:05d}.mds"
            (temporary / name).write_bytes(content)
            raw = {"basename": name, "bytes": len(content), "hashes": {}}
            shards.append({"samples": len(group), "raw_data": raw, "zip_data": None, **config})
        (temporary / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def write_litdata(store: TokenStore, folder: str | Path, chunk_bytes: int = SHARD_BYTES) -> None:
    """Chunks for a StreamingDataset with a TokensLoader."""
    code, dtype = LITDATA_DTYPES[_signed(store)]
    size = np.dtype(dtype).itemsize
    items = (ids.tobytes() for ids in _documents(store, dtype))
    chunks: list[dict[str, Any]] = []
    with new_folder(folder) as temporary:
        for number, group in enumerate(_grouped(items, chunk_bytes, 0)):
            content = _offsets(group, extra=0, between=b"")
            name = f"chunk-0-{number}.bin"
            (temporary / name).write_bytes(content)
            num_tokens = sum(map(len, group)) // size
            chunks.append(
                {
                    "chunk_bytes": len(content), "chunk_size": len(group), "dim": num_tokens,
                    "filename": name,
                }
            )  # fmt: skip
        config = {
            "chunk_bytes": chunk_bytes, "chunk_size": None, "compression": None,
            "data_format": [f"no_header_tensor:{code}"], "encryption": None,
            "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
            "item_loader": "TokensLoader",
        }  # fmt: skip
        index = {"chunks": chunks, "config": config, "updated_at": "0"}
        (temporary / "index.json").write_text(json.dumps(index))


WRITERS: dict[str, Callable[[TokenStore, str | Path], None]] = {
    "megatron": write_megatron,
    "mds": write_mds,
    "litdata": write_litdata,
}


def _signed(store: TokenStore) -> str:
    """The store's type of token. Raises ConfigError for ids that 31 bits can't hold, which these
    formats have no type for."""
    if store.vocab_size > 1 << 31:
        raise ConfigError(
            f"{store.folder} has a vocabulary of {store.vocab_size:,}; they hold ids below "
            f"{1 << 31:,}"
        )
    return store.manifest["dtype"]


def _documents(store: TokenStore, dtype: str) -> Iterator[np.ndarray]:
    for i in range(store.num_docs):
        yield np.asarray(store.doc(i)).astype(dtype)


def _mds_sample(ids: np.ndarray) -> bytes:
    """The size of the column, then the array: dimensions and the bytes of each size, the size, the
    values."""
    width = next(code for code, bits in enumerate((8, 16, 32, 64)) if len(ids) < 1 << bits)
    shape = len(ids).to_bytes(1 << width, "little")
    body = bytes([(1 << 2) | width]) + shape + ids.tobytes()
    return struct.pack("<I", len(body)) + body


def _grouped(items: Iterator[bytes], limit: int, extra: int) -> Iterator[list[bytes]]:
    """As many as fit into `limit` bytes, each with `extra` more; at least one."""
    group: list[bytes] = []
    size = 0
    for item in items:
        if group and size + len(item) + extra > limit:
            yield group
            group, size = [], 0
        group.append(item)
        size += len(item) + extra
    if group:
        yield group


def _offsets(items: list[bytes], extra: int, between: bytes) -> bytes:
    """Number of items, where each begins and the last ends (from the file's start), `between`, the
    items."""
    sizes = np.array([0, *map(len, items)], np.int64)
    starts = 4 + 4 * len(sizes) + extra + np.cumsum(sizes)
    head = struct.pack("<I", len(items)) + starts.astype("<u4").tobytes()
    return head + between + b"".join(items)
