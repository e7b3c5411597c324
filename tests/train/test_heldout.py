"""Held-out loss during training: its value, its rows, and that it changes nothing else."""

import math
import os
from pathlib import Path

import pytest
import torch

from stepwell.config import Run
from stepwell.data.batch import concat
from stepwell.data.store import TokenStore
from stepwell.metrics import read_lines
from stepwell.models.transformer import ForwardOptions
from stepwell.train.engine import Engine
from stepwell.train.heldout import (
    heldout_conversations,
    heldout_loss,
    heldout_windows,
    without_repeats,
)
from stepwell.train.pretrain import pretrain
from stepwell.train.run_checkpoints import read_state
from stepwell.types import ConfigError, DataError
from tests import runs
from tests.oracle import base_run, global_batch
from tests.parallel.ranks import run_ranks
from tests.runs import final_weights, killed, measured, settings, words

HELDOUT = {"data.heldout": '[{path = "heldout"}]', "train.eval_rows": 5}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def score(run):
    return heldout_loss(Engine(run), global_batch())


def test_value_equals_a_plain_computation_on_any_number_of_ranks():
    """A mean over all tokens, not over rows, micro-batches or ranks: their token counts differ."""
    run = base_run(**{"train.micro_batch_rows": 2})
    engine, batch = Engine(run), global_batch()
    total, count = 0.0, 0.0
    for row in range(batch.num_rows):
        one = batch.rows(row, row + 1)
        options = ForwardOptions(needs=frozenset({"logits"}), dtype=torch.float64)
        logits = engine.decoder(
            one.tokens_BT, one.positions_BT, one.cu_seqlens(), one.targets_BT, options=options
        ).logits_BTV[0]
        nll = -logits.log_softmax(-1)[torch.arange(len(logits)), one.targets_BT[0]]
        total += (nll * one.weights_BT[0]).sum().item()
        count += one.weights_BT[0].sum().item()
    expected = {"eval/loss": total / count, "eval/bits_per_token": total / count / math.log(2)}
    assert score(run) == pytest.approx(expected, rel=1e-6)
    for num_ranks in (2, 3):
        for found in run_ranks(score, num_ranks, run):
            assert found == pytest.approx(expected, rel=1e-6)
    with pytest.raises(DataError, match="none of the 7 held-out rows has a token with loss"):
        heldout_loss(engine, batch.masked())


