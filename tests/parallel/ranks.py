"""Real gloo ranks for tests: `run_ranks(function, num_ranks, *args)`.

The function must be importable by name (top level of its test module). It is called once in each
process with RANK, WORLD_SIZE and the rest set as torchrun does. The processes are forked from a
server that has torch and Stepwell imported already, so a launch costs about a tenth of a second
a rank; what costs more is the first step in a new process (half a second a rank and core), so tests
that need the same number of ranks share a launch where they can: `run_jobs`.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        "pytest",
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "stepwell.parallel.fsdp",
        "stepwell.posttrain.grpo",
        "stepwell.posttrain.sft",
    ]
)
_GRACE_S = 5.0


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 100.0
) -> list[Any]:
    """Each rank's return value, in rank order; AssertionError with every rank's traceback."""
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        ranks = [
            FORKSERVER.Process(
                target=_rank_main,
                args=(function, rank, num_ranks, port, folder, timeout_s, args),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        _join(ranks, timeout_s)
        trouble = [
            f"--- rank {number} (exit code {rank.exitcode})\n{_read(Path(folder), number)}"
            for number, rank in enumerate(ranks)
            if rank.exitcode != 0
        ]
        assert not trouble, "\n".join([f"{len(trouble)} of {num_ranks} ranks failed", *trouble])
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)
        ]


def run_jobs(num_ranks: int, **jobs: tuple[Any, ...]) -> dict[str, list[Any]]:
    """Several (function, *args) one after another in one launch: name -> each rank's value."""
    results = run_ranks(_each, num_ranks, list(jobs.values()))
    return {name: [rank[i] for rank in results] for i, name in enumerate(jobs)}


def _each(jobs: list[tuple[Any, ...]]) -> list[Any]:
    return [function(*args) for function, *args in jobs]


def _join(ranks: list[Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(rank.is_alive() for rank in ranks):
        if any(rank.exitcode not in (None, 0) for rank in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
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
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    with open(Path(folder) / f"{rank}.txt", "w") as log:
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


def _read(folder: Path, rank: int) -> str:
    log = folder / f"{rank}.txt"
    return log.read_text() if log.exists() else "(ended before it began)"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
