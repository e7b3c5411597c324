"""Real ranks through torchrun's launcher: small programs that stand for a command."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepwell.launch import (
    check_num_procs,
    end_with_launcher,
    first_host,
    is_rank,
    rank_environment,
    threads_per_rank,
)
from stepwell.types import ConfigError

LAUNCH = """
import sys
from stepwell.launch import launch
from stepwell.types import StepwellError
try:
    sys.exit(launch(int(sys.argv[1]), sys.argv[2:], module="program"))
except StepwellError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""

SUMS_RANKS = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(x)
print("rank", dist.get_rank(), "sum", x.item(), "threads", os.environ["OMP_NUM_THREADS"], sys.argv)
dist.destroy_process_group()
"""

FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("this rank has no row")
time.sleep(60)
"""

SAVES_ON_SIGNAL = """
import os, signal, sys, time
from pathlib import Path
from stepwell.launch import end_with_launcher
end_with_launcher(os.environ)
rank = os.environ["RANK"]
signals = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, f: signals.append(n))
Path(f"ready{rank}").write_text(str(os.getpid()))
while not signals:
    time.sleep(0.02)
time.sleep(0.5)  # the rest of the step, and saving it
Path(f"saved{rank}").write_text(" ".join(signal.Signals(n).name for n in signals))
sys.exit(130)
"""


def start(folder: Path, program: str, *arguments: str, **environ: str) -> subprocess.Popen:
    (folder / "program.py").write_text(program)
    clean = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *arguments],
        cwd=folder,
        env=clean | environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(*paths: Path, timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < end, f"{paths} did not appear"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_ranks_work_together_and_only_rank_0_is_heard(tmp_path):
    process = start(tmp_path, SUMS_RANKS, "2", "a b", "--c")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    threads = threads_per_rank(2)
    assert out == f"rank 0 sum 3.0 threads {threads} ['{tmp_path}/program.py', 'a b', '--c']\n"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("stepwell-ranks")] == []


def test_threads_that_the_user_chose_are_kept(tmp_path):
    out, _ = start(tmp_path, SUMS_RANKS, "1", OMP_NUM_THREADS="7").communicate(timeout=120)
    assert "threads 7" in out


def test_a_failed_rank_is_named_and_ends_the_others(tmp_path):
    begin = time.monotonic()
    process = start(tmp_path, FAILS, "2")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "rank 1 failed (exit code 1)" in err
    assert "rank 1: this rank has no row" in err
    assert time.monotonic() - begin < 40
    kept = re.search("everything it wrote: (.*)", err)
    assert kept is not None
    assert (Path(kept[1]) / "stderr.log").read_text() == "this rank has no row\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_once_and_they_may_save(tmp_path, number):
    process = start(tmp_path, SAVES_ON_SIGNAL, "2")
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == ""
    for rank in (0, 1):
        assert (tmp_path / f"saved{rank}").read_text() == signal.Signals(number).name


def test_ranks_end_with_a_killed_launcher(tmp_path):
    process = start(tmp_path, SAVES_ON_SIGNAL, "2")
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    pids = [int((tmp_path / f"ready{rank}").read_text()) for rank in (0, 1)]
    process.kill()
    process.communicate(timeout=60)
    wait_for(tmp_path / "saved0", tmp_path / "saved1", timeout_s=20)
    end = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_process_without_a_launcher_is_left_alone():
    environ = {"PATH": "/bin"}
    end_with_launcher(environ)
    assert environ == {"PATH": "/bin"}


SLURM = {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
}


def test_a_slurm_task_joins():
    assert is_rank(SLURM)
    environ = rank_environment(SLURM)
    assert environ | {"MASTER_PORT": ""} == {
        "RANK": "11",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "node07",
        "MASTER_PORT": "",
    }
    assert 20_000 <= int(environ["MASTER_PORT"]) < 30_000
    assert rank_environment(SLURM | {"SLURM_PROCID": "0"})["MASTER_PORT"] == environ["MASTER_PORT"]


def test_an_incomplete_slurm_step_names_what_is_missing():
    with pytest.raises(ConfigError, match="SLURM_LOCALID is not set; start it with srun"):
        rank_environment({k: v for k, v in SLURM.items() if k != "SLURM_LOCALID"})


def test_torchrun_and_single_processes_keep_their_environment():
    torchrun = {"RANK": "0", "WORLD_SIZE": "2"}
    assert is_rank(torchrun)
    assert rank_environment(torchrun | SLURM) == {}
    assert not is_rank({"SLURM_STEP_NUM_TASKS": "1"})
    assert rank_environment({}) == {}


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("node[07-09,12],login1", "node07"),
        ("gpu-a[3,5-6]", "gpu-a3"),
        ("rack[1-2]-b,x", "rack1-b"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_more_processes_than_rows_are_refused():
    check_num_procs(8, 8)
    check_num_procs(8)
    with pytest.raises(ConfigError, match=r"--nproc 9 .*global_batch_rows=8.* is --nproc 8"):
        check_num_procs(9, 8)
    with pytest.raises(ConfigError, match="--nproc 0 must be at least 1"):
        check_num_procs(0)


def test_threads_are_shared_out():
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1) == cores
    assert threads_per_rank(cores) == 1
    assert threads_per_rank(10 * cores) == 1
