"""`--nproc` and torchrun, with real processes that are killed in the middle of a step."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepwell.metrics import read_events
from tests import runs
from tests.runs import assert_equal, final_weights, measured, settings, words

STEPS = {"train.steps": 12, "checkpoint.every_steps": 2, "train.micro_batch_rows": 1}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return runs.make_world(tmp_path_factory.mktemp("world"))


def start(world: Path, temporary: Path, *arguments: str) -> subprocess.Popen:
    """In a process of its own; what it leaves in its temporary folder can be seen."""
    temporary.mkdir(exist_ok=True)
    root = str(Path(__file__).parents[2])
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "PYTHONPATH": root}
    return subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=world, env=environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def ranks_in(temporary: Path) -> dict[str, int]:
    """RANK -> process id of the ranks that use this temporary folder."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            environ = environment(int(path.name))
            if environ.get("TMPDIR") == str(temporary) and "RANK" in environ:
                found[environ["RANK"]] = int(path.name)
    return found


def wait_for_checkpoint(process, run: Path) -> None:
    end = time.monotonic() + 120
    while not any(run.glob("checkpoints/step-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def kill_at_checkpoint(process, run: Path, temporary: Path, rank: str) -> None:
    wait_for_checkpoint(process, run)
    os.kill(ranks_in(temporary)[rank], signal.SIGKILL)


def test_a_killed_rank_costs_a_restart_and_no_bit(world, tmp_path):
    whole = words("pretrain", settings("pretrain", str(tmp_path / "whole"), **STEPS))
    broken = words("pretrain", settings("pretrain", str(tmp_path / "broken"), **STEPS))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "stepwell"]
    process = start(world, tmp_path / "a", *torchrun, *whole)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err

    more = ["--nproc", "2", "--max-restarts", "1", "--fresh", "--json"]
    process = start(world, tmp_path / "b", "stepwell", *broken, *more)
    kill_at_checkpoint(process, tmp_path / "broken", tmp_path / "b", "1")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert json.loads(out)["step"] == 12
    assert "rank 1 failed (signal SIGKILL)" in err
    assert "start 1 of 1 more, from the last checkpoint" in err
    assert [event["event"] for event in read_events(tmp_path / "broken")] == ["resume"]
    assert measured(tmp_path / "broken") == measured(tmp_path / "whole")
    assert_equal(final_weights(tmp_path / "broken"), final_weights(tmp_path / "whole"))
    assert os.listdir(tmp_path / "b") == []
    assert ranks_in(tmp_path / "b") == {}


@pytest.mark.slow
def test_the_launcher_names_the_one_of_four_that_was_killed(world, tmp_path):
    steps = {**STEPS, "train.steps": 1000}
    arguments = words("pretrain", settings("pretrain", str(tmp_path / "run"), **steps))
    process = start(world, tmp_path / "a", "stepwell", *arguments, "--nproc", "4")
    kill_at_checkpoint(process, tmp_path / "run", tmp_path / "a", "2")
    begin = time.monotonic()
    _, err = process.communicate(timeout=200)
    assert time.monotonic() - begin < 25
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 2 failed (signal SIGKILL); the other ranks were stopped" in err
    assert os.listdir(tmp_path / "a") == []
    assert ranks_in(tmp_path / "a") == {}


def test_nproc_1_has_a_process_group(world, tmp_path):
    """FSDP2 offloads parameters, and needs one."""
    more = {**STEPS, "train.steps": 2, "offload.parameters": True}
    command = words("pretrain", settings("pretrain", str(tmp_path / "run"), **more))
    _, err = runs.finish(command, world, tmp_path / "log")
    assert "needs a process group; start with --nproc 1" in err
    process = start(world, tmp_path / "a", "stepwell", *command, "--nproc", "1")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "2 steps done" in out
    assert "1 rank: pp 1 x" in err


def test_a_rank_that_stops_is_named_soon_after_the_time_limit(world, tmp_path):
    steps = {**STEPS, "train.steps": 100_000, "checkpoint.every_steps": 5}
    command = words("pretrain", settings("pretrain", str(tmp_path / "run"), **steps))
    more = ["--nproc", "2", "--rank-timeout", "8"]
    process = start(world, tmp_path / "a", "stepwell", *command, *more)
    wait_for_checkpoint(process, tmp_path / "run")
    os.kill(ranks_in(tmp_path / "a")["1"], signal.SIGSTOP)
    begin = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < 8 + 20
    assert process.returncode == 6
    assert "rank 1 is not answering: it came to no collective within its time limit" in err
    assert "SIGKILL" not in err
    assert "gloo" not in err
    assert "Traceback" not in err
    assert ranks_in(tmp_path / "a") == {}


def test_a_refusal_by_all_ranks_is_said_once(world, tmp_path):
    """Of what only the ranks look at."""
    settings_of = settings("pretrain", str(tmp_path / "run"), **STEPS)
    command = words("pretrain", {**settings_of, "data.sources": '[{path = "nowhere"}]'})
    process = start(world, tmp_path / "a", "stepwell", *command, "--nproc", "2")
    _, err = process.communicate(timeout=60)
    assert process.returncode in (2, 3), err
    assert err.count("nowhere") == 1
    assert "exit code" not in err


@pytest.mark.parametrize("more", [[], ["--nproc", "2"]])
def test_ctrl_c_that_comes_twice_saves_once(world, tmp_path, more):
    steps = {**STEPS, "train.steps": 100_000, "checkpoint.every_steps": 5}
    command = words("pretrain", settings("pretrain", str(tmp_path / "run"), **steps))
    process = start(world, tmp_path / "a", "stepwell", *command, *more)
    wait_for_checkpoint(process, tmp_path / "run")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "of 100000 and saved; the same command goes on from there" in err
    assert ranks_in(tmp_path / "a") == {}
