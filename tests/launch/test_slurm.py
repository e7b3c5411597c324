"""The batch script: read by bash and shellcheck, and run with programs that stand for Slurm's."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepwell import cli
from stepwell.cli import main
from stepwell.launch.slurm import Job, batch_script, check_job, seconds
from stepwell.metrics import read_events
from stepwell.types import ConfigError
from tests import runs
from tests.parallel.ranks import run_ranks
from tests.runs import assert_equal, final_weights, measured, settings, words

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
JOBS = {
    "one node": Job("small", gpus_per_node=1),
    "many": Job(
        "llama", nodes=64, time="2-00", partition="gpu", account="x", cpus_per_task=12,
        more=("--qos=high", "--exclusive"),
    ),
    "no GPUs": Job("cpu", gpus_per_node=0, tasks_per_node=4, requeue=False, logs="my logs"),
}  # fmt: skip


def script_of(job: Job) -> str:
    return batch_script(job, ["python", "-m", "stepwell", "sft", "a b.toml"], "/data/my run", ["x"])


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_bash_and_shellcheck_find_nothing(job):
    script = script_of(job)
    for command in (["bash", "-n"], [str(SHELLCHECK), "-"]):
        done = subprocess.run(command, input=script, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def directives(job: Job) -> set[str]:
    lines = script_of(job).splitlines()
    end = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    found = {line for line in lines if line.startswith("#SBATCH ")}
    # Slurm reads them up to the first command only.
    assert found == {line for line in lines[:end] if line.startswith("#SBATCH ")}
    return {line.removeprefix("#SBATCH ") for line in found}


def test_what_is_asked_of_slurm():
    assert directives(JOBS["many"]) == {
        "--job-name=llama",
        "--nodes=64",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--cpus-per-task=12",
        "--time=2-00",
        "--partition=gpu",
        "--account=x",
        '--chdir="/data/my run"',
        "--output=slurm-%x-%j.out",
        "--open-mode=append",
        "--signal=B:USR1@300",
        "--requeue",
        "--qos=high",
        "--exclusive",
    }
    cpu = directives(JOBS["no GPUs"])
    assert {"--ntasks-per-node=4", "--no-requeue"} <= cpu
    assert not any("gpu" in line for line in cpu)
    assert "--gpu-bind" not in script_of(JOBS["no GPUs"])
    assert "python -m stepwell sft 'a b.toml'" in script_of(JOBS["many"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "--nodes 0 must be at least 1"),
        ({"gpus_per_node": -1}, "--gpus-per-node -1 must be at least 0"),
        ({"tasks_per_node": 4}, "--tasks-per-node 4 must equal --gpus-per-node 8"),
        ({"time": "soon"}, "--time 'soon' is no time limit; Slurm takes minutes, MM:SS"),
        ({"time": "0"}, "must be longer than nothing"),
        ({"time": "5:00"}, "300 must be less than --time 5:00; the nearest legal value is 299"),
        ({"save_before_s": 1}, "--save-before-s 1 must be at least 10"),
        ({"more": ("--a b",)}, "--sbatch 'a b' must look like name=value"),
    ],
)
def test_jobs_that_cannot_be(change, message):
    with pytest.raises(ConfigError) as error:
        check_job(Job("x", **change))
    assert message in str(error.value)


def test_names_that_would_break_the_script_are_refused():
    with pytest.raises(ConfigError, match="cannot stand in a Slurm script"):
        script_of(Job("x\n#SBATCH --uid=0"))


@pytest.mark.parametrize(
    ("time", "wanted"),
    [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-0", 86_400), ("1-2:03:04", 93_784)],
)
def test_time_limits(time, wanted):
    assert seconds(time) == wanted


# The script at work


class Cluster:
    """A folder with programs that stand for Slurm's on PATH."""

    def __init__(self, folder: Path):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir(exist_ok=True)
        srun = f'exec {sys.executable} {Path(__file__).with_name("srun.py")} "$@"'
        for name, line in {"srun": srun, "scontrol": 'echo "$@" >> scontrol.txt'}.items():
            (self.bin / name).write_text(f"#!/bin/bash\n{line}\n")
            (self.bin / name).chmod(0o755)

    def start(self, script: Path, num_requeues: int = 0) -> subprocess.Popen:
        """What slurmd does: the batch step."""
        environ = os.environ | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NAME": "tiny",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_CPUS_ON_NODE": "2",
            **({"SLURM_RESTART_COUNT": str(num_requeues)} if num_requeues else {}),
        }
        with open(self.folder / "job.out", "a") as out:
            return subprocess.Popen(
                ["bash", str(script)], cwd=self.folder, env=environ, stdout=out, stderr=out
            )

    def said(self) -> str:
        logs = sorted((self.folder / "slurm-logs").glob("*.log"))
        return "\n".join(path.read_text() for path in (self.folder / "job.out", *logs))

    def queued_again(self) -> list[str]:
        calls = self.folder / "scontrol.txt"
        return calls.read_text().splitlines() if calls.exists() else []


