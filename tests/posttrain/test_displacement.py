"""The monitor's alarm on both sides of its limits; CHES by hand."""

import json
import math

import numpy as np
import pytest
import torch

from stepwell.data.pair_packing import pack_pairs
from stepwell.data.preference import Pair
from stepwell.parallel.mesh import init_distributed
from stepwell.posttrain import displacement as d
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
    (alarm,) = watch(line(-0.2, noise=0.1), line(0.5, noise=0.1, seed=1))
    assert alarm.chosen_slope == pytest.approx(-0.2, abs=0.05)
    assert alarm.margin_slope == pytest.approx(0.5, abs=0.05)
    assert alarm.level < -d.LEAST_FALL
    text = alarm.text("runs/x", "dpo")
    for word in ("displacement", "drop_ches", "sft_coef", "dpop", "runs/x/ches.jsonl"):
        assert word in text


@pytest.mark.parametrize(
    ("chosen", "margin"),
    [
        (line(0.2), line(0.5)),  # both rise
        (line(-0.2), line(-0.1)),  # the margin falls too
        (line(-0.2), line(0.0)),  # the margin stands still
        (line(0.0, noise=1.0), line(0.5)),  # noise is no fall
        (line(-0.02), line(0.5)),  # within LEAST_FALL
        (line(-0.2, start=30.0), line(0.5)),  # falling, but still above the reference
    ],
)
def test_it_is_silent_otherwise(chosen, margin):
    assert watch(chosen, margin) == []


def test_the_least_fall_on_both_sides():
    level = lambda slope: slope * (np.arange(40)[-5:]).mean()
    just = d.LEAST_FALL / level(1.0)
    assert watch(line(-just * 0.99), line(1.0)) == []
    assert len(watch(line(-just * 1.01), line(1.0))) == 1


def test_without_a_reference_the_first_window_is_the_start():
    assert watch(line(-0.01, start=-50), line(0.5), has_reference=False) == []
    assert len(watch(line(-0.2, start=-50), line(0.5), has_reference=False)) == 1


def test_a_resumed_monitor_goes_on():
    chosen, margin = line(-0.2, noise=0.1), line(0.5, noise=0.1, seed=1)
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


def test_trends():
    assert d.trend([1, 2, 3, 4], [2.0, 4.0, 6.0, 8.0]) == (2.0, math.inf)
    assert d.trend([1, 2, 3, 4], [1.0, 1.0, 1.0, 1.0]) == (0.0, 0.0)
    slope, t = d.trend([1, 2, 3, 4], [1.0, 2.0, 2.0, 4.0])
    # Least squares by hand: slope 0.9, residual sum 0.7, error sqrt(0.35 / 5).
    assert slope == pytest.approx(0.9)
    assert t == pytest.approx(0.9 / math.sqrt(0.7 / 2 / 5))
    monitor = d.Monitor(4)
    assert monitor.see(1, math.nan, 1.0) is None
    assert monitor.steps == []


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
    class Letters:
        def decode(self, ids):
            return "".join(chr(97 + i) for i in ids)

    path = tmp_path / d.CHES_FILE
    found = [d.Ches(1.0, 0.1), d.Ches(2.0, 0.9), d.Ches(3.0, 0.5)]
    d.write_ches(path, found, PAIRS, [0, 2], Letters())
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["pair"] for line in lines] == [1, 2, 0]
    assert [line["dropped"] for line in lines] == [True, False, False]
    assert lines[1] | {"item": ""} == {
        "pair": 2,
        "item": "",
        "ches": 3.0,
        "ches_normalised": 0.5,
        "dropped": False,
        "prompt": "bcd",
        "chosen": "uv",
        "rejected": "uw",
    }
    assert d.read_kept(path, 3) == [0, 2]
    assert d.read_kept(path, 4) is None
    assert d.read_kept(tmp_path / "nothing", 3) is None
