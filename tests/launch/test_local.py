"""Real ranks through torchrun's launcher: small programs that stand for a command."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepwell.launch.environ import threads_per_rank
from stepwell.launch.local import (
    AT_ONCE_S,
    FAILED_RANK_LOG,
    MISSING_S,
    LocalRanks,
    UnnamedLogs,
    _failure,
    _until_ended,
    end_with_launcher,
    first_cause,
)
from stepwell.launch.stopping import Requests
from tests.disk import largest_file

LAUNCH = """
import os, sys
from stepwell.launch.local import launch
from stepwell.types import StepwellError
again = int(os.environ.get("AGAIN", "0"))
try:
    sys.exit(launch(int(sys.argv[1]), sys.argv[2:], "program", again, folder="."))
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
    print(*range(30), sep="\\n", file=sys.stderr)
    sys.exit("this rank has no row")
time.sleep(60)
"""

SAVES_ON_SIGNAL = """
import os, signal, sys, time
from pathlib import Path
from stepwell.launch.local import end_with_launcher
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


def left_in(folder: Path) -> list[str]:
    """Temporary files too: `start` sets TMPDIR to the folder."""
    known = ("program.py", "__pycache__")
    names = [path.name for path in folder.iterdir() if path.name not in known]
    return [name for name in names if not name.startswith(("ready", "saved"))]


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
    assert left_in(tmp_path) == []


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
    assert "rank 1: 10\n" not in err
    assert f"everything it wrote: {FAILED_RANK_LOG}" in err
    lines = (tmp_path / FAILED_RANK_LOG).read_text().splitlines()
    assert lines == [*map(str, range(30)), "this rank has no row"]
    assert left_in(tmp_path) == [FAILED_RANK_LOG]


def test_what_a_failed_rank_wrote_is_whole_or_as_it_was(tmp_path):
    log = tmp_path / FAILED_RANK_LOG
    log.write_text("an earlier rank's\n")
    ranks = LocalRanks([], UnnamedLogs())
    streams = ranks.logs.streams(1)
    assert streams[0] is not None
    streams[0].write(b"a line\n" * 1000)
    with largest_file(1000):
        said = str(_failure(1, 1, ranks, tmp_path))
    assert f"does not fit in {log}: File too large" in said
    assert log.read_text() == "an earlier rank's\n"
    assert f"everything it wrote: {log}" in str(_failure(1, 1, ranks, tmp_path))
    assert log.read_text() == "a line\n" * 1000
    assert left_in(tmp_path) == [FAILED_RANK_LOG]


# Rank 1 is killed as often as `num_kills` says.
DIES = """
import os, signal, sys, time
from pathlib import Path
rank, start = os.environ["RANK"], int(os.environ["STEPWELL_RESTART_COUNT"])
if rank == "1" and start < int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "1" and sys.argv[2] == "refuse":
    sys.exit(2)
time.sleep(60 if start < int(sys.argv[1]) else 0)
Path(f"done{rank}").write_text(str(start))
"""


@pytest.mark.parametrize(
    ("num_kills", "then", "code", "num_starts"),
    [(1, "end", 0, 1), (3, "end", 137, 2), (1, "refuse", 2, 1)],
)
def test_all_ranks_start_again_when_one_dies(tmp_path, num_kills, then, code, num_starts):
    process = start(tmp_path, DIES, "2", str(num_kills), then, AGAIN="2")
    _, err = process.communicate(timeout=200)
    assert process.returncode == code
    assert "rank 1 failed (signal SIGKILL); the other ranks were stopped" in err
    assert err.count("of 2 more, from the last checkpoint") == num_starts
    if code == 0:
        assert [(tmp_path / f"done{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
    if then == "refuse":
        assert "rank 1 failed (exit code 2)" in err


REFUSED_LATER = """
import os, sys, time
from pathlib import Path

if os.environ["RANK"] == "0":
    Path("ready").touch()
    time.sleep(1.0)
    sys.stderr.write("no\\n")
while not Path("ready").exists():
    time.sleep(0.01)
sys.exit(3)
"""


def test_rank_0_may_say_what_another_rank_refused_before(tmp_path):
    process = start(tmp_path, REFUSED_LATER, "2")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert err.splitlines() == ["no"]


def test_the_first_cause_is_no_rank_that_ended_for_another():
    assert first_cause({0: -15, 2: -9}) == 2
    assert first_cause({3: 6, 0: 6, 1: 1, 2: 5}) == 1
    assert first_cause({3: 6, 0: 143}) == 3
    assert first_cause({0: 6, 1: -9}) == 1
    assert first_cause({0: 6, 1: -9}, killed=[1]) == 0


STOPS = """
import os, signal, sys, time
rank = os.environ["RANK"]
if rank == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)
if rank == "0":
    print("rank 1 is not answering", file=sys.stderr)
    sys.exit(6)
time.sleep(60)
"""


def test_a_stopped_rank_does_not_look_like_a_killed_one(tmp_path):
    process = start(tmp_path, STOPS, "3")
    begin = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < MISSING_S + 10
    assert process.returncode == 6
    assert "rank 1 is not answering" in err
    assert "killed, because they did not answer: rank 1" in err
    assert "SIGKILL" not in err


IGNORES = SAVES_ON_SIGNAL.replace("time.sleep(0.5)", "time.sleep(60)").replace("while not", "while")


def test_a_second_signal_ends_at_once_and_says_what_is_saved(tmp_path):
    process = start(tmp_path, IGNORES, "2")
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    for _ in range(2):  # one request
        process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=AT_ONCE_S + 10)
    except subprocess.TimeoutExpired:
        # On a busy machine the first ones may have been taken only just before this one.
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=AT_ONCE_S + 10)
    assert process.returncode == 130
    assert err == "stepwell: ranks 0, 1 ended at once, without saving; nothing is saved in .\n"


HEARS_NOTHING = """
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
open(sys.argv[1], "w").write("begun")
time.sleep(60)
"""


def test_two_signals_before_the_ranks_are_looked_at_end_them_at_once(tmp_path):
    """While the launcher still imports torch."""
    begun = tmp_path / "begun"
    words = [sys.executable, "-c", HEARS_NOTHING, str(begun)]
    ranks = LocalRanks([subprocess.Popen(words)], UnnamedLogs())
    wait_for(begun)
    seconds = iter([0.0, 5.0])
    requests = Requests(lambda: next(seconds))
    for _ in range(2):
        requests.take(signal.SIGINT)
    begin = time.monotonic()
    _until_ended(ranks, requests)
    assert AT_ONCE_S <= time.monotonic() - begin < AT_ONCE_S + 10
    ranks.kill()
    assert ranks.killed == [0]


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
    assert left_in(tmp_path) == []


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
    assert left_in(tmp_path) == []


def test_a_process_without_a_launcher_is_left_alone():
    environ = {"PATH": "/bin"}
    end_with_launcher(environ)
    assert environ == {"PATH": "/bin"}
