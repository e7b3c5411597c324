"""What the guard's events are good for, and how a run goes on after the guard has acted."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from stepwell.cli import main
from stepwell.config import Run
from stepwell.data.store import StoreWriter
from stepwell.diagnose.replay import replay
from stepwell.metrics import read_events
from stepwell.sections.optim import GuardConfig
from stepwell.train import session
from stepwell.train.engine import Engine
from stepwell.train.guard import Guard, GuardStop
from stepwell.train.guard_events import (
    FORGOTTEN,
    drop_undone_rewinds,
    kept_for_replay,
    replay_command,
    settings_at,
    stopped_after,
)
from stepwell.train.pretrain import pretrain
from stepwell.train.run_checkpoints import read_state, step_folder, steps_of
from stepwell.types import CheckpointError
from tests.runs import MODEL, assert_equal, final_weights, measured, words
from tests.train.test_guard_story import GLITCH, LENGTH, ROWS, of_kind, story

SHORT = {"train.steps": 30, "guard.suspect_steps": 1, "checkpoint.every_steps": 4}


def write_glitches(folder: str, steps: set[int]) -> None:
    """Arithmetic sequences; the batches `steps`, counted from 1, hold the glitch."""
    generator = np.random.default_rng(0)
    with StoreWriter(Path(folder), "f" * 64, 320) as writer:
        for step in range(1, 61):
            rows = (generator.integers(0, 64, (ROWS, 1)) + np.arange(LENGTH)) % 64
            rows[0, 0] = GLITCH if step in steps else rows[0, 0]
            for row in rows:
                writer.add(row)


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("events")
    before = Path.cwd()
    os.chdir(folder)
    write_glitches("clean", set())
    write_glitches("two", {12, 25})
    write_glitches("many", set(range(11, 22)))
    engine = Engine(Run.parse({}, {**MODEL, "model.tied": False}))
    with torch.no_grad():
        engine.decoder.get_parameter("embed.weight")[GLITCH] = 1e5
    engine.save("base", {}).wait()
    yield folder
    os.chdir(before)


def trained(folder: str, store: str, **more) -> int:
    return main(words("pretrain", story(folder, store=store, **{**SHORT, **more})))


def last_state(folder: str) -> dict:
    """The guard's, in the newest checkpoint."""
    return read_state(step_folder(folder, max(steps_of(folder))))["guard"]


def kinds(folder: str) -> list[str]:
    return [event["event"] for event in read_events(folder)]


# --- branches and restarts ------------------------------------------------------------------------


def test_a_branch_of_a_run_that_gave_up_goes_on_at_the_full_rate(capsys):
    """As the guard's last words say."""
    values = {"guard.action": "rewind", "guard.max_rewinds": 1, "guard.cooldown_steps": 0}
    assert trained("spent", "two", **values) == 5
    assert "checkpoint.branch_from" in capsys.readouterr().err
    before = last_state("spent")
    assert (before["rewinds"], before["lr_scale"]) == (1, 0.5)
    more = {"optim.lr": 0.01, "guard.lr_factor": 1.0, "checkpoint.branch_from": "spent"}
    assert trained("branch", "two", **values, **more) == 0
    events = read_events("branch")
    assert [event["event"] for event in events] == ["branch", "rewind", "jump"]
    assert events[0]["jumped"] == {"sources": [[12, 12]]}
    assert events[0]["good_steps"] == len(before["good"]["loss"]) > 16
    assert {line["train/lr"] for line in measured(Path("branch"))} == {0.01}
    assert events[1]["rewinds"] == 1
    assert events[1]["jumped"] == {"sources": [[12, 12], [25, 25]]}


def test_started_again_after_a_stop_it_counts_the_skips_anew(capsys):
    """Eleven bad batches in a row, and five are allowed: two restarts get over them."""
    assert trained("streak", "many") == 5
    assert "6 steps in a row" in capsys.readouterr().err
    assert (max(steps_of("streak")), kinds("streak")[-1]) == (12, "stop")
    assert trained("streak", "many") == 5
    (event,) = of_kind("streak", "resume")
    assert (event["step"], event[FORGOTTEN]) == (12, 2)
    assert read_events("streak")[-1]["step"] == 18
    assert trained("streak", "many") == 0
    assert [event["step"] for event in of_kind("streak", "skip")] == list(range(11, 22))
    found = replay("streak", 20)
    assert found.difference is None
    assert math.isnan(found.loss)


