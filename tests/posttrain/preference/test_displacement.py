"""The monitor's alarm on both sides of its limits; CHES by hand."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from stepwell.data.pair_packing import pack_pairs
from stepwell.data.preference import Pair
from stepwell.parallel.mesh import init_distributed
from stepwell.posttrain.preference import displacement as d
from stepwell.tokenizer import Tokenizer
from stepwell.train.engine import Engine
from tests.oracle import base_run
from tests.parallel.ranks import run_ranks


def watch(chosen, margin, window=10, has_reference=True):
    monitor = d.Monitor(window, has_reference)
    found = [monitor.see(i + 1, c, m) for i, (c, m) in enumerate(zip(chosen, margin, strict=True))]
    return [alarm for alarm in found if alarm is not None]


def line(slope, count=40, start=0.0, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return start + slope * np.arange(count) + noise * rng.standard_normal(count)


def test_it_fires_once_when_the_margin_grows_while_the_chosen_fall():
    (alarm,) = watch(line(-0.5, noise=0.1), line(0.5, noise=0.1, seed=1))
    assert alarm.step == 12
    assert alarm.chosen == pytest.approx(-3.3, abs=0.2)
    assert alarm.margin == pytest.approx(3.3, abs=0.2)
    text = alarm.text("dpo", "runs/x")
    for word in ("displacement", "drop_ches", "sft_coef", "dpop", "runs/x/ches.jsonl"):
        assert word in text
    assert "--method.loss.kind dpop" not in alarm.text("dpop", "runs/x")
    assert "drop_ches" not in alarm.text("dpo")


@pytest.mark.parametrize(
    ("chosen", "margin"),
    [
        (line(0.2), line(0.5)),  # both rise
        (line(-0.2), line(-0.1)),  # the margin falls too
        (line(-0.2), line(0.0)),  # the margin stands still
        (line(-0.2), line(0.0, noise=1.0)),  # or only wavers
        (line(0.0, noise=2.0), line(0.5)),  # noise is no fall
        (line(-0.2, start=30.0), line(0.5)),  # falling, but still above the reference
        (line(0.1, start=-10.0), line(0.5)),  # below, but rising again
    ],
)
def test_it_is_silent_otherwise(chosen, margin):
    assert watch(chosen, margin) == []


@pytest.mark.parametrize(("factor", "alarms"), [(0.99, 0), (1.01, 1)])
def test_limits_on_both_sides(factor, alarms):
    last = np.arange(40)[-10:].mean()
    assert len(watch(line(-factor * d.LEAST_FALL / last), line(0.1))) == alarms
    assert len(watch(line(-0.5), line(0.5 / d.LEAST_SHARE / factor))) == alarms
    # A window whose mean is LEAST_T standard errors away.
    zigzag = np.tile([1.0, -1.0], 5)
    level = factor * d.LEAST_T * zigzag.std(ddof=1) / math.sqrt(10)
    assert len(watch(line(-1.0, 10, -9.0), level + zigzag)) == alarms


def test_without_a_reference_the_first_window_is_the_start():
    assert watch(line(-0.05, start=-50), line(0.1, start=9), has_reference=False) == []
    (alarm,) = watch(line(-0.2, start=-50), line(0.5, start=9), has_reference=False)
    assert alarm.chosen == pytest.approx(-3.2, abs=0.21)
    assert watch(line(-0.2, start=-50), line(0, start=9), has_reference=False) == []


def test_a_resumed_monitor_goes_on():
    chosen, margin = line(-0.5, noise=0.1), line(0.5, noise=0.1, seed=1)
    (wanted,) = watch(chosen, margin)
    monitor = d.Monitor(10)
    for i in range(40):
        if i == 7:
            state = json.loads(json.dumps(monitor.state()))
            monitor = d.Monitor(10)
            monitor.load(state)
        alarm = monitor.see(i + 1, float(chosen[i]), float(margin[i]))
        if alarm is not None:
            assert alarm == wanted
    assert monitor.alarmed


def test_how_far_means_moved():
    assert d.moved([5.0, 5.0, 5.0], 4.0) == (1.0, math.inf)
    assert d.moved([4.0, 4.0], 4.0) == (0.0, 0.0)
    mean, t = d.moved([1.0, 2.0, 6.0], 1.0)
    assert mean == pytest.approx(2.0)
    assert t == pytest.approx(2.0 / math.sqrt(7.0 / 3))
    monitor = d.Monitor(4)
    assert monitor.see(1, math.nan, 1.0) is None
    assert monitor.chosen == []


PAIRS = [
    Pair((1, 2), (5, 6, 7), (8, 9)),
    Pair((3,), (10,), (11, 12, 13, 14), rejected_prompt_ids=(4, 4)),
    Pair((1, 2, 3), (20, 21), (20, 22)),
]


def test_ches_by_hand():
    plus, minus = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0])
    found = d.ches(plus, minus, 2, 1)
    assert found == (5.0 - 5.0, 5.0 / 2 - 5.0 / 4)


def scores() -> list[d.Ches]:
    run = base_run(**{"data.seq_len": 24})
    return d.ches_scores(Engine(run, mesh=init_distributed(run.layout)), PAIRS, 0)


def test_ches_of_pairs_is_that_of_their_hidden_states(monkeypatch):
    engine = Engine(base_run(**{"data.seq_len": 24}))
    wanted = []
    for pair in PAIRS:
        sums = []
        for ids, mask in (pair.chosen, pair.rejected):
            batch = pack_pairs([pair], 24)
            row = batch.tokens_BT[0].tolist()
            # The state at the place before a token predicts it.
            start = 0 if row[: len(ids) - 1] == list(ids[:-1]) else len(pair.chosen[0]) - 1
            hidden = engine.hidden(batch)[0, start : start + len(ids) - 1].double()
            sums.append(hidden[torch.tensor(mask[1:]) != 0].sum(0))
        counts = sum(pair.chosen[1]), sum(pair.rejected[1])
        wanted.append(d.ches(sums[0], sums[1], *counts))
    found = scores()
    for got, want in zip(found, wanted, strict=True):
        assert got == pytest.approx(want, rel=1e-4)
    monkeypatch.setattr(d, "CHUNK_PAIRS", 1)
    assert [s.score for s in scores()] == pytest.approx([s.score for s in found], rel=1e-4)
    for ranks in run_ranks(scores, 2):
        assert [s.score for s in ranks] == pytest.approx([s.score for s in found], rel=1e-4)


def test_the_share_with_the_highest_scores_is_left_out():
    found = [d.Ches(0.0, x) for x in (0.1, 5.0, -2.0, 5.0, 1.0)]
    assert d.kept_pairs(found, 0.0) == [0, 1, 2, 3, 4]
    assert d.kept_pairs(found, 0.19) == [0, 1, 2, 3, 4]
    assert d.kept_pairs(found, 0.2) == [0, 2, 3, 4]
    assert d.kept_pairs(found, 0.6) == [0, 2]


def test_scores_are_written_with_the_pairs_texts(tmp_path):
    tokenizer = Tokenizer.train(["abc xyz"], 300)
    path = tmp_path / d.CHES_FILE
    found = [d.Ches(1.0, 0.1), d.Ches(2.0, 0.9), d.Ches(3.0, 0.5)]
    d.write_ches(path, found, PAIRS, [0, 2], tokenizer)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["pair"] for line in lines] == [1, 2, 0]
    assert [line["dropped"] for line in lines] == [True, False, False]
    assert lines[1] | {"item": ""} == {
        "pair": 2,
        "item": "",
        "ches": 3.0,
        "ches_normalised": 0.5,
        "dropped": False,
        "prompt": tokenizer.decode([1, 2, 3]),
        "chosen": tokenizer.decode([20, 21]),
        "rejected": tokenizer.decode([20, 22]),
    }
    assert d.read_kept(path, 3) == [0, 2]
    assert d.read_kept(path, 4) is None
    assert d.read_kept(tmp_path / "nothing", 3) is None
    # Text from the web has breaks of lines that JSON does not know.
    odd = [replace(pair, prompt_ids=tuple(tokenizer.encode("a\u2028b\x85c"))) for pair in PAIRS]
    d.write_ches(path, found, odd, [0, 2], tokenizer)
    assert d.read_kept(path, 3) == [0, 2]
