"""Refusals name the values and the nearest legal one, and that one is legal."""

import pytest

from stepwell.config import LayoutConfig, Run
from stepwell.parallel.rules import RULES, AxisSizes, axis_sizes, check_run
from stepwell.types import ConfigError
from tests.oracle import base_run

EVEN = {"model.vocab_size": 64, "model.d_ff": 28, "train.global_batch_rows": 8}
# name -> (ranks, what is wrong, words of the message, what mends it)
CASES = {
    "tp does not divide the ranks": (
        6,
        {"layout.tp": 4},
        ["layout.tp=4", "6", "nearest that does is 3"],
        {
            "layout.tp": 3,
            "model.num_heads": 6,
            "model.num_kv_heads": 3,
            "model.d_ff": 27,
            "model.vocab_size": 63,
            "data.seq_len": 15,
        },
    ),
    "pp is more than the ranks": (
        2,
        {"layout.pp": 4},
        ["layout.pp=4", "nearest that does is 2"],
        {"layout.pp": 2},
    ),
    "cp of what pp and tp leave": (
        4,
        {"layout.pp": 2, "layout.tp": 2, "layout.cp": 2},
        ["layout.cp=2", "1 of the 4 that the axes before it leave", "nearest that does is 1"],
        {"layout.cp": 1},
    ),
    "dp_shard does not fill the world": (
        4,
        {"layout.tp": 2, "layout.dp_shard": 4},
        ["dp_shard=4", "= 8", "only legal dp_shard is 2"],
        {"layout.dp_shard": 2},
    ),
    "heads": (
        8,
        {"layout.tp": 8},
        ["layout.tp=8", "num_heads=4", "nearest that does is 4"],
        {"layout.tp": 4},
    ),
    "key/value heads": (
        4,
        {"layout.tp": 4, "model.num_heads": 12, "model.num_kv_heads": 3},
        ["num_kv_heads=3", "nearest legal value is 3"],
        {"layout.tp": 1},
    ),
    "d_ff": (
        4,
        {"layout.tp": 4, "model.d_ff": 27},
        ["d_ff=27", "layout.tp=4", "nearest is 28"],
        {"model.d_ff": 28},
    ),
    "vocabulary": (
        2,
        {"layout.tp": 2, "model.vocab_size": 61},
        ["vocab_size=61", "nearest is 60"],
        {"model.vocab_size": 60},
    ),
    "sequence over tp": (
        2,
        {"layout.tp": 2, "data.seq_len": 15},
        ["seq_len=15", "= 2", "nearest is 16"],
        {"data.seq_len": 16},
    ),
    "sequence over cp": (
        2,
        {"layout.cp": 2, "data.seq_len": 18},
        ["seq_len=18", "2 x layout.cp=2 = 4", "nearest is 16"],
        {"data.seq_len": 16},
    ),
    "ulysses": (
        8,
        {"layout.cp": 8, "layout.cp_method": "ulysses"},
        ["4 heads", "layout.cp=8", "divides them is 4", "ring"],
        {"layout.cp_method": "ring"},
    ),
    "zero 1 that reduces often": (
        2,
        {"layout.zero": 1, "layout.reduce_gradients": "micro_batch"},
        ["layout.zero=1", "reduce_gradients='micro_batch'", "zero=2"],
        {"layout.zero": 2},
    ),
    "zero 2 that reduces once": (
        2,
        {"layout.zero": 2, "layout.reduce_gradients": "step"},
        ["layout.zero=2", "zero=1"],
        {"layout.zero": 1},
    ),
    "node below zero 3": (
        2,
        {"layout.zero": 2, "layout.reshard_after_forward": "node"},
        ["'node'", "zero=2", "'always'"],
        {"layout.reshard_after_forward": "always"},
    ),
    "fewer micro-batches than stages": (
        4,
        {"layout.pp": 4, "model.num_layers": 4, "train.micro_batch_rows": 8},
        [
            "micro_batch_rows=8",
            "1 micro-batches",
            "the 4",
            "nearest legal value is micro_batch_rows=2",
        ],
        {"train.micro_batch_rows": 2},
    ),
    "more stages than blocks": (
        8,
        {"layout.pp": 8, "train.micro_batch_rows": 1},
        ["8 stages", "num_layers=2", "pp=4"],
        {"layout.pp": 4},
    ),
    "stages that don't add up": (
        2,
        {"layout.pp": 2, "layout.pp_layers": [2, 2], "train.micro_batch_rows": 1},
        ["adds up to 4", "num_layers=2", "[1, 1]"],
        {"layout.pp_layers": [1, 1]},
    ),
}


def run_of(settings) -> Run:
    return base_run(**{**EVEN, "train.micro_batch_rows": 1, **settings})


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_names_a_value_that_is_legal(name):
    ranks, wrong, words, mended = CASES[name]
    with pytest.raises(ConfigError) as error:
        check_run(run_of(wrong), ranks)
    for word in words:
        assert word in str(error.value)
    check_run(run_of({**wrong, **mended}), ranks)


def test_every_broken_rule_is_told_at_once():
    wrong = {"layout.tp": 2, "model.d_ff": 27, "data.seq_len": 15}
    with pytest.raises(ConfigError) as error:
        check_run(run_of(wrong), 2)
    assert "d_ff=27" in str(error.value)
    assert "seq_len=15" in str(error.value)


def test_axes_fill_the_world():
    layout = LayoutConfig(pp=2, dp_replicate=3, cp=2, tp=4)
    assert axis_sizes(layout, 96) == AxisSizes(pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=4)


def test_rules_have_names_of_their_own_and_reasons():
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert all(rule.why.endswith(".") for rule in RULES)
