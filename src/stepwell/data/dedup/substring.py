"""Exact substring deduplication (Lee et al., 2107.06499): text of at least `min_bytes` bytes that
occurs a second time is cut there.

All shards together have one order, (source, id). A window of min_bytes is cut where an equal one
ends before it begins and is itself left whole; so each window that is cut can be read in what is
kept, also where repeats overlap one another. Finding equal windows needs a suffix array, but only
of the texts around repeated anchors (`anchors`), and, since equal windows have equal anchors, of a
range of anchors at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from stepwell.data.batches import Outcome
from stepwell.data.dedup.anchors import BLOCK, find_anchors, gram_size
from stepwell.data.dedup.counting import (
    Order,
    document_order,
    found_at,
    names_at,
    repeated_hashes,
)
from stepwell.data.dedup.cuts import Cuts, cut_out
from stepwell.data.dedup.suffix_array import SEPARATOR, equal_windows
from stepwell.data.dedup.survivor import rank_columns
from stepwell.data.steps import GlobalStep, Shard, read_batches, read_table, write_table
from stepwell.schema import NonNegative
from stepwell.types import DataError

MAX_ROUNDS = 32
WORST = 60  # bytes of memory a byte of which all are repeats


class SubstringDedup(GlobalStep):
    """Cuts what repeats an earlier text of min_bytes or more, within a document too; never across
    documents, never within a character.

    min_bytes: of UTF-8; the paper's 50 tokens are about 200.
    max_bytes_at_once: the most bytes of which a suffix array is made at once; memory is about 15
    times as much, and up to 45 bytes more for each byte of it that is a repeat. The result doesn't
    depend on it.
    min_kept_characters: a document that lost something and holds fewer is removed, unless what it
    holds was cut elsewhere.
    """

    kind: Literal["substring-dedup"] = "substring-dedup"
    min_bytes: Annotated[int, Field(strict=True, ge=16, le=1 << 16)] = 200
    max_bytes_at_once: Annotated[int, Field(strict=True, gt=0, lt=1 << 31)] = 1 << 26
    min_kept_characters: NonNegative = 50

    def check(self) -> None:
        import pydivsufsort  # noqa: F401  what `decide` needs

    def sketch(self, batch: pa.RecordBatch) -> Mapping[str, np.ndarray | pa.Array]:
        """anchor and place: hashes and byte positions of the anchors of a document."""
        offsets, data = text_bytes(batch)
        places, hashes = find_anchors(data, offsets[1:], self.min_bytes)
        starts = np.searchsorted(places, offsets)
        within = places - np.repeat(offsets[:-1], np.diff(starts))
        borders = pa.array(starts, pa.int64())
        return {
            **rank_columns(batch, ()),
            "anchor": pa.LargeListArray.from_arrays(borders, pa.array(hashes)),
            "place": pa.LargeListArray.from_arrays(borders, pa.array(within.astype(np.uint32))),
        }

    def decide(self, shards: Sequence[Shard], folder: Path) -> None:
        """Writes for each document that loses something the spans of bytes it loses."""
        order = document_order(shards)
        texts = Texts(shards, order)
        hashes = self._repeated(shards, folder)
        keys, anchors = self._occurrences(shards, order, hashes)
        places = self._regions(np.unique(keys), texts)
        last = np.array([len(hashes) - 1])
        if places.num_bytes > self.max_bytes_at_once:
            last = part_ends(self._surroundings(shards, hashes), self)
        num_parts = len(last) if len(hashes) else 0
        part_of = np.searchsorted(last, anchors)
        parts = [np.unique(keys[part_of == i]) for i in range(num_parts)]
        del keys, anchors, part_of
        for i, part in enumerate(parts):
            positions, starts = self._windows(self._regions(part, texts), places, texts)
            np.save(folder / f"positions-{i}.npy", positions)
            np.save(folder / f"starts-{i}.npy", starts)
        spans, num_rounds = find_cuts(folder, num_parts, self.min_bytes, places.num_bytes)
        needed, witnesses = _witnesses(folder, num_parts, spans, places, self.min_bytes)
        table = _decision(spans, places, texts, needed, witnesses, shards, order)
        write_table(table, folder / "cut.arrow")
        for i in range(num_parts):
            (folder / f"positions-{i}.npy").unlink()
            (folder / f"starts-{i}.npy").unlink()
        summary = {
            "documents": len(order.key),
            "documents_cut": table.num_rows,
            "bytes": texts.num_bytes,
            "bytes_cut": int(sum(spans[1] - spans[0])),
            "bytes_sorted": int(places.sizes.sum()),
            "parts": num_parts,
            "rounds": num_rounds,
        }
        (folder / "summary.json").write_text(json.dumps(summary), "utf-8")

    def apply(self, batch: pa.RecordBatch, folder: Path) -> Outcome:
        table = read_table(folder / "cut.arrow")
        at = found_at(batch["key"].to_numpy(), table["key"].to_numpy())
        offsets, data = text_bytes(batch)
        cuts: list[Cuts | None] = [None] * batch.num_rows
        for i in np.flatnonzero(at >= 0).tolist():
            row = {name: table[name][int(at[i])].as_py() for name in table.column_names}
            content = data[offsets[i] : offsets[i + 1]].tobytes()
            spans = _characters(content, row["spans"])
            cuts[i] = Cuts(spans, row["is_needed"], row["witness"])
        return cut_out(batch, self.kind, "substring", cuts, self.min_kept_characters)

    # --- the parts of decide ---

    def _repeated(self, shards: Sequence[Shard], folder: Path) -> np.ndarray:
        """Anchors that occur more than once, ascending."""
        columns = [b["anchor"] for shard in shards for b in read_batches(shard.sketch)]
        chunks = (
            (hashes, np.zeros(len(hashes), np.uint32))
            for hashes in (column.flatten().to_numpy() for column in columns)
        )
        return repeated_hashes(chunks, sum(len(c.flatten()) for c in columns), folder)[0]

    def _surroundings(self, shards: Sequence[Shard], hashes: np.ndarray) -> np.ndarray:
        """At most how many bytes there are around each of `hashes` (a separator among them)."""
        sizes = np.zeros(len(hashes), np.int64)
        for batch in [b for shard in shards for b in read_batches(shard.sketch)]:
            found = found_at(batch["anchor"].flatten().to_numpy(), hashes)
            place = batch["place"].flatten().to_numpy().astype(np.int64)
            # in a run of one letter every position is the same anchor
            again = (found[1:] == found[:-1]) & (place[1:] > place[:-1])
            alone = 2 * self.min_bytes - gram_size(self.min_bytes) + 1
            more = np.where(again, np.minimum(place[1:] - place[:-1], alone), alone)
            weight = np.r_[alone, more][: len(place)]
            np.add.at(sizes, found[found >= 0], weight[found >= 0])
        return sizes

    def _occurrences(
        self, shards: Sequence[Shard], order: Order, hashes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where `hashes` occur: rank << 32 | place, and the index of the hash."""
        keys, anchors = [np.empty(0, np.uint64)], [np.empty(0, np.int32)]
        for shard, ranks in zip(shards, order.ranks, strict=True):
            row = 0
            for batch in read_batches(shard.sketch):
                lengths = batch["anchor"].value_lengths().to_numpy()
                at = found_at(batch["anchor"].flatten().to_numpy(), hashes)
                rank = np.repeat(ranks[row : row + batch.num_rows], lengths)[at >= 0]
                place = batch["place"].flatten().to_numpy()[at >= 0].astype(np.uint64)
                keys.append(rank.astype(np.uint64) << np.uint64(32) | place)
                anchors.append(at[at >= 0].astype(np.int32))
                row += batch.num_rows
        return np.concatenate(keys), np.concatenate(anchors)

    def _regions(self, occurrences: np.ndarray, texts: Texts) -> Regions:
        """All windows of min_bytes that hold one of these anchors (ascending)."""
        rank = (occurrences >> np.uint64(32)).astype(np.int64)
        place = (occurrences & np.uint64(0xFFFFFFFF)).astype(np.int64)
        start = np.maximum(place + gram_size(self.min_bytes) - self.min_bytes, 0)
        stop = np.minimum(place + self.min_bytes, texts.sizes[rank])
        new = np.r_[True, (rank[1:] != rank[:-1]) | (start[1:] > stop[:-1])][: len(rank)]
        first = np.flatnonzero(new)
        last = np.r_[first[1:], len(rank)][: len(first)] - 1
        return Regions(rank[first], start[first], stop[last] - start[first])

    def _windows(
        self, regions: Regions, places: Regions, texts: Texts
    ) -> tuple[np.ndarray, np.ndarray]:
        """Groups of equal windows within `regions`, as positions among all `places`."""
        bases = regions.bases
        data = np.full(regions.num_bytes, SEPARATOR, np.uint8)
        rows = zip(bases, regions.rank, regions.start, regions.sizes, strict=True)
        for base, rank, start, size in rows:
            data[base : base + size] = texts.at(rank)[start : start + size]
        positions, starts = equal_windows(data, self.min_bytes)
        moved = places.position_of(regions.rank, regions.start) - bases
        region = np.repeat(np.arange(len(bases), dtype=np.int32), regions.sizes + 1)
        positions += moved[region[positions]]
        return positions, starts


