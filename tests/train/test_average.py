"""Averages of checkpoints: the weights they count with, what is written, and what it does."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stepwell.cli import main
from stepwell.config import Run
from stepwell.data.store import TokenStore
from stepwell.models.flops import parameter_shapes
from stepwell.models.hf import load_hf, read_hf_config
from stepwell.tokenizer import Tokenizer
from stepwell.train.average import averaged, check_alike, choose, merge_weights
from stepwell.train.checkpoint import load_weights
from stepwell.train.engine import Engine
from stepwell.train.heldout import heldout_loss, heldout_windows
from stepwell.train.run_checkpoints import step_folder
from stepwell.types import CheckpointError, ConfigError
from tests import runs
from tests.runs import MODEL, settings, words, write_store

KEPT = {
    "train.steps": 12,
    "checkpoint.every_steps": 2,
    "checkpoint.keep_last": 9,
    "data.tokenizer": "tokenizer",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    assert main(words("pretrain", settings("pretrain", "run", **KEPT))) == 0
    wide = {**KEPT, "model.d_ff": 96, "train.steps": 2}
    assert main(words("pretrain", settings("pretrain", "wide", **wide))) == 0
    yield folder
    os.chdir(before)


# --- how much each counts ------------------------------------------------------------------------


def test_uniform_and_ema():
    assert merge_weights("uniform", [1, 5, 6, 9]) == [0.25] * 4
    assert merge_weights("ema", [1, 2, 3], 0.5) == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    assert merge_weights("ema", [1, 2], 1.0) == [0.5, 0.5]


@pytest.mark.parametrize("steps", [[0, 10], [100, 200, 300, 400], [3, 4, 50, 51, 90]])
def test_1_sqrt_counts_every_update_as_the_decay_would(steps):
    """With d_j the mean rate of an interval and u_j its update, the sum of c_k * (u_1 + ... + u_k)
    is the sum of d_j * u_j."""
    weights = merge_weights("1-sqrt", steps)
    assert sum(weights) == pytest.approx(1)
    assert min(weights) > 0
    length = steps[-1] - steps[0]
    for j in range(1, len(steps)):
        inside = range(steps[j - 1] * 1000, steps[j] * 1000)
        rates = [1 - math.sqrt((s / 1000 - steps[0]) / length) for s in inside]
        assert sum(weights[j:]) == pytest.approx(sum(rates) / len(rates), abs=1e-4)


def test_1_sqrt_needs_ascending_steps():
    with pytest.raises(ConfigError, match="must ascend: 3, 2"):
        merge_weights("1-sqrt", [3, 2])


def test_for_constant_gradients_the_average_is_the_decay():
    """SGD on a linear loss: the average of a constant rate's checkpoints is where the same steps
    end under the 1-sqrt decay."""
    gradient, start, lr, num_steps = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 4.0]), 0.1, 64
    steps = list(range(0, num_steps + 1, 8))
    points = [start - lr * step * gradient for step in steps]
    weights = merge_weights("1-sqrt", steps)
    merged = sum(w * p for w, p in zip(weights, points, strict=True))
    middle = [1 - math.sqrt((step + 0.5) / num_steps) for step in range(num_steps)]
    assert torch.allclose(torch.as_tensor(merged), start - lr * sum(middle) * gradient, atol=2e-2)


# --- what is written -----------------------------------------------------------------------------


def test_the_average_is_the_mean_of_the_weights(world, capsys):
    assert main(["average", "run", "--last", "3", "--out", "mean", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [part["step"] for part in told["checkpoints"]] == [8, 10, 12]
    model = Run.load("run/run.toml").model
    folders = [step_folder("run", step) for step in (8, 10, 12)]
    parts = [dict(load_weights(folder, parameter_shapes(model))) for folder in folders]
    wanted = {k: torch.stack([p[k] for p in parts]).double().mean(0) for k in parts[0]}
    for name, value in averaged(folders, [1 / 3] * 3, model):
        assert value.dtype == torch.float32
        assert torch.allclose(value.double(), wanted[name], atol=1e-6), name
    stored = load_file("mean/model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float32}
    embed = stored["model.embed_tokens.weight"].double()
    assert torch.allclose(embed, wanted["embed.weight"], atol=1e-6)


def test_other_commands_take_it(world, capsys):
    Path("text.txt").write_text("1+1=2 is the sum of them " * 9)
    assert main(["average", "run", "--from-step", "6", "--weights", "1-sqrt", "--out", "m"]) == 0
    assert "step        12" in capsys.readouterr().out
    assert main(["eval", "m", "--text", "text.txt", "--json"]) == 0
    assert main(["export", "m", "--out", "exported"]) == 0
    assert main(["generate", "m", "--prompt", "1+1=", "--max-new-tokens", "3"]) == 0
    on = settings("pretrain", "tuned", **{"model.init": "m", "train.steps": 1})
    model = [key for key in on if key.startswith("model.") and key != "model.init"]
    assert main(words("pretrain", {k: v for k, v in on.items() if k not in model})) == 0
    capsys.readouterr()
    assert main(["average", "run", "--last", "2", "--out", "m"]) == 4
    assert "--overwrite" in capsys.readouterr().err
    assert main(["average", "run", "--last", "2", "--out", "m", "--overwrite"]) == 0


def test_named_checkpoints_of_branches(world):
    points = [str(step_folder("run", step)) for step in (4, 12)]
    assert main(["average", *points, "--weights", "ema", "--out", "two"]) == 0
    assert Path("two/tokenizer.json").exists()


def test_it_lowers_the_loss_at_a_constant_rate(world):
    """The effect: where nothing can be learnt but the rate keeps the weights wandering, the mean is
    better than the last."""
    values = {
        **KEPT,
        "train.steps": 40,
        "checkpoint.every_steps": 3,
        "checkpoint.keep_last": 8,
        "checkpoint.asynchronous": False,
        "optim.lr": 0.3,
        "guard.action": "none",
        "data.sources": '[{path = "noise"}]',
    }
    write_store(world / "noise", 9, 2000, Tokenizer.load("tokenizer").fingerprint)
    assert main(words("pretrain", settings("pretrain", "wander", **values))) == 0
    run = Run.load("wander/run.toml")
    rows = heldout_windows([(TokenStore.open("heldout"), 1.0)], 32, 24, True)
    folders = choose("wander", 8, None)
    shapes = parameter_shapes(run.model)
    last = heldout_loss(Engine(run, load_weights(folders[-1], shapes)), rows)["eval/loss"]
    losses = {}
    for kind in ("uniform", "1-sqrt", "ema"):
        weights = merge_weights(kind, [int(f.name[5:]) for f in folders])
        losses[kind] = heldout_loss(Engine(run, averaged(folders, weights, run.model)), rows)
        assert losses[kind]["eval/loss"] < last - 0.01, (kind, last, losses)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["run", "--last", "7"], 4, ["finds 6", "2, 4, 6, 8, 10, 12", "--last 6", "keep_last"]),
        (["run", "--last", "1"], 2, ["--last 1 must be at least 2"]),
        (["run", "--from-step", "12"], 4, ["finds 1", "--from-step 10"]),
        (["run"], 2, ["--last K, or --from-step STEP"]),
        (["run", "--last", "2", "--from-step", "2"], 2, ["exclude each other"]),
        (["run", "--last", "2", "--ema-decay", "0"], 2, ["--ema-decay 0.0", "above 0"]),
        (["wide", "--last", "2"], 4, ["finds 1", "an average takes at least 2"]),
        ([], 2, ["no run"]),
        (["run/checkpoints/step-00000002"], 4, ["no average; name at least 2"]),
        (["run", "wide"], 2, ["stands alone"]),
        (
            ["run/checkpoints/step-00000002", "wide/checkpoints/step-00000002"],
            4,
            ["another architecture", "d_ff is 64 in the first and 96 in this"],
        ),
    ],
)
def test_refusals(world, capsys, arguments, code, named):
    assert main(["average", *arguments, "--out", "refused"]) == code
    error = capsys.readouterr().err
    for part in named:
        assert part in error
    assert not Path("refused").exists()


def test_the_longest_legal_choices_are_taken(world):
    assert len(choose("run", 6, None)) == 6
    assert [folder.name for folder in choose("run", None, 10)] == ["step-00000010", "step-00000012"]


def test_a_damaged_checkpoint_is_named(world):
    folders = [step_folder("run", step) for step in (2, 4)]
    path = next(folders[0].glob("__0_*"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="step-00000002 is damaged"):
        averaged(folders, [0.5, 0.5], check_alike(folders))
    path.write_bytes(whole)


@pytest.mark.parametrize("head", ["score", "both"])
def test_a_score_is_averaged_and_written_as_what_it_is(world, head):
    method = {
        "score": {"method.kind": "reward"},
        "both": {"method.kind": "ppo", "method.verifier": "exact", "method.critic": "shared"},
    }[head]
    run = Run.parse({}, {**MODEL, **method, "model.head": head})
    for name in ("1", "2"):
        Engine(run).save(world / head / name, {}).wait()
    arguments = [f"{head}/1", f"{head}/2", "--out", f"mean-{head}", "--tokenizer", "tokenizer"]
    assert main(["average", *arguments]) == 0
    cfg = read_hf_config(world / f"mean-{head}")
    assert cfg.head == {"score": "score", "both": "lm"}[head]
    found = dict(load_hf(world / f"mean-{head}", parameter_shapes(cfg)))
    assert ("score.weight" in found) == (head == "score")


def test_the_same_checkpoint_twice_is_refused_unrelated_runs_are_warned_of(world, capsys):
    third, last = "run/checkpoints/step-00000006", "run/checkpoints/step-00000012"
    assert main(["average", third, last, f"./{third}", "--out", "refused"]) == 4
    assert f"{third} is named twice" in capsys.readouterr().err
    other = settings("pretrain", "other", **{**KEPT, "train.seed": 99})
    assert main(words("pretrain", other)) == 0
    branch = {**KEPT, "train.steps": 14, "checkpoint.branch_from": "run"}
    assert main(words("pretrain", settings("pretrain", "branched", **branch))) == 0
    capsys.readouterr()
    for name, related in (("branched", True), ("other", False)):
        step = "step-00000014" if related else "step-00000012"
        points = [third, f"{name}/checkpoints/{step}"]
        assert main(["average", *points, "--out", f"with-{name}", "--json"]) == 0
        shown = capsys.readouterr()
        assert (json.loads(shown.out)["warnings"] == []) == related
        assert ("is of another run" in shown.err) != related
