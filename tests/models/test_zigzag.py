"""The division of tokens and the tiles against the plain rule, one pair at a time."""

import itertools
import random

import pytest
import torch

from stepwell.models.context_attention import dealt, in_order
from stepwell.models.zigzag import Shares, chunks, visible_pairs


def cases():
    """Random documents in rows of several lengths, some of them empty, and one long document."""
    generator = random.Random(0)
    for num_ranks, num_rows, chunk in [(2, 1, 3), (2, 3, 4), (4, 2, 3), (3, 2, 5)]:
        length = 2 * num_ranks * chunk
        for _ in range(4):
            inner = generator.sample(range(length), generator.randint(0, 4))
            inner = {row * length + b for row in range(num_rows) for b in (0, *inner)}
            borders = [*sorted(inner), num_rows * length]
            yield num_ranks, num_rows, borders
            yield num_ranks, num_rows, [0, *borders, borders[-1]]
        yield num_ranks, num_rows, [row * length for row in range(num_rows + 1)]


def positions(rank, num_ranks, num_rows, length):
    """Number among all tokens of each of a rank's tokens."""
    chunk = length // (2 * num_ranks)
    return [
        row * length + c * chunk + i
        for row in range(num_rows)
        for c in chunks(rank, num_ranks)
        for i in range(chunk)
    ]


def seen(borders, query, key, window):
    """Whether two tokens see each other, by the rule."""
    document = lambda token: sum(border <= token for border in borders)
    near = not window or query - key < window
    return document(query) == document(key) and key <= query and near


@pytest.mark.parametrize("window", [0, 1, 2, 4, 7, 100])
def test_tiles_cover_what_is_seen_once_and_nothing_else(window):
    for num_ranks, num_rows, borders in cases():
        length = borders[-1] // num_rows
        shares = Shares(borders, num_rows, num_ranks, window)
        for mine, other in itertools.product(range(num_ranks), repeat=2):
            queries = positions(mine, num_ranks, num_rows, length)
            keys = positions(other, num_ranks, num_rows, length)
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


@pytest.mark.parametrize("window", [0, 3])
def test_visible_pairs_are_the_tiles(window):
    for num_ranks, num_rows, borders in cases():
        shares = Shares(borders, num_rows, num_ranks, window)
        counted = [
            sum(
                tile.num_pairs(window)
                for other in range(num_ranks)
                for tile in shares.tiles(rank, other)
            )
            for rank in range(num_ranks)
        ]
        parts = [chunks(rank, num_ranks) for rank in range(num_ranks)]
        assert visible_pairs(borders, num_rows, parts, window) == counted


def test_one_long_document_costs_every_rank_the_same_and_stretches_do_not():
    zigzag = visible_pairs([0, 4096], 1, [chunks(r, 4) for r in range(4)])
    stretches = visible_pairs([0, 4096], 1, [[r] for r in range(4)])
    assert sum(zigzag) == sum(stretches) == 4096 * 4097 // 2
    assert max(zigzag) == min(zigzag)
    assert max(stretches) > 6.9 * min(stretches)


def test_a_long_document_is_two_triangles_and_one_product_for_each_two_ranks():
    shares = Shares([0, 64], 1, 4)
    for mine, other in itertools.product(range(4), repeat=2):
        tiles = shares.tiles(mine, other)
        if mine == other:
            assert [t.gap for t in tiles] == [0, None, 0]
        else:
            assert [(t.num_queries, t.num_keys) for t in tiles] == [
                (16, 8) if other < mine else (8, 16)
            ]


def test_dealt_tokens_are_the_ranks_and_come_back_in_order():
    tokens = torch.arange(3 * 24)
    ranks = dealt(tokens, 3, 4)
    assert ranks.tolist() == [positions(r, 4, 3, 24) for r in range(4)]
    assert torch.equal(in_order(ranks, 3), tokens)
