"""What global deduplication rests on: the order of documents, and hashes seen more than once.

Both read shards and give the same answer however documents are spread over them. Hashes go through
files cut by value, so that memory is bounded however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from stepwell.data.batches import name_of
from stepwell.data.dedup.decision import ranked_documents
from stepwell.data.dedup.survivor import ranked
from stepwell.data.steps import Shard, read_batches

PART_ENTRIES = 1 << 23  # sorted at once: about 0.4 GB
PAIR = np.dtype([("hash", np.uint64), ("rank", np.uint32)])


@dataclass(frozen=True)
class Order:
    """Documents in order of (source, id), then of a hash of the text.

    ranks[s]: the place of each row of shard s. shard, row, key: for each place, where it is.
    """

    ranks: list[np.ndarray]
    shard: np.ndarray
    row: np.ndarray
    key: np.ndarray


def document_order(shards: Sequence[Shard]) -> Order:
    """Reads the columns key, source and id of documents and `rank_columns` of their sketches."""
    order = ranked(ranked_documents(shards), ())
    sizes = np.array([sum(b.num_rows for b in read_batches(s.documents)) for s in shards], np.int64)
    keys = [b["key"].to_numpy() for s in shards for b in read_batches(s.documents)]
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    ends = np.cumsum(sizes)
    shard = np.searchsorted(ends, order, side="right")
    return Order(
        ranks=np.split(ranks, ends[:-1]),
        shard=shard,
        row=order - (ends - sizes)[shard],
        key=np.concatenate([np.empty(0, np.uint64), *keys])[order],
    )


def names_at(shards: Sequence[Shard], order: Order, places: np.ndarray) -> list[str]:
    """`source/id` of the documents at `places`."""
    names: list[str] = [""] * len(places)
    for number, shard in enumerate(shards):
        here = np.flatnonzero(order.shard[places] == number)
        if not len(here):
            continue
        batches = [batch.select(["source", "id"]) for batch in read_batches(shard.documents)]
        rows = pa.Table.from_batches(batches).take(pa.array(order.row[places[here]])).to_pylist()
        for i, row in zip(here.tolist(), rows, strict=True):
            names[i] = name_of(row["source"], row["id"])
    return names


def repeated_hashes(
    chunks: Iterable[tuple[np.ndarray, np.ndarray]],
    num_entries: int,
    folder: Path,
    part_entries: int = PART_ENTRIES,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The hashes that occur more than once among chunks of (hashes uint64, document ranks), sorted,
    with how often they do and the least rank.

    folder: a scratch folder; num_entries: of all chunks together (at most part_entries of them are
    sorted at once).
    """
    num_parts = 1 << max(0, (max(num_entries, 1) - 1) // part_entries).bit_length()
    bits = num_parts.bit_length() - 1
    paths = [folder / f"part-{i}" for i in range(num_parts)]
    for pairs in _gathered(chunks, part_entries // 4):
        part = (pairs["hash"] >> np.uint64(64 - bits)) if bits else np.zeros(len(pairs), int)
        by_part = np.argsort(part, kind="stable")
        starts = np.searchsorted(part[by_part], np.arange(num_parts + 1))
        for i, path in enumerate(paths):
            # One at a time: there may be more of them than a process may have open.
            with path.open("ab") as file:
                pairs[by_part[starts[i] : starts[i + 1]]].tofile(file)
    found = [_repeated(_taken(path)) for path in paths]
    hashes, counts, firsts = (np.concatenate(columns) for columns in zip(*found, strict=True))
    return hashes, counts, firsts


def _gathered(chunks: Iterable[tuple[np.ndarray, np.ndarray]], least: int) -> Iterator[np.ndarray]:
    """Chunks together, as PAIR: `least` entries or more at a time, but for the last."""
    held: list[np.ndarray] = []
    size = 0
    for hashes, ranks in chunks:
        pairs = np.empty(len(hashes), PAIR)
        pairs["hash"], pairs["rank"] = hashes, ranks
        held.append(pairs)
        size += len(pairs)
        if size >= least:
            yield np.concatenate(held)
            held, size = [], 0
    if size:
        yield np.concatenate(held)


def _taken(path: Path) -> np.ndarray:
    """What a file holds, which is then removed."""
    if not path.exists():
        return np.empty(0, PAIR)
    pairs = np.fromfile(path, PAIR)
    path.unlink()
    return pairs


def _repeated(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    order = np.argsort(pairs["hash"])
    hashes, ranks = pairs["hash"][order], pairs["rank"][order]
    starts = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]]) if len(hashes) else order
    counts = np.diff(np.r_[starts, len(hashes)])
    firsts = np.minimum.reduceat(ranks, starts) if len(hashes) else ranks
    many = counts > 1
    return hashes[starts[many]], counts[many], firsts[many]


def found_at(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The index of each value in a sorted table of distinct values, -1 where it is not there."""
    if not len(table):
        return np.full(len(values), -1)
    at = np.minimum(np.searchsorted(table, values), len(table) - 1)
    return np.where(table[at] == values, at, -1)
