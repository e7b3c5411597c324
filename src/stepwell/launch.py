"""Starts N local processes of the same command through torchrun's launcher.

Under torchrun or `srun` a command joins the ranks that are already there. A rank other than 0
writes to a file, which is shown when that rank fails.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from stepwell.types import ConfigError, StepwellError

# Set for the ranks that `launch` starts, so that they can end with it.
LAUNCHER = "STEPWELL_LAUNCHER_PID"
# How long ranks may take to finish their step and save once a signal has asked them to.
GRACE_S = 300


class RankFailed(StepwellError):
    """A rank that ended with an error; `exit_code` is the rank's own where it has one."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether somebody else (torchrun, `srun`) has already started this process as a rank."""
    return "RANK" in environ or int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What torch.distributed wants to know, for a task of a Slurm step; empty under torchrun.

    Raises ConfigError when Slurm leaves out a variable that is needed.
    """
    if "RANK" in environ or int(environ.get("SLURM_STEP_NUM_TASKS", "1")) <= 1:
        return {}
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    if missing := [name for name in needed if name not in environ]:
        raise ConfigError(
            f"this looks like a task of a Slurm step, but {', '.join(missing)} is not set; "
            "start it with srun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    job, step = int(environ["SLURM_JOB_ID"]), int(environ.get("SLURM_STEP_ID", "0"))
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "MASTER_ADDR": environ.get("MASTER_ADDR", first_host(environ["SLURM_STEP_NODELIST"])),
        "MASTER_PORT": environ.get("MASTER_PORT", str(20_000 + (job * 31 + step) % 10_000)),
    }


def first_host(nodelist: str) -> str:
    """The first name in Slurm's short form: `node[07-09,12],login1` gives `node07`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodelist)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST={nodelist!r} names no host")
    prefix, first, suffix = match.groups()
    return prefix + (first or "") + (suffix or "")


def threads_per_rank(num_procs: int) -> int:
    """An even share of the cores this process may use: two ranks on a core wait for each other."""
    return max(1, len(os.sched_getaffinity(0)) // num_procs)


def check_num_procs(num_procs: int, global_batch_rows: int | None = None) -> None:
    """Raises ConfigError unless every rank gets a row of the global batch."""
    if num_procs < 1:
        raise ConfigError(f"--nproc {num_procs} must be at least 1")
    if global_batch_rows is not None and num_procs > global_batch_rows:
        raise ConfigError(
            f"--nproc {num_procs} exceeds train.global_batch_rows={global_batch_rows}, so some "
            f"ranks would have no row; the nearest legal value is --nproc {global_batch_rows}"
        )


def launch(num_procs: int, arguments: Sequence[str], module: str = "stepwell.cli") -> int:
    """Runs `python -m module *arguments` as ranks 0..num_procs-1 here; returns an exit code.

    The first SIGINT or SIGTERM is passed to every rank, and the ranks get GRACE_S to save (then
    130 is returned); a second one ends them at once. Raises RankFailed, which names the rank.
    """
    from torch.distributed.elastic.multiprocessing import (
        DefaultLogsSpecs,
        SignalException,
        Std,
    )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # It reports the failures that are reported below, in many lines.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(num_procs)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_S))
    os.environ[LAUNCHER] = str(os.getpid())
    logs = Path(tempfile.mkdtemp(prefix="stepwell-ranks-"))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_procs,
        run_id=logs.name,
        role="stepwell",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(logs), redirects=dict.fromkeys(range(1, num_procs), Std.ALL)
        ),
    )
    command = elastic_launch(config, sys.executable)
    try:
        command("-m", module, *arguments)
    except ChildFailedError as error:
        raise _failure(error, logs) from None
    except SignalException:
        shutil.rmtree(logs, ignore_errors=True)
        return 130
    shutil.rmtree(logs, ignore_errors=True)
    return 0


def end_with_launcher(environ: MutableMapping[str, str]) -> None:
    """Has the kernel send this rank SIGTERM when its launcher dies, even by kill -9.

    Otherwise orphaned ranks would go on writing into a run that has been started again. Linux
    only.
    """
    if not sys.platform.startswith("linux") or LAUNCHER not in environ:
        return
    launcher = int(environ.pop(LAUNCHER))
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGTERM)


def _failure(error: Any, logs: Path) -> RankFailed:
    """Names the rank that failed first; the others were ended because of it."""
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    lines = [f"rank {rank} failed ({how}); the other ranks were stopped"]
    stderr = next(iter(sorted(logs.glob(f"*/attempt_*/{rank}/stderr.log"))), None)
    if stderr is not None:
        tail = stderr.read_text("utf-8", errors="replace").splitlines()[-20:]
        lines += [f"  rank {rank}: {line}" for line in tail]
        lines.append(f"everything it wrote: {stderr.parent}")
    else:
        shutil.rmtree(logs, ignore_errors=True)
    return RankFailed("\n".join(lines), code if code > 0 else 128 - code)