def test_a_restart_counts_only_after_a_stop():
    stop, resume = {"event": "stop", "step": 20}, {"event": "resume", "step": 16, FORGOTTEN: 3}
    assert stopped_after([stop], 16)
    assert stopped_after([resume], 16)  # killed again before its first checkpoint
    assert not stopped_after([resume], 20)
    assert not stopped_after([{"event": "resume", "step": 16}, {"event": "interrupted"}], 16)


# --- rewinds that were not finished ---------------------------------------------------------------


def test_killed_between_the_event_and_the_checkpoint_a_rewind_is_told_once(monkeypatch):
    values = {"guard.action": "rewind"}
    assert trained("undisturbed", "two", **values) == 0
    save, num_saves = session.Session.save, []

    def dies_at_the_rewind(self, extra):
        num_saves.append(self.engine.step)
        if num_saves[-2:] == [8, 8]:
            raise KeyboardInterrupt
        save(self, extra)

    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "save", dies_at_the_rewind)
        trained("torn", "two", **values)
    assert kinds("torn") == ["rewind"]
    assert last_state("torn")["rewinds"] == 0
    assert trained("torn", "two", **values) == 0
    assert kinds("torn") == ["resume", *kinds("undisturbed")]
    assert measured(Path("torn")) == measured(Path("undisturbed"))
    assert_equal(final_weights(Path("torn")), final_weights(Path("undisturbed")))


def test_only_rewinds_without_a_checkpoint_are_undone(tmp_path):
    lines = [{"event": "rewind", "step": 4, "rewinds": n, "value": "NaN"} for n in (1, 2)]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"event": "data"}, *lines]))
    guard = Guard(GuardConfig())
    guard.rewinds = 2
    before = path.read_bytes()
    drop_undone_rewinds(tmp_path, guard)
    assert path.read_bytes() == before
    guard.rewinds = 1
    drop_undone_rewinds(tmp_path, guard)
    assert [e.get("rewinds") for e in read_events(tmp_path)] == [None, 1]


# --- both streams ---------------------------------------------------------------------------------


def test_suspects_from_before_a_switch_of_streams_are_left_out_too():
    write_glitches("end", {1})
    more = {
        "guard.action": "rewind",
        "guard.suspect_steps": 3,
        "optim.schedule.kind": "wsd",
        "optim.schedule.decay_steps": 10,
        "data.stages": '[{phase = "decay", sources = [{path = "end"}]}]',
    }
    assert trained("switch", "clean", **more) == 0
    (event,) = of_kind("switch", "rewind")
    assert (event["bad_step"], event["stream"], event["to_step"]) == (21, "stages.0", 16)
    assert event["jumped"] == {"stages.0": [[1, 1]], "sources": [[19, 20]]}
    jumped = [(e["stream"], e["batch"]) for e in of_kind("switch", "jump")]
    assert jumped == [("sources", 19), ("sources", 20), ("stages.0", 1)]


# --- weights that are not finite ------------------------------------------------------------------


def spoilt_weights():
    """An infinite embedding of a token that never comes."""
    engine = Engine(Run.parse({}, {**MODEL, "model.tied": False}))
    for name, value in engine.iter_state():
        if name == "embed.weight":
            value[319] = math.inf
        yield name, value


