"""Starts N local processes of the same command, as torchrun would, and ends them together.

Under torchrun or `srun` a command joins the ranks that are already there. What a rank other than 0
writes is shown when that rank fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepwell.files import write_text
from stepwell.launch.environ import RESTARTS, threads_per_rank
from stepwell.launch.rank_logs import UnnamedLogs
from stepwell.launch.stopping import SIGNALS, Requests, what_is_saved
from stepwell.types import (
    CheckpointError,
    ConfigError,
    DataError,
    Interrupted,
    RankMissing,
    StepwellError,
    TrainingError,
)

# Set for the ranks that `launch` starts, so that they can end with it.
LAUNCHER = "STEPWELL_LAUNCHER_PID"
# How long ranks may take to finish their step and save once a signal has asked them to.
GRACE_S = 300.0
# How long they may take to end once another one has failed (`launch.peers` needs 10 seconds at
# most); once one has ended because another is missing, which `launch.peers` tells all at the same
# time; and once a second signal has come.
ENDING_S, MISSING_S, AT_ONCE_S = 12.0, 6.0, 3.0
# What one rank refuses, the others are about to refuse too: how long they may take to say so.
REFUSING_S = 3.0
POLL_S = 0.05
SHOWN_LINES = 20
# In the folder of `launch`: all that the failed rank wrote, where that is more than is shown.
FAILED_RANK_LOG = "failed-rank.log"
# Endings that another start would only repeat.
FINAL = tuple(e.exit_code for e in (ConfigError, DataError, CheckpointError, TrainingError))
# Endings of a rank because of another rank's, or of a signal that the launcher passed on.
FOLLOWING = (-signal.SIGTERM, 128 + signal.SIGTERM, RankMissing.exit_code)


class RankFailed(StepwellError):
    """A rank that ended with an error; `exit_code` is the rank's own where it has one."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class LocalRanks:
    """Running ranks. codes: rank -> exit code, in the order they were found to have ended; killed:
    those that had to be, because they did not end when they were asked to."""

    processes: list[subprocess.Popen[bytes]]
    logs: UnnamedLogs
    codes: dict[int, int] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)

    @property
    def running(self) -> list[int]:
        return [rank for rank in range(len(self.processes)) if rank not in self.codes]

    @property
    def failed(self) -> bool:
        return any(self.codes.values())

    def look(self) -> None:
        for rank in self.running:
            code = self.processes[rank].poll()
            if code is not None:
                self.codes[rank] = code

    def send(self, number: int) -> None:
        for rank in self.running:
            self.processes[rank].send_signal(number)

    def kill(self) -> None:
        """Also what is stopped, and so hears no other signal."""
        self.look()
        self.killed += self.running
        self.send(signal.SIGKILL)
        for rank in self.running:
            self.codes[rank] = self.processes[rank].wait()


def launch(
    num_procs: int,
    arguments: Sequence[str],
    module: str = "stepwell",
    max_restarts: int = 0,
    folder: str | Path | None = None,
) -> int:
    """Runs `python -m module *arguments` as ranks 0..num_procs-1 here; returns an exit code.

    When a rank dies or fails, the others end and all are started again, up to `max_restarts` times;
    not after an error that another start would repeat. The first of `SIGNALS` is passed to every
    rank, and the ranks get GRACE_S to save (then 130 is returned); a second one ends them at once.
    folder: the run's, where FAILED_RANK_LOG is written if it exists.

    Raises RankFailed, which names the rank, unless rank 0 has said on the console what is wrong.
    """
    words = ("-m", module, *arguments)
    with _heard() as requests:
        for attempt in range(max_restarts + 1):
            try:
                return _attempt(num_procs, words, folder, attempt, requests)
            except RankFailed as error:
                if error.exit_code in FINAL or attempt == max_restarts:
                    raise
                again = f"start {attempt + 1} of {max_restarts} more, from the last checkpoint"
                sys.stderr.write(f"stepwell: {error}\nstepwell: {again}\n")
                sys.stderr.flush()
    raise AssertionError("the last attempt returns or raises")


@contextlib.contextmanager
def _heard() -> Iterator[Requests]:
    """Takes the signals that ask to stop, until the end."""
    requests = Requests()
    numbers = (*SIGNALS, signal.SIGHUP, signal.SIGQUIT)
    before = {n: signal.signal(n, lambda number, _: requests.take(number)) for n in numbers}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _attempt(
    num_procs: int,
    words: Sequence[str],
    folder: str | Path | None,
    attempt: int,
    requests: Requests,
) -> int:
    ranks = LocalRanks([], UnnamedLogs())
    try:
        # The ranks meet at a store of this process's, so that nobody can take its port meanwhile.
        # They import torch as this process does; who is earlier waits at the open socket.
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            port = listener.getsockname()[1]
            for rank in range(num_procs):
                ranks.processes.append(_start(rank, num_procs, port, words, attempt, ranks.logs))
            store = _store(listener)
        _until_ended(ranks, requests)
        del store
    finally:
        ranks.kill()
    return _outcome(ranks, requests, folder)


