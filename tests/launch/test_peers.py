"""Ranks started by hand (no launcher watches them), one of which dies in the middle of a step."""

import json
import os
import re
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stepwell.launch.peers import watched
from stepwell.metrics import read_events
from stepwell.types import ConfigError, RankMissing
from tests import runs
from tests.parallel.ranks import FORKSERVER
from tests.runs import assert_equal, final_weights, measured, settings, words


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return runs.make_world(tmp_path_factory.mktemp("world"))


class Ranks:
    """Processes with RANK, WORLD_SIZE and so on of their own; what each wrote is in its log."""

    def __init__(self, folder: Path, num_ranks: int, function, *args):
        self.logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
        port = free_port()
        self.processes = [
            FORKSERVER.Process(
                target=_rank_main, args=(rank, num_ranks, port, str(log), function, args)
            )
            for rank, log in enumerate(self.logs)
        ]
        for process in self.processes:
            process.start()

    def codes(self, timeout_s: float, stopped: int | None = None) -> list[int | None]:
        """Exit codes; a rank that is still there after timeout_s is killed and has None. The one
        that is stopped is not waited for."""
        end = time.monotonic() + timeout_s
        for rank, process in enumerate(self.processes):
            if rank != stopped:
                process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return codes

    def said(self, rank: int) -> str:
        return self.logs[rank].read_text()


def _rank_main(rank, num_ranks, port, log, function, args):
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*args)


def command(arguments, cwd):
    runs._main(arguments, cwd, f"/dev/fd/{os.dup(1)}")


def wait_until(condition, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


# Through the command


def test_the_others_name_a_rank_that_was_killed_and_a_restart_is_exact(world, tmp_path):
    steps = {"train.steps": 6, "checkpoint.every_steps": 2, "train.micro_batch_rows": 1}
    whole = words("pretrain", settings("pretrain", str(tmp_path / "whole"), **steps))
    broken = words("pretrain", settings("pretrain", str(tmp_path / "broken"), **steps))
    assert Ranks(tmp_path, 4, command, whole, str(world)).codes(60) == [0] * 4
    ranks = Ranks(tmp_path, 4, command, broken, str(world))
    wait_until(lambda: any(tmp_path.glob("broken/checkpoints/step-*")))
    assert ranks.processes[2].pid is not None
    os.kill(ranks.processes[2].pid, signal.SIGKILL)
    assert ranks.codes(15) == [6, 6, -signal.SIGKILL, 6]
    for rank in (0, 1, 3):
        assert "stepwell: rank 2 is missing" in ranks.said(rank)
        assert "goes on from the last checkpoint" in ranks.said(rank)
    again = Ranks(tmp_path, 4, command, broken, str(world))
    assert again.codes(60) == [0] * 4, again.said(0)
    assert [event["event"] for event in read_events(tmp_path / "broken")] == ["resume"]
    assert measured(tmp_path / "broken") == measured(tmp_path / "whole")
    assert_equal(final_weights(tmp_path / "broken"), final_weights(tmp_path / "whole"))


def late_main_rank(arguments, cwd):
    if os.environ["RANK"] == "0":
        time.sleep(1.5)
    command(arguments, cwd)


def test_who_waits_for_the_rank_that_clears_the_folder_begins_anew_too(world, tmp_path):
    """`--fresh` by hand-started ranks, of which all but rank 0 are there before it clears."""
    folder = tmp_path / "run"
    arguments = words("sft", settings("sft", str(folder), **{"train.steps": 3}))
    code, said = runs.finish(arguments, world, tmp_path / "log")
    assert code == 0, said
    ranks = Ranks(tmp_path, 2, late_main_rank, [*arguments, "--fresh"], str(world))
    assert ranks.codes(60) == [0, 0], ranks.said(0) + ranks.said(1)
    assert "3 steps done" in ranks.said(0)
    assert [line["step"] for line in measured(folder)] == [1, 2, 3]
    assert [event["event"] for event in read_events(folder)] == ["data"]


# By themselves: what ranks say of each other


def work(kind: str, culprit: int) -> None:
    """A rank that all-reduces for a minute at most; the culprit ends as `kind` says."""
    try:
        with watched(os.environ, grace_s=2.0):
            dist.init_process_group("gloo")
            _reduce(kind, culprit)
    except RankMissing as error:
        print(f"missing: {error}", flush=True)
        raise SystemExit(6) from None
    except (ValueError, ConfigError, RuntimeError) as error:
        print(f"own: {error}", flush=True)
        raise SystemExit(1) from None


def _reduce(kind: str, culprit: int) -> None:
    seconds = 2 if kind == "stop" else 60
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    for step in range(100_000):
        if step == 20 and dist.get_rank() == culprit:
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "raise":
                raise ValueError("this row is broken")
            elif kind == "refuse":
                raise ConfigError("this cannot be")
            elif kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        if step == 40 and kind == "end":
            return
        if step == 25 and kind in ("kill", "raise"):
            time.sleep(60)  # not in a collective: no error will tell
        dist.all_reduce(torch.ones(8), group=group)


def joins_late(culprit: int) -> None:
    """The culprit dies before its watch can reach the hub."""
    if os.environ["RANK"] != str(culprit):
        work("late", culprit)
    dist.init_process_group("gloo")
    group = dist.new_group()
    dist.all_reduce(torch.ones(8), group=group)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("culprit", "said"),
    [
        (2, "rank 2 is missing: never seen by rank 0"),
        (0, "rank 0 is missing: its watch was never reached"),
    ],
)
def test_a_rank_that_was_killed_before_it_was_seen_is_named(tmp_path, culprit, said):
    ranks = Ranks(tmp_path, 3, joins_late, culprit)
    codes = ranks.codes(40)
    for rank in {0, 1, 2} - {culprit}:
        assert codes[rank] == 6
        assert said in ranks.said(rank)


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_killed_rank_is_named(tmp_path, culprit):
    ranks = Ranks(tmp_path, 3, work, "kill", culprit)
    codes = ranks.codes(15)
    for rank in {0, 1, 2} - {culprit}:
        assert codes[rank] == 6
        assert f"rank {culprit} is missing: " in ranks.said(rank)


