"""`stepwell grpo`, killed in the middle of sampling."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from stepwell.metrics import read_lines
from tests import runs
from tests.runs import assert_equal, final_weights, finish, settings, start, words

# Of the answers that are being sampled when the process is killed: how many reports there are.
NUM_LINES = 7


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return runs.make_world(tmp_path_factory.mktemp("world"))


def command(folder: str, staleness: int) -> list[str]:
    long = {"method.max_new_tokens": 120, "data.seq_len": 160, "train.steps": 3}
    stale = {"method.max_staleness": staleness, "checkpoint.every_steps": 1}
    return words("grpo", settings("grpo", folder, **long, **stale))


def killed_while_sampling(arguments: list[str], world: Path, partial: Path) -> list[dict]:
    """Kills the run once the journal has so many lines; what it holds then."""
    process = start(arguments, world, world / "log")
    deadline = time.monotonic() + 60
    while process.is_alive() and time.monotonic() < deadline:
        if partial.exists() and partial.read_bytes().count(b"\n") >= NUM_LINES:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.0005)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, (world / "log").read_text()
    return [json.loads(line) for line in partial.read_bytes().split(b"\n")[:-1]]


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_rest_is_sampled_and_all_is_as_if_undisturbed(world, staleness):
    """Rollout 2, of the newest weights or of those before, is half sampled; twice."""
    whole, broken = f"whole-{staleness}", f"broken-{staleness}"
    assert finish(command(whole, staleness), world, world / "log")[0] == 0
    partial = world / broken / "rollouts" / "00000002.rank0000.partial"
    first = killed_while_sampling(command(broken, staleness), world, partial)
    assert any("end" not in line for line in first[1:]), "some answers are cut in the middle"
    sampled = sum(len(line["tokens"]) for line in first[1:])
    again = killed_while_sampling(command(broken, staleness), world, partial)
    assert again[: len(first)] == first, "what was sampled stays"
    code, log = finish(command(broken, staleness), world, world / "log")
    assert code == 0, log
    assert 0 < sampled < 6 * 120
    samples = [read_lines(world / name / "samples.jsonl") for name in (whole, broken)]
    assert samples[0] == samples[1]
    assert_equal(final_weights(world / broken), final_weights(world / whole))
