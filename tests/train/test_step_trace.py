import math
from dataclasses import replace

import pytest

from stepwell.metrics import read_events, read_metrics
from stepwell.plan.job import Arrangement
from stepwell.plan.measured.parts import parts_of
from stepwell.plan.measured.trace import read_trace
from stepwell.train.losses import cross_entropy
from stepwell.train.start import open_session
from stepwell.types import ConfigError
from tests.oracle import base_run, global_batch
from tests.parallel.ranks import run_ranks

FP32 = {"precision.param": "fp32", "precision.compute": "fp32", "precision.reduce": "fp32"}
ALONE = Arrangement(seq_len=16, micro_batch_rows=2, global_batch_rows=8)


def steps(folder, num_steps=3, **overrides):
    run = base_run(**{"dir": str(folder), "train.steps": 3, **FP32, **overrides})
    with open_session(run, console=False) as session:
        for _ in range(num_steps):
            session.step(global_batch(), cross_entropy(run.loss))


def test_the_trace_is_of_that_step_and_lasts_as_long(tmp_path):
    steps(tmp_path, **{"log.profile_step": 2})
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "step-2-rank-0.json.gz"
    trace = read_trace(path)
    assert [window.number for window in trace.steps] == [2]
    assert (trace.world, trace.rank) == (1, 0)
    seconds = read_metrics(tmp_path)[1]["time/step_s"]
    assert trace.steps[0].seconds == pytest.approx(seconds, rel=0.2)
    measured = parts_of(trace, ALONE)
    assert math.fsum(measured.parts.values()) == pytest.approx(measured.step_s)
    for name in ("products", "attention", "memory-bound", "optimizer", "idle"):
        assert 0 < measured.parts[name] < measured.step_s
    assert measured.messages == {}


def test_nothing_is_written_unless_asked_for_and_a_step_begun_is_dropped(tmp_path):
    steps(tmp_path / "without")
    steps(tmp_path / "stopped", 1, **{"log.profile_step": 2})
    steps(tmp_path / "after", **{"log.profile_step": 3})  # no recording is left open
    assert not list(tmp_path.glob("without/traces/*")) + list(tmp_path.glob("stopped/traces/*"))
    assert list(tmp_path.glob("after/traces/step-3*"))


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "traces").write_text("a file where the folder would be")
    steps(tmp_path, **{"log.profile_step": 2})
    (event,) = (e for e in read_events(tmp_path) if e["event"] == "warning")
    assert "trace is not written" in event["text"]
    assert len(read_metrics(tmp_path)) == 3


@pytest.mark.parametrize(("step", "legal"), [(3, True), (4, False)])
def test_a_step_that_is_never_reached_is_refused(tmp_path, step, legal):
    overrides = {"dir": str(tmp_path), "train.steps": 3, "log.profile_step": step}
    if legal:
        assert base_run(**overrides).log.profile_step == 3
        return
    with pytest.raises(ConfigError, match=r"profile_step=4 is after the last step.*train.steps=3"):
        base_run(**overrides)


def two_ranks(folder):
    steps(folder, **{"log.profile_step": 2, "layout.dp_shard": 2})


@pytest.mark.slow
def test_one_of_two_data_ranks_writes_and_its_messages_are_the_data_axis(tmp_path):
    run_ranks(two_ranks, 2, str(tmp_path))
    (path,) = (tmp_path / "traces").iterdir()
    trace = read_trace(path)
    assert (trace.world, trace.rank) == (2, 0)
    data = parts_of(trace, replace(ALONE, dp_shard=2)).messages["data"]
    assert 0 < data.exposed_s <= data.busy_s < trace.steps[0].seconds
    assert data.calls >= 6  # two blocks: gathered twice, reduced once
