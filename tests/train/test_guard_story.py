"""The NaN story, with real files through the command line: a run in fp16 whose loss falls until, at
step 20, a row holds a token whose embedding no fp16 number can hold.

The token is a glitch of the weights that the run starts from (never trained, far too large); in
float32 the same run is fine.
"""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from stepwell.cli import main
from stepwell.config import Run
from stepwell.data.store import StoreWriter
from stepwell.metrics import read_events
from stepwell.train.engine import Engine
from stepwell.train.pretrain import pretrain
from stepwell.train.run_checkpoints import read_state, step_folder
from tests.parallel.ranks import run_ranks
from tests.runs import MODEL, assert_equal, final_weights, finish, killed, measured, words

LENGTH, ROWS, STEPS, BAD_STEP, GLITCH = 32, 4, 40, 20, 300
GUARD = {"guard.min_history": 8, "guard.suspect_steps": 3, "guard.cooldown_steps": 10}


def write_batches(folder: Path, left_out: set[int]) -> None:
    """Windows in the order in which they are read: arithmetic sequences, and one glitch."""
    generator = np.random.default_rng(0)
    with StoreWriter(folder, "f" * 64, 320) as writer:
        for step in range(1, STEPS + 20):
            starts, strides = generator.integers(0, 64, ROWS), generator.integers(1, 4, ROWS)
            rows = (starts[:, None] + strides[:, None] * np.arange(LENGTH)) % 64
            if step == BAD_STEP:
                rows[2, 5] = GLITCH
            if step not in left_out:
                for row in rows:
                    writer.add(row)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("story")
    before = Path.cwd()
    os.chdir(folder)
    write_batches(folder / "store", set())
    write_batches(folder / "shorter", {18, 19, 20})
    engine = Engine(Run.parse({}, {**MODEL, "model.tied": False}))
    with torch.no_grad():
        engine.decoder.get_parameter("embed.weight")[GLITCH] = 1e5
    engine.save("base", {}).wait()
    yield folder
    os.chdir(before)


def story(folder: str, store: str = "store", init: str | None = "base", **more):
    """Settings of the run in `folder`."""
    return {
        **MODEL,
        **GUARD,
        **({"model.init": init, "model.tied": False} if init else {}),
        "dir": folder,
        "data.sources": f'[{{path = "{store}"}}]',
        "data.seq_len": LENGTH,
        "data.order": "sequential",
        "train.global_batch_rows": ROWS,
        "train.micro_batch_rows": 2,
        "train.steps": STEPS,
        "optim.lr": 0.03,
        "optim.schedule.kind": "constant",
        "precision.compute": "fp16",
        "precision.loss_scale.initial": 256.0,
        "checkpoint.every_steps": 5,
        "checkpoint.keep_last": 99,
        **more,
    }


def run_story(folder: str, **more) -> list[float]:
    """The losses of the lines of metrics.jsonl."""
    assert main(words("pretrain", story(folder, **more))) == 0
    return [line["train/loss"] for line in measured(Path(folder))]


def of_kind(folder: str, kind: str):
    return [event for event in read_events(folder) if event["event"] == kind]


def test_without_a_guard_the_loss_falls_and_then_is_nan_for_ever(world):
    losses = run_story("none", **{"guard.action": "none"})
    good, bad = losses[: BAD_STEP - 1], losses[BAD_STEP - 1 :]
    assert all(map(math.isfinite, good))
    assert good[-1] < 0.5 * good[0]
    assert len(bad) == STEPS - BAD_STEP + 1
    assert all(map(math.isnan, bad))
    assert any(not weight.isfinite().all() for weight in final_weights(world / "none").values())
    assert read_events("none") == []


def test_the_same_data_do_no_harm_in_float32(world):
    losses = run_story("fp32", **{"guard.action": "none", "precision.compute": "fp32"})
    assert all(map(math.isfinite, losses))


