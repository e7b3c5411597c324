"""Refusals name the values and the nearest legal one, and that one is legal."""

import random

import pytest

from stepwell.config import Run
from stepwell.parallel.remedies import RANKS
from stepwell.parallel.rules import RULES, AxisSizes, axis_sizes, check_run
from stepwell.sections.layout import LayoutConfig
from stepwell.types import ConfigError
from tests.oracle import base_run
from tests.parallel.refusals import changed, check_named, named, refusal

EVEN = {"model.vocab_size": 64, "model.d_ff": 28, "train.global_batch_rows": 8}
PIPELINE = {"layout.pp": 2, "train.micro_batch_rows": 1}
ZBV = {"layout.pp_schedule": "zbv", "layout.pp_stages_per_rank": 2}
RELEASE = {
    "optim.release_gradients": True,
    "optim.clip_norm": 0.0,
    "guard.action": "none",
    "train.micro_batch_rows": 8,
}
FP32 = {"precision.compute": "fp32", "precision.param": "fp32", "precision.reduce": "fp32"}
FP8 = {
    **FP32,
    "precision.compute": "bf16",
    "precision.fp8.recipe": "tensorwise",
    "model.d_model": 32,
    "model.head_dim": 16,
    "model.d_ff": 32,
}
# name -> (ranks, what is wrong, words of the message, the changes it names)
CASES = {
    "tp does not divide the ranks": (
        6,
        {"layout.tp": 4},
        ["layout.tp=4", "6"],
        [{"layout.tp": 2}, {RANKS: 4}],
    ),
    "pp is more than the ranks": (
        2,
        {"layout.pp": 4},
        ["layout.pp=4"],
        [{"layout.pp": 2}, {RANKS: 4}],
    ),
    "cp of what pp and tp leave": (
        4,
        {"layout.pp": 2, "layout.tp": 2, "layout.cp": 2},
        ["layout.cp=2", "1 of the 4 that the axes before it leave"],
        [{"layout.cp": 1}, {RANKS: 8}],
    ),
    "dp_shard does not fill the world": (
        4,
        {"layout.tp": 2, "layout.dp_shard": 4},
        ["dp_shard=4", "= 8"],
        [{"layout.dp_shard": 2}, {RANKS: 8}],
    ),
    "an axis and a fixed dp_shard": (
        6,
        {"layout.tp": 4, "layout.dp_shard": 2},
        ["layout.tp=4"],
        [{RANKS: 8}],
    ),
    "heads": (
        8,
        {"layout.tp": 8, "model.d_ff": 32},
        ["layout.tp=8", "num_heads=4"],
        [{"layout.tp": 4}],
    ),
    "heads, key/value heads and the rest": (
        4,
        {"layout.tp": 4, "model.num_heads": 6, "model.num_kv_heads": 2},
        ["layout.tp=4", "num_heads=6"],
        [{"layout.tp": 2}],
    ),
    "key/value heads": (
        4,
        {"layout.tp": 4, "model.num_heads": 12, "model.num_kv_heads": 3},
        ["num_kv_heads=3"],
        [{"layout.tp": 1}],
    ),
    "d_ff": (
        4,
        {"layout.tp": 4, "model.d_ff": 27},
        ["d_ff=27", "layout.tp=4"],
        [{"model.d_ff": 28}, {"layout.tp": 1}],
    ),
    "vocabulary": (
        2,
        {"layout.tp": 2, "model.vocab_size": 61},
        ["vocab_size=61"],
        [{"model.vocab_size": 62}, {"layout.tp": 1}],
    ),
    "sequence over tp": (
        2,
        {"layout.tp": 2, "data.seq_len": 15},
        ["seq_len=15", "= 2"],
        [{"data.seq_len": 16}, {"layout.tp": 1}],
    ),
    "sequence within max_seq_len": (
        3,
        {
            "layout.tp": 3,
            "model.num_heads": 6,
            "model.num_kv_heads": 3,
            "model.vocab_size": 63,
            "model.d_ff": 27,
            "data.seq_len": 128,
            "model.max_seq_len": 128,
        },
        ["seq_len=128", "= 3"],
        [{"data.seq_len": 126}, {"layout.tp": 1}],
    ),
    "sequence of max_seq_len": (
        2,
        {"layout.tp": 2, "data.seq_len": 127, "model.max_seq_len": 127},
        ["seq_len=127"],
        [{"data.seq_len": 126}, {"layout.tp": 1}],
    ),
    "sequence over cp": (
        2,
        {"layout.cp": 2, "data.seq_len": 18},
        ["seq_len=18", "2 x layout.cp=2 = 4"],
        [{"data.seq_len": 20}, {"layout.cp": 1}],
    ),
    "ulysses": (
        8,
        {"layout.cp": 8, "layout.cp_method": "ulysses"},
        ["4 heads", "layout.cp=8"],
        [{"layout.cp": 4}, {"layout.cp_method": "ring"}],
    ),
    "zero 1 that reduces often": (
        2,
        {"layout.zero": 1, "layout.reduce_gradients": "micro_batch"},
        ["layout.zero=1", "reduce_gradients='micro_batch'"],
        [{"layout.reduce_gradients": "auto"}, {"layout.zero": 2}],
    ),
    "zero 2 that reduces once": (
        2,
        {"layout.zero": 2, "layout.reduce_gradients": "step"},
        ["layout.zero=2"],
        [{"layout.reduce_gradients": "auto"}, {"layout.zero": 1}],
    ),
    "node below zero 3": (
        2,
        {"layout.zero": 2, "layout.reshard_after_forward": "node"},
        ["'node'", "zero=2"],
        [{"layout.reshard_after_forward": "always"}, {"layout.zero": 3}],
    ),
    "node with tensor ranks": (
        8,
        {"layout.tp": 2, "layout.reshard_after_forward": "node"},
        ["'node'", "layout.tp=2"],
        [{"layout.reshard_after_forward": "always"}, {"layout.tp": 1}],
    ),
    "fewer micro-batches than stages": (
        4,
        {"layout.pp": 4, "model.num_layers": 4, "train.micro_batch_rows": 8},
        ["micro_batch_rows=8", "1 micro-batches", "the 4"],
        [{"train.micro_batch_rows": 2}],
    ),
    "micro-batches of equal size": (
        2,
        {"layout.pp": 2, "train.micro_batch_rows": 8},
        ["micro_batch_rows=8"],
        [{"train.micro_batch_rows": 4}],
    ),
    "ranks without a row": (
        12,
        {"layout.tp": 1},
        ["12 ranks exceed train.global_batch_rows=8"],
        [{"train.global_batch_rows": 12}, {RANKS: 8}],
    ),
    "fewer rows than stages": (
        4,
        {"layout.pp": 2, "train.global_batch_rows": 2, "train.micro_batch_rows": 2},
        ["global_batch_rows=2 / 2 shares", "1 micro-batches"],
        [{"train.global_batch_rows": 4, "train.micro_batch_rows": 1}],
    ),
    "more stages than blocks": (
        8,
        {"layout.pp": 8},
        ["8 stages", "num_layers=2"],
        [{"layout.pp": 4}],
    ),
    "stages that don't add up": (
        2,
        {**PIPELINE, "layout.pp_layers": [2, 2]},
        ["adds up to 4", "num_layers=2"],
        [{"layout.pp_layers": [1, 1]}],
    ),
    "stages that are not so many": (
        2,
        {**PIPELINE, "layout.pp_layers": [2]},
        ["1 numbers for 2 stages"],
        [{"layout.pp_layers": [1, 1]}],
    ),
    "stages without a pipeline": (
        2,
        {"layout.pp_schedule": "gpipe"},
        ["pp_schedule='gpipe'", "layout.pp=1"],
        [{"layout.pp_schedule": "1f1b"}, {"layout.pp": 2}],
    ),
    "stages of a schedule": (
        2,
        {**PIPELINE, "layout.pp_stages_per_rank": 2},
        ["pp_stages_per_rank=2", "'1f1b'"],
        [{"layout.pp_stages_per_rank": 1}, {"layout.pp_schedule": "interleaved-1f1b"}],
    ),
    "a pipeline that reduces often": (
        2,
        {**PIPELINE, "layout.zero": 2, "layout.reduce_gradients": "micro_batch"},
        ["layout.zero=2"],
        [
            {"layout.zero": 1, "layout.reduce_gradients": "auto"},
            {"layout.zero": 3, "layout.reduce_gradients": "auto"},
        ],
    ),
    "zero bubble and resharding": (
        2,
        {**PIPELINE, **ZBV},
        ["'zbv'", "reshard_after_forward='always'"],
        [
            {"layout.reshard_after_forward": "never"},
            {"layout.zero": 1},
            {"layout.pp_schedule": "interleaved-1f1b"},
        ],
    ),
    "zero bubble and recomputation within a budget": (
        2,
        {
            **PIPELINE,
            **ZBV,
            "layout.zero": 0,
            "remat.mode": "budget",
            "remat.budget_bytes": 10**9,
        },
        ["'zbv'", "remat.mode='budget'"],
        [
            {"remat.mode": "none", "remat.budget_bytes": None},
            {"layout.pp_schedule": "interleaved-1f1b"},
        ],
    ),
    "released gradients": (
        1,
        {**RELEASE, "train.micro_batch_rows": 4},
        ["train.micro_batch_rows=4"],
        [{"train.micro_batch_rows": 8}, {"train.global_batch_rows": 4}],
    ),
    "released and clipped": (
        1,
        {**RELEASE, "optim.clip_norm": 1.0},
        ["optim.clip_norm=1"],
        [{"optim.clip_norm": 0.0}],
    ),
    "moments that are not in 8 bits": (
        1,
        {**FP32, "optim.kind": "adamw8bit", "model.d_model": 64},
        ["adamw8bit", "blocks of 256", "d_model=64"],
        [{"model.d_model": 256}, {"optim.kind": "adamw"}],
    ),
    "8 bits and a layer of odd size": (
        1,
        {**FP8, "model.d_ff": 40},
        ["d_ff=40", "multiples of 16"],
        [
            {"model.d_ff": 48},
            {"precision.fp8.keep": ["*.w_down", "*.w_gate", "*.w_up"]},
        ],
    ),
    "8 bits without a layer": (
        1,
        {**FP8, "precision.fp8.min_dim": 64},
        ["min_dim=64"],
        [
            {"precision.fp8.min_dim": 32},
            {"precision.fp8.recipe": "none", "precision.fp8.shadow_every": 0},
        ],
    ),
}


