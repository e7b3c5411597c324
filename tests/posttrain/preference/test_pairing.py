import math

import pytest

from stepwell.posttrain.preference.pairing import NoPair, best_and_worst, right_and_wrong


@pytest.mark.parametrize(
    ("scores", "found"),
    [
        ([0.0, 1.0, 0.5], (1, 0)),
        ([1.0, 0.0, 1.0, 0.0], (0, 1)),
        ([None, 0.0, -1.0, None], (1, 2)),
        ([0.0, 0.0, None], NoPair("tie")),
        ([None, 1.0], NoPair("too_few")),
        ([], NoPair("too_few")),
    ],
)
def test_best_and_worst(scores, found):
    assert best_and_worst(scores) == found


@pytest.mark.parametrize("num_right", [1, 2, 3, 4])
@pytest.mark.parametrize("num_wrong", [1, 2, 3, 6])
def test_every_right_with_every_wrong_once(num_right, num_wrong):
    scores = [1.0] * num_right + [None] + [0.2] * num_wrong
    found = right_and_wrong(scores, 0.5, 1000)
    wrong = range(num_right + 1, num_right + 1 + num_wrong)
    assert sorted(found) == [(i, j) for i in range(num_right) for j in wrong]
    # As many as the larger side has: each of it once, and of the smaller as often as any other.
    first = right_and_wrong(scores, 0.5, max(num_right, num_wrong))
    for side, number in ((0, num_right), (1, num_wrong)):
        uses = [[pair[side] for pair in first].count(i) for i in {pair[side] for pair in first}]
        assert len(uses) == number
        assert max(uses) <= math.ceil(len(first) / number)


def test_right_and_wrong_without_pairs():
    assert right_and_wrong([1.0, 1.0], 1.0, 4) == NoPair("all_right")
    assert right_and_wrong([0.99, 0.5], 1.0, 4) == NoPair("all_wrong")
    assert right_and_wrong([1.0, None], 1.0, 4) == NoPair("too_few")
    assert right_and_wrong([0.0, 1.0, 0.0], 1.0, 1) == [(1, 0)]
