"""`stepwell replay`: bit for bit, read only, and refused where it cannot be."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from stepwell.cli import main
from stepwell.commands.replay import outcome
from stepwell.config import Run
from stepwell.diagnose.replay import load_run, replay
from stepwell.metrics import read_lines
from stepwell.train.engine import Engine
from stepwell.train.pretrain import pretrain
from stepwell.train.run_checkpoints import step_folder
from stepwell.types import CheckpointError, ConfigError, DataError
from tests import runs
from tests.parallel.ranks import run_ranks
from tests.runs import settings, words
from tests.train.test_guard_events import write_glitches
from tests.train.test_guard_story import GLITCH, story, write_batches

EVERY_3 = {"checkpoint.every_steps": 3, "checkpoint.keep_last": 9, "train.steps": 8}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    decay = {
        "optim.schedule.kind": "wsd",
        "optim.schedule.decay_steps": 4,
        "data.stages": '[{phase = "decay", sources = [{path = "best"}]}]',
    }
    assert main(words("pretrain", settings("pretrain", "pre", **EVERY_3, **decay))) == 0
    assert main(words("sft", settings("sft", "sft", **EVERY_3))) == 0
    yield folder
    os.chdir(before)


def contents(folder: str) -> dict[str, tuple[int, bytes]]:
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize("folder", ["pre", "sft"])
@pytest.mark.parametrize(("step", "start"), [(1, 0), (3, 0), (4, 3), (6, 3), (8, 6)])
def test_every_logged_step_comes_out_bit_for_bit(world, folder, step, start):
    before = contents(folder)
    found = replay(folder, step)
    assert (found.start, found.num_compared, found.is_logged) == (start, step - start, True)
    assert found.difference is None
    row = read_lines(Path(folder) / "metrics.jsonl")[step - 1]
    assert (found.loss, found.grad_norm) == (row["train/loss"], row["train/grad_norm"])
    assert found.verdict.ok
    names = [f"blocks.{i}{part}" for i in (0, 1) for part in (".attn", ".mlp", "")]
    assert [row.layer for row in found.layers] == ["embed", *names, "norm", "head"]
    parts = [row.weight_gradient for row in found.layers
             if row.layer in ("embed", "blocks.0", "blocks.1", "norm")]  # fmt: skip
    assert math.hypot(*(part or math.nan for part in parts)) == pytest.approx(found.grad_norm)
    assert contents(folder) == before


def test_the_command_prints_a_table_and_json(world, capsys):
    assert main(["replay", "pre", "--step", "5"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step 5, from the checkpoint of step 3: loss ")
    assert "are those of metrics.jsonl, bit for bit (2 logged steps)" in text
    assert "blocks.1.mlp" in text
    assert main(["replay", "pre", "--step", "5", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    found = replay("pre", 5)
    assert (shown["bit_equal"], shown["loss"], shown["start"]) == (True, found.loss, 3)
    assert [layer["activation"]["rms"] for layer in shown["layers"]] == [
        row.activation.rms for row in found.layers
    ]


def test_a_difference_is_found_at_its_first_step_with_what_is_not_as_it_was(world, tmp_path):
    copy = _copy("pre", tmp_path)
    lines = read_lines(copy / "metrics.jsonl")
    lines[4]["train/grad_norm"] += 1e-15
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = replay(copy, 6)
    assert found.difference is not None
    assert (found.difference.step, found.difference.metric) == (5, "train/grad_norm")
    assert "machine, ranks, threads and versions are the same" in outcome(found)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        again = replay(copy, 6)
    finally:
        torch.set_num_threads(threads)
    assert f"with threads {threads}, here it is {threads + 1}" in outcome(again)


def test_a_checkpoint_of_other_data_is_refused(world, tmp_path):
    """Another seed's checkpoint in the place of the run's own."""
    values = settings("pretrain", str(tmp_path / "other"), **EVERY_3, **{"train.seed": 1})
    assert main(words("pretrain", values)) == 0
    copy = _copy("pre", tmp_path)
    other = step_folder(tmp_path / "other", 3)
    mine = step_folder(copy, 3)
    state = json.loads((mine / "state.json").read_text())
    assert state["extra"]["machine"]["ranks"] == 1
    for path in mine.iterdir():
        path.unlink()
    for path in other.iterdir():
        (mine / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="seed was 1 and is now 0"):
        replay(copy, 4)


def _copy(folder: str, to: Path) -> Path:
    shutil.copytree(folder, to / "copy")
    return to / "copy"


def _on_two_ranks(cwd: str):
    os.chdir(cwd)
    pretrain(Run.parse({}, settings("pretrain", "two", **EVERY_3)))
    found = replay("two", 5)
    return found.difference, found.num_compared, found.sample_ids, [r.layer for r in found.layers]


def test_a_run_of_two_ranks_is_repeated_by_two(world):
    first, second = run_ranks(_on_two_ranks, 2, str(world))
    assert first == second
    assert first[:2] == (None, 2)
    assert len(first[2]) == 4
    alone = replay("two", 5)
    assert alone.sample_ids == first[2]
    if alone.difference is not None:
        assert "with ranks 2, here it is 1" in outcome(alone)


# --- the NaN story -------------------------------------------------------------------------------


def test_a_bad_step_shows_where_it_went_bad_and_a_rewound_run_what_it_took_instead(world):
    write_batches(Path("glitch"), set())
    engine = Engine(Run.parse({}, {**runs.MODEL, "model.tied": False}))
    with torch.no_grad():
        engine.decoder.get_parameter("embed.weight")[300] = 1e5
    values = {"model.init": "glitchy", "train.steps": 24}
    engine.save("glitchy", {}).wait()
    assert main(words("pretrain", story("skipped", "glitch", **values))) == 0
    found = replay("skipped", 20)
    assert found.difference is None
    assert math.isnan(found.loss)
    assert (found.verdict.action, found.verdict.watched) == ("skip", "loss")
    by_name = {row.layer: row for row in found.layers}
    # One token, and then its whole document: attention's zero weight times NaN is NaN.
    assert by_name["embed"].activation.num_bad == 32
    assert by_name["blocks.0"].activation.num_bad == 32 * 32
    rewinding = {**values, "guard.action": "rewind"}
    assert main(words("pretrain", story("rewound", "glitch", **rewinding))) == 0
    for step in (18, 20, 24):
        again = replay("rewound", step)
        assert again.difference is None
        assert again.verdict.ok
    assert replay("rewound", 18).sample_ids == [80, 81, 82, 83]

    stopping = {**values, "guard.action": "stop"}
    assert main(words("pretrain", story("stopped", "glitch", **stopping))) == 5
    last = replay("stopped", 20)
    assert (last.start, last.num_compared, last.is_logged) == (15, 4, False)
    assert (last.difference, last.verdict.action) == (None, "stop")
    assert math.isnan(last.grad_norm)


def test_rewinds_that_the_starting_point_does_not_know_are_taken_into_account(world, tmp_path):
    """From the first weights, and from a checkpoint of before a later rewind."""
    write_glitches("early", {2, 11})
    engine = Engine(Run.parse({}, {**runs.MODEL, "model.tied": False}))
    with torch.no_grad():
        engine.decoder.get_parameter("embed.weight")[GLITCH] = 1e5
    engine.save("fragile", {}).wait()
    values = {"model.init": "fragile", "guard.action": "rewind", "guard.suspect_steps": 1,
              "checkpoint.every_steps": 4, "train.steps": 14}  # fmt: skip
    assert main(words("pretrain", story("early-run", "early", **values))) == 0
    rewinds = [e for e in read_lines(Path("early-run/events.jsonl")) if e["event"] == "rewind"]
    assert [(e["step"], e["lr_scale"]) for e in rewinds] == [(0, 0.5), (8, 0.25)]
    copy = _copy("early-run", tmp_path)
    shutil.rmtree(step_folder(copy, 0))
    for step in (1, 2, 4):
        found = replay(copy, step)
        assert (found.start, found.num_compared, found.difference) == (0, step, None)
    assert found.sample_ids == [16, 17, 18, 19]
    shutil.copytree(step_folder("early-run", 0), step_folder(copy, 0))
    for step in (4, 8, 12):
        shutil.rmtree(step_folder(copy, step))
    found = replay(copy, 14)
    assert (found.start, found.num_compared, found.difference) == (0, 14, None)


# --- refusals ------------------------------------------------------------------------------------


def test_fewer_than_one_process_is_refused(world, capsys):
    assert main(["replay", "pre", "--step", "5", "--nproc", "0"]) == 2
    assert "--nproc 0 must be at least 1" in capsys.readouterr().err


def test_refusals(world, tmp_path):
    with pytest.raises(ConfigError, match=r"--step 9: pre has taken steps 1 to 8.*value is 8"):
        replay("pre", 9)
    with pytest.raises(ConfigError, match=r"nearest legal value is 1"):
        replay("pre", 0)
    with pytest.raises(DataError, match=r"store has no run\.toml"):
        replay("store", 1)
    values = settings("pretrain", "pruned", **{**EVERY_3, "checkpoint.keep_last": 1})
    assert main(words("pretrain", values)) == 0
    with pytest.raises(
        CheckpointError, match=r"before it; the legal steps are 1 to 3 from.*after 8 "
    ):
        replay("pruned", 8)
    copy = _copy("pre", tmp_path)
    text = (copy / "run.toml").read_text().replace('path = "store"', 'path = "gone"')
    (copy / "run.toml").write_text(text)
    with pytest.raises(DataError, match="gone"):
        replay(copy, 2)


def test_a_run_of_several_ranks_asks_for_as_many(world, capsys):
    place = shutil.copytree("pre", "pre-of-4")
    run = Run.load(Path(place) / "run.toml")
    layout = run.layout.model_copy(update={"pp": 2})
    run.model_copy(update={"layout": layout}).save(Path(place) / "run.toml")
    last = sorted(Path(place).glob("checkpoints/step-*/state.json"))[-1]
    state = json.loads(last.read_text())
    state["extra"]["machine"]["ranks"] = 4
    last.write_text(json.dumps(state))
    command = ["replay", str(place), "--step", "2"]
    assert main(command) == 2
    assert "pre-of-4 is a run of 4 ranks, and this is one" in (err := capsys.readouterr().err)
    assert "give --nproc 4" in err
    assert main([*command, "--nproc", "3"]) == 2
    assert "layout.pp=2 must divide the number of ranks, 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("grpo", "sampled and judged while it ran.*samples.jsonl"),
        ("ppo", "sampled and judged while it ran.*samples.jsonl"),
        ("online-dpo", "sampled and judged while it ran.*samples.jsonl"),
        ("dpo", "what a reference said of each answer.*sample_ids"),
        ("reward", "scores at the end of answers.*sample_ids"),
        ("sft", None),
        ("pretrain", None),
    ],
)
def test_which_methods_can_be_replayed(kind, reason, tmp_path):
    """By the recipe alone, before anything else of the run is read."""
    run = Run.parse({"method": {"kind": kind}}, {"dir": str(tmp_path)})
    run.save(tmp_path / "run.toml")
    if reason is None:
        assert load_run(tmp_path).method.kind == kind
    else:
        with pytest.raises(ConfigError, match=f"is a {kind} run: .*{reason}.*can be replayed"):
            load_run(tmp_path)
