"""How rows' tokens are divided among context ranks, and which of them see each other. No torch.

R ranks, B rows of T tokens, cut into chunks of C tokens. Each rank has k chunks of every row, in
order, row by row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Chunks = Sequence[Sequence[Sequence[int]]]

BALANCED = 1.05
SMALLEST_CHUNK = 128


def deal(
    borders: Sequence[int], num_rows: int, num_ranks: int, smallest: int = SMALLEST_CHUNK
) -> Chunks:
    """The numbers of the chunks that each rank has of each row, (B, R, k), such that causal
    attention within the documents costs all ranks about the same.

    The dearest chunk goes to the rank with the least work until all have k. Where a document fills
    the row that is zig-zag: an early chunk with a late one (Llama 3, 2407.21783). k is 2, or 4 or 8
    where the documents make coarser chunks too uneven, and their tokens stay at least `smallest`.
    T must divide by 2R.
    """
    length = borders[-1] // num_rows
    found: list[tuple[float, int, Chunks]] = []
    for k in (2, 4, 8):
        size, rest = divmod(length, k * num_ranks)
        if rest or (k > 2 and size < smallest):
            break
        found.append(_deal(borders, num_rows, num_ranks, k))
        if found[-1][0] <= BALANCED:
            break
    return min(found)[2]


def _deal(
    borders: Sequence[int], num_rows: int, num_ranks: int, k: int
) -> tuple[float, int, Chunks]:
    """(the dearest rank's work over the mean, k, chunks)."""
    size = borders[-1] // (num_rows * num_ranks * k)
    work, rows = [0] * num_ranks, []
    for row in range(num_rows):
        first = row * num_ranks * k
        costs = [_cost(borders, (first + c) * size, size, 0) for c in range(num_ranks * k)]
        hands: list[list[int]] = [[] for _ in range(num_ranks)]
        for chunk in sorted(range(num_ranks * k), key=lambda c: -costs[c]):
            rank = min(
                (rank for rank in range(num_ranks) if len(hands[rank]) < k), key=lambda r: work[r]
            )
            hands[rank].append(chunk)
            work[rank] += costs[chunk]
        rows.append(tuple(tuple(sorted(hand)) for hand in hands))
    return max(work) * num_ranks / sum(work), k, tuple(rows)


class Tile(NamedTuple):
    """A rectangle of queries and keys that is computed in one piece.

    query, key: numbers of the first ones among their rank's tokens. gap: how far the first query
    comes after the first key in the row; query i sees key j if 0 <= gap + i - j < window (no
    upper bound without a window). None: every query sees every key.
    """

    query: int
    num_queries: int
    key: int
    num_keys: int
    gap: int | None

    @property
    def queries(self) -> slice:
        return slice(self.query, self.query + self.num_queries)

    @property
    def keys(self) -> slice:
        return slice(self.key, self.key + self.num_keys)

    def num_pairs(self, window: int) -> int:
        """Queries and keys that see each other."""
        if self.gap is None:
            return self.num_queries * self.num_keys
        seen = 0
        for last in range(self.gap, self.gap + self.num_queries):
            first = max(0, last - window + 1) if window else 0
            seen += min(last + 1, self.num_keys) - first
        return seen


class Shares(NamedTuple):
    """borders: of the documents in the B*T tokens of all rows, which no document crosses. chunks:
    (B, R, k), as `deal` gives them. window: a token sees itself and the window - 1 tokens before
    it; 0 is no bound."""

    borders: Sequence[int]
    chunks: Chunks
    window: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.chunks[0])

    @property
    def size(self) -> int:
        """C."""
        return self.borders[-1] // (len(self.chunks) * sum(map(len, self.chunks[0])))

    def tiles(self, query_rank: int, key_rank: int) -> list[Tile]:
        """What must be computed where `query_rank`'s queries meet `key_rank`'s keys. A query is in
        several tiles if it sees several parts of the keys; tiles in which nothing is seen are left
        out, and each query of a tile sees at least one key of it."""
        found: list[Tile] = []
        size, per_row = self.size, sum(map(len, self.chunks[0]))
        for row, hands in enumerate(self.chunks):
            tiles: list[Tile] = []
            k = len(hands[query_rank])
            for i, late in enumerate(hands[query_rank]):
                start, place = (row * per_row + late) * size, (row * k + i) * size
                document = bisect_right(self.borders, start) - 1
                first = self.borders[document]  # token that is seen from chunk `late`
                if self.window:
                    first = max(first, start - self.window + 1)
                earliest = first // size - row * per_row
                for j, early in enumerate(hands[key_rank]):
                    if early == late:
                        tiles += self._within(start, size, place, document)
                    elif earliest <= early < late:
                        key = (row * k + j) * size
                        key_stop = start - (late - early - 1) * size
                        tiles += self._across(start, key_stop, size, place, key, document)
            found += _joined(tiles)
        return found

    def visible_pairs(self) -> list[int]:
        """For each rank how many (query, key) pairs its queries see: what its attention costs."""
        size, per_row, counts = self.size, sum(map(len, self.chunks[0])), [0] * self.num_ranks
        for row, hands in enumerate(self.chunks):
            for rank, hand in enumerate(hands):
                for chunk in hand:
                    start = (row * per_row + chunk) * size
                    counts[rank] += _cost(self.borders, start, size, self.window)
        return counts

    def _within(self, start: int, size: int, place: int, document: int) -> Iterator[Tile]:
        """Each document's part of one chunk sees itself."""
        stop = start + size
        while start < stop:
            document += 1
            length = min(self.borders[document], stop) - start
            if length:
                yield Tile(place, length, place, length, None if length == 1 else 0)
            start, place = start + length, place + length

    def _across(
        self, start: int, key_stop: int, size: int, query: int, key: int, document: int
    ) -> Iterator[Tile]:
        """The one document that reaches from the chunk up to key_stop into the one at start."""
        num_queries = min(self.borders[document + 1] - start, size)
        num_keys = min(key_stop - self.borders[document], size)
        between = start - key_stop
        if self.window:
            num_queries = min(num_queries, self.window - 1 - between)
            num_keys = min(num_keys, self.window - 1 - between)
        if num_queries <= 0 or num_keys <= 0:
            return
        gap = between + num_keys
        reach = gap + num_queries - 1  # of the last query to the first key
        masked = self.window and reach >= self.window
        yield Tile(query, num_queries, key + size - num_keys, num_keys, gap if masked else None)


