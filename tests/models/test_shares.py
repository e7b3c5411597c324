"""The division of tokens and the tiles against the plain rule, one pair at a time."""

import itertools
import random

import pytest
import torch

from stepwell.models.context_attention import dealt, in_order
from stepwell.models.shares import Shares, deal


def cases():
    """Shares of random documents in rows of several lengths, some of them empty, and of documents
    that fill the rows; as dealt, as stretches, and at random."""
    generator = random.Random(0)
    for num_ranks, num_rows, size in [(2, 1, 3), (2, 3, 4), (4, 2, 4), (3, 2, 5)]:
        length = 2 * num_ranks * size
        every = [row * length for row in range(num_rows + 1)]
        for number in range(4):
            inner = generator.sample(range(length), generator.randint(0, 4))
            inner = {row * length + b for row in range(num_rows) for b in inner}
            borders = sorted({*every, *inner} if number else every)
            if number == 1:
                borders = sorted([*borders, borders[-1]])
            stretches = [[[2 * r, 2 * r + 1] for r in range(num_ranks)]] * num_rows
            shuffled = generator.sample(range(2 * num_ranks), 2 * num_ranks)
            mixed = [[sorted(shuffled[r::num_ranks]) for r in range(num_ranks)]] * num_rows
            for chunks in (deal(borders, num_rows, num_ranks, smallest=1), stretches, mixed):
                yield borders, chunks


def positions(rank, chunks, length):
    """Number among all tokens of each of a rank's tokens."""
    size = length // sum(map(len, chunks[0]))
    return [
        row * length + c * size + i
        for row, hands in enumerate(chunks)
        for c in hands[rank]
        for i in range(size)
    ]


def seen(borders, query, key, window):
    """Whether two tokens see each other, by the rule."""
    document = lambda token: sum(border <= token for border in borders)
    near = not window or query - key < window
    return document(query) == document(key) and key <= query and near


@pytest.mark.parametrize("window", [0, 1, 2, 4, 7, 100])
def test_tiles_cover_what_is_seen_once_and_nothing_else(window):
    for borders, chunks in cases():
        length = borders[-1] // len(chunks)
        shares = Shares(borders, chunks, window)
        counted = [0] * shares.num_ranks
        for mine, other in itertools.product(range(shares.num_ranks), repeat=2):
            queries, keys = (positions(rank, chunks, length) for rank in (mine, other))
            wanted = {
                (i, j)
                for i, query in enumerate(queries)
                for j, key in enumerate(keys)
                if seen(borders, query, key, window)
            }
            found = []
            for tile in shares.tiles(mine, other):
                pairs = [
                    (tile.query + i, tile.key + j)
                    for i in range(tile.num_queries)
                    for j in range(tile.num_keys)
                    if tile.gap is None
                    or (tile.gap + i - j >= 0 and (not window or tile.gap + i - j < window))
                ]
                assert len(pairs) == tile.num_pairs(window)
                assert {i for i, _ in pairs} == set(range(len(queries))[tile.queries])
                assert {j for _, j in pairs} == set(range(len(keys))[tile.keys])
                found += pairs
            assert len(found) == len(set(found))
            assert set(found) == wanted
            counted[mine] += len(found)
        assert shares.visible_pairs() == counted


def test_every_chunk_is_dealt_once_and_hands_are_equal():
    for borders, chunks in cases():
        for hands in chunks:
            dealt_out = sorted(itertools.chain(*hands))
            assert dealt_out == list(range(len(dealt_out)))
            assert len({len(hand) for hand in hands}) == 1
            assert all(list(hand) == sorted(hand) for hand in hands)
        assert borders[-1] % sum(len(hand) for hands in chunks for hand in hands) == 0


def imbalance(borders, chunks, window=0):
    """The dearest rank's pairs over the mean."""
    pairs = Shares(borders, chunks, window).visible_pairs()
    return max(pairs) * len(pairs) / sum(pairs)


def test_a_document_that_fills_the_row_is_dealt_zigzag():
    chunks = deal([0, 4096], 1, 4)
    assert sorted(map(tuple, chunks[0])) == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert imbalance([0, 4096], chunks) == 1
    assert imbalance([0, 4096], [[[r] for r in range(4)]]) == pytest.approx(1.75, abs=0.01)
    assert imbalance([0, 4096], chunks, window=100) < 1.02
    assert sum(Shares([0, 4096], chunks).visible_pairs()) == 4096 * 4097 // 2


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("mean", [300, 1000, 3000])
def test_packed_documents_are_balanced_where_zigzag_is_not(num_ranks, mean):
    generator = random.Random(0)
    fixed = [[(r, 2 * num_ranks - 1 - r) for r in range(num_ranks)]]
    found = []
    for _ in range(20):
        borders = [0]
        while borders[-1] < 16384:
            borders.append(borders[-1] + 1 + int(generator.expovariate(1 / mean)))
        borders[-1] = 16384
        found.append((imbalance(borders, deal(borders, 1, num_ranks)), imbalance(borders, fixed)))
    dealt_out, zigzag = zip(*found, strict=True)
    assert max(dealt_out) < 1.12
    assert sum(zigzag) / 20 > (1.05 if num_ranks == 2 else 1.15)


def test_chunks_do_not_become_too_small():
    borders = [0, 100, 1024]
    assert len(deal(borders, 1, 4)[0][0]) == 2
    assert len(deal(borders, 1, 4, smallest=16)[0][0]) > 2


def test_a_long_document_is_two_triangles_and_one_product_for_each_two_ranks():
    shares = Shares([0, 64], deal([0, 64], 1, 4))
    for mine, other in itertools.product(range(4), repeat=2):
        tiles = shares.tiles(mine, other)
        if mine == other:
            assert [t.gap for t in tiles] == [0, None, 0]
        else:
            (tile,) = tiles
            assert sorted((tile.num_queries, tile.num_keys)) == [8, 16]


def test_dealt_tokens_are_the_ranks_and_come_back_in_order():
    tokens = torch.arange(3 * 32)
    chunks = deal([0, 32, 40, 47, 64, 96], 3, 4, smallest=1)
    ranks = dealt(tokens, torch.tensor(chunks))
    assert ranks.tolist() == [positions(r, chunks, 32) for r in range(4)]
    assert torch.equal(in_order(ranks, torch.tensor(chunks)), tokens)
