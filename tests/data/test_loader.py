import json
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepwell.data.batch import concat
from stepwell.data.loader import (
    num_windows,
    packed_stream,
    packing_report,
    pretrain_stream,
    rank_rows,
)
from stepwell.data.store import StoreWriter, TokenStore
from stepwell.types import CheckpointError, ConfigError, DataError

SEQ_LEN = 8


def make_store(folder, lengths, masks=None, first=0, shard_tokens=1 << 20) -> TokenStore:
    """Documents whose tokens count upwards through the whole store."""
    with StoreWriter(folder, "print", 1 << 20, masks is not None, shard_tokens) as writer:
        for i, length in enumerate(lengths):
            writer.add(np.arange(first, first + length), None if masks is None else masks[i])
            first += length
    return TokenStore.open(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TokenStore:
    lengths = [3, 1, 30, 2, 2, 5, 17, 8, 8, 1, 1, 40, 6, 9, 12, 20]
    return make_store(tmp_path_factory.mktemp("s") / "s", lengths, shard_tokens=40)


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("b") / "b", [50] * 40, first=1000)


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> TokenStore:
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 30, 60).tolist()
    masks = [[0] * (n // 2) + [1] * (n - n // 2) for n in lengths]
    return make_store(tmp_path_factory.mktemp("c") / "c", lengths, masks)


def take(stream, n):
    return list(islice(stream, n))


def sample_ids(batches) -> list[int]:
    return [i for batch, _ in batches for i in batch.sample_ids]


def test_rows_are_windows_of_the_stream(store):
    ((batch, _),) = take(pretrain_stream([(store, 1)], SEQ_LEN, 20, order="sequential"), 1)
    assert num_windows(store, SEQ_LEN) == 20
    assert torch.equal(batch.tokens_BT.flatten(), torch.arange(160))
    assert torch.equal(batch.targets_BT, batch.tokens_BT + 1)
    assert batch.sample_ids == tuple(range(20))


def test_positions_continue_across_windows_and_targets_stay_in_their_document(store):
    ((batch, _),) = take(pretrain_stream([(store, 1)], SEQ_LEN, 20, order="sequential"), 1)
    lengths = store.doc_lengths()
    doc = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    position = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))
    assert torch.equal(batch.positions_BT.flatten(), position[:160])
    expected = (doc[:160] == doc[1:161]).float()
    assert torch.equal(batch.weights_BT.flatten(), expected)
    doc_BT = doc[:160].view(20, SEQ_LEN)
    runs_BT = torch.zeros_like(doc_BT)
    runs_BT[:, 1:] = (doc_BT[:, 1:] != doc_BT[:, :-1]).cumsum(1)
    assert torch.equal(batch.docs_BT.long(), runs_BT)
    assert batch.docs_BT.dtype == torch.int32


def test_without_document_mask_a_row_is_one_text(store):
    stream = pretrain_stream([(store, 1)], SEQ_LEN, 20, document_mask=False)
    ((batch, _),) = take(stream, 1)
    assert batch.weights_BT.min() == 1
    assert batch.docs_BT.abs().max() == 0
    assert torch.equal(batch.positions_BT, torch.arange(SEQ_LEN).expand(20, -1))


