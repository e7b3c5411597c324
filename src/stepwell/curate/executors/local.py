"""Tasks in processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from stepwell.curate.folders import remove_unfinished
from stepwell.curate.tasks import run_task
from stepwell.launch.local import LAUNCHER, end_with_launcher
from stepwell.types import StepwellError

END_S = 3.0


class LocalExecutor:
    """workers: processes; 1 works in this one."""

    def __init__(self, workers: int):
        self.workers = workers

    def run(self, work: Path, stage: int, numbers: Sequence[int]) -> Iterator[int]:
        """The numbers of tasks as they end. Raises what a task raises; the tasks that are then at
        work are waited for, the others are not begun. When this process is interrupted, its workers
        are ended at once, and what they had not finished is removed."""
        remove_unfinished(work)
        if self.workers == 1 or len(numbers) < 2:
            for number in numbers:
                run_task(work, stage, number)
                yield number
            return
        # A fork would carry over threads of Arrow and of tokenizers.
        context = multiprocessing.get_context("spawn")
        others = set(multiprocessing.active_children())
        environ = {LAUNCHER: str(os.getpid())}
        pool = ProcessPoolExecutor(min(self.workers, len(numbers)), context, _begin, (environ,))
        try:
            with _interrupts_held():
                running = {pool.submit(run_task, work, stage, number): number for number in numbers}
            yield from _as_they_end(running, stage)
        except Exception:
            raise
        except BaseException:
            _end([p for p in multiprocessing.active_children() if p not in others])
            pool.shutdown(wait=True, cancel_futures=True)
            remove_unfinished(work)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(environ: dict[str, str]) -> None:
    """In a worker. A terminal's Ctrl-C is for the process that started it; libraries start no
    threads, as every core has a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_launcher(environ)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _as_they_end(running: dict[Future[None], int], stage: int) -> Iterator[int]:
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


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + END_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the block is over, and never reaches the processes that begin in it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
