"""`stepwell reward`: what it learns, in which order, what it says of held-out rows; resuming."""

import json
import os
from pathlib import Path

import pytest
import torch

from stepwell.cli import main
from stepwell.config import Run
from stepwell.metrics import read_events
from stepwell.parallel.mesh import Mesh, init_distributed
from stepwell.posttrain.reward_model.heldout import evaluate, ratio_interval, score_rows
from stepwell.posttrain.reward_model.losses import at_places
from stepwell.posttrain.reward_model.model import open_scorer
from stepwell.posttrain.reward_model.rows import pack, rows_of_step
from stepwell.posttrain.reward_model.train import reward
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from stepwell.train.guard_events import replay_command
from stepwell.types import ConfigError, DataError
from tests import runs
from tests.parallel.ranks import run_ranks
from tests.reward_rows import pair_rows, run_of, settings, step_rows, usable_rows
from tests.runs import final_weights, finish, killed, measured, words, write_rows

ALONE = Mesh(1, 0, 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    for name, rows in (("pairs", pair_rows), ("steps", step_rows)):
        write_rows(folder / f"{name}.jsonl", rows(0, 96))
        write_rows(folder / f"held_{name}.jsonl", rows(1, 40))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def train(folder: str, rows: str = "pairs", /, **more) -> tuple[Run, list[dict]]:
    run = run_of(folder, rows, **more)
    reward(run, Tokenizer.load("tokenizer"))
    return run, measured(Path(folder))


# --- what is learnt ------------------------------------------------------------------------------


def test_pairs_are_told_apart_and_the_trained_model_scores_texts(world):
    more = {"data.heldout_path": "held_pairs.jsonl", "train.eval_every": 15}
    run, lines = train("told", **more, **{"method.centre_coef": 0.01})
    first, last = (next(x for x in ls if "eval/loss" in x) for ls in (lines, lines[::-1]))
    assert (first["step"], last["step"]) == (15, 30)
    assert last["eval/accuracy"] > 0.9
    assert last["eval/accuracy_low"] <= last["eval/accuracy"] <= last["eval/accuracy_high"]
    assert last["eval/margin"] > 1
    tokenizer = Tokenizer.load("tokenizer")
    rows, _ = usable_rows(run, "held_pairs.jsonl", tokenizer)
    scorer = open_scorer(["told"], ALONE, 64, compute="fp32", tokenizer=tokenizer)
    chosen = scorer.score([row.chosen[0] for row in rows])
    rejected = scorer.score([row.rejected[0] for row in rows])
    accuracy = (chosen > rejected).float().mean().item()
    assert accuracy == pytest.approx(last["eval/accuracy"], abs=1e-6)
    both = torch.cat([chosen, rejected])
    assert both.mean().item() == pytest.approx(last["eval/score_mean"], abs=1e-4)
    assert both.std().item() == pytest.approx(last["eval/score_sd"], abs=1e-4)
    (member,) = scorer.members
    assert member.mean is not None
    assert member.sd is not None
    assert member.mean == last["eval/score_mean"]
    # An ensemble of it and itself: standardised, and of one mind.
    twice = open_scorer(["told", "told"], ALONE, 64, "mean-k-sd", compute="fp32")
    assert twice.standardises
    wanted = (chosen - member.mean) / member.sd
    torch.testing.assert_close(twice.score([r.chosen[0] for r in rows]), wanted)
    assert twice.disagreement([rows[0].chosen[0]]).item() == 0


def test_steps_are_told_apart_in_one_pass_over_a_row(world):
    more = {"method.objective": "process", "data.heldout_path": "held_steps.jsonl"}
    run, lines = train("steps", "steps", **more, **{"train.eval_every": 30})
    last = next(line for line in lines[::-1] if "eval/loss" in line)
    assert last["eval/accuracy"] > 0.9
    assert last["eval/first_error"] > 0.7
    rows, _ = usable_rows(run, "held_steps.jsonl", Tokenizer.load("tokenizer"))
    scorer = open_scorer(["steps"], ALONE, 64, compute="fp32")
    found = scorer.step_scores([row.ids for row in rows], [row.step_ends for row in rows])
    judged = [
        (chance > 0.5) == (label > 0.5)
        for row, chances in zip(rows, found, strict=True)
        for chance, label in zip(chances, row.labels, strict=True)
        if label is not None
    ]
    assert sum(judged) / len(judged) == pytest.approx(last["eval/accuracy"])
    assert len(judged) == sum(x is not None for row in rows for x in row.labels)


@pytest.mark.parametrize(
    ("objective", "num_labels", "label"),
    [
        ("regression", 1, lambda ok: 1.5 if ok else -0.5),
        ("classification", 1, bool),
        ("classification", 3, lambda ok: 2 if ok else 0),
    ],
)
def test_labels_are_learnt(world, objective, num_labels, label):
    for name, seed in (("labels", 0), ("held_labels", 1)):
        rows = [
            {"prompt": row["prompt"], "completion": row[key], "label": label(key == "chosen")}
            for row in pair_rows(seed, 40)
            for key in ("chosen", "rejected")
        ]
        write_rows(Path(f"{name}.jsonl"), rows)
    more = {"method.objective": objective, "model.num_labels": num_labels}
    held = {"data.heldout_path": "held_labels.jsonl", "train.eval_every": 40, "train.steps": 40}
    _, lines = train(f"{objective}{num_labels}", "labels", **more, **held)
    last = next(line for line in lines[::-1] if "eval/loss" in line)
    if objective == "regression":
        assert last["eval/correlation"] > 0.9
        assert last["eval/error"] < 0.4
    else:
        assert last["eval/accuracy"] > 0.9


# --- rows ----------------------------------------------------------------------------------------


def test_a_truth_value_beside_minus_100_is_not_true(world):
    """-100 and null say that nobody judged; they are neither right nor wrong, nor counted."""
    labels = [[True, -100, False], [None, 0.25], [-100, -100]]
    write_rows(
        Path("mixed.jsonl"),
        [{"prompt": "1=", "completions": ["a"] * len(ls), "labels": ls} for ls in labels],
    )
    run = run_of("x", "mixed", **{"method.objective": "process"})
    rows, drops = usable_rows(run, "mixed.jsonl", Tokenizer.load("tokenizer"))
    assert drops.by_reason == {"unlabelled": 1}
    batch = pack(rows, run, 0, [0, 1])
    assert sorted(at_places(batch.extra["label"], batch).tolist()) == [0.0, 0.25, 1.0]
    write_rows(
        Path("mixed.jsonl"),
        [{"prompt": "1=", "completion": "a", "label": x} for x in (True, -100, False, None)],
    )
    run = run_of("x", "mixed", **{"method.objective": "classification"})
    rows, drops = usable_rows(run, "mixed.jsonl", Tokenizer.load("tokenizer"))
    assert [row.label for row in rows] == [1, 0]
    assert drops.by_reason == {"unlabelled": 2}


def test_a_score_is_read_at_the_last_token(world):
    run, tokenizer = run_of("x"), Tokenizer.load("tokenizer")
    rows, _ = usable_rows(run, "pairs.jsonl", tokenizer)
    batch = pack(rows[:5], run, tokenizer.pad_id, range(5))
    last = at_places(batch.tokens_BT, batch)
    assert len(last) == 10
    assert set(last.tolist()) == {tokenizer.eos_id}
    # The whole document is seen: its positions end with its length.
    lengths = sorted(len(d[0]) for row in rows[:5] for d in (row.chosen, row.rejected))
    assert sorted((at_places(batch.positions_BT, batch) + 1).tolist()) == lengths


def test_every_epoch_takes_each_row_once_in_an_order_of_its_own(world):
    run = run_of("x", **{"method.rows_per_step": 7})
    taken = [i for step in range(30) for i in rows_of_step(run, 10, 7 * step)]
    epochs = [taken[i : i + 10] for i in range(0, 210, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 15
    other = run_of("x", **{"method.rows_per_step": 7, "train.seed": 1})
    assert rows_of_step(other, 10, 0) != rows_of_step(run, 10, 0)
    plain = run_of("x", **{"method.rows_per_step": 7, "data.order": "sequential"})
    assert rows_of_step(plain, 10, 7) == [7, 8, 9, 0, 1, 2, 3]


def test_what_the_knobs_do_to_rows(world):
    tokenizer = Tokenizer.load("tokenizer")

    def rows(name="pairs", **more):
        run = run_of("x", name, **{f"method.{k}": v for k, v in more.items()})
        return usable_rows(run, f"{name}.jsonl", tokenizer)[0], run

    assert len(rows(max_rows=5)[0]) == 5
    assert max(len(r.chosen[0]) for r in rows()[0]) > 8
    assert max(len(d[0]) for r in rows(max_length=8)[0] for d in (r.chosen, r.rejected)) == 8
    assert max(len(r.prompt_ids) for r in rows(max_prompt_tokens=2)[0]) == 2
    assert max(len(r.prompt_ids) for r in rows()[0]) > 2
    steps, _ = rows("steps", objective="process", step_separator=" =")
    assert all(tokenizer.decode(s).endswith(" =") for row in steps for s in row.steps)
    plain, run = rows()
    assert not pack(plain[:9], run, 0, range(9)).extra["margin"].any()
    wide, run = rows(margins=True)
    assert pack(wide[:9], run, 0, range(9)).extra["margin"].any()
    write_rows(Path("bare.jsonl"), [{"prompt": "1", "chosen": "2", "rejected": "3"}])
    with pytest.raises(DataError, match="1 of 1 pairs .* have no number `margin`"):
        rows("bare", margins=True)


def test_margins_and_centring_change_what_is_learnt(world):
    held = {"data.heldout_path": "held_pairs.jsonl", "train.eval_every": 30}

    def last(folder, **more):
        lines = train(folder, **held, **{f"method.{k}": v for k, v in more.items()})[1]
        return next(line for line in lines[::-1] if "eval/loss" in line)

    plain, wide, centred = last("plain"), last("wide", margins=True), last("mid", centre_coef=0.5)
    assert wide["eval/margin"] > plain["eval/margin"] + 0.1
    assert abs(centred["eval/score_mean"]) < 0.3 * abs(plain["eval/score_mean"])


# --- held-out rows -------------------------------------------------------------------------------


def evaluated(run: Run, path: str) -> tuple[dict, torch.Tensor]:
    """Runs in each rank."""
    mesh = init_distributed(run.layout)
    tokenizer = Tokenizer.load("tokenizer")
    rows, _ = usable_rows(run, path, tokenizer)
    engine = Engine(run, mesh=mesh)
    return evaluate(engine, rows[:5], tokenizer.pad_id), score_rows(engine, rows[:5], 0).scores_MC


def test_ranks_evaluate_together_as_one_alone(world):
    run = run_of("x", **{"model.init": "none"})
    (one, scores), both = (
        evaluated(run, "held_pairs.jsonl"),
        run_ranks(evaluated, 2, run, str(world / "held_pairs.jsonl")),
    )
    for found, found_scores in both:
        torch.testing.assert_close(found_scores, scores, atol=1e-5, rtol=1e-5)
        assert found == pytest.approx(one, abs=1e-5)


def test_an_interval_over_whole_rows():
    low, high = ratio_interval([1.0] * 30, [2] * 30)
    assert low == high == 0.5
    narrow = ratio_interval([1.0, 0.0] * 50, [1] * 100)
    wide = ratio_interval([10.0, 0.0] * 5, [10] * 10)  # the same, but of ten rows
    assert wide[1] - wide[0] > 2 * (narrow[1] - narrow[0])
    assert wide[0] < 0.5 < wide[1]


# --- stopping and starting -----------------------------------------------------------------------


def test_killed_it_ends_as_if_undisturbed(world):
    """Several epochs, so that the resume lies past an epoch's end."""
    values = settings(
        "straight",
        **{
            "data.heldout_path": "held_pairs.jsonl",
            "train.eval_every": 10,
            "checkpoint.every_steps": 7,
        },
    )
    assert main(words("reward", values)) == 0
    broken = words("reward", values | {"dir": "broken"})
    killed(broken, world, world / "log", world / "broken", 18)
    assert finish(broken, world, world / "log")[0] == 0
    got, wanted = (measured(world / name) for name in ("broken", "straight"))
    assert got == wanted
    runs.assert_equal(final_weights(world / "broken"), final_weights(world / "straight"))


def test_other_rows_are_refused_and_dropped_ones_counted(world, capsys):
    write_rows(Path("mine.jsonl"), [*pair_rows(3, 20), {"prompt": "1"}])
    values = settings("mine", **{"data.path": "mine.jsonl", "train.steps": 2})
    assert main([*words("reward", values), "--check"]) == 0
    assert "1 row left out (1 missing_column)" in capsys.readouterr().out
    assert main(words("reward", values)) == 0
    (event,) = (e for e in read_events("mine") if e["event"] == "data")
    assert (event["rows"], event["kept"], event["dropped"]) == (21, 20, {"missing_column": 1})
    write_rows(Path("mine.jsonl"), pair_rows(4, 20))
    assert main(words("reward", values)) == 2
    assert "was trained on rows of another file" in capsys.readouterr().err
    assert main([*words("reward", values), "--fresh", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps_done"] == 2


def test_what_cannot_start_is_refused(world):
    tokenizer = Tokenizer.load("tokenizer")
    with pytest.raises(ConfigError, match=r"data\.path is not set"):
        reward(run_of("x", **{"data.path": "none"}), tokenizer)
    with pytest.raises(ConfigError, match="needs a model to start from"):
        reward(run_of("x", **{"model.init": "none"}), tokenizer)
    other = Tokenizer.train(["another text altogether"], 300)
    with pytest.raises(ConfigError, match="does not fit the model"):
        reward(run_of("x"), other)


# --- the configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("legal", "illegal", "message"),
    [
        ({"model.head": "score"}, {"model.head": "lm"}, "model.head='score'"),
        (
            {"method.objective": "classification", "model.num_labels": 2},
            {"model.num_labels": 2},
            "nearest legal value is 1",
        ),
        (
            {"method.objective": "process", "model.num_labels": 2},
            {"method.objective": "process", "model.num_labels": 3},
            "nearest legal value is 2",
        ),
        (
            {"method.margins": True},
            {"method.margins": True, "method.objective": "regression"},
            "method.margins=True belongs to pairs",
        ),
        (
            {"method.objective": "process", "method.step_separator": "\n\n"},
            {"method.step_separator": "\n\n"},
            "belongs to objective 'process'",
        ),
        (
            {"method.max_prompt_tokens": 9, "method.max_length": 10},
            {"method.max_prompt_tokens": 10, "method.max_length": 10},
            "the nearest legal value is 9",
        ),
        ({"method.max_length": 2}, {"method.max_length": 1}, "max_length"),
        (
            {"method.objective": "process", "method.step_separator": "x"},
            {"method.objective": "process", "method.step_separator": ""},
            "step_separator is empty",
        ),
    ],
)
def test_rules_between_keys(legal, illegal, message):
    Run.parse({"method": {"kind": "reward"}}, legal)
    with pytest.raises(ConfigError, match=message):
        Run.parse({"method": {"kind": "reward"}}, illegal)


def test_adapters_are_trained_together_with_the_score(world):
    more = {"lora.rank": 4, "data.heldout_path": "held_pairs.jsonl", "train.eval_every": 30}
    run, lines = train("adapters", **more)
    last = next(line for line in lines[::-1] if "eval/loss" in line)
    assert last["eval/accuracy"] > 0.9
    rows, _ = usable_rows(run, "held_pairs.jsonl", Tokenizer.load("tokenizer"))
    scorer = open_scorer(["adapters"], ALONE, 64, compute="fp32")
    chosen = scorer.score([row.chosen[0] for row in rows])
    rejected = scorer.score([row.rejected[0] for row in rows])
    found = (chosen > rejected).float().mean().item()
    assert found == pytest.approx(last["eval/accuracy"], abs=1e-6)


def test_its_steps_are_not_offered_for_a_replay(world, capsys):
    train("no_replay", **{"train.steps": 2})
    assert main(["replay", "no_replay", "--step", "1"]) == 2
    err = capsys.readouterr().err
    assert "no_replay is a reward run: " in err
    assert "pretrain and sft runs can be replayed" in err
    run = run_of("no_replay")
    assert replay_command(run, 1, [0]) is None
    sft = Run.parse({"method": {"kind": "sft"}}, {"dir": "x"})
    assert replay_command(sft, 1, [0]) == "stepwell replay x --step 1"