@dataclass(frozen=True)
class Regions:
    """Spans of bytes in documents, ordered by (rank, start), apart; laid out one after another with
    a byte between them."""

    rank: np.ndarray
    start: np.ndarray
    sizes: np.ndarray

    @property
    def bases(self) -> np.ndarray:
        """Where each of them begins in the layout."""
        return np.cumsum(self.sizes + 1) - (self.sizes + 1)

    @property
    def num_bytes(self) -> int:
        """Of the layout."""
        return int(self.sizes.sum()) + len(self.sizes)

    def position_of(self, rank: np.ndarray, start: np.ndarray) -> np.ndarray:
        """The layout's position of bytes that lie in some region."""
        keys = self.rank << 32 | self.start
        at = np.searchsorted(keys, rank << 32 | start, side="right") - 1
        return self.bases[at] + start - self.start[at]


class Texts:
    """The UTF-8 bytes of documents by rank, memory-mapped."""

    def __init__(self, shards: Sequence[Shard], order: Order) -> None:
        parts = [[text_bytes(b) for b in read_batches(s.documents)] for s in shards]
        self._parts = [part for one in parts for part in one]
        rows = [len(offsets) - 1 for offsets, _ in self._parts]
        firsts = np.cumsum([0, *(sum(len(o) - 1 for o, _ in one) for one in parts)])[:-1]
        row = firsts[order.shard] + order.row
        ends = np.cumsum(rows)
        self._part = np.searchsorted(ends, row, side="right")
        self._row = row - (ends - rows)[self._part] if len(row) else row
        self.sizes = np.empty(len(row), np.int64)
        lengths = [np.diff(offsets) for offsets, _ in self._parts]
        if lengths:
            self.sizes[:] = np.concatenate(lengths)[row]
        self.num_bytes = int(self.sizes.sum())

    def at(self, rank: int) -> np.ndarray:
        offsets, data = self._parts[self._part[rank]]
        row = self._row[rank]
        return data[offsets[row] : offsets[row + 1]]


