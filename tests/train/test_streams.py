"""Streams opened with a run's settings, and the numbers of their batches."""

import pytest
import torch

from stepwell.config import Run
from stepwell.data.store import StoreWriter, TokenStore
from stepwell.parallel.mesh import Mesh
from stepwell.train.streams import batch_number, open_rows, open_windows, stream_name
from tests.runs import write_store

RUN = Run.parse(
    {}, {"data.seq_len": 32, "train.global_batch_rows": 3, "train.seed": 5, "train.steps": 9}
)
ALONE = Mesh(1, 0, 0, torch.device("cpu"))


@pytest.fixture
def masked_store(tmp_path):
    with StoreWriter(tmp_path / "rows", "f" * 64, 320, with_mask=True) as writer:
        for length in range(4, 24):
            writer.add(torch.arange(length).numpy(), [0] + [1] * (length - 1))
    return TokenStore.open(tmp_path / "rows")


def test_batches_are_counted_through_sources_and_after_going_on(tmp_path):
    stores = [(TokenStore.open(write_store(tmp_path / str(i), i)), 1.0 + i) for i in range(2)]
    run = Run.parse(RUN.model_dump(), {"data.sources": [{"path": "0"}, {"path": "1"}]})
    stream = open_windows(run, ALONE, "sources", stores, {})
    states = [next(stream)[1] for _ in range(4)]
    assert [batch_number(state, run) for state in states] == [1, 2, 3, 4]
    batch, state = next(open_windows(run, ALONE, "sources", stores, {"sources": states[1]}))
    assert batch_number(state, run) == 3
    wanted = [next(s)[0].sample_ids for s in [open_windows(run, ALONE, "sources", stores, {})] * 3]
    assert batch.sample_ids == wanted[2]


def test_rows_of_conversations_are_counted_too(masked_store):
    stream = open_rows(RUN, ALONE, masked_store, None, pad_id=7)
    numbers = [
        (batch.sample_ids, batch_number(s, RUN)) for batch, s in (next(stream), next(stream))
    ]
    assert numbers == [((0, 1, 2), 1), ((3, 4, 5), 2)]


def test_what_a_step_reads():
    sft = Run.parse({"method": {"kind": "sft"}}, {"train.steps": 9})
    assert stream_name(sft, 8) == "rows"
    assert stream_name(RUN, 8) == "sources"