def run_of(settings) -> Run:
    return base_run(**{**EVEN, "train.micro_batch_rows": 1, **settings})


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_names_values_that_are_legal(name):
    ranks, wrong, words, changes = CASES[name]
    run = run_of(wrong)
    message = refusal(run, ranks)
    for word in words:
        assert word in message
    assert check_named(run, ranks) == changes


def test_values_that_would_break_another_rule_are_not_named():
    """Three ranks cannot be two tensor ranks; and a seq_len is within the model's."""
    wrong = {"layout.tp": 3, "model.vocab_size": 512, "data.seq_len": 128}
    wrong |= {"model.max_seq_len": 128, "model.num_heads": 6}
    lines = refusal(run_of(wrong), 3).splitlines()
    found = [change for line in lines for change in named(line)]
    assert {"layout.tp": 1} in found
    assert {"data.seq_len": 126} in found
    assert not any(change.get("layout.tp", 1) != 1 for change in found)
    assert not any(change.get("data.seq_len", 0) > 128 for change in found)


def test_nothing_is_named_where_no_value_will_do():
    wrong = {"layout.tp": 3, "layout.dp_shard": 1}
    line = refusal(
        run_of({**wrong, "data.seq_len": 15, "model.vocab_size": 63, "model.d_ff": 27}), 3
    )
    assert "no value of layout.tp alone mends that" in line


