import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.data.packing import best_fit, pack_rows, truncate
from stepwell.types import DataError


def test_truncation_keeps_the_prompt_and_the_head_of_the_answer():
    for num_response, kept in ((30, 10), (3, 3)):
        ids, mask = list(range(10 + num_response)), [0] * 10 + [1] * num_response
        cut = truncate(ids, mask, 20)
        assert cut is not None
        assert sum(cut[1]) == kept
        assert list(cut[0]) == ids[: 10 + kept]


def test_truncation_drops_what_has_nothing_left_to_train_on():
    assert truncate(list(range(30)), [0] * 20 + [1] * 10, 20) is None
    assert truncate([1], [1], 20) is None


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(50, 70))
@settings(max_examples=80, deadline=None)
def test_best_fit_places_each_once_and_wastes_little(lengths, capacity):
    rows = best_fit(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    used = [sum(lengths[i] for i in row) for row in rows]
    assert all(u <= capacity for u in used)
    assert sum(2 * u <= capacity for u in used) <= 1


def test_best_fit_takes_the_tightest_row():
    assert best_fit([6, 5, 4, 5], 10) == [[0, 2], [1, 3]]
    assert best_fit([], 10) == []
    with pytest.raises(DataError, match="document 1 needs 11 places but a row has 10"):
        best_fit([3, 11], 10)


def test_pack_rows_lays_out_documents():
    docs = [([1, 2, 3], [0, 1, 1]), ([4, 5, 6, 7], [0, 0, 1, 1]), ([8, 9], [0, 1])]
    batch = pack_rows(docs, 5, pad_id=99, rows=[[0, 1], [2]])
    assert batch.tokens_BT.tolist() == [[1, 2, 4, 5, 6], [8, 99, 99, 99, 99]]
    assert batch.targets_BT.tolist() == [[2, 3, 5, 6, 7], [9, 99, 99, 99, 99]]
    assert batch.weights_BT.tolist() == [[1, 1, 0, 1, 1], [1, 0, 0, 0, 0]]
    assert batch.positions_BT.tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 0, 0]]
    assert batch.docs_BT.tolist() == [[0, 0, 1, 1, 1], [0, -1, -1, -1, -1]]
    assert batch.sample_ids == (0, 1)
    assert batch.cu_seqlens().tolist() == [0, 2, 5, 6, 10]
    types = (batch.tokens_BT.dtype, batch.weights_BT.dtype, batch.docs_BT.dtype)
    assert types == (torch.int64, torch.float32, torch.int32)


@given(
    st.lists(st.integers(2, 12), min_size=1, max_size=30),
    st.integers(11, 30),
    st.randoms(use_true_random=False),
)
@settings(max_examples=30, deadline=None)
def test_extra_streams_land_where_their_token_is_the_target(lengths, seq_len, random):
    docs = [([random.randrange(100) for _ in range(n)], [1] * n) for n in lengths]
    names = [[1000 * i + t for t in range(n)] for i, n in enumerate(lengths)]
    values = [np.array(ids) / 7 for ids, _ in docs]
    batch = pack_rows(docs, seq_len, extra={"name": names, "value": values})
    assert batch.extra["name"].dtype == torch.int64
    assert batch.extra["value"].dtype == torch.float32
    real = batch.docs_BT >= 0
    torch.testing.assert_close(
        batch.extra["value"][real], batch.targets_BT[real].float() / 7, rtol=1e-6, atol=1e-6
    )
    assert sorted(batch.extra["name"][real].tolist()) == sorted(x for n in names for x in n[1:])
    for row in range(batch.num_rows):
        for doc in range(int(batch.docs_BT[row].max()) + 1):
            at = batch.docs_BT[row] == doc
            first = int(batch.extra["name"][row][at][0]) // 1000
            ids = torch.tensor(docs[first][0])
            assert torch.equal(batch.tokens_BT[row][at], ids[:-1])
            assert torch.equal(batch.targets_BT[row][at], ids[1:])
            assert torch.equal(batch.positions_BT[row][at], torch.arange(len(ids) - 1))
    assert batch.weights_BT[~real].sum() == 0


def test_a_stream_is_float_when_any_document_is():
    docs = [([1, 2], [1, 1])] * 2
    extra = {"advantages": [[0, 0], [0.0, 0.5]], "count": [[1, 2], np.array([True, False])]}
    batch = pack_rows(docs, 2, extra=extra)
    assert sorted(batch.extra["advantages"].flatten().tolist()) == [0, 0.5]
    assert batch.extra["count"].dtype == torch.int64


def test_pack_rows_refusals():
    with pytest.raises(DataError, match="fewer than 2 tokens"):
        pack_rows([([1], [1])], 5)
    with pytest.raises(DataError, match="needs 6 places"):
        pack_rows([([1] * 7, [1] * 7)], 5)
    with pytest.raises(DataError, match="row 0 needs 6 places but has 5"):
        pack_rows([([1] * 4, [1] * 4), ([1] * 4, [1] * 4)], 5, rows=[[0, 1]])
    with pytest.raises(DataError, match="stream 'x' has 2 values for a document of 3"):
        pack_rows([([1, 2, 3], [1, 1, 1])], 5, extra={"x": [[1, 2]]})


def test_no_documents_make_an_empty_batch():
    batch = pack_rows([], 5)
    assert batch.tokens_BT.shape == (0, 5)
    assert batch.cu_seqlens().tolist() == [0]