def test_with_skipping_it_ends_well_and_says_what_it_saw(world):
    losses = run_story("skip")
    assert [step for step, loss in enumerate(losses, 1) if math.isnan(loss)] == [BAD_STEP]
    assert losses[-1] < 0.4 * losses[0]
    assert losses[-1] < losses[BAD_STEP - 2]
    (event,) = read_events("skip")
    first = (BAD_STEP - 1) * ROWS
    assert (event["event"], event["step"], event["batch"]) == ("skip", BAD_STEP, BAD_STEP)
    assert (event["watched"], event["reason"]) == ("loss", "the loss is nan")
    assert event["sample_ids"] == [first, first + 1, first + 2, first + 3]
    assert event["first_non_finite"] == {
        "layer": "embed",
        "kind": "activation",
        "rank": 0,
        "micro_batch": 1,
        "sample_ids": [first + 2, first + 3],
    }


def test_with_rewinding_it_goes_back_leaves_out_the_suspects_and_cools_down(world):
    losses = run_story("rewind", **{"guard.action": "rewind"})
    assert len(losses) == STEPS
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.4 * losses[0]
    (event,) = of_kind("rewind", "rewind")
    assert (event["step"], event["bad_step"], event["rewinds"]) == (15, BAD_STEP, 1)
    assert event["first_non_finite"]["layer"] == "embed"
    assert event["jumped"] == {"sources": [[18, 20]]}
    assert event["recent_losses"] == pytest.approx(
        [line["train/loss"] for line in measured(world / "skip")[9:19]], rel=1e-3
    )
    jumps = of_kind("rewind", "jump")
    assert [(e["step"], e["batch"], e["sample_ids"]) for e in jumps] == [
        (18, number, list(range((number - 1) * ROWS, number * ROWS))) for number in (18, 19, 20)
    ]
    rates = [line["train/lr"] for line in measured(world / "rewind")]
    assert rates == [0.03] * 15 + [0.015] * 15 + [0.03] * 10


def test_a_rewind_equals_a_run_that_never_saw_the_suspects(world):
    """Bit for bit, when the learning rate is left alone."""
    values = {"guard.action": "rewind", "guard.lr_factor": 1.0}
    run_story("again", **values)
    run_story("clean", store="shorter", **values)
    assert of_kind("again", "rewind")
    assert not read_events("clean")
    assert measured(world / "again") == measured(world / "clean")
    assert_equal(final_weights(world / "again"), final_weights(world / "clean"))


def test_killed_before_and_after_the_rewind_it_ends_as_if_undisturbed(world):
    values = {"guard.action": "rewind", "checkpoint.every_steps": 4, "train.steps": 60}
    command = words("pretrain", story("whole", **values))
    assert finish(command, world, world / "log")[0] == 0
    broken = words("pretrain", story("broken", **values))
    for num_lines in (14, 17, 21, 30):
        killed(broken, world, world / "log", world / "broken", num_lines)
    code, output = finish(broken, world, world / "log")
    assert code == 0
    assert "[resume at step" in output
    assert measured(world / "broken") == measured(world / "whole")
    assert_equal(final_weights(world / "broken"), final_weights(world / "whole"))
    states = [read_state(step_folder(world / name, 60))["guard"] for name in ("whole", "broken")]
    assert states[0] == states[1]
    assert (states[0]["rewinds"], states[0]["jumped"]) == (1, {"sources": [[18, 20]]})
    told = [
        [{k: v for k, v in e.items() if k != "time"} for e in read_events(name)
         if e["event"] != "resume"] for name in ("whole", "broken")
    ]  # fmt: skip
    assert told[0] == told[1]
    assert [event["event"] for event in told[0]] == ["rewind", "jump", "jump", "jump"]


def test_after_the_last_rewind_it_stops_with_advice(world):
    """Two glitches further apart than the suspects reach, and one rewind."""
    values = {"guard.action": "rewind", "guard.max_rewinds": 1, "guard.suspect_steps": 1}
    command = words("pretrain", story("twice", store="glitches", **values))
    generator = np.random.default_rng(0)
    with StoreWriter(Path("glitches"), "f" * 64, 320) as writer:
        for step in range(60):
            rows = (generator.integers(0, 64, (ROWS, 1)) + np.arange(LENGTH)) % 64
            rows[0, 0] = GLITCH if step in (11, 24) else rows[0, 0]
            for row in rows:
                writer.add(row)
    code, output = finish(command, world, world / "log")
    assert code == 5
    assert "guard.max_rewinds=1 rewinds" in output
    assert "optim.lr" in output
    assert "guard.suspect_steps" in output
    assert [event["event"] for event in read_events("twice")] == ["rewind", "jump", "stop"]
    (event,) = of_kind("twice", "stop")
    assert event["batch"] == 25
    assert event["first_non_finite"]["layer"] == "embed"


