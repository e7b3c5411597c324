"""A process that grades, so that one that hangs, even in C code, can be killed."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from stepwell.eval.grade import Verdict, columns_for, one_verdict, required_columns, verify_each
from stepwell.posttrain.verifiers.find import find_verifier
from stepwell.types import StepwellError

Item = tuple[int, str, str, dict[str, Any]]  # number, prompt, completion, columns


def main(source: str, timeout_s: float, pipe: int, alive: int) -> None:
    """pipe: items in, (number, Verdict) out, until it ends. alive: ends when the owner has gone,
    and then this process does, whatever it is doing."""
    _end_with(alive)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a Ctrl-C the owner decides
    os.dup2(2, 1)  # what graders print is no answer
    connection = Connection(pipe)
    try:
        verifier = find_verifier(source)
    except StepwellError as error:
        connection.send(("refused", type(error).__name__, str(error)))
        return
    is_async = is_coroutine_function(verifier)
    connection.send(("ready", tuple(required_columns(verifier)), is_async))
    if is_async:
        asyncio.run(_grade_together(verifier, timeout_s, connection))
    else:
        _grade_one_by_one(verifier, timeout_s, connection)


def is_coroutine_function(verifier: Callable[..., Any]) -> bool:
    """Also of an object whose `__call__` is one, and of such a one with arguments filled in."""
    function: Any = inspect.unwrap(verifier)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    called = getattr(type(function), "__call__", None)  # noqa: B004 - is it async?
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _end_with(alive: int) -> None:
    """Another process waits for the owner's end: this one may not be able to."""
    worker = os.getpid()
    if os.fork():
        os.close(alive)
        return
    os.closerange(0, alive)
    os.closerange(alive + 1, 1024)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.read(alive, 1)
    if os.getppid() == worker:
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _grade_one_by_one(
    verifier: Callable[..., Any], timeout_s: float, connection: Connection
) -> None:
    while (item := _next(connection)) is not None:
        number, prompt, text, row = item
        (verdict,) = verify_each(verifier, [prompt], [text], [row], timeout_s)
        connection.send((number, verdict))


async def _grade_together(
    verifier: Callable[..., Any], timeout_s: float, connection: Connection
) -> None:
    """The owner says how many at once, by how many it sends."""
    items: asyncio.Queue[Item | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        item: Item | None = (0, "", "", {})
        while item is not None:
            item = _next(connection)
            loop.call_soon_threadsafe(items.put_nowait, item)

    threading.Thread(target=read, daemon=True).start()
    tasks: set[asyncio.Task[None]] = set()
    while (item := await items.get()) is not None:
        task = asyncio.create_task(_grade_one(verifier, timeout_s, connection, item))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _grade_one(
    verifier: Callable[..., Any], timeout_s: float, connection: Connection, item: Item
) -> None:
    number, prompt, text, row = item
    columns = columns_for(verifier, row)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            verdict = one_verdict(await verifier([prompt], [text], **columns))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - anyone's code; failures are counted
        verdict = Verdict(None, "error", f"{type(error).__name__}: {error}")
        if isinstance(error, TimeoutError) and limit.expired():
            verdict = Verdict(None, "timeout", f"took longer than {timeout_s} s")
    connection.send((number, verdict))


def _next(connection: Connection) -> Item | None:
    try:
        return connection.recv()
    except EOFError:
        return None


def run(arguments: Sequence[str]) -> None:
    source, timeout_s, pipe, alive = arguments
    main(source, float(timeout_s), int(pipe), int(alive))


if __name__ == "__main__":
    run(sys.argv[1:])