def random_settings(seed):
    """A small run that most often breaks something."""
    pick = random.Random(seed).choice
    settings = {
        "model.num_heads": pick([4, 6, 8, 12]),
        "model.num_kv_heads": pick([1, 2]),
        "model.d_ff": pick([24, 27, 32, 60]),
        "model.vocab_size": pick([60, 61, 64]),
        "model.num_layers": pick([1, 2, 5]),
        "model.max_seq_len": 32,
        "data.seq_len": pick([15, 16, 24, 31, 32]),
        "layout.tp": pick([1, 2, 3, 4]),
        "layout.cp": pick([1, 1, 2, 3]),
        "layout.pp": pick([1, 1, 2, 4]),
        "layout.dp_replicate": pick([1, 1, 2]),
        "layout.dp_shard": pick([-1, -1, 1, 2]),
        "layout.cp_method": pick(["ring", "ulysses"]),
        "layout.zero": pick([0, 1, 2, 3]),
        "layout.reduce_gradients": pick(["auto", "auto", "step", "micro_batch"]),
        "train.global_batch_rows": pick([2, 8, 12]),
        "train.micro_batch_rows": pick([1, 2, 5, 8]),
        "optim.release_gradients": pick([False, False, True]),
        "optim.clip_norm": 0.0,
        "guard.action": "none",
    }
    if settings["layout.pp"] > 1:
        schedule = pick(["1f1b", "gpipe", "interleaved-1f1b", "zbv", "dualpipev"])
        settings |= {"layout.pp_schedule": schedule, "layout.pp_stages_per_rank": pick([1, 2])}
    return pick([1, 2, 3, 4, 6, 8, 12]), settings


def test_named_values_of_random_runs_are_legal():
    """Each value alone: the complaint is gone, none is new, and none is about the same key."""
    num_named = 0
    for seed in range(40):
        world, settings = random_settings(seed)
        try:
            run = run_of(settings)
            check_run(run, world)
        except ConfigError:
            pass
        else:
            continue
        try:
            run = run_of(settings)
        except ConfigError:  # not even a run
            continue
        lines = refusal(run, world).splitlines()
        for line in lines:
            for change in named(line):
                num_named += 1
                after = told_after(run, world, change)
                said = line.split("; ")[0]
                assert said not in after, (settings, world, change)
                assert len(after) < len(lines) or "ranks" in line, (settings, world, change)
                for other in after:
                    keys = {key for way in named(other) for key in way}
                    assert not keys & change.keys(), (settings, world, change, other)
    assert num_named > 50


def told_after(run, world, change):
    try:
        check_run(*changed(run, world, change))
    except ConfigError as error:
        return str(error).splitlines()
    return []


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