def text_bytes(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """Offsets (rows + 1) into the bytes of all texts; nothing is copied."""
    column = batch["text"]
    _, offsets, data = column.buffers()
    if not len(column) or offsets is None:
        return np.zeros(len(column) + 1, np.int64), np.empty(0, np.uint8)
    borders = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    whole = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return borders - borders[0], whole[borders[0] : borders[-1]]


def part_ends(sizes: np.ndarray, step: SubstringDedup) -> np.ndarray:
    """The index of the last anchor of each part, such that a part has at most max_bytes_at_once
    bytes around its anchors (`sizes`: around each). Raises DataError where one anchor has more."""
    if (most := int(sizes.max())) > step.max_bytes_at_once:
        raise DataError(
            f"substring-dedup: one passage is repeated so often that its copies, with what stands "
            f"around each, are {most} bytes, above max_bytes_at_once = {step.max_bytes_at_once}; "
            f"set it to {most} (at worst {most * WORST / 1e9:.1f} GB of memory), or let "
            "fuzzy-dedup or line-dedup go before"
        )
    sums = np.cumsum(sizes)
    last: list[int] = []
    done = 0
    while not last or last[-1] < len(sums) - 1:
        last.append(int(np.searchsorted(sums, done + step.max_bytes_at_once, side="right")) - 1)
        done = sums[last[-1]]
    return np.array(last)


# --- which windows go ------------------------------------------------------------------------

Spans = tuple[np.ndarray, np.ndarray]  # starts and stops, ascending, apart


def find_cuts(folder: Path, num_parts: int, width: int, size: int) -> tuple[Spans, int]:
    """Cuts such that each window in them has an equal one before it that is left whole, and how
    many rounds that took. size: of the layout; a few maps of it lie in `folder` for the while.

    Whether a window goes depends only on what goes before it, so each round is right for longer;
    when they are too many, one last step keeps whatever is in doubt.
    """
    nothing = np.empty(0, np.int64)
    spans: Spans = (nothing, nothing)
    if not num_parts:
        return spans, 0
    names = ("goes", "whole", "whole-before")
    goes, whole, before = (np.memmap(folder / name, bool, "w+", shape=size) for name in names)
    whole[:] = True
    rounds = 0
    while rounds < MAX_ROUNDS:
        rounds += 1
        _mark(goes, folder, num_parts, width, [whole])
        last, spans = spans, _spans(goes, width)
        before, whole = whole, before
        _mark_whole(whole, spans, width)
        if all(np.array_equal(a, b) for a, b in zip(last, spans, strict=True)):
            break
    else:
        _mark(goes, folder, num_parts, width, [before, whole])
        spans = _spans(goes, width)
    for name in names:
        (folder / name).unlink()
    return spans, rounds


def repeats(
    positions: np.ndarray, starts: np.ndarray, width: int, whole: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each window: the first of its group that is `whole` (by position), and whether this one
    begins after that one's end."""
    far = np.iinfo(np.int64).max - width
    first = np.minimum.reduceat(np.where(whole[positions], positions, far), starts)
    first = np.repeat(first, np.diff(np.r_[starts, len(positions)]))
    return first, positions >= first + width


def _mark(
    goes: np.ndarray, folder: Path, num_parts: int, width: int, wholes: Sequence[np.ndarray]
) -> None:
    """Where windows begin that go by each of `wholes`."""
    goes[:] = False
    for positions, starts in _parts(folder, num_parts):
        chosen = np.ones(len(positions), bool)
        for whole in wholes:
            chosen &= repeats(positions, starts, width, whole)[1]
        goes[positions[chosen]] = True


def _mark_whole(whole: np.ndarray, spans: Spans, width: int) -> None:
    """Whether a window that begins at a position loses nothing by `spans`."""
    whole[:] = True
    for start, stop in zip(spans[0].tolist(), spans[1].tolist(), strict=True):
        whole[max(0, start - width + 1) : stop] = False


def _spans(goes: np.ndarray, width: int) -> Spans:
    """The windows that begin where `goes`, joined where they touch."""
    found = []
    for start in range(0, len(goes), BLOCK):
        at = np.flatnonzero(goes[start : start + BLOCK]) + start
        found.append(_joined(at, at + width))
    starts, stops = (np.concatenate(columns) for columns in zip(*found, strict=True))
    return _joined(starts, stops)


def _joined(starts: np.ndarray, stops: np.ndarray) -> Spans:
    """Spans whose starts and stops both ascend, with those that touch joined."""
    if not len(starts):
        return starts, stops
    apart = starts[1:] > stops[:-1]
    return starts[np.r_[True, apart]], stops[np.r_[apart, True]]


def _parts(folder: Path, num_parts: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Those that hold any window."""
    for i in range(num_parts):
        positions = np.load(folder / f"positions-{i}.npy")
        if len(positions):
            yield positions, np.load(folder / f"starts-{i}.npy")


def _witnesses(
    folder: Path, num_parts: int, spans: Spans, places: Regions, width: int
) -> tuple[np.ndarray, dict[int, int]]:
    """Ranks of the documents that hold what was cut elsewhere; and for each document that loses
    something, the rank of one that holds the first of it."""
    whole = np.ones(places.num_bytes, bool)
    _mark_whole(whole, spans, width)
    needed = [np.empty(0, np.int64)]
    first: dict[int, tuple[int, int]] = {}
    for positions, starts in _parts(folder, num_parts):
        keeper, goes = repeats(positions, starts, width, whole)
        for begin in range(0, len(positions), BLOCK):
            block = slice(begin, begin + BLOCK)
            # A window may be due and yet stay, when rounds ran out.
            chosen = goes[block] & ~whole[positions[block]]
            at, origin = positions[block][chosen], keeper[block][chosen]
            order = np.argsort(at)
            at, origin = at[order], origin[order]
            rank, holder = _rank(places, at), _rank(places, origin)
            needed.append(np.unique(holder[holder != rank]))
            ranks, least = np.unique(rank, return_index=True)
            found = zip(ranks.tolist(), at[least].tolist(), holder[least].tolist(), strict=True)
            for r, position, held in found:
                first[r] = min(first.get(r, (position, held)), (position, held))
    return np.unique(np.concatenate(needed)), {rank: held for rank, (_, held) in first.items()}


def _rank(places: Regions, positions: np.ndarray) -> np.ndarray:
    return places.rank[np.searchsorted(places.bases, positions, side="right") - 1]


def _decision(
    spans: Spans,
    places: Regions,
    texts: Texts,
    needed: np.ndarray,
    witnesses: Mapping[int, int],
    shards: Sequence[Shard],
    order: Order,
) -> pa.Table:
    """key (ascending), spans of bytes at borders of characters, is_needed, witness."""
    region = np.searchsorted(places.bases, spans[0], side="right") - 1
    ranks = places.rank[region]
    starts = places.start[region] + spans[0] - places.bases[region]
    stops = starts + spans[1] - spans[0]
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for rank, start, stop in zip(ranks.tolist(), starts.tolist(), stops.tolist(), strict=True):
        if (span := _within_characters(texts.at(rank), start, stop)) is not None:
            by_rank.setdefault(rank, []).append(span)
    cut = np.array(sorted(by_rank, key=lambda rank: order.key[rank]), np.int64)
    columns = {
        "key": pa.array(order.key[cut], pa.uint64()),
        "spans": pa.array([by_rank[rank] for rank in cut], pa.list_(pa.list_(pa.int64()))),
        "is_needed": pa.array(np.isin(cut, needed), pa.bool_()),
        "witness": pa.array(
            names_at(shards, order, np.array([witnesses[rank] for rank in cut], np.int64)),
            pa.string(),
        ),
    }
    return pa.table(columns)


def _within_characters(data: np.ndarray, start: int, stop: int) -> tuple[int, int] | None:
    """The span without characters that lie in it by a part only."""
    while start < stop and data[start] & 0xC0 == 0x80:
        start += 1
    while start < stop < len(data) and data[stop] & 0xC0 == 0x80:
        stop -= 1
    return (start, stop) if start < stop else None


def _characters(content: bytes, spans: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Spans of bytes as spans of characters."""
    counted, found, here = 0, [], 0
    for start, stop in spans:
        first = counted + len(content[here:start].decode())
        counted, here = first + len(content[start:stop].decode()), stop
        found.append((first, counted))
    return found
