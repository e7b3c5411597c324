"""Real gloo ranks on this machine, for labs and tests: `run_ranks(function, num_ranks, *args)`.

The function must be importable by name (top level of its module). It is called once in each process
with RANK, WORLD_SIZE and the rest set as torchrun does. The processes are forked from a server that
has torch imported already, so a launch costs about a tenth of a second a rank; what costs more is
the first step in a new process (half a second a rank and core).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from stepwell.types import StepwellError

PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "stepwell.parallel.fsdp",
)
# How long the other ranks may take to notice that one has failed.
GRACE_S = 5.0


class RanksFailed(StepwellError):
    """At least one rank raised, died or did not end in time; the message has every traceback."""


def forkserver(preload: Sequence[str] = PRELOAD) -> Any:
    """The multiprocessing context that ranks come from. Its server starts with the first process,
    and imports `preload` then; a later list has no effect."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 100.0,
    preload: Sequence[str] = PRELOAD,
) -> list[Any]:
    """Each rank's return value, in rank order. No process and no file is left behind.

    Raises RanksFailed with the traceback of every rank that failed; of one that did not end within
    timeout_s, where it was at that moment.
    """
    context = forkserver(preload)
    # The ranks meet at a store of this process's, so that nobody can take its port meanwhile.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="stepwell-run-ranks-") as folder:
        ranks = [
            context.Process(
                target=_rank_main,
                args=(function, rank, num_ranks, store.port, folder, timeout_s, args),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            for rank in ranks:
                rank.start()
            _wait(ranks, timeout_s)
        finally:
            _end(ranks)
        trouble = [
            f"--- rank {number} ({_ending(rank.exitcode)})\n{_read(Path(folder), number)}"
            for number, rank in enumerate(ranks)
            if rank.exitcode != 0
        ]
        if trouble:
            raise RanksFailed("\n".join([f"{len(trouble)} of {num_ranks} ranks failed", *trouble]))
        # Written by the ranks just now, so it may hold any object.
        files = [Path(folder) / f"{rank}.pt" for rank in range(num_ranks)]
        return [torch.load(file, weights_only=False) for file in files]


def _wait(ranks: list[BaseProcess], timeout_s: float) -> None:
    """Until all have ended, the time is over, or one has failed and the others had GRACE_S."""
    deadline = time.monotonic() + timeout_s
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        if any(rank.exitcode not in (None, 0) for rank in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.02)


def _end(ranks: list[BaseProcess]) -> None:
    started = [rank for rank in ranks if rank.pid is not None]
    for rank in started:
        rank.kill()
    for rank in started:
        rank.join()


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    port: int,
    folder: str,
    timeout_s: float,
    args: tuple[Any, ...],
) -> None:
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        OMP_NUM_THREADS="1",
    )
    with open(Path(folder) / f"{rank}.txt", "w") as log:
        faulthandler.enable(file=log)
        faulthandler.dump_traceback_later(max(timeout_s - 2, 1), file=log)
        try:
            torch.save(function(*args), Path(folder) / f"{rank}.pt")
        except BaseException:  # noqa: BLE001 - whatever it was, the parent shows it
            traceback.print_exc(file=log)
            raise SystemExit(1) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _end_with_parent(folder: str) -> None:
    """The server that forked this rank lives on when the process that asked for it is killed; and
    that one's folder is then this one's to remove."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _ending(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return signal.Signals(-exit_code).name
    return f"exit code {exit_code}"


def _read(folder: Path, rank: int) -> str:
    log = folder / f"{rank}.txt"
    return log.read_text() if log.exists() else "(ended before it began)"
