"""Runs programs that a model wrote, in killable processes with limits.

What is limited, and what is not, is in docs/rewards.md.
"""

from __future__ import annotations

import json
import os
import queue
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from stepwell.types import ConfigError, StepwellError

Ended = Literal["ok", "wrong", "timeout", "memory", "error", "broken"]
Level = Literal["auto", "namespaces", "python"]
GRACE_S = 10.0
START_S = 60.0
SOURCE = Path(__file__).parents[3]


@dataclass(frozen=True)
class Limits:
    """wall_s, cpu_s: of the whole job, and of each process's processor. memory_bytes: of address
    space, and file_bytes of a file, for each process; folder_bytes: of all files. processes: of the
    program, with threads. output_bytes: what is kept of stdout and of stderr."""

    wall_s: float = 5.0
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    file_bytes: int = 16 << 20
    folder_bytes: int = 64 << 20
    processes: int = 8
    output_bytes: int = 64 << 10


@dataclass(frozen=True)
class Program:
    """code: Python, run as `__main__` with `stdin`. With tests it is run first and then tried by
    them, in another process (`sandbox.remote`); entry_point names their `candidate`."""

    code: str
    stdin: str = ""
    tests: str | None = None
    entry_point: str = ""


@dataclass(frozen=True)
class Outcome:
    """ended: ok (exit code 0, or all tests held), wrong (a test did not hold), timeout, memory,
    error, or broken (the tests themselves cannot be run)."""

    ended: Ended
    detail: str
    stdout: str
    stderr: str
    exit_code: int | None
    wall_s: float


class SandboxBroken(StepwellError):
    """The sandbox failed, not the program in it."""


class Sandbox:
    """`num_workers` warm interpreters. isolation: "auto" takes Linux namespaces where there are
    any, otherwise Python's audit hook; `level` says which it was, `why` why not the first.

    Raises ConfigError when isolation="namespaces" cannot be had, and away from Linux.
    """

    def __init__(
        self, limits: Limits | None = None, num_workers: int = 1, isolation: Level = "auto"
    ) -> None:
        self.limits = limits or Limits()
        self.num_workers = num_workers
        if sys.platform != "linux":
            raise ConfigError(f"the sandbox needs Linux, this is {sys.platform}")
        self.why = ""
        try:
            self.level: Literal["namespaces", "python"] = "namespaces"
            first = None if isolation == "python" else _Worker("namespaces")
        except ConfigError as error:
            if isolation == "namespaces":
                raise
            first, self.why = None, str(error)
        if first is None:
            self.level, first = "python", _Worker("python")
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._idle.put(first)
        self._threads = ThreadPoolExecutor(num_workers, "sandbox")

    def run(self, program: Program, limits: Limits | None = None) -> Outcome:
        """limits: others than the sandbox's own. Raises SandboxBroken when the sandbox itself
        fails, twice."""
        for attempt in range(2):
            worker = self._take()
            try:
                answer = worker.run(program, limits or self.limits)
            except BaseException as error:
                worker.close()
                if attempt or not isinstance(error, SandboxBroken):
                    raise
                continue
            self._idle.put(worker)
            return Outcome(
                answer["ended"],
                answer["detail"],
                answer["stdout"],
                answer["stderr"],
                answer.get("exit_code"),
                answer["wall_s"],
            )
        raise AssertionError

    def run_many(self, programs: Sequence[Program]) -> list[Outcome]:
        """In their order; at most num_workers at once."""
        return list(self._threads.map(self.run, programs))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                return

    def _take(self) -> _Worker:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return _Worker(self.level)


class _Worker:
    def __init__(self, level: str) -> None:
        start = (
            f"import sys; sys.path.insert(0, {str(SOURCE)!r}); "
            "from stepwell.posttrain.sandbox.worker import main; sys.path.pop(0); "
            f"main({level!r})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-B", "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "PYTHONHASHSEED": "0"},
        )
        self._rest = b""
        try:
            said = self._line(START_S)
        except BaseException:
            self.close()
            raise
        if "refused" in said:
            self.close()
            raise ConfigError(f"the sandbox cannot have namespaces of its own: {said['refused']}")

    def run(self, program: Program, limits: Limits) -> dict[str, Any]:
        job = {
            **asdict(limits),
            "code": program.code,
            "stdin": program.stdin,
            "tests": program.tests is not None,
            "entry_point": program.entry_point,
        }
        tests = (program.tests or "").encode("utf-8", "surrogatepass")
        for data in (json.dumps(job).encode(), tests):
            self._write(struct.pack("<Q", len(data)) + data)
        return self._line(limits.wall_s + GRACE_S)

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        try:
            while view:
                view = view[self._process.stdin.write(view) or 0 :]
        except OSError as error:
            raise SandboxBroken(f"the sandbox has ended: {error}") from error

    def _line(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        fd, until = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
                raise SandboxBroken(f"the sandbox has not answered for {timeout_s:g} s")
            data = os.read(fd, 1 << 16)
            if not data:
                raise SandboxBroken("the sandbox has ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """The supervisor of a job ends with its worker, and with it the job's processes."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout):
            assert file is not None
            file.close()
