import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stepwell.ranks import RanksFailed
from stepwell.types import StepwellError
from tests.parallel.ranks import run_jobs, run_ranks


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where this process makes its temporary folders."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def left_in(folder):
    """The forkserver's socket stays as long as this process."""
    return [name for name in os.listdir(folder) if not name.startswith("pymp-")]


def total(factor):
    dist.init_process_group("gloo")
    x = torch.tensor([factor * (dist.get_rank() + 1.0)])
    dist.all_reduce(x)
    return dist.get_rank(), x.item(), os.environ["LOCAL_WORLD_SIZE"], torch.get_num_threads()


def rank_alone():
    return os.environ["RANK"]


def one_raises():
    if os.environ["RANK"] == "1":
        raise ValueError("the reason on rank 1")


def one_is_killed():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def sleeps_in_here():
    time.sleep(60)


def test_values_come_in_rank_order(temporary):
    assert run_ranks(total, 3, 2.0) == [(rank, 12.0, "3", 1) for rank in range(3)]
    assert left_in(temporary) == []


def test_jobs_share_a_launch():
    assert run_jobs(2, a=(rank_alone,), b=(rank_alone,)) == {"a": ["0", "1"], "b": ["0", "1"]}


def test_a_failing_rank_shows_its_traceback(temporary):
    with pytest.raises(RanksFailed, match="1 of 2 ranks failed(?s:.)*in one_raises(?s:.)*reason"):
        run_ranks(one_raises, 2)
    assert issubclass(RanksFailed, StepwellError)
    assert left_in(temporary) == []


def test_a_killed_rank_ends_the_others(temporary):
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 1 \(SIGKILL\)"):
        run_ranks(one_is_killed, 2)
    assert time.monotonic() - begin < 20
    assert left_in(temporary) == []


def test_ranks_that_do_not_end_say_where_they_were():
    with pytest.raises(RanksFailed, match="in sleeps_in_here"):
        run_ranks(sleeps_in_here, 1, timeout_s=3)


def waits_with_a_pid(folder):
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(60)


def test_ranks_end_with_a_killed_parent(tmp_path):
    code = (
        "from stepwell.ranks import run_ranks\nfrom tests.test_ranks import waits_with_a_pid\n"
        f"run_ranks(waits_with_a_pid, 2, {str(tmp_path)!r})"
    )
    root = str(Path(__file__).parents[1])
    environ = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": root}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environ)
    files = [tmp_path / "0", tmp_path / "1"]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(is_alive(int(file.read_text())) for file in files):
        assert time.monotonic() < deadline, "a rank outlived its parent"
        time.sleep(0.02)
    assert sorted(left_in(tmp_path)) == ["0", "1"]


def crash(marker, times):
    """Rank 0 dies of a signal, the first `times` times."""
    with open(marker, "a") as file:
        file.write("x" if os.environ["RANK"] == "0" else "")
    if os.environ["RANK"] == "0" and Path(marker).stat().st_size <= times:
        os.kill(os.getpid(), signal.SIGSEGV)
    return int(os.environ["RANK"])


def test_a_launch_that_crashed_once_is_tried_again(tmp_path):
    with pytest.warns(UserWarning, match="SIGSEGV"):
        assert run_ranks(crash, 2, str(tmp_path / "marker"), 1) == [0, 1]


@pytest.mark.filterwarnings("ignore:a rank crashed")
def test_a_launch_that_crashes_again_fails(tmp_path):
    with pytest.raises(RanksFailed, match="SIGSEGV"):
        run_ranks(crash, 2, str(tmp_path / "marker"), 2)
