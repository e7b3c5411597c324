"""Tasks in processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from stepwell.curate.tasks import run_task
from stepwell.launch.local import LAUNCHER, end_with_launcher
from stepwell.types import StepwellError


class LocalExecutor:
    """workers: processes; 1 works in this one."""

    def __init__(self, workers: int):
        self.workers = workers

    def run(self, work: Path, stage: int, numbers: Sequence[int]) -> Iterator[int]:
        """The numbers of tasks as they end. Raises what a task raises; the tasks that are then at
        work are waited for, the others are not begun."""
        if self.workers == 1 or len(numbers) < 2:
            for number in numbers:
                run_task(work, stage, number)
                yield number
            return
        # A fork would carry over threads of Arrow and of tokenizers.
        context = multiprocessing.get_context("spawn")
        environ = {LAUNCHER: str(os.getpid())}
        pool = ProcessPoolExecutor(
            min(self.workers, len(numbers)), context, end_with_launcher, (environ,)
        )
        with pool:
            yield from _as_they_end(pool, work, stage, numbers)


def _as_they_end(
    pool: ProcessPoolExecutor, work: Path, stage: int, numbers: Sequence[int]
) -> Iterator[int]:
    running: dict[Future[None], int] = {
        pool.submit(run_task, work, stage, number): number for number in numbers
    }
    try:
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                number = running.pop(future)
                future.result()
                yield number
    except BrokenProcessPool as error:
        raise StepwellError(
            f"a worker process died during stage {stage} of the curation (killed, or out of "
            f"memory?); what was finished is kept, and the same command goes on from there. Fewer "
            "workers need less memory"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
