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
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from stepwell.eval.grade import Verdict
from stepwell.types import ConfigError, DataError, StepwellError, TrainingError

START_S = 120.0
END_S = 2.0  # that a process whose pipe has ended takes to be gone
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
                for number, verdict in worker.receive():
                    verdicts[number] = verdict
                    # What was interrupted (an import, a lock) may be in pieces.
                    worker.is_torn |= verdict.failure == "timeout" and not self.is_async
            now = time.monotonic()  # before any is started, which takes others' time
            for worker in busy:
                self._replace_if_needed(worker, verdicts, left, items, now)
        return [verdicts[i] for i in range(len(items))]

    def _replace_if_needed(
        self,
        worker: _Worker,
        verdicts: dict[int, Verdict],
        left: deque[Any],
        items: list[tuple[int, str, str, dict[str, Any]]],
        now: float,
    ) -> None:
        """A worker that is dead, late or torn. Of the answers that it had, those that were late (or
        all, if it died by itself) fail; the others are graded again."""
        late = [number for number, deadline in worker.deadlines.items() if deadline <= now]
        if worker.is_alive and not worker.is_torn and not late:
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
        self._workers.remove(worker)
        if left:
            self._workers.append(self._started())

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
        self.source = source
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
        self.is_torn = False

    def ready(self) -> tuple[tuple[str, ...], bool]:
        """(required columns, is async). Raises what the verifier's opening did."""
        said, is_late = None, False
        try:
            is_late = not self.connection.poll(START_S)
            said = None if is_late else self.connection.recv()
        except (EOFError, OSError):  # it has ended
            said = None
        if said is not None and said[0] == "ready":
            return said[1], said[2]
        if said is not None:
            self.close()
            kinds = {kind.__name__: kind for kind in (ConfigError, DataError)}
            raise kinds.get(said[1], StepwellError)(said[2])
        if not is_late:
            raise ConfigError(
                f"{self.source}: reading it ended the process (exit code {self._code()}) before "
                "anything could be graded; a file of rewards must come to its end"
            )
        self.close()
        raise ConfigError(
            f"{self.source}: reading it took longer than {START_S:g} s; a file of rewards must "
            "come to its end (what waits or loads for long belongs into the function)"
        )

    def _code(self) -> int:
        """The exit code of one whose pipe has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        return self.close()

    def send(self, item: tuple[int, str, str, dict[str, Any]], deadline: float) -> None:
        self.deadlines[item[0]] = deadline
        try:
            self.connection.send(item)
        except OSError:
            self.is_alive = False

    def receive(self) -> list[tuple[int, Verdict]]:
        """All that it has said."""
        found = []
        try:
            while self.connection.poll():
                number, verdict = self.connection.recv()
                self.deadlines.pop(number)
                found.append((number, verdict))
        except (EOFError, OSError):
            self.is_alive = False
        return found

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