def test_every_epoch_has_each_window_once_in_its_own_order(store):
    ids = sample_ids(take(pretrain_stream([(store, 1)], SEQ_LEN, 4), 15))
    epochs = [ids[start : start + 20] for start in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = sample_ids(take(pretrain_stream([(store, 1)], SEQ_LEN, 4, seed=1), 5))
    assert other != epochs[0]
    assert sample_ids(take(pretrain_stream([(store, 1)], SEQ_LEN, 4), 5)) == epochs[0]


def test_sample_ids_name_their_rows(store, big):
    for batch, _ in take(pretrain_stream([(store, 1), (big, 2)], SEQ_LEN, 6), 9):
        for row, sample in enumerate(batch.sample_ids):
            start = sample * SEQ_LEN if sample < 20 else 1000 + (sample - 20) * SEQ_LEN
            assert batch.tokens_BT[row].tolist() == list(range(start, start + SEQ_LEN))


@given(
    rows=st.integers(1, 13),
    worlds=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    steps=st.integers(1, 7),
    packed=st.booleans(),
)
@example(rows=10, worlds=[4, 8, 6], steps=5, packed=False)
@example(rows=10, worlds=[4, 8, 6], steps=5, packed=True)
@settings(max_examples=25, deadline=None)
def test_order_is_global_and_resume_exact_at_any_world_size(
    store, big, chats, rows, worlds, steps, packed
):
    """4 -> 8 -> 6 ranks and the like, past epochs' ends: the rows of one rank's run."""

    def stream(rank, world, state=None):
        if packed:
            return packed_stream(chats, 40, rows, rank, world, state=state)
        mixture = [(store, 0.3), (big, 0.7)]
        return pretrain_stream(mixture, SEQ_LEN, rows, rank, world, state=state)

    whole = take(stream(0, 1), steps * len(worlds))
    state, got = None, []
    for world in worlds:
        parts = [take(stream(rank, world, state), steps) for rank in range(world)]
        for step in range(steps):
            states = [part[step][1] for part in parts]
            assert all(s == states[0] for s in states)
            got.append((concat([part[step][0] for part in parts]), states[0]))
        state = json.loads(json.dumps(got[-1][1]))
    for (batch, batch_state), (expected, expected_state) in zip(got, whole, strict=True):
        assert batch_state == expected_state
        assert batch.sample_ids == expected.sample_ids
        for name in ("tokens_BT", "targets_BT", "weights_BT", "positions_BT", "docs_BT"):
            assert torch.equal(getattr(batch, name), getattr(expected, name))


def test_state_saved_at_an_epochs_end_starts_the_next(store):
    whole = take(pretrain_stream([(store, 1)], SEQ_LEN, 5), 8)
    again = take(pretrain_stream([(store, 1)], SEQ_LEN, 5, state=whole[3][1]), 4)
    assert sample_ids(whole[:4]) != sample_ids(again)
    assert sorted(sample_ids(again)) == list(range(20))
    assert sample_ids(again) == sample_ids(whole[4:])


@given(st.integers(1, 50), st.integers(1, 20))
def test_rank_shares_partition_the_step(rows, world):
    shares = [rank_rows(rows, rank, world) for rank in range(world)]
    assert [j for share in shares for j in share] == list(range(rows))
    assert all(j * world // rows == rank for rank in range(world) for j in shares[rank])
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_even_mixture_in_every_window_of_samples(store, big, order):
    ids = sample_ids(take(pretrain_stream([(store, 1), (big, 1)], SEQ_LEN, 100, order=order), 30))
    first = np.convolve(np.array(ids) < 20, np.ones(1000), "valid")
    assert np.abs(first - 500).max() <= 25


def test_rare_source_never_overruns(store, big):
    ids = np.array(
        sample_ids(take(pretrain_stream([(store, 0.001), (big, 0.999)], SEQ_LEN, 250), 40))
    )
    rare = np.cumsum(ids < 20)
    assert np.abs(rare - 0.001 * np.arange(1, len(ids) + 1)).max() <= 1
    assert rare[-1] == 10
    assert ids.max() < 20 + num_windows(big, SEQ_LEN)


def test_packed_epochs_hold_each_document_once(chats):
    report = packing_report(chats, 40)
    assert report["docs"] == 60
    assert report["truncated"] == report["no_trained_tokens"] == 0
    stream = packed_stream(chats, 40, report["rows"])
    orders = []
    for batch, _ in take(stream, 3):
        real = batch.docs_BT >= 0
        starts = batch.tokens_BT[real & (batch.positions_BT == 0)].tolist()
        assert sorted(starts) == np.cumsum([0, *chats.doc_lengths()[:-1]]).tolist()
        trained = sum(int(chats.doc_mask(i)[1:].sum()) for i in range(60))
        assert batch.weights_BT.sum() == trained
        assert batch.weights_BT[~real].sum() == 0
        assert real.float().mean() > 0.9
        orders.append(starts)
    assert orders[0] != orders[1] != orders[2]


def test_packed_rows_in_the_given_order_of_the_store(chats):
    batches = take(
        packed_stream(chats, 40, 1, order="sequential"), packing_report(chats, 40)["rows"]
    )
    firsts = [int(batch.tokens_BT[0, 0]) for batch, _ in batches]
    assert firsts == sorted(firsts)


def test_packed_rows_of_other_documents_do_not_go_on(chats, tmp_path):
    lengths = chats.doc_lengths().tolist()
    masks = [chats.doc_mask(i) for i in range(chats.num_docs)]
    other = make_store(tmp_path / "s", lengths, masks, first=7)
    _, state = next(packed_stream(chats, 40, 2))
    with pytest.raises(CheckpointError, match="data was"):
        next(packed_stream(other, 40, 2, state=state))


def test_truncated_prompts_and_documents_without_trained_tokens(tmp_path):
    lengths = [40, 13, 45, 6]
    masks = [[0] * 10 + [1] * 30, [0] * 10 + [1] * 3, [0] * 20 + [1] * 25, [0] * 6]
    store = make_store(tmp_path / "s", lengths, masks)
    report = packing_report(store, 20)
    assert report.pop("trained_tokens") == 13
    assert report == {"rows": 2, "docs": 2, "truncated": 1, "no_trained_tokens": 2}
    ((batch, _),) = take(packed_stream(store, 20, 2, order="sequential"), 1)
    assert batch.weights_BT.sum(1).tolist() == [10, 3]
    assert torch.isfinite(batch.weights_BT).all()
    with pytest.raises(DataError, match="no document"):
        next(packed_stream(store, 5, 2))


def test_masks_of_a_store_count_in_windows_too(chats):
    ((batch, _),) = take(pretrain_stream([(chats, 1)], 16, 10, order="sequential"), 1)
    mask = torch.from_numpy(chats.read_mask(1, 161).copy()).float()
    border = batch.positions_BT.flatten()[1:] == 0
    expected = mask.clone()
    expected[:159][border] = 0
    assert torch.equal(batch.weights_BT.flatten()[:159], expected[:159])


def test_refusals(store, big, tmp_path):
    with pytest.raises(ConfigError, match="at least one store"):
        next(pretrain_stream([], SEQ_LEN, 4))
    with pytest.raises(ConfigError, match="positive number, not 0"):
        next(pretrain_stream([(store, 0)], SEQ_LEN, 4))
    with pytest.raises(ConfigError, match="rank=2 must lie"):
        next(pretrain_stream([(store, 1)], SEQ_LEN, 4, 2, 2))
    with pytest.raises(ConfigError, match="rows_per_step=0"):
        next(pretrain_stream([(store, 1)], SEQ_LEN, 0))
    with pytest.raises(DataError, match="the longest that fits is 164"):
        next(pretrain_stream([(store, 1)], 200, 4))
    _, state = next(pretrain_stream([(store, 1)], SEQ_LEN, 4))
    with pytest.raises(CheckpointError, match="seq_len was 8 and is now 16"):
        next(pretrain_stream([(store, 1)], 16, 4, state=state))
    with pytest.raises(CheckpointError, match="data was"):
        next(pretrain_stream([(store, 1), (big, 1)], SEQ_LEN, 4, state=state))
    with pytest.raises(CheckpointError, match="kind was"):
        next(packed_stream(store, SEQ_LEN, 4, state=state))


def test_more_ranks_than_rows_leave_some_without(store):
    batches = [next(pretrain_stream([(store, 1)], SEQ_LEN, 2, r, 5))[0] for r in range(5)]
    assert sum(b.num_rows for b in batches) == 2
    assert all(b.tokens_BT.shape[1] == SEQ_LEN for b in batches)


# --- caps on epochs ------------------------------------------------------------------------------


@given(
    caps=st.tuples(*[st.one_of(st.none(), st.floats(0.2, 3))] * 2),
    weight=st.floats(0.01, 0.99),
    rows=st.integers(5, 40),
    worlds=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
@example(caps=(1.5, None), weight=0.5, rows=10, worlds=[4, 8, 6])
@settings(max_examples=12, deadline=None)
def test_no_row_is_read_more_often_than_its_cap_at_any_world_size(
    store, big, caps, weight, rows, worlds
):
    """Counts never exceed the cap; resume is exact across exhaustion, at any number of ranks."""
    mixture = [(store, weight), (big, 1 - weight)]
    sizes = [num_windows(s, SEQ_LEN) for s in (store, big)]
    most = [np.inf if c is None else int(c * n + 1e-9) for c, n in zip(caps, sizes, strict=True)]
    num_steps = int(min(sum(most), 700) // rows)
    steps = max(1, num_steps // len(worlds))
    if num_steps < len(worlds):
        return

    def stream(rank, world, state=None):
        return pretrain_stream(mixture, SEQ_LEN, rows, rank, world, state=state, max_epochs=caps)

    whole = take(stream(0, 1), steps * len(worlds))
    ids = np.array(sample_ids(whole))
    for k, (low, high) in enumerate(((0, sizes[0]), (sizes[0], sum(sizes)))):
        mine = ids[(ids >= low) & (ids < high)]
        assert len(mine) <= most[k]
        if len(mine):
            assert np.bincount(mine - low).max() <= -(-len(mine) // sizes[k])
    state, got = None, []
    for world in worlds:
        parts = [take(stream(rank, world, state), steps) for rank in range(world)]
        for step in range(steps):
            got += [i for part in parts for i in part[step][0].sample_ids]
        state = json.loads(json.dumps(parts[0][-1][1]))
        assert all(part[-1][1] == state for part in parts)
    assert got == ids.tolist()


def test_when_all_caps_are_reached_the_stream_says_so(store, big):
    stream = pretrain_stream([(store, 1), (big, 1)], SEQ_LEN, 10, max_epochs=[1.0, 0.04])
    assert len(sample_ids(take(stream, 2))) == 20
    with pytest.raises(DataError, match="max_epochs times, after 29 rows"):
        next(stream)


def test_a_cap_below_a_row_names_the_smallest_legal_one(store):
    with pytest.raises(ConfigError, match=r"less than one of its 20 rows .* value is 0\.05"):
        next(pretrain_stream([(store, 1)], SEQ_LEN, 2, max_epochs=[0.049]))
    next(pretrain_stream([(store, 1)], SEQ_LEN, 1, max_epochs=[0.05]))


def test_a_store_goes_on_where_another_stream_left_it(store, big):
    """In one seeded order, at whatever place of the mixture it stands; caps count both."""
    first = take(pretrain_stream([(store, 1)], SEQ_LEN, 4), 2)
    mixture = [(big, 1), (store, 1)]
    then = take(pretrain_stream(mixture, SEQ_LEN, 4, seen=[0, 8], max_epochs=[None, 1.0]), 9)
    ids = [i - 249 for i in sample_ids(then) if i >= 249]
    assert num_windows(big, SEQ_LEN) == 249
    assert sorted(sample_ids(first) + ids) == list(range(20))
    assert sample_ids(first) + ids == sample_ids(take(pretrain_stream([(store, 1)], SEQ_LEN, 4), 5))


def test_a_cap_that_is_lifted_begins_the_shares_anew(store, big):
    mixture = [(store, 0.5), (big, 0.5)]
    batches = take(pretrain_stream(mixture, SEQ_LEN, 10, max_epochs=[0.5, None]), 6)
    assert sum(i < 20 for i in sample_ids(batches)) == 10
    on = take(
        pretrain_stream(mixture, SEQ_LEN, 10, state=batches[-1][1], max_epochs=[1.0, None]), 2
    )
    assert sum(i < 20 for i in sample_ids(on)) == 10  # half of them, not all to catch up


# --- order by quality ----------------------------------------------------------------------------


def scored_store(folder, lengths, scores) -> TokenStore:
    with StoreWriter(folder, "print", 1 << 20, shard_tokens=100, with_scores=True) as writer:
        first = 0
        for length, score in zip(lengths, scores, strict=True):
            writer.add(np.arange(first, first + length), score=score)
            first += length
    return TokenStore.open(folder)


def test_quality_ascending_orders_windows_by_the_mean_score_of_their_tokens(tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 60)
    scores = rng.normal(size=60).astype(np.float32)
    store = scored_store(tmp_path / "s", lengths, scores)
    per_token = np.repeat(scores.astype(np.float64), lengths)
    n = num_windows(store, SEQ_LEN)
    means = per_token[: n * SEQ_LEN].reshape(n, SEQ_LEN).mean(1)
    stream = pretrain_stream([(store, 1)], SEQ_LEN, n, order="quality-ascending")
    batches = take(stream, 2)
    for batch, _ in batches:
        ids = list(batch.sample_ids)
        assert sorted(ids) == list(range(n))
        assert (np.diff(means[ids]) >= -1e-9).all()
    again = pretrain_stream(
        [(store, 1)], SEQ_LEN, n, order="quality-ascending", state=batches[0][1]
    )
    assert next(again)[0].sample_ids == batches[1][0].sample_ids


def test_equal_scores_are_shuffled_anew_each_epoch(tmp_path):
    store = scored_store(tmp_path / "s", [SEQ_LEN] * 61, [1.0] * 31 + [2.0] * 30)
    stream = pretrain_stream([(store, 1)], SEQ_LEN, 60, order="quality-ascending")
    one, two = (list(batch.sample_ids) for batch, _ in take(stream, 2))
    for ids in (one, two):
        assert sorted(ids[:31]) == list(range(31))
    assert one[:31] != two[:31]
    assert one[:31] != sorted(one[:31])


def test_quality_ascending_refuses_what_has_no_scores(store, chats):
    with pytest.raises(DataError, match="has no scores of its documents"):
        next(pretrain_stream([(store, 1)], SEQ_LEN, 4, order="quality-ascending"))
    with pytest.raises(ConfigError, match="the nearest is 'sequential'"):
        next(packed_stream(chats, 40, 4, order="quality-ascending"))
