import time

import numpy as np
import pytest
import torch

from stepwell.data.judged import Labelled, Pair, Stepwise
from stepwell.data.pair_packing import pack_labelled, pack_pairs, pack_steps
from stepwell.types import DataError


def some_pairs(num_pairs: int, longest: int = 30, seed: int = 0) -> list[Pair]:
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.integers(1, 50, rng.integers(low, high)).tolist())

    return [
        Pair(ids(1, longest), ids(1, longest), ids(1, longest), margin=float(i))
        for i in range(num_pairs)
    ]


def test_pairs_are_neighbouring_documents_of_one_row():
    pairs = some_pairs(40)
    batch = pack_pairs(pairs, 128, pad_id=0)
    seen = []
    for row in range(batch.num_rows):
        docs = batch.docs_BT[row]
        for number in range(0, int(docs.max()) + 1, 2):
            index = int(batch.extra["index"][row][docs == number][0])
            seen.append(index)
            for doc, (ids, mask) in (
                (number, pairs[index].chosen),
                (number + 1, pairs[index].rejected),
            ):
                here = docs == doc
                assert batch.tokens_BT[row][here].tolist() == list(ids[:-1])
                assert batch.targets_BT[row][here].tolist() == list(ids[1:])
                assert batch.weights_BT[row][here].tolist() == list(mask[1:])
                assert batch.positions_BT[row][here].tolist() == list(range(len(ids) - 1))
                assert (batch.extra["index"][row][here] == index).all()
    assert sorted(seen) == list(range(40))
    assert batch.num_rows < 40, "pairs share rows"


def test_first_token_of_an_answer_is_trained():
    batch = pack_pairs([Pair((1, 2), (3, 4), (5,))], 8)
    assert batch.targets_BT[0].tolist() == [2, 3, 4, 2, 5, 0, 0, 0]
    assert batch.weights_BT[0].tolist() == [0, 1, 1, 0, 1, 0, 0, 0]
    assert batch.docs_BT[0].tolist() == [0, 0, 0, 1, 1, -1, -1, -1]


def test_masks_within_answers_and_prompts_of_their_own():
    pair = Pair((1, 2), (3, 4, 5), (6,), rejected_prompt_ids=(9,), chosen_mask=(1, 0, 1))
    batch = pack_pairs([pair], 5)
    assert batch.tokens_BT[0].tolist() == [1, 2, 3, 4, 9]
    assert batch.weights_BT[0].tolist() == [0, 1, 0, 1, 1]


def test_scores_are_read_at_the_last_token():
    batch = pack_pairs([Pair((1, 2), (3, 4), (5,))], 8, read="last")
    assert batch.tokens_BT[0].tolist() == [1, 2, 3, 4, 1, 2, 5, 0]
    assert batch.weights_BT[0].tolist() == [0, 0, 0, 1, 0, 0, 1, 0]
    labelled = pack_labelled([Labelled((1,), (2,), 0.5)], 4, read="last")
    assert labelled.weights_BT[0].tolist() == [0, 1, 0, 0]
    assert labelled.tokens_BT[0, 1] == 2


def test_streams_are_constant_over_documents():
    pairs = some_pairs(9)
    reference = np.arange(18, dtype=np.float64).reshape(9, 2) + 0.25
    streams = {"reference": reference, "margin": [p.margin for p in pairs]}
    batch = pack_pairs(pairs, 200, streams=streams, index=range(100, 109))
    assert batch.extra["reference"].dtype == torch.float64
    held = batch.docs_BT >= 0
    index = batch.extra["index"][held] - 100
    side = batch.docs_BT[held].long() % 2
    assert torch.equal(batch.extra["reference"][held], torch.from_numpy(reference)[index, side])
    assert torch.equal(batch.extra["margin"][held], index.double())
    assert (batch.extra["reference"][~held] == 0).all()
    assert all(100 <= i < 109 for i in batch.sample_ids)


def test_streams_of_a_wrong_length_are_refused():
    with pytest.raises(DataError, match=r"'margin' has values of shape \(2,\) for 3 items"):
        pack_pairs(some_pairs(3), 200, streams={"margin": [1.0, 2.0]})


def test_a_pair_fits_exactly_or_is_refused():
    pair = Pair((1, 2), (3, 4), (5,))
    assert pack_pairs([pair], 5).num_rows == 1
    with pytest.raises(DataError, match="pair 0 needs 5 places but a row has 4"):
        pack_pairs([pair], 4)


def test_labels_of_rows_keep_their_kind():
    rows = [Labelled((1,), (2, 3), True), Labelled((1,), (4,), False)]
    batch = pack_labelled(rows, 8)
    assert batch.extra["label"].dtype == torch.bool
    assert batch.extra["label"][0].tolist() == [True, True, False] + [False] * 5
    assert batch.weights_BT[0].tolist() == [1, 1, 1] + [0] * 5
    numbers = [Labelled((1,), (2,), 0.5)]
    assert pack_labelled(numbers, 2).extra["label"].dtype == torch.float64


def test_steps_are_read_at_their_last_tokens():
    row = Stepwise((1, 2), ((3, 4), (5,), (6, 7)), (1.0, None, 0.25), end_ids=(9,))
    batch = pack_steps([row], 10)
    assert batch.tokens_BT[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 9, 0, 0]
    assert batch.weights_BT[0].tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 0]
    assert batch.extra["label"][0].tolist() == [0, 0, 0, 1, 0, 0, 0.25, 0, 0, 0]


def test_no_pairs_give_no_rows():
    assert pack_pairs([], 16).tokens_BT.shape == (0, 16)


def test_ten_thousand_pairs_are_packed_in_seconds():
    pairs = some_pairs(10_000, longest=60)
    start = time.process_time()
    batch = pack_pairs(pairs, 1024)
    assert time.process_time() - start < 10  # about 1 s on one core
    places = sum(len(p.chosen[0]) + len(p.rejected[0]) - 2 for p in pairs)
    assert places / batch.tokens_BT.numel() > 0.98