def test_stopping_at_once(world):
    code, output = finish(
        words("pretrain", story("stop", **{"guard.action": "stop"})), world, world / "log"
    )
    assert code == 5
    assert "guard.action='stop', and the loss is nan" in output
    (event,) = read_events("stop")
    assert (event["event"], event["step"]) == ("stop", BAD_STEP)


def _rewind_on_a_rank(folder: str, cwd: str):
    os.chdir(cwd)
    run = Run.parse({}, story(folder, **{"guard.action": "rewind", "train.micro_batch_rows": 1}))
    num_steps = pretrain(run)
    return num_steps, read_state(step_folder(folder, STEPS))["guard"]


def test_all_ranks_go_back_together(world):
    first, second = run_ranks(_rewind_on_a_rank, 2, "ranks", str(world))
    assert first == second
    assert first[0] == STEPS
    assert first[1]["jumped"] == {"sources": [[18, 20]]}
    (event,) = of_kind("ranks", "rewind")
    finding = event["first_non_finite"]
    assert (finding["layer"], finding["rank"], finding["micro_batch"]) == ("embed", 1, 0)
    assert event["sample_ids"] == list(range(76, 80))
    losses = [line["train/loss"] for line in measured(world / "ranks")]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.4 * losses[0]


# --- recognised late -----------------------------------------------------------------------------

NOISE = {40, 41, 42, 43}
LATE = {
    "optim.lr": 0.3,
    "optim.beta2": 0.999,
    "optim.clip_norm": 0.0,
    "precision.loss_scale.initial": 65536.0,
    # Only what is not finite is bad: so the harm is seen some steps after it was done.
    "guard.loss_spike": 0.0,
    "guard.spike_factor": 1e9,
    "guard.update_spike_factor": 0.0,
    "guard.suspect_steps": 20,
    "guard.lr_factor": 0.1,
    "guard.cooldown_steps": 0,
    "checkpoint.every_steps": 10,
    "train.steps": 80,
}


def write_noise(folder: str, steps: set[int]) -> None:
    generator = np.random.default_rng(0)
    with StoreWriter(Path(folder), "f" * 64, 320) as writer:
        for step in range(1, 121):
            starts, strides = generator.integers(0, 64, ROWS), generator.integers(1, 4, ROWS)
            rows = (starts[:, None] + strides[:, None] * np.arange(LENGTH)) % 64
            for row in generator.integers(64, 320, (ROWS, LENGTH)) if step in steps else rows:
                writer.add(row)


def test_harm_that_is_seen_late_needs_a_rewind(world):
    """Noise that the run learns from at a rate far too high: a few steps later a block's
    activations outgrow fp16, on every batch. Skipping is no use then; going back is."""
    write_noise("quiet", set())
    write_noise("noise", NOISE)
    quiet = run_story("quiet-run", store="quiet", init=None, **LATE, **{"guard.action": "none"})
    assert all(map(math.isfinite, quiet))
    harmed = run_story("harmed", store="noise", init=None, **LATE, **{"guard.action": "none"})
    first = next(step for step, loss in enumerate(harmed, 1) if math.isnan(loss))
    assert max(NOISE) + 1 < first < 60
    assert all(map(math.isnan, harmed[first - 1 :]))
    code, output = finish(
        words("pretrain", story("skipping", store="noise", init=None, **LATE)), world, world / "log"
    )
    assert code == 5
    assert "6 steps in a row were refused" in output
    assert "guard.action='rewind'" in output
    healed = run_story("healed", store="noise", init=None, **LATE, **{"guard.action": "rewind"})
    assert all(map(math.isfinite, healed))
    assert healed[-1] < healed[min(NOISE) - 11]
    (event,) = of_kind("healed", "rewind")
    assert event["bad_step"] == first
    assert event["to_step"] < min(NOISE)
    ((begin, end),) = event["jumped"]["sources"]
    assert begin <= min(NOISE)
    assert end >= max(NOISE)
    finding = event["first_non_finite"]
    assert finding["layer"].startswith("blocks.")
    assert finding["kind"] == "activation"
