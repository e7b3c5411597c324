"""Stands for `srun` where there is no Slurm: starts the tasks of a step on this machine.

As srun does, it gives each task its SLURM_* variables, forwards SIGUSR1 to the tasks, kills them on
SIGTERM, and ends with the highest of their exit codes. Tasks are this process's children; their
ids are written to `pids-STEP`.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


def main(words: list[str]) -> int:
    options = {}
    while words[0].startswith("--"):
        name, _, value = words.pop(0).partition("=")
        options[name] = value
    num_tasks = int(options["--ntasks-per-node"])
    counter = Path(f"steps-{os.environ['SLURM_JOB_ID']}")
    step = len(counter.read_text()) if counter.exists() else 0
    counter.write_text("x" * (step + 1))
    tasks: list[subprocess.Popen] = []

    def on_signal(number: int, _frame: object) -> None:
        for task in tasks:
            task.send_signal(signal.SIGKILL if number == signal.SIGTERM else number)

    signal.signal(signal.SIGUSR1, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    for rank in range(num_tasks):
        tasks.append(start(words, rank, num_tasks, step, options["--output"]))
    Path(f"pids-{step}").write_text(" ".join(str(task.pid) for task in tasks))
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def start(words: list[str], rank: int, num_tasks: int, step: int, log: str) -> subprocess.Popen:
    job, name = os.environ["SLURM_JOB_ID"], os.environ["SLURM_JOB_NAME"]
    for pattern, value in {"%x": name, "%j": job, "%t": str(rank)}.items():
        log = log.replace(pattern, value)
    environ = os.environ | {
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_ID": str(step),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }
    with open(log, "a") as file:
        return subprocess.Popen(words, env=environ, stdout=file, stderr=file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