def _start(
    rank: int, num_procs: int, port: int, words: Sequence[str], attempt: int, logs: UnnamedLogs
) -> subprocess.Popen[bytes]:
    environ = {"OMP_NUM_THREADS": str(threads_per_rank(num_procs)), **os.environ}
    environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_procs),
        "LOCAL_WORLD_SIZE": str(num_procs),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        RESTARTS: str(attempt),
        LAUNCHER: str(os.getpid()),
    }
    out, err = logs.streams(rank)
    # A session of its own: a terminal's Ctrl-C comes through this process, once.
    return subprocess.Popen(
        [sys.executable, *words], env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
        start_new_session=True,
    )  # fmt: skip


def _store(listener: socket.socket) -> Any:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host, port = listener.getsockname()[:2]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _until_ended(ranks: LocalRanks, requests: Requests) -> None:
    """Until all have ended by themselves, because one has failed, or for a signal."""
    deadline, passed_on, at_once, asked_at = None, None, False, None
    while True:
        ranks.look()
        now = time.monotonic()
        if not ranks.running or (deadline is not None and now >= deadline):
            return
        if asked_at is not None and now >= asked_at:
            asked_at = None
            ranks.send(signal.SIGTERM)
        if requests.at_once and not at_once:
            at_once, deadline = True, now + AT_ONCE_S
            ranks.send(signal.SIGTERM)
        elif requests.first is not None and passed_on is None and not at_once:
            passed_on, deadline = requests.first, now + GRACE_S
            ranks.send(passed_on if passed_on in SIGNALS else signal.SIGTERM)
        elif ranks.failed and deadline is None:
            codes = ranks.codes.values()
            if Interrupted.exit_code in codes:  # a signal of their own: they save first
                deadline = now + GRACE_S
            else:
                deadline = now + (MISSING_S if RankMissing.exit_code in codes else ENDING_S)
                asked_at = now + (REFUSING_S if set(FINAL).intersection(codes) else 0)
        time.sleep(POLL_S)


def _outcome(ranks: LocalRanks, requests: Requests, folder: str | Path | None) -> int:
    """The exit code of all. Raises RankFailed."""
    codes = {rank: code for rank, code in ranks.codes.items() if code}
    stopped = requests.first is not None or Interrupted.exit_code in codes.values()
    if not codes:
        return 0
    if stopped:
        own = {r: c for r, c in codes.items() if c > 0 and c not in (130, *FOLLOWING)}
        if not own:
            _say_what_is_saved(ranks, folder)
            return Interrupted.exit_code
        codes = own
    rank = first_cause(codes, ranks.killed)
    code = codes[rank]
    if code in FINAL and codes.get(0) == code:
        return code  # rank 0 has said why
    raise _failure(rank, code, ranks, folder)


def _say_what_is_saved(ranks: LocalRanks, folder: str | Path | None) -> None:
    if ranks.killed and folder is not None:
        text = f"{numbered(ranks.killed)} ended at once, without saving; {what_is_saved(folder)}"
        sys.stderr.write(f"stepwell: {text}\n")
        sys.stderr.flush()


def first_cause(exit_codes: Mapping[int, int], killed: Sequence[int] = ()) -> int:
    """Which of the failed ranks (rank -> exit code, in the order they were found) the others ended
    for: the first that did not end because another one had. killed: those that the launcher did."""
    own = [r for r, code in exit_codes.items() if code not in FOLLOWING and r not in killed]
    return (own or list(exit_codes))[0]


def end_with_launcher(environ: MutableMapping[str, str], number: int = signal.SIGTERM) -> None:
    """Has the kernel send this rank a signal when its launcher dies, even by kill -9.

    Otherwise orphaned ranks would go on writing into a run that has been started again. Linux
    only.
    """
    if not sys.platform.startswith("linux") or LAUNCHER not in environ:
        return
    launcher = int(environ.pop(LAUNCHER))
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, number)
    if os.getppid() != launcher:
        os.kill(os.getpid(), number)


def _failure(rank: int, code: int, ranks: LocalRanks, folder: Any) -> RankFailed:
    """Names the rank that failed first, with the end of what it wrote."""
    others = "the other ranks were stopped"
    if code == RankMissing.exit_code and ranks.killed:
        others = f"killed, because they did not answer: {numbered(ranks.killed)}"
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    ended = "ended" if code == RankMissing.exit_code else "failed"
    lines = [f"rank {rank} {ended} ({how}); {others}"]
    written = ranks.logs.written(rank)
    lines += [f"  rank {rank}: {line}" for line in written[-SHOWN_LINES:]]
    if len(written) > SHOWN_LINES and folder is not None and os.access(folder, os.W_OK):
        path = Path(folder) / FAILED_RANK_LOG
        try:
            write_text(path, "\n".join(written) + "\n")
            lines.append(f"everything it wrote: {path}")
        except OSError as error:  # a full disk may be what the rank failed of
            lines.append(f"everything it wrote does not fit in {path}: {error.strerror}")
    return RankFailed("\n".join(lines), code if code > 0 else 128 - code)


def numbered(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2"."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, sorted(ranks)))}"
