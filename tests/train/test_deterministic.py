"""`layout.deterministic`: two runs of the same command are bit-equal, state and metrics."""

import os
from pathlib import Path

import pytest
import torch

from stepwell.config import Run
from stepwell.train.engine import Engine
from stepwell.train.pretrain import pretrain
from stepwell.train.run_checkpoints import latest
from tests import runs
from tests.parallel.ranks import run_ranks
from tests.runs import assert_equal, finish, measured, settings, words

DETERMINISTIC = {"layout.deterministic": True, "optim.schedule.warmup_steps": 2}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)
    torch.use_deterministic_algorithms(False)


def everything(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimiser state of the last checkpoint."""
    last = latest(folder)
    assert last is not None
    engine = Engine(Run.load(folder / "run.toml", {"layout.dp_shard": -1}))
    engine.load(last)
    state = engine.full_state_dict()
    return state | {f"optim.{name}": value for name, value in engine.optimizer.state_dict().items()}


def assert_same_run(one: Path, other: Path) -> None:
    assert len(measured(one)) == 6
    assert measured(one) == measured(other)
    assert_equal(everything(one), everything(other))


@pytest.mark.parametrize("method", ["pretrain", "sft", "grpo"])
def test_two_runs_are_bit_equal(world, method):
    names = [f"{method}-{i}" for i in range(2)]
    for name in names:
        command = words(method, settings(method, name, **DETERMINISTIC))
        assert finish(command, world, world / "log")[0] == 0
    assert_same_run(*(world / name for name in names))


def _twice(cwd: str):
    os.chdir(cwd)
    for name in ("ranks-0", "ranks-1"):
        pretrain(Run.parse({}, settings("pretrain", name, **DETERMINISTIC)))
    return torch.are_deterministic_algorithms_enabled()


def test_two_runs_of_two_ranks_are_bit_equal(world):
    assert run_ranks(_twice, 2, str(world)) == [True, True]
    assert_same_run(world / "ranks-0", world / "ranks-1")


def test_the_key_has_an_effect(world):
    """An operation without a deterministic kernel is an error then, not a number that varies."""
    Engine(Run.parse({}, {**runs.MODEL, "layout.deterministic": True}))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