def test_rows_are_fixed_and_none_is_scored_twice(world):
    stores = [(TokenStore.open("heldout"), 3.0), (TokenStore.open("best"), 1.0)]
    few = heldout_windows(stores, 32, 8, document_mask=True)
    assert few.sample_ids == heldout_windows(stores, 32, 8, document_mask=True).sample_ids
    first = (stores[0][0].num_tokens - 1) // 32
    assert sum(sample < first for sample in few.sample_ids) == 6
    everything = heldout_windows(stores, 32, 10_000, document_mask=True)
    assert sorted(everything.sample_ids) == list(range(first + (stores[1][0].num_tokens - 1) // 32))
    assert without_repeats(concat([few, few])).sample_ids == few.sample_ids


def test_conversations_are_all_there_once(world):
    from stepwell.data.sft_data import build_sft_store
    from stepwell.tokenizer import Tokenizer

    store, report = build_sft_store("heldout.jsonl", Tokenizer.load("tokenizer"), "rendered")
    batch = heldout_conversations(store, 32, 10_000, pad_id=0)
    assert int(batch.weights_BT.sum()) == report.trained_tokens
    assert heldout_conversations(store, 32, 1, pad_id=0).num_rows == 1


def test_it_changes_nothing_in_training(world):
    """Weights and every training figure bit-equal with and without, and step times without it."""
    without = Run.parse({}, settings("pretrain", "without"))
    evaluated = Run.parse({}, settings("pretrain", "with", **HELDOUT, **{"train.eval_every": 2}))
    pretrain(without)
    pretrain(evaluated)
    lines = measured(world / "with")
    assert [line for line in lines if "train/loss" in line] == measured(world / "without")
    runs.assert_equal(final_weights(world / "with"), final_weights(world / "without"))
    evals = [line for line in lines if "eval/loss" in line]
    assert [line["step"] for line in evals] == [2, 4, 6]
    assert len({line["eval/loss"] for line in evals}) == 3


def test_the_last_step_is_evaluated_too_and_its_value_is_that_of_the_weights(world):
    run = Run.parse({}, settings("pretrain", "last", **HELDOUT, **{"train.eval_every": 4}))
    pretrain(run)
    shown = [line for line in measured(world / "last") if "eval/loss" in line]
    assert [line["step"] for line in shown] == [4, 6]
    engine = Engine(run, final_weights(world / "last").items())
    rows = heldout_windows([(TokenStore.open("heldout"), 1.0)], 32, 5, document_mask=True)
    assert shown[-1] | heldout_loss(engine, rows) == shown[-1]


def test_time_spent_is_left_out_of_step_times(world, monkeypatch):
    import time

    from stepwell.train import pretrain as module

    def slow(engine, batch):
        time.sleep(0.4)
        return heldout_loss(engine, batch)

    monkeypatch.setattr(module, "heldout_loss", slow)
    pretrain(Run.parse({}, settings("pretrain", "timed", **HELDOUT, **{"train.eval_every": 1})))
    lines = read_lines(world / "timed" / "metrics.jsonl")
    assert sorted(line["time/step_s"] for line in lines if "time/step_s" in line)[-2] < 0.4


def test_the_best_checkpoint_is_kept_also_over_a_kill(world):
    """A rate so high that the held-out loss soon rises for good: the best is an early one."""
    values = {
        **HELDOUT,
        "train.steps": 60,
        "train.eval_every": 3,
        "checkpoint.every_steps": 5,
        "checkpoint.keep_best": 2,
        "checkpoint.keep_last": 1,
        "optim.lr": 0.05,
        "optim.schedule.kind": "constant",
    }
    command = words("pretrain", settings("pretrain", "best-of", **values))
    killed(command, world, world / "log", world / "best-of", 40)
    assert runs.finish(command, world, world / "log")[0] == 0
    evals = {s["step"]: s["eval/loss"] for s in measured(world / "best-of") if "eval/loss" in s}
    assert list(evals) == list(range(3, 61, 3))
    best = sorted(evals, key=lambda step: evals[step])[:2]
    assert max(best) < 40
    kept = sorted((world / "best-of" / "checkpoints").iterdir())
    assert {folder.name for folder in kept} == {f"step-{s:08d}" for s in {*best, 60}}
    for folder in kept:
        state = read_state(folder)
        assert state["extra"]["metrics"]["eval/loss"] == evals[state["step"]]


def test_the_console_shows_it(world):
    values = settings("pretrain", "console", **HELDOUT, **{"train.eval_every": 3})
    _, output = runs.finish(words("pretrain", values), world, world / "log")
    shown = [line["eval/loss"] for line in measured(world / "console") if "eval/loss" in line]
    assert len(shown) == 2
    for step, loss in zip((3, 6), shown, strict=True):
        assert f"step {step}/6  held-out loss {loss:.4g}  {loss / math.log(2):.4g} bits/token" in (
            output
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train.eval_every": 5}, r"train\.eval_every=5 needs held-out data: set data\.heldout"),
        ({"checkpoint.keep_best": 1}, r"keep_best=1 needs train\.eval_every above 0"),
        ({"data.heldout_path": "x"}, r"data\.heldout_path='x' belongs to sft, dpo and reward"),
        (
            {"method.kind": "sft", "data.heldout_path": "x", "data.heldout": '[{path = "y"}]'},
            "exclude each other",
        ),
        ({"method.kind": "grpo", "train.eval_every": 5}, "to pretrain, sft, dpo and reward"),
        ({"method.kind": "sft", "train.eval_every": 5}, r"or data\.heldout_path"),
    ],
)
def test_knobs_without_effect_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Run.parse({}, values)
