"""How a row's tokens are divided among context ranks, and which of them see each other. No torch.

R ranks, B rows of T tokens. A row is cut into 2R chunks of C tokens; rank r has chunks r and
2R-1-r, one early and one late, so that causal attention costs every rank the same (Llama 3,
2407.21783). A rank's tokens lie row by row, in each row the early chunk before the late one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple


def chunks(rank: int, num_ranks: int) -> tuple[int, int]:
    """The chunks of a row that `rank` has, in order."""
    return rank, 2 * num_ranks - 1 - rank


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
    """borders: of the documents in the B*T tokens of all rows, which no document crosses. window: a
    token sees itself and the window - 1 tokens before it; 0 is no bound."""

    borders: Sequence[int]
    num_rows: int
    num_ranks: int
    window: int = 0

    @property
    def chunk(self) -> int:
        """C."""
        return self.borders[-1] // (self.num_rows * 2 * self.num_ranks)

    def tiles(self, query_rank: int, key_rank: int) -> list[Tile]:
        """What must be computed where `query_rank`'s queries meet `key_rank`'s keys. A query is in
        several tiles if it sees several parts of the keys; tiles in which nothing is seen are left
        out, and each query of a tile sees at least one key of it."""
        found: list[Tile] = []
        for row in range(self.num_rows):
            tiles: list[Tile] = []
            for half, late in enumerate(chunks(query_rank, self.num_ranks)):
                for other, early in enumerate(chunks(key_rank, self.num_ranks)):
                    place = (2 * row + half) * self.chunk, (2 * row + other) * self.chunk
                    if late == early:
                        tiles += self._within(row, late, place[0])
                    elif late > early:
                        tiles += self._across(row, late, early, *place)
            found += _joined(tiles)
        return found

    def _first_token(self, row: int, chunk: int) -> int:
        return (row * 2 * self.num_ranks + chunk) * self.chunk

    def _within(self, row: int, chunk: int, place: int) -> Iterator[Tile]:
        """Each document's part of one chunk sees itself."""
        start = self._first_token(row, chunk)
        stop, document = start + self.chunk, bisect_right(self.borders, start) - 1
        while start < stop:
            document += 1
            length = min(self.borders[document], stop) - start
            if length:
                yield Tile(place, length, place, length, None if length == 1 else 0)
            start, place = start + length, place + length

    def _across(self, row: int, late: int, early: int, query: int, key: int) -> Iterator[Tile]:
        """The one document that may reach from chunk `early` into chunk `late`."""
        start, key_stop = self._first_token(row, late), self._first_token(row, early + 1)
        document = bisect_right(self.borders, start) - 1
        num_queries = min(self.borders[document + 1] - start, self.chunk)
        num_keys = min(key_stop - self.borders[document], self.chunk)
        between = start - key_stop
        if self.window:
            num_queries = min(num_queries, self.window - 1 - between)
            num_keys = min(num_keys, self.window - 1 - between)
        if num_queries <= 0 or num_keys <= 0:
            return
        gap = between + num_keys
        reach = gap + num_queries - 1  # of the last query to the first key
        masked = self.window and reach >= self.window
        yield Tile(
            query, num_queries, key + self.chunk - num_keys, num_keys, gap if masked else None
        )


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


def visible_pairs(
    borders: Sequence[int],
    num_rows: int,
    parts: Sequence[Sequence[int]],
    window: int = 0,
) -> list[int]:
    """For each rank how many (query, key) pairs its queries see: what its attention costs.

    parts: each rank's chunks of a row that is cut into as many equal chunks as are dealt; zig-zag
    is `[chunks(r, R) for r in range(R)]`, one stretch for each rank `[[r] for r in range(R)]`.
    """
    num_chunks = sum(len(part) for part in parts)
    size = borders[-1] // (num_rows * num_chunks)
    costs = [
        [_cost(borders, (row * num_chunks + c) * size, size, window) for c in range(num_chunks)]
        for row in range(num_rows)
    ]
    return [sum(row[c] for row in costs for c in part) for part in parts]


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