# Stands for training: ends with 130 after SIGUSR1, or at once with the code that it is given.
TASK = """
trap 'echo saved; exit ${2:-130}' USR1
echo $1 > ready-$SLURM_PROCID
[[ $1 == wait ]] || exit $1
while true; do sleep 0.02; done
"""


def job_of_task(folder: Path, *words: str, **settings) -> tuple[Cluster, subprocess.Popen]:
    (folder / "task.sh").write_text(TASK)
    job = Job("tiny", gpus_per_node=0, tasks_per_node=2, **settings)
    (folder / "job.sh").write_text(batch_script(job, ["bash", "task.sh", *words], str(folder)))
    cluster = Cluster(folder)
    return cluster, cluster.start(folder / "job.sh")


@pytest.mark.parametrize(
    ("number", "settings", "after", "code", "calls"),
    [
        (signal.SIGUSR1, {}, "130", 130, ["requeue 4711"]),
        (signal.SIGUSR1, {"requeue": False}, "130", 130, []),
        (signal.SIGTERM, {}, "130", 130, []),
        # The run was done just then, or could not go on.
        (signal.SIGUSR1, {}, "0", 0, []),
        (signal.SIGUSR1, {}, "5", 5, []),
    ],
)
def test_a_signal_lets_the_tasks_save(tmp_path, number, settings, after, code, calls):
    cluster, job = job_of_task(tmp_path, "wait", after, **settings)
    wait_until(lambda: all((tmp_path / f).exists() for f in ("ready-0", "ready-1", "pids-0")))
    job.send_signal(number)
    assert job.wait(20) == code
    assert cluster.said().count("saved") == 2
    assert cluster.queued_again() == calls
    assert (tmp_path / "steps-4711").read_text() == "x"


def test_a_signal_before_the_tasks_start_is_not_lost(tmp_path):
    (tmp_path / "bin").mkdir()
    date = tmp_path / "bin" / "date"  # what the script runs last before srun
    date.write_text('#!/bin/bash\nkill -USR1 "$PPID"\nexec /bin/date "$@"\n')
    date.chmod(0o755)
    cluster, job = job_of_task(tmp_path, "wait")
    try:
        assert job.wait(20) == 130
    finally:
        job.kill()
    assert cluster.queued_again() == ["requeue 4711"]
    assert not (tmp_path / "steps-4711").exists()


@pytest.mark.parametrize(("code", "num_steps"), [(0, 1), (2, 1), (5, 1), (6, 3), (137, 3), (1, 3)])
def test_what_is_started_again(tmp_path, code, num_steps):
    cluster, job = job_of_task(tmp_path, str(code), max_restarts=2)
    assert job.wait(20) == code, cluster.said()
    assert len((tmp_path / "steps-4711").read_text()) == num_steps
    assert cluster.queued_again() == []


def wait_until(condition, timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.mark.slow
def test_training_survives_a_dead_rank_and_preemption(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(runs.make_world(tmp_path))
    steps = {"train.steps": 40, "checkpoint.every_steps": 2}
    keys = words("pretrain", settings("pretrain", "run", **steps))[1:]
    (tmp_path / "tiny.toml").write_text("")
    asked = ["launch", "--slurm", "tiny.toml", "--gpus-per-node", "0", "--tasks-per-node", "2"]
    assert main([*asked, "-o", "job.sh", "--", *keys, "--fresh"]) == 0
    assert "1 nodes x 2 tasks = 2 ranks" in capsys.readouterr().out
    cluster, folder = Cluster(tmp_path), tmp_path / "run"

    job = cluster.start(Path("job.sh"))
    # A rank dies: all start again in this allocation.
    wait_until(lambda: any(folder.glob("checkpoints/step-*")) or job.poll() is not None)
    os.kill(int((tmp_path / "pids-0").read_text().split()[1]), signal.SIGKILL)
    wait_until(lambda: len(happened(folder)) == 1 or job.poll() is not None)
    # Preempted: it saves, and Slurm queues it again.
    job.send_signal(signal.SIGTERM)
    assert job.wait(120) == 130, cluster.said()
    assert "rank 1 is missing" in cluster.said()
    assert "start 1 of 3 more" in cluster.said()
    assert cluster.queued_again() == []
    # --fresh does not start it over.
    job = cluster.start(Path("job.sh"), 1)
    assert job.wait(120) == 0, cluster.said()
    assert happened(folder) == ["resume", "interrupted", "resume"]

    whole = words("pretrain", settings("pretrain", "whole", **steps))
    run_ranks(cli.main, 2, whole)
    assert measured(folder) == measured(tmp_path / "whole")
    assert_equal(final_weights(folder), final_weights(tmp_path / "whole"))


def happened(folder: Path) -> list[str]:
    if not (folder / "events.jsonl").exists():
        return []
    return [event["event"] for event in read_events(folder)]
