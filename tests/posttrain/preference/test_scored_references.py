"""Scores of the reference: their sums, the file, and when it is stale."""

import numpy as np
import pytest
import torch

from stepwell.config import Run
from stepwell.data.packing import pack_rows
from stepwell.parallel.mesh import init_distributed
from stepwell.posttrain.preference import scored_references as r
from stepwell.train.engine import Engine
from stepwell.types import CheckpointError, ConfigError
from tests.oracle import base_run
from tests.parallel.ranks import run_ranks

DOCS = [
    (tuple(range(start, start + length)), (0,) * (length - trained) + (1,) * trained)
    for start, length, trained in ((0, 9, 4), (5, 4, 1), (20, 16, 15), (3, 2, 1), (30, 7, 3))
]


def sums_of_ranks() -> list[float]:
    run = base_run()
    mesh = init_distributed(run.layout)
    engine = Engine(run, mesh=mesh)
    return r.score_documents(engine.logprobs, DOCS, run, 0, mesh).tolist()


def test_sums_are_each_documents_own_over_any_ranks():
    engine = Engine(base_run())
    wanted = []
    for ids, mask in DOCS:
        batch = pack_rows([(ids, mask)], 16)
        wanted.append((engine.logprobs(batch).double() * batch.weights_BT).sum().item())
    assert sums_of_ranks() == pytest.approx(wanted, rel=1e-6)
    for found in run_ranks(sums_of_ranks, 2):
        assert found == pytest.approx(wanted, rel=1e-6)


def test_chunks_keep_the_order(monkeypatch):
    engine = Engine(base_run())
    wanted = r.score_documents(engine.logprobs, DOCS, engine.run, 0, engine.mesh)
    monkeypatch.setattr(r, "CHUNK_DOCS", 2)
    found = r.score_documents(engine.logprobs, DOCS, engine.run, 0, engine.mesh)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert r.score_documents(engine.logprobs, [], engine.run, 0, engine.mesh).tolist() == []


def test_rows_are_no_longer_than_they_need():
    run = base_run(**{"data.seq_len": 256, "model.max_seq_len": 256})
    assert r.row_length([100, 100, 90], run) == 192  # two rows, as of 256
    assert r.row_length([200, 50], run) == 256
    assert r.row_length([31], run) == r.row_length([32], run) == 32
    assert r.row_length([33], run) == 64
    assert r.row_length([256], run) == 256
    assert r.row_length([], run) == 256
    whole = base_run(**{"data.seq_len": 256, "model.max_seq_len": 256, "layout.compile": True})
    assert r.row_length([31], whole) == 256
    odd = base_run(**{"data.seq_len": 240, "layout.tp": 3})
    assert r.row_length([31], odd) == 96, "tensor ranks divide a row's tokens"


def test_a_stream_has_its_documents_value_everywhere():
    batch, places = r.pack_in_order(DOCS, 16, 0)
    values = torch.tensor([float(10 + i) for i in places])
    stream = r.with_stream(batch, "x", values).extra["x"]
    for b in range(batch.num_rows):
        for t in range(16):
            held = batch.docs_BT[b, t] >= 0
            # A document's first token tells which it is; positions lead back to it.
            first = t - int(batch.positions_BT[b, t])
            ids = int(batch.tokens_BT[b, first])
            starts = {doc[0][0]: i for i, doc in enumerate(DOCS)}
            assert stream[b, t] == (10 + starts[ids] if held else 0)


def test_fingerprints_see_every_change():
    engine = Engine(base_run())
    before = r.weights_hash(engine)
    assert before == r.weights_hash(Engine(base_run(), engine.iter_state(), frozen=True))
    with torch.no_grad():
        dict(engine.named_parameters())["norm.weight"][3] += 1e-3
    assert r.weights_hash(engine) != before
    known = {r.documents_hash(DOCS)}
    ids, mask = DOCS[0]
    for other in (
        [(ids[:-1], mask[:-1]), *DOCS[1:]],
        [(ids, (0, *mask[1:-1], 0)), *DOCS[1:]],
        [((59, *ids[1:]), mask), *DOCS[1:]],
        DOCS[::-1],
        DOCS[:-1],
    ):
        known.add(r.documents_hash(other))
    assert len(known) == 6


def settings(tmp_path, **more) -> Run:
    values = {"dir": str(tmp_path / "run"), "method.kind": "dpo", **more}
    (tmp_path / "run").mkdir(exist_ok=True)
    return base_run(**values)


def test_scored_once_and_taken_from_the_file(tmp_path):
    run = settings(tmp_path)
    engine, calls = Engine(run), []

    def first():
        calls.append(1)
        return engine

    def cached(run=run, docs=DOCS, weights=None):
        return r.cached_scores(run, first, docs, 0, engine.mesh, weights)

    sums, weights = cached()
    assert not list((tmp_path / "run").glob("*.tmp"))
    calls.clear()
    again, same = cached(weights=weights)
    assert calls == []
    assert (again.tolist(), same) == (sums.tolist(), weights)
    # Other pairs, in a folder that nothing was trained in: made anew.
    other, _ = cached(docs=DOCS[:3], weights=weights)
    assert other.tolist() == pytest.approx(sums[:3].tolist(), rel=1e-6)
    # The first weights are gone.
    (tmp_path / "run" / r.FILE).unlink()
    with pytest.raises(ConfigError, match="holds others now"):
        cached(weights="0" * 64)


def test_another_runs_scores_are_taken_if_they_are_the_same(tmp_path):
    run = settings(tmp_path)
    engine = Engine(run)
    sums, weights = r.cached_scores(run, lambda: engine, DOCS, 0, engine.mesh, None)
    (tmp_path / "second").mkdir()
    values = {"dir": str(tmp_path / "second"), "method.reference_from": run.dir}
    second = settings(tmp_path, **values)
    never = lambda: pytest.fail("scored again")
    found, _ = r.cached_scores(second, never, DOCS, 0, engine.mesh, weights)
    assert found.tolist() == sums.tolist()
    (tmp_path / "second" / r.FILE).unlink()
    with pytest.raises(ConfigError, match="other documents"):
        r.cached_scores(second, never, DOCS[::-1], 0, engine.mesh, weights)
    with pytest.raises(ConfigError, match="other weights"):
        r.cached_scores(second, never, DOCS, 0, engine.mesh, "0" * 64)
    nowhere = settings(tmp_path, **{**values, "method.reference_from": str(tmp_path / "third")})
    with pytest.raises(ConfigError, match="there is no reference"):
        r.cached_scores(nowhere, never, DOCS, 0, engine.mesh, weights)


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / r.FILE
    assert r.read_scores(path) is None
    path.write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="remove it"):
        r.read_scores(path)


def test_adapter_off_needs_adapters_that_start_at_nothing():
    with pytest.raises(ConfigError, match=r"lora\.rank=0"):
        r.check_adapter_off(Run.parse({}, {}))
    r.check_adapter_off(Run.parse({}, {"lora.rank": 4}))
    with pytest.raises(ConfigError, match="are the reference"):
        r.check_adapter_off(Run.parse({}, {"lora.rank": 4, "lora.init": "adapter"}))
