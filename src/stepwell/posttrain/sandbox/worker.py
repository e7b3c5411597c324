"""A warm interpreter that forks a confined child for each program.

    worker (in the namespaces) -> supervisor (a job's clock and output)
        -> first (its processes' init) -> code, and for tests a second process beside it

When the first process ends, or is killed, the kernel kills all of the job's, whatever they ignore
and whoever their parents are. Where there are no namespaces, the supervisor finds them.

A request: 8 bytes of length, JSON of the limits and the code, 8 bytes of length, the tests. The
tests are read after the code's process was forked, so it has never had them. Answers are lines of
JSON. Standard library only.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from stepwell.posttrain.sandbox import isolation
from stepwell.posttrain.sandbox.remote import (
    read_exactly,
    receive,
    run_program,
    run_tests,
    send,
    serve,
)

OURS = 8  # processes of a job that are not the program's own


def main(level: str) -> None:
    """level: "namespaces" or "python"."""
    os.setsid()
    if level == "namespaces":
        try:
            isolation.enter_namespaces()
        except OSError as error:
            _say({"refused": str(error)})
            return
    _say({"level": level})
    while True:
        head = read_exactly(0, 8)
        if head is None:
            return
        job = read_exactly(0, struct.unpack("<Q", head)[0])
        if job is None:
            return
        worker = os.getpid()
        pid = os.fork()
        if pid == 0:
            _child(partial(_supervise, json.loads(job), level, worker))
        del job
        if os.waitpid(pid, 0)[1]:
            return  # its words may be cut short, or the tests half read


def _say(value: dict[str, Any]) -> None:
    data = memoryview(json.dumps(value).encode() + b"\n")
    while data:
        data = data[os.write(1, data) :]


def _child(work: Callable[[], None]) -> None:
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def _supervise(job: dict[str, Any], level: str, worker: int) -> None:
    isolation.die_with_parent(worker)
    started = time.monotonic()
    if level == "namespaces":
        isolation.enter_job(job["folder_bytes"])
        folder = "/tmp"
    else:
        folder = tempfile.mkdtemp(prefix="stepwell-sandbox-")
        isolation.become_reaper()
    pipes = {name: os.pipe() for name in ("stdin", "stdout", "stderr", "status", "tests")}
    supervisor = os.getpid()
    first = os.fork()
    if first == 0:
        _child(lambda: _first(job, level, folder, pipes, supervisor))
    to_read: dict[int, bytearray] = {}
    try:
        tests = _read_tests()
        for name in ("stdin", "tests"):
            os.close(pipes[name][0])
        for name in ("stdout", "stderr", "status"):
            os.close(pipes[name][1])
        to_write = {
            pipes["stdin"][1]: job["stdin"].encode("utf-8", "surrogatepass"),
            pipes["tests"][1]: tests,
        }
        to_read = {pipes[name][0]: bytearray() for name in ("stdout", "stderr", "status")}
        in_time = _exchange(
            to_write,
            to_read,
            last=pipes["status"][0],
            until=started + job["wall_s"],
            most=job["output_bytes"],
        )
    finally:
        _end(first, level)
        if level != "namespaces":
            shutil.rmtree(folder, ignore_errors=True)
    _drain(to_read, pipes["status"][0], job["output_bytes"])
    out, err, status = (bytes(to_read[pipes[n][0]]) for n in ("stdout", "stderr", "status"))
    answer = json.loads(status) if status else {}
    if not in_time:
        answer = {"ended": "timeout", "detail": f"longer than {job['wall_s']:g} s"}
    elif not status:
        answer = {"ended": "error", "detail": "ended without a word"}
    _say(
        {
            **answer,
            "stdout": out.decode("utf-8", "replace"),
            "stderr": err.decode("utf-8", "replace"),
            "wall_s": time.monotonic() - started,
        }
    )


def _read_tests() -> bytes:
    head = read_exactly(0, 8)
    assert head is not None
    tests = read_exactly(0, struct.unpack("<Q", head)[0])
    assert tests is not None
    return head + tests


def _exchange(
    to_write: dict[int, bytes], to_read: dict[int, bytearray], last: int, until: float, most: int
) -> bool:
    """Writes and reads until `last` ends, keeping `most` bytes of each; False if time is up.

    Nobody asks anything during a job, so where stdin can be read it has ended, and its owner too.
    """
    selector = selectors.DefaultSelector()
    left = {fd: memoryview(data) for fd, data in to_write.items()}
    for fd in (*to_write, *to_read):
        os.set_blocking(fd, False)
        selector.register(fd, selectors.EVENT_WRITE if fd in left else selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    while last in selector.get_map():
        remaining = until - time.monotonic()
        if remaining <= 0:
            return False
        for key, _ in selector.select(remaining):
            fd = key.fd
            if fd == 0:
                raise EOFError("the owner of the sandbox has gone")
            if fd in left:
                left[fd] = _write_some(fd, left[fd])
                if left[fd]:
                    continue
                os.close(fd)
            elif _read_some(fd, to_read[fd], most if fd != last else 1 << 20):
                continue
            selector.unregister(fd)
    return True


def _write_some(fd: int, data: memoryview) -> memoryview:
    if not data:
        return data
    try:
        return data[os.write(fd, data[:65536]) :]
    except BrokenPipeError:
        return data[:0]


def _read_some(fd: int, kept: bytearray, most: int) -> bool:
    """False at the end."""
    try:
        data = os.read(fd, 65536)
    except BlockingIOError:
        return True
    kept += data[: max(0, most - len(kept))]
    return bool(data)


def _drain(to_read: dict[int, bytearray], last: int, most: int) -> None:
    for fd, kept in to_read.items():
        if fd == last:
            continue
        for _ in range(64):  # a pipe holds no more; it ends here, all writers are dead
            before = len(kept)
            if not _read_some(fd, kept, most) or len(kept) in (before, most):
                break


def _end(first: int, level: str) -> None:
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    if level == "namespaces":
        return
    for _ in range(1000):  # descendants, also those whose parents have left them
        found = _children(os.getpid())
        if not found:
            return
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        for pid in found:
            os.waitpid(pid, 0)


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _first(
    job: dict[str, Any], level: str, folder: str, pipes: dict[str, tuple[int, int]], parent: int
) -> None:
    """Starts the job's processes, waits for the one that decides, and says how it ended."""
    if level == "namespaces":
        isolation.libc().prctl(isolation.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        isolation.own_proc()
    else:
        isolation.die_with_parent(parent)
    isolation.unreadable()  # and so are its children
    os.chdir(folder)
    calls, answers = os.pipe(), os.pipe()
    code = os.fork()
    if code == 0:
        _child(lambda: _code(job, level, folder, pipes, calls[0], answers[1]))
    verdict = os.pipe()
    if job["tests"] and os.fork() == 0:
        _child(lambda: _tests(job, level, pipes, calls[1], answers[0], verdict[1]))
    for pair in (calls, answers):
        os.close(pair[0])
        os.close(pair[1])
    os.close(verdict[1])
    for name in ("stdin", "tests"):  # their readers are others
        os.close(pipes[name][0])
        os.close(pipes[name][1])
    said = receive(verdict[0]) if job["tests"] else None
    answer = json.loads(said) if said else {"ended": "left", "detail": ""}
    if answer["ended"] == "left":
        answer = _how(code, job, answer["detail"])
    data = json.dumps(answer).encode()
    os.write(pipes["status"][1], data)


def _how(code: int, job: dict[str, Any], detail: str) -> dict[str, Any]:
    """How the code's process has ended, or ends."""
    while True:
        pid, status, usage = os.wait3(0)
        if pid == code:
            break
    exit_code = os.waitstatus_to_exitcode(status)
    ended, is_busy = "error", usage.ru_utime + usage.ru_stime >= job["cpu_s"] - 0.5
    detail = f"{detail}: exit code {exit_code}" if detail else f"exit code {exit_code}"
    if exit_code == 0 and not job["tests"]:
        ended, detail = "ok", ""
    elif exit_code == 77:
        ended, detail = "memory", "too little memory"
    elif exit_code == -signal.SIGKILL and is_busy:
        ended, detail = "timeout", "too much processor time"
    return {"ended": ended, "detail": detail, "exit_code": exit_code}


def _confine(job: dict[str, Any], level: str, folder: str | None) -> None:
    """folder: of an untrusted process; where there are no namespaces it is refused the rest."""
    if level == "namespaces":
        isolation.without_privileges()
    processes = job["processes"] + OURS
    if level != "namespaces":  # the limit counts all that this user has, and spares root
        processes += isolation.tasks_of_this_user() + isolation.SLACK
    isolation.set_limits(job["cpu_s"], job["memory_bytes"], job["file_bytes"], processes)
    if level != "namespaces" and folder is not None:
        isolation.refuse_by_audit(folder, (sys.base_prefix, sys.base_exec_prefix))


def _standard_files(stdin: int, stdout: int, stderr: int, keep: tuple[int, ...]) -> list[int]:
    """These become 0, 1, 2; those to keep follow; all others are closed."""
    wanted = [os.dup(fd) for fd in (stdin, stdout, stderr, *keep)]
    high = [os.dup2(fd, 100 + i) for i, fd in enumerate(wanted)]
    for number, fd in enumerate(high):
        os.dup2(fd, number)
    os.closerange(len(high), 256)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    return list(range(3, len(high)))


def _code(
    job: dict[str, Any],
    level: str,
    folder: str,
    pipes: dict[str, tuple[int, int]],
    calls: int,
    answers: int,
) -> None:
    os.setsid()
    keep = (calls, answers) if job["tests"] else ()
    kept = _standard_files(pipes["stdin"][0], pipes["stdout"][1], pipes["stderr"][1], keep)
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    program = job["code"]
    _confine(job, level, folder)
    code = run_program(program, namespace)
    if job["tests"] and code == 0:
        serve(namespace, *kept)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        code = code or 1
    os._exit(code)


def _tests(
    job: dict[str, Any],
    level: str,
    pipes: dict[str, tuple[int, int]],
    calls: int,
    answers: int,
    verdict: int,
) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    keep = (pipes["tests"][0], calls, answers, verdict)
    tests_fd, calls, answers, verdict = _standard_files(nothing, nothing, nothing, keep)
    _confine(job, level, None)
    tests = receive(tests_fd)
    assert tests is not None
    ended, detail = run_tests(tests, job["entry_point"], calls, answers)
    send(verdict, json.dumps({"ended": ended, "detail": detail[:1000], "exit_code": 0}))
