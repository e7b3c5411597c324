"""Graders in processes of their own: one that hangs is killed and costs its own answer only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from stepwell.eval.grade import Verdict
from stepwell.types import ConfigError, DataError, StepwellError, TrainingError

START_S = 120.0
KILL_AFTER_S = 1.0  # beyond the limit that a grader is interrupted at from within
TOGETHER = 16  # answers that one process grades at once, if its function is async


class GraderPool:
    """`num_workers` processes that grade by the verifier `source`, started when they are needed.

    requires: the columns that it takes by name. Raises ConfigError for a source that cannot be
    had, as `find_verifier` does.
    """

    def __init__(self, source: str, timeout_s: float, num_workers: int = 1) -> None:
        self.source, self.timeout_s, self.num_workers = source, timeout_s, num_workers
        self._lock = threading.Lock()
        self._workers = [_Worker(source, timeout_s)]
        self.requires, self.is_async = self._workers[0].ready()

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> list[Verdict]:
        """From any thread. Raises TrainingError when no grader can be started any more."""
        items = [
            (i, prompt, text, dict(row))
            for i, (prompt, text, row) in enumerate(zip(prompts, completions, rows, strict=True))
        ]
        with self._lock:
            try:
                return self._score(items)
            except BaseException:  # what is under way must not be taken for a later answer
                self.close()
                raise

    def _score(self, items: list[tuple[int, str, str, dict[str, Any]]]) -> list[Verdict]:
        left, verdicts = deque(items), dict[int, Verdict]()
        at_once = TOGETHER if self.is_async else 1
        self._grow(-(-len(items) // at_once))
        while len(verdicts) < len(items):
            for worker in self._workers:
                while left and len(worker.deadlines) < at_once and worker.is_alive:
                    worker.send(left.popleft(), time.monotonic() + self.timeout_s + KILL_AFTER_S)
            busy = [w for w in self._workers if w.deadlines]
            now = time.monotonic()
            first = min((d for w in busy for d in w.deadlines.values()), default=now)
            for connection in wait([w.connection for w in busy], max(0.0, first - now)):
                worker = next(w for w in busy if w.connection is connection)
                answer = worker.receive()
                if answer is not None:
                    verdicts[answer[0]] = answer[1]
            for worker in busy:
                self._replace_if_needed(worker, verdicts, left, items)
        return [verdicts[i] for i in range(len(items))]

    def _replace_if_needed(
        self,
        worker: _Worker,
        verdicts: dict[int, Verdict],
        left: deque[Any],
        items: list[tuple[int, str, str, dict[str, Any]]],
    ) -> None:
        """A worker that is dead or late. Of the answers that it had, those that were late (or all,
        if it died by itself) fail; the others are graded again."""
        now = time.monotonic()
        late = [number for number, deadline in worker.deadlines.items() if deadline <= now]
        if worker.is_alive and not late:
            return
        code = worker.close()
        for number in worker.deadlines:
            if number in late:
                text = f"took longer than {self.timeout_s} s, and was killed"
                verdicts[number] = Verdict(None, "timeout", text)
            elif not late:
                verdicts[number] = Verdict(None, "error", f"the grader has died ({code})")
            else:
                left.appendleft(items[number])
        self._workers[self._workers.index(worker)] = self._started()

    def _grow(self, wanted: int) -> None:
        self._workers = [w for w in self._workers if w.is_there()]
        more = range(len(self._workers), max(1, min(wanted, self.num_workers)))
        new = [_Worker(self.source, self.timeout_s) for _ in more]
        self._workers += new
        for worker in new:
            self._require(worker)

    def _started(self) -> _Worker:
        worker = _Worker(self.source, self.timeout_s)
        self._require(worker)
        return worker

    def _require(self, worker: _Worker) -> None:
        try:
            worker.ready()
        except StepwellError as error:
            raise TrainingError(f"the grader {self.source!r} cannot be started: {error}") from error

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []


class _Worker:
    def __init__(self, source: str, timeout_s: float) -> None:
        ours, theirs = socket.socketpair()
        watched, alive = os.pipe()
        words = [source, str(timeout_s), str(theirs.fileno()), str(watched)]
        # Workers are many: one thread each.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stepwell.posttrain.rewards.grader_worker", *words],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), watched),
            env={**os.environ, **threads, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
        theirs.close()
        os.close(watched)
        self._alive: int | None = alive
        self.connection = Connection(ours.detach())
        self.deadlines: dict[int, float] = {}
        self.is_alive = True

    def ready(self) -> tuple[tuple[str, ...], bool]:
        """(required columns, is async). Raises what the verifier's opening did."""
        try:
            said = self.connection.recv() if self.connection.poll(START_S) else None
        except (EOFError, OSError):
            said = None
        if said is not None and said[0] == "ready":
            return said[1], said[2]
        code = self.close()
        if said is not None:
            kinds = {kind.__name__: kind for kind in (ConfigError, DataError)}
            raise kinds.get(said[1], StepwellError)(said[2])
        raise StepwellError(f"the process ended ({code}) or did not start within {START_S:g} s")

    def send(self, item: tuple[int, str, str, dict[str, Any]], deadline: float) -> None:
        self.deadlines[item[0]] = deadline
        try:
            self.connection.send(item)
        except OSError:
            self.is_alive = False

    def receive(self) -> tuple[int, Verdict] | None:
        try:
            number, verdict = self.connection.recv()
        except (EOFError, OSError):
            self.is_alive = False
            return None
        self.deadlines.pop(number)
        return number, verdict

    def is_there(self) -> bool:
        """Also closes one that has ended by itself."""
        if self.is_alive and self._process.poll() is None:
            return True
        self.close()
        return False

    def close(self) -> int:
        """The exit code; it is killed with its children if it is still there."""
        if self._alive is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            os.close(self._alive)
            self._alive = None
            self.connection.close()
        return self._process.wait()


def usual_num_workers() -> int:
    """The machine's cores, shared among its ranks; at most 8."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, (os.cpu_count() or 1) // ranks))
