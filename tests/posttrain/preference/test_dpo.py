"""`stepwell dpo`: the loop, its reference, its monitor, and what a resume must not change."""

import json
import math
import os
import random
from pathlib import Path

import pytest
import torch

from stepwell.cli import main
from stepwell.config import Run
from stepwell.metrics import read_events, read_metrics
from stepwell.posttrain.preference.dpo import dpo
from stepwell.posttrain.preference.rows import load_rows, step_numbers
from stepwell.posttrain.preference.scored_references import FILE, document_totals, read_scores
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.train.run_checkpoints import latest
from stepwell.train.weights import initial_weights
from stepwell.types import ConfigError, TrainingError
from tests import runs
from tests.parallel.ranks import run_jobs
from tests.runs import MODEL, finish, killed, measured, words, write_rows

BASE = {
    **MODEL,
    "model.init": "base",
    "data.path": "pairs.jsonl",
    "data.tokenizer": "tokenizer",
    "data.seq_len": 64,
    "precision.compute": "fp32",
    "train.micro_batch_rows": 2,
    "train.steps": 6,
    "optim.lr": 0.003,
    "method.pairs_per_step": 8,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{(7 * a + b) % 10}?"}
        for a in range(1, 9)
        for b in range(1, 9)
    ]
    write_rows(folder / "pairs.jsonl", rows[:44])
    write_rows(folder / "held.jsonl", rows[44:])
    labelled = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in rows
        for side in ("chosen", "rejected")
    ]
    write_rows(folder / "labelled.jsonl", labelled[:80])
    write_rows(folder / "labelled-held.jsonl", labelled[80:])
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def parse(folder: str, **values) -> Run:
    return Run.parse({"method": {"kind": "dpo"}}, {**BASE, "dir": folder, **values})


def train(folder: str, **values) -> list[dict]:
    run = parse(folder, **values)
    dpo(run, Tokenizer.load("tokenizer"))
    return read_metrics(folder)


EVAL = {"data.heldout_path": "held.jsonl", "train.eval_every": 3}


def test_it_starts_at_ln_2_and_learns(world):
    lines = train("plain", **EVAL, **{"train.steps": 12})
    first, last = lines[0], lines[-1]
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(first["train/rewards/margin"]) < 1e-6
    assert last["eval/loss"] < 0.6
    assert last["eval/rewards/accuracy_low"] <= last["eval/rewards/accuracy"]
    assert last["eval/rewards/accuracy"] <= last["eval/rewards/accuracy_high"]
    for side in ("chosen", "rejected"):
        assert last[f"eval/rewards/{side}"] == pytest.approx(
            0.1 * last[f"eval/logps/{side}_shift"], rel=1e-9
        )
    (event,) = [e for e in read_events("plain") if e["event"] == "data"]
    assert (event["rows"], event["kept"], event["dropped"], event["truncated"]) == (44, 44, {}, 0)


