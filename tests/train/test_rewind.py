"""Going back in the loops of sft and grpo, and what a session does around it."""

import os
from pathlib import Path

import pytest

from stepwell.cli import main
from stepwell.config import Run
from stepwell.metrics import read_events, read_lines
from stepwell.train.run_checkpoints import latest, read_state
from stepwell.train.start import open_session
from stepwell.types import DataError
from tests import runs
from tests.runs import measured, settings, words

# Bounds that are soon exceeded, so that an ordinary run goes back a few times.
NERVOUS = {
    "guard.action": "rewind",
    "guard.loss_spike": 0.0,
    "guard.update_spike_factor": 0.0,
    "guard.spike_factor": 1.2,
    "guard.min_history": 2,
    "guard.window": 4,
    "guard.suspect_steps": 2,
    "guard.max_rewinds": 99,
    "guard.cooldown_steps": 0,
    "guard.lr_factor": 0.5,
    "checkpoint.every_steps": 3,
    "checkpoint.keep_last": 9,
    "train.steps": 10,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def went_back(folder: str, method: str, **more):
    """Events of a run that went back, its guard's last state, and its lines."""
    assert main(words(method, settings(method, folder, **{**NERVOUS, **more}))) == 0
    last = latest(folder)
    assert last is not None
    lines = measured(Path(folder))
    assert [line["step"] for line in lines] == list(range(1, 11))
    return read_events(folder), read_state(last)["guard"], lines


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_loop_goes_back_and_leaves_out_what_it_says(world, method):
    stream = {"sft": "rows", "grpo": "rollouts"}[method]
    last = {"guard.spike_factor": 1.001, "guard.min_history": 1, "guard.window": 1}
    more = last if method == "sft" else {}  # whose norm falls nearly all the time
    events, guard, lines = went_back(method, method, **more)
    rewinds = [event for event in events if event["event"] == "rewind"]
    assert rewinds
    assert [event["rewinds"] for event in rewinds] == list(range(1, guard["rewinds"] + 1))
    assert all(event["step"] <= event["to_step"] < event["bad_step"] for event in rewinds)
    left_out = {n for first, last in guard["jumped"][stream] for n in range(first, last + 1)}
    jumps = [event for event in events if event["event"] == "jump"]
    assert {event["batch"] for event in jumps} <= left_out
    assert jumps
    assert all(event["sample_ids"] for event in jumps)
    assert lines[-1]["train/lr"] == 0.01 * 0.5 ** guard["rewinds"]
    assert all(event["watched"] == "grad_norm" for event in rewinds)
    assert all(event["first_non_finite"] is None for event in rewinds)


def test_samples_are_those_of_the_steps_that_stand(world):
    events, *_ = went_back("samples", "grpo", **{"method.updates_per_rollout": 2})
    assert any(event["event"] == "rewind" for event in events)
    rows = read_lines(Path("samples") / "samples.jsonl")
    steps = [row["step"] for row in rows if not row["greedy"]]
    assert steps == sorted(steps)
    assert all(steps.count(step) == 6 for step in set(steps))  # 2 prompts, 3 answers each
    assert sorted(set(steps)) == [2, 4, 6, 8, 10]


def test_a_run_that_can_go_back_saves_before_its_first_step(world):
    values = settings("pretrain", "first", **{"guard.action": "rewind", "train.steps": 2})
    assert main(words("pretrain", values)) == 0
    assert sorted(p.name for p in Path("first/checkpoints").iterdir()) == [
        "step-00000000",
        "step-00000002",
    ]


def fails_at_the_first_batch(run):
    with open_session(run, console=False) as session:
        assert latest(session.dir) is not None
        raise DataError("the first batch cannot be read")


def test_a_start_that_fails_leaves_nothing(world):
    run = Run.parse({}, settings("pretrain", "failed", **{"guard.action": "rewind"}))
    with pytest.raises(DataError, match="cannot be read"):
        fails_at_the_first_batch(run)
    assert latest("failed") is None
    assert not (Path("failed") / "run.toml").exists()
