"""The three loops on a pipeline of two ranks leave what one process leaves."""

import os

import pytest

from stepwell.cli import main
from stepwell.metrics import read_lines
from tests.parallel.ranks import run_ranks
from tests.runs import final_weights, make_world, measured, settings, words

EXACT = {"precision.compute": "fp32", "train.steps": 3, "optim.eps": 1e-4}
LAYOUTS = {
    "pretrain": {"layout.pp": 2},
    "sft": {
        "layout.pp": 2,
        "layout.pp_schedule": "zbv",
        "layout.pp_stages_per_rank": 2,
        "layout.zero": 1,
    },
    "grpo": {
        "layout.pp": 2,
        "layout.pp_schedule": "interleaved-1f1b",
        "layout.pp_stages_per_rank": 2,
        "method.updates_per_rollout": 2,
    },
}
SHARED = {
    "pretrain": {
        "data.heldout": '[{path = "heldout"}]',
        "train.eval_every": 2,
        "train.eval_rows": 5,
        "checkpoint.every_steps": 2,
    },
    "sft": {"data.heldout_path": "heldout.jsonl", "train.eval_every": 2, "train.eval_rows": 3},
    "grpo": {"method.updates_per_rollout": 2},
}


def run_all(folder, name, laid_out):
    os.chdir(folder)
    codes = []
    for method, layout in LAYOUTS.items():
        more = {**EXACT, **SHARED[method], **(layout if laid_out else {})}
        codes.append(main(words(method, settings(method, f"{name}-{method}", **more))))
    return codes


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("world"))
    before = os.getcwd()
    assert run_ranks(run_all, 2, folder, "ranks", True) == [[0, 0, 0]] * 2
    assert run_all(folder, "alone", False) == [0, 0, 0]
    yield folder
    os.chdir(before)


@pytest.mark.parametrize("method", list(LAYOUTS))
def test_a_loop_on_a_pipeline_leaves_what_one_process_leaves(world, method):
    got, wanted = (measured(world / f"{name}-{method}") for name in ("ranks", "alone"))
    assert len(got) == len(wanted) > 0
    for one, other in zip(got, wanted, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            if not key.startswith("memory/"):
                assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5), key
    weights = [final_weights(world / f"{name}-{method}") for name in ("ranks", "alone")]
    for name, value in weights[1].items():
        assert (weights[0][name] - value).abs().max() < 1e-3, name


def test_every_answer_is_written_once(world):
    rows = [read_lines(world / f"{name}-grpo" / "samples.jsonl") for name in ("ranks", "alone")]
    assert len(rows[0]) == len(rows[1])
    assert rows[0][:6] == rows[1][:6]