def test_in_bf16_a_policy_that_is_its_reference_has_a_loss_of_ln_2(world):
    """A separate reference computes the same; cached sums come from other rows, rounded apart."""
    values = {"train.steps": 1, "precision.compute": "bf16"}
    (separate,) = train("bf16-separate", **values, **{"method.reference": "separate"})
    assert separate["train/loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert separate["train/logps/chosen_shift"] == separate["train/rewards/margin"] == 0
    (cached,) = train("bf16-cached", **values)
    assert cached["train/loss"] == pytest.approx(math.log(2), abs=2e-3)


def test_evaluation_after_training_is_against_the_first_weights(world):
    """By hand, from the weights that the run began with and those that it ended with."""
    lines = train("evaluated", **EVAL)
    run, tokenizer = parse("evaluated", **EVAL), Tokenizer.load("tokenizer")
    rows, _ = load_rows(run, tokenizer)
    batch = rows.batch(rows.heldout, run, tokenizer.pad_id)
    first = Engine(run, initial_weights(run.model), frozen=True)
    last = Engine(run, runs.final_weights(world / "evaluated").items(), frozen=True)
    assert not torch.equal(first.logprobs(batch), last.logprobs(batch))
    old, new = (document_totals(e.logprobs(batch), batch) for e in (first, last))
    margin = 0.1 * ((new - old)[0::2] - (new - old)[1::2])
    wanted = -torch.nn.functional.logsigmoid(margin).mean().item()
    assert lines[-1]["eval/loss"] == pytest.approx(wanted, rel=1e-5)
    assert abs(wanted - math.log(2)) > 0.005


@pytest.mark.parametrize("kind", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_killed_twice_it_ends_as_if_undisturbed(world, kind):
    """Several epochs, so that a resume lies past an epoch's end; steps while scoring too."""
    values = {
        **BASE,
        **EVAL,
        "train.steps": 24,
        "train.eval_every": 10,
        "checkpoint.every_steps": 7,
        "method.loss.kind": kind,
    }
    if kind == "kto":
        values |= {"data.path": "labelled.jsonl", "data.heldout_path": "labelled-held.jsonl"}
    else:
        values["method.displacement_window"] = 6
    straight = words("dpo", {**values, "dir": f"straight-{kind}"})
    assert finish(straight, world, world / "log")[0] == 0
    broken = words("dpo", {**values, "dir": f"broken-{kind}"})
    for num_lines in (9, 19) if kind == "dpo" else (16,):
        killed(broken, world, world / "log", world / f"broken-{kind}", num_lines)
    assert finish(broken, world, world / "log")[0] == 0
    got, wanted = (measured(world / f"{name}-{kind}") for name in ("broken", "straight"))
    assert got == wanted
    final = [runs.final_weights(world / f"{name}-{kind}") for name in ("broken", "straight")]
    runs.assert_equal(*final)


def test_a_separate_reference_says_the_same_as_the_cached_one(world):
    for kind, more in (
        ("dpo", {}),
        ("kto", {"data.path": "labelled.jsonl", "data.heldout_path": "labelled-held.jsonl"}),
    ):
        values = {**EVAL, **more, "method.loss.kind": kind}
        cached = train(f"cached-{kind}", **values)
        separate = train(f"separate-{kind}", **values, **{"method.reference": "separate"})
        for one, other in zip(cached, separate, strict=True):
            for key in one:
                if key.startswith(("train/loss", "train/rewards", "train/kl", "eval/")):
                    assert one[key] == pytest.approx(other[key], abs=2e-5, rel=1e-5), key
        assert not (world / f"separate-{kind}" / FILE).exists()


def losses_of_ranks(folder: str, kind: str, path: str) -> list[float]:
    torch.set_num_threads(1)
    values = {"method.loss.kind": kind, "data.path": path, "layout.dp_shard": -1}
    dpo(parse(folder, **values), Tokenizer.load("tokenizer"))
    return [line["train/loss"] for line in read_metrics(folder)]


def test_two_ranks_train_alike(world):
    paths = {"dpo": "pairs.jsonl", "kto": "labelled.jsonl"}
    jobs = {k: (losses_of_ranks, f"two-{k}", k, path) for k, path in paths.items()}
    for kind, found in run_jobs(2, **jobs).items():
        wanted = losses_of_ranks(f"one-{kind}", kind, paths[kind])
        assert found[0] == pytest.approx(wanted, abs=2e-5)


def test_scores_of_another_run_are_taken(world):
    train("scored", **{"train.steps": 2})
    train("borrowed", **{"train.steps": 2, "method.reference_from": "scored"})
    scored, borrowed = (read_scores(world / name / FILE) for name in ("scored", "borrowed"))
    assert scored is not None
    assert borrowed is not None
    assert scored[0] == borrowed[0]
    assert scored[1].tolist() == borrowed[1].tolist()
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    write_rows(Path("other.jsonl"), rows[::-1])
    with pytest.raises(ConfigError, match="other documents"):
        train("stale", **{"data.path": "other.jsonl", "method.reference_from": "scored"})
    assert not (world / "stale" / "run.toml").exists()


def test_other_pairs_on_a_resume_are_refused(world, capsys):
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    write_rows(Path("mine.jsonl"), rows)
    values = {**BASE, "dir": "changed", "data.path": "mine.jsonl", "checkpoint.every_steps": 2}
    assert main(words("dpo", values)) == 0
    (world / "changed" / FILE).unlink()
    train("changed", **{"data.path": "mine.jsonl", "checkpoint.every_steps": 2})
    write_rows(Path("mine.jsonl"), rows[1:])
    assert main(words("dpo", values)) == 2
    assert "was trained on other rows" in capsys.readouterr().err
    assert main([*words("dpo", values), "--fresh"]) == 0


def test_what_cannot_be_trained_on_is_refused(world):
    with pytest.raises(ConfigError, match=r"data\.path is not set"):
        train("refused", **{"data.path": "none"})
    with pytest.raises(ConfigError, match="the nearest legal value is 44"):
        train("refused", **{"method.pairs_per_step": 45})
    with pytest.raises(ConfigError, match="the nearest legal value is 22"):
        train("refused", **{"method.pairs_per_step": 23, "method.drop_ches": 0.5})
    with pytest.raises(ConfigError, match=r"data\.heldout_path"):
        train("refused", **{"data.heldout": '[{path = "heldout"}]', "train.eval_every": 2})
    with pytest.raises(ConfigError, match=r"lora\.rank=0"):
        train("refused", **{"method.reference": "adapter-off"})
    one_label = [{"prompt": f"{i}=", "completion": "7", "label": True} for i in range(9)]
    write_rows(Path("happy.jsonl"), one_label)
    with pytest.raises(ConfigError, match="all 9 answers"):
        train("refused", **{"data.path": "happy.jsonl", "method.loss.kind": "kto"})
    same = [{"prompt": "1=", "completion": str(i), "label": i % 2 == 0} for i in range(9)]
    write_rows(Path("same.jsonl"), same)
    with pytest.raises(ConfigError, match="no answer to another prompt"):
        train("refused", **{"data.path": "same.jsonl", "method.loss.kind": "kto"})
    assert not list(Path("refused").glob("*.toml"))


def test_epochs_bound_the_steps(world):
    assert len(train("epochs", **{"method.epochs": 0.5, "train.steps": 100})) == 3


def test_every_pair_once_an_epoch_in_any_order():
    seen = [i for batch in range(11) for i in step_numbers(44, 8, 3, batch)]
    assert sorted(seen[:44]) == sorted(seen[44:88]) == list(range(44))
    assert seen[:44] != seen[44:88]
    assert step_numbers(44, 8, 4, 0) != step_numbers(44, 8, 3, 0)
    assert step_numbers(3, 8, 0, 0)[:3] != []


@pytest.mark.parametrize("kind", ["simpo", "orpo", "cpo"])
def test_without_a_reference_nothing_is_scored(world, kind):
    lines = train(f"free-{kind}", **{"method.loss.kind": kind})
    assert not (world / f"free-{kind}" / FILE).exists()
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    assert "train/logps/chosen_shift" not in lines[0]


def test_the_command_line(world, capsys):
    values = {**BASE, "dir": "cli", "train.steps": 1}
    command = [*words("dpo", values), "--loss.kind", "ipo"]
    assert main([*command, "--check"]) == 0
    assert not (world / "cli" / "checkpoints").exists()
    assert main(command) == 0
    assert read_metrics("cli")[0]["train/loss"] == pytest.approx(25.0, abs=1e-3)
    assert main([*words("dpo", {**values, "dir": "scores"}), "--method.ches"]) == 0
    lines = [json.loads(line) for line in Path("scores/ches.jsonl").read_text().splitlines()]
    assert len(lines) == 44
    assert not any(line["dropped"] for line in lines)
    assert lines[0]["ches_normalised"] >= lines[-1]["ches_normalised"]
    capsys.readouterr()


LORA = {"lora.rank": 4, "lora.targets": r'["blocks\\.\\d+\\.attn\\.w[qv]"]'}


def test_adapters_are_their_own_reference_until_they_are_trained(world):
    """Left out, they give what was cached before the first step. Another run that starts from the
    trained ones has these as its reference."""
    cached = train("adapters", **LORA, **EVAL)
    left_out = train("adapter-off", **LORA, **EVAL, **{"method.reference": "adapter-off"})
    for one, other in zip(cached, left_out, strict=True):
        key = "train/loss" if "train/loss" in one else "eval/loss"
        assert one[key] == pytest.approx(other[key], abs=2e-6)
    assert cached[-1]["eval/loss"] < math.log(2) - 1e-3
    again = train("again", **LORA, **EVAL, **{"lora.init": "adapters"})
    assert again[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert again[0]["train/logps/chosen"] != pytest.approx(cached[0]["train/logps/chosen"])
    separate = {"lora.init": "adapters", "method.reference": "separate"}
    other = train("again-separate", **LORA, **EVAL, **separate)
    assert other[-1]["eval/loss"] == pytest.approx(again[-1]["eval/loss"], abs=2e-6)


# --- likelihood displacement ---------------------------------------------------------------------

NUM_NEAR, NUM_FAR = 96, 32
WATCHED = {
    "train.steps": 45,
    "optim.lr": 0.0015,
    "method.pairs_per_step": 16,
    "method.displacement_window": 12,
    "train.micro_batch_rows": 8,
}


@pytest.fixture(scope="module")
def taught(world):
    """A model that has begun to learn the chosen answers; pairs that differ in one token, that are
    nothing alike, and both."""
    rng = random.Random(0)
    answers = [
        (f"{rng.randrange(1000)}=", "".join(rng.choice("123456789+= ") for _ in range(8)))
        for _ in range(NUM_NEAR + NUM_FAR)
    ]
    near = [
        {"prompt": p, "chosen": c, "rejected": rng.choice([x for x in "1234" if x != c[0]]) + c[1:]}
        for p, c in answers
    ]
    far = [
        {"prompt": p, "chosen": c, "rejected": "".join(rng.choice("the is sum") for _ in range(8))}
        for p, c in answers
    ]
    write_rows(world / "near.jsonl", near)
    write_rows(world / "far.jsonl", far)
    write_rows(world / "mixed.jsonl", near[:NUM_NEAR] + far[NUM_NEAR:])
    write_rows(world / "taught.jsonl", [{"prompt": p, "completion": c} for p, c in answers])
    values = {
        **{k: v for k, v in BASE.items() if not k.startswith("method.")},
        "data.path": "taught.jsonl",
        "dir": "taught",
        "train.steps": 20,
        "train.global_batch_rows": 8,
        "optim.lr": 0.01,
    }
    assert main(words("sft", values)) == 0
    return {**WATCHED, "model.init": str(latest(world / "taught"))}


def alarms(folder: str) -> list[dict]:
    return [e for e in read_events(folder) if e["event"] == "displacement"]


def shift(lines: list[dict]) -> float:
    return sum(line["train/logps/chosen_shift"] for line in lines[-5:]) / 5


def test_near_identical_pairs_raise_the_alarm_and_unlike_ones_do_not(taught):
    near, far = (
        train(name, **taught, **{"data.path": f"{name}.jsonl"}) for name in ("near", "far")
    )
    (alarm,) = alarms("near")
    assert shift(near) < -5
    assert alarm["chosen"] < -3
    assert "drop_ches" in alarm["advice"]
    assert alarms("far") == []
    assert shift(far) > -3


@pytest.mark.parametrize("values", [{"kind": "dpop"}, {"sft_coef": 1.0}])
def test_dpo_positive_and_sft_repair_it(taught, values):
    loss = {f"method.loss.{k}": v for k, v in values.items()}
    name = "repaired-" + "-".join(values)
    lines = train(name, **taught, **loss, **{"data.path": "near.jsonl"})
    assert alarms(name) == []
    assert shift(lines) > -1
    assert lines[-1]["train/rewards/margin"] > 0


def test_filtering_by_ches_repairs_it(taught):
    values = {**taught, "data.path": "mixed.jsonl"}
    before = train("mixed", **values)
    share = NUM_NEAR / (NUM_NEAR + NUM_FAR)
    after = train("filtered", **values, **{"method.drop_ches": share + 1e-6})
    assert len(alarms("mixed")) == 1
    assert alarms("filtered") == []
    assert shift(after) > shift(before) + 2
    lines = [json.loads(line) for line in Path("filtered/ches.jsonl").read_text().splitlines()]
    dropped = [line["pair"] for line in lines if line["dropped"]]
    assert len(dropped) == NUM_NEAR
    assert sum(pair < NUM_NEAR for pair in dropped) >= 0.9 * NUM_NEAR
    # A resume leaves out the same pairs, also where their scores are gone.
    Path("filtered/ches.jsonl").unlink()
    assert dpo(parse("filtered", **values, **{"method.drop_ches": share + 1e-6}),
               Tokenizer.load("tokenizer")) == 0  # fmt: skip


def test_the_alarm_may_stop_the_run_or_be_ignored(taught):
    values = {**taught, "data.path": "near.jsonl"}
    with pytest.raises(TrainingError, match="likelihood displacement"):
        train("stopped", **values, **{"method.displacement": "stop"})
    (alarm,) = alarms("stopped")
    assert len(read_metrics("stopped")) < 45
    values["train.steps"] = alarm["step"]
    del values["method.displacement_window"]
    assert len(train("ignored", **values, **{"method.displacement": "ignore"})) == alarm["step"]
    assert alarms("ignored") == []
