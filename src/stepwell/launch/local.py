"""Starts N local processes of the same command through torchrun's launcher.

Under torchrun or `srun` a command joins the ranks that are already there. What a rank other than 0
writes is shown when that rank fails.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell.launch.environ import RESTARTS, threads_per_rank
from stepwell.types import (
    CheckpointError,
    ConfigError,
    DataError,
    Interrupted,
    RankMissing,
    StepwellError,
    TrainingError,
)

if TYPE_CHECKING:
    from stepwell.launch.rank_logs import UnnamedLogs

# Set for the ranks that `launch` starts, so that they can end with it.
LAUNCHER = "STEPWELL_LAUNCHER_PID"
# How long ranks may take to finish their step and save once a signal has asked them to.
GRACE_S = 300
SHOWN_LINES = 20
# In the folder of `launch`: all that the failed rank wrote, where that is more than is shown.
FAILED_RANK_LOG = "failed-rank.log"
# Endings that another start would only repeat.
FINAL = tuple(e.exit_code for e in (ConfigError, DataError, CheckpointError, TrainingError))
# Endings of a rank because of another rank's.
FOLLOWING = (-signal.SIGTERM, 128 + signal.SIGTERM, RankMissing.exit_code)


class RankFailed(StepwellError):
    """A rank that ended with an error; `exit_code` is the rank's own where it has one."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def launch(
    num_procs: int,
    arguments: Sequence[str],
    module: str = "stepwell",
    max_restarts: int = 0,
    folder: str | Path | None = None,
) -> int:
    """Runs `python -m module *arguments` as ranks 0..num_procs-1 here; returns an exit code.

    When a rank dies or fails, the others end and all are started again, up to `max_restarts` times;
    not after an error that another start would repeat. The first SIGINT or SIGTERM is passed to
    every rank, and the ranks get GRACE_S to save (then 130 is returned); a second one ends them at
    once. folder: where FAILED_RANK_LOG is written if that folder exists.

    Raises RankFailed, which names the rank.
    """
    import torch.distributed.launcher.api  # noqa: F401 - so that its loggers are there
    from torch.distributed.elastic.multiprocessing import SignalException

    # It reports the failures that are reported below, in many lines.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(num_procs)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_S))
    os.environ[LAUNCHER] = str(os.getpid())
    words = ("-m", module, *arguments)
    try:
        for attempt in range(max_restarts):
            os.environ[RESTARTS] = str(attempt)
            try:
                return _attempt(num_procs, words, folder)
            except RankFailed as error:
                if error.exit_code in FINAL:
                    raise
                again = f"start {attempt + 1} of {max_restarts} more, from the last checkpoint"
                sys.stderr.write(f"stepwell: {error}\nstepwell: {again}\n")
                sys.stderr.flush()
        os.environ[RESTARTS] = str(max_restarts)
        return _attempt(num_procs, words, folder)
    except SignalException:
        return Interrupted.exit_code


def _attempt(num_procs: int, words: Sequence[str], folder: str | Path | None) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from stepwell.launch.rank_logs import UnnamedLogs

    logs = UnnamedLogs()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_procs,
        run_id=uuid.uuid4().hex,
        role="stepwell",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=logs,
    )
    try:
        elastic_launch(config, sys.executable)(*words)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        rank = first_cause(codes)
        if codes[rank] == Interrupted.exit_code:
            return Interrupted.exit_code
        raise _failure(rank, codes[rank], logs, folder) from None
    return 0


def first_cause(exit_codes: Mapping[int, int]) -> int:
    """Which of the failed ranks (rank -> exit code, in the order they were found) the others ended
    for: the first that did not end because another one had."""
    own = [rank for rank, code in exit_codes.items() if code not in FOLLOWING]
    return (own or list(exit_codes))[0]


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


def _failure(rank: int, code: int, logs: UnnamedLogs, folder: Any) -> RankFailed:
    """Names the rank that failed first, with the end of what it wrote."""
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    lines = [f"rank {rank} failed ({how}); the other ranks were stopped"]
    written = logs.written(rank)
    lines += [f"  rank {rank}: {line}" for line in written[-SHOWN_LINES:]]
    if len(written) > SHOWN_LINES and folder is not None and os.access(folder, os.W_OK):
        path = Path(folder) / FAILED_RANK_LOG
        path.write_text("\n".join(written) + "\n", "utf-8")
        lines.append(f"everything it wrote: {path}")
    return RankFailed("\n".join(lines), code if code > 0 else 128 - code)
