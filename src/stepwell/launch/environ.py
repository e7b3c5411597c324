"""What the environment says about this process's place among the ranks. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from stepwell.types import ConfigError

# Set by `--nproc` for a launch after the first, and by the Slurm script for a step after the first.
RESTARTS = "STEPWELL_RESTART_COUNT"
RANK_TIMEOUT = "STEPWELL_RANK_TIMEOUT_S"
DEFAULT_RANK_TIMEOUT_S = 600.0


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether somebody else (torchrun, `srun`) has already started this process as a rank."""
    return "RANK" in environ or int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def num_restarts(environ: Mapping[str, str]) -> int:
    """How often this command was started again by a launcher or by Slurm: 0 the first time."""
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", RESTARTS)
    return sum(int(environ.get(name) or 0) for name in names)


def rank_timeout_s(environ: Mapping[str, str]) -> float:
    """How long a rank waits in a collective for one that does not come. Raises ConfigError."""
    text = environ.get(RANK_TIMEOUT, str(DEFAULT_RANK_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 1 <= seconds < 1e7:
        raise ConfigError(
            f"--rank-timeout {text} must be a number of seconds of at least 1; the default is "
            f"{DEFAULT_RANK_TIMEOUT_S:g}"
        )
    return seconds


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