def _joined(tiles: list[Tile]) -> list[Tile]:
    """Unmasked neighbours as one: a long document costs one product for each two ranks."""
    joined: list[Tile] = []
    for tile in tiles:
        last = joined[-1] if joined else None
        if last is None or tile.gap is not None or last.gap is not None:
            joined.append(tile)
        elif last.queries == tile.queries and last.keys.stop == tile.key:
            joined[-1] = last._replace(num_keys=last.num_keys + tile.num_keys)
        elif last.keys == tile.keys and last.queries.stop == tile.query:
            joined[-1] = last._replace(num_queries=last.num_queries + tile.num_queries)
        else:
            joined.append(tile)
    return joined


def _cost(borders: Sequence[int], start: int, size: int, window: int) -> int:
    """Keys seen by the tokens start..start+size-1 of all rows."""
    stop, seen = start + size, 0
    document = bisect_right(borders, start) - 1
    while start < stop:
        first, end = borders[document], min(borders[document + 1], stop)
        seen += _keys_before(end - first, window) - _keys_before(start - first, window)
        start, document = end, document + 1
    return seen


def _keys_before(position: int, window: int) -> int:
    """Keys seen by the first `position` tokens of a document together."""
    rising = min(position, window) if window else position
    return rising * (rising + 1) // 2 + (position - rising) * window