@pytest.mark.parametrize(("action", "num_skips"), [("skip", 5), ("rewind", 0), ("stop", 0)])
def test_a_weight_that_is_not_finite_is_named(action, num_skips):
    """Its row is in no batch, so the pass is finite, and only the update norm is not."""
    values = {"guard.action": action, "precision.compute": "fp32", "optim.weight_decay": 0.1}
    folder = f"spoilt-{action}"
    run = Run.parse({}, story(folder, store="clean", init=None, **{"model.tied": False}, **values))
    with pytest.raises(GuardStop, match=r"update norm is inf.*themselves: embed\.weight") as error:
        pretrain(run, spoilt_weights())
    assert ("No step was good" in str(error.value)) == (action != "rewind")
    events = read_events(folder)
    assert [e["event"] for e in events] == ["skip"] * num_skips + ["stop"]
    assert all(e["non_finite_state"] == ["embed.weight"] for e in events)
    assert all(e["first_non_finite"] is None for e in events)
    if action == "rewind":
        assert "going back is no use" in str(error.value)


def test_a_branch_from_spoilt_weights_is_refused():
    engine = Engine(Run.parse({}, {**MODEL, "model.tied": False}), spoilt_weights())
    engine.save("spoilt/step", {"method": "pretrain"}).wait()
    more = {"checkpoint.branch_from": "spoilt/step", "model.tied": False}
    run = Run.parse({}, story("refused", store="clean", init=None, **more))
    with pytest.raises(CheckpointError, match=r"branch_from='spoilt/step'.*embed\.weight"):
        pretrain(run)


def test_an_explosion_within_the_first_steps_ends_the_run(capsys):
    values = {"optim.lr": 30.0, "precision.compute": "fp32", "guard.min_history": 16}
    assert trained("exploded", "clean", init=None, **values) == 5
    assert "above the" in capsys.readouterr().err
    assert read_events("exploded")[0]["step"] < 16


# --- checkpoints for replay -----------------------------------------------------------------------


def test_the_checkpoint_before_a_refused_step_stays():
    assert trained("kept", "two", **{"checkpoint.keep_last": 1}) == 0
    assert steps_of("kept") == [8, 24, 30]
    for event, step, start in zip(of_kind("kept", "skip"), (12, 25), (8, 24), strict=True):
        assert event["replay"] == f"stepwell replay kept --step {step}"
        found = replay("kept", step)
        assert (found.start, found.difference) == (start, None)
        assert math.isnan(found.loss)


def test_no_more_than_two_stay():
    events = [{"event": "skip", "step": step, "watched": "loss"} for step in (3, 12, 13, 25, 26)]
    assert kept_for_replay(events, [2, 4, 8, 16, 24, 28]) == [8, 24]
    rewind = {"event": "rewind", "step": 16, "watched": "loss"}
    overflow = {"event": "skip", "step": 30, "watched": "loss_scale"}
    assert kept_for_replay([*events, rewind, overflow], [8, 16, 24, 28]) == [16, 24]
    assert kept_for_replay([{"event": "stop", "step": 2}], [2]) == []


def test_a_replay_is_offered_where_there_can_be_one():
    run = Run.parse({}, {"dir": "here", "checkpoint.every_steps": 5})
    assert replay_command(run, 5, []) == "stepwell replay here --step 5"
    assert replay_command(run, 6, [6]) is None
    assert replay_command(run, 7, [6]) == "stepwell replay here --step 7"
    branch = Run.parse(run.model_dump(), {"checkpoint.branch_from": "x"})
    assert replay_command(branch, 5, []) is None


def test_settings_are_those_of_the_last_rewind_before_the_step():
    def rewind(step, rewinds):
        jumped = {"sources": [[step, step + rewinds]]}
        return {"event": "rewind", "step": step, "rewinds": rewinds, "jumped": jumped,
                "lr_scale": 0.5**rewinds, "cooldown_until": None}  # fmt: skip

    events = [rewind(0, 1), rewind(8, 2), {"event": "resume", "step": 9, FORGOTTEN: 4}]

    def settings(since, step):
        guard = Guard(GuardConfig())
        guard.skips_in_a_row = 4
        settings_at(events, guard, since, step)
        return guard.rewinds, guard.lr_scale, guard.skips_in_a_row

    assert settings(-1, 7) == (1, 0.5, 4)
    assert settings(-1, 8) == (2, 0.25, 4)
    assert settings(0, 7) == (0, 1.0, 4)
    assert settings(4, 9) == (2, 0.25, 0)
    assert settings(8, 8) == (0, 1.0, 4)