@pytest.mark.parametrize(("kind", "reason"), [("raise", "row is broken"), ("refuse", "cannot be")])
def test_a_rank_that_fails_tells_the_others_why(tmp_path, kind, reason):
    ranks = Ranks(tmp_path, 3, work, kind, 1)
    assert ranks.codes(15) == [6, 1, 6]
    assert f"own: this {reason}" in ranks.said(1)
    for rank in (0, 2):
        assert "rank 1 failed (" in ranks.said(rank)
        assert reason in ranks.said(rank)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_does_not_answer_is_named(tmp_path, culprit):
    ranks = Ranks(tmp_path, 3, work, "stop", culprit)
    codes = ranks.codes(20, stopped=culprit)
    assert codes == [None if rank == culprit else 6 for rank in range(3)]
    for rank in {0, 1, 2} - {culprit}:
        # On a busy machine it may be stopped before its watch has begun.
        wanted = rf"rank {culprit} is (not answering: .* --rank-timeout|missing: never seen)"
        assert re.search(wanted, ranks.said(rank))
        assert "Timed out" not in ranks.said(rank)


def test_ranks_that_end_in_order_say_nothing(tmp_path):
    ranks = Ranks(tmp_path, 3, work, "end", 0)
    assert ranks.codes(30) == [0, 0, 0]
    assert [ranks.said(rank) for rank in range(3)] == ["", "", ""]


def test_a_single_process_is_not_watched():
    before = set(os.listdir("/proc/self/task"))
    with watched({"RANK": "0", "WORLD_SIZE": "1"}):
        assert set(os.listdir("/proc/self/task")) == before


def stranger_first(num_ranks: int) -> None:
    """Rank 1 sends the hub nonsense before it works."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    with watched(os.environ):
        dist.init_process_group("gloo")
        if os.environ["RANK"] == "1":
            store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), wait_for_workers=False)
            host, port, _ = json.loads(store.get("stepwell/watch/0"))
            for text in (b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 0, "token": "x"}\n', b"[]\n", b""):
                with socket.create_connection((host, port)) as connection:
                    connection.sendall(text)
        dist.all_reduce(torch.ones(1))


def test_strangers_are_ignored(tmp_path):
    ranks = Ranks(tmp_path, num_ranks := 2, stranger_first, num_ranks)
    assert ranks.codes(30) == [0, 0], ranks.said(0) + ranks.said(1)
