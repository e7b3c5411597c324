"""Tests and the code they try, in two processes that pass plain data.

A test that ran in the process of the code it tries could be made to pass: by an `__eq__` that is
always true, by leaving before the first assertion, by reading what is expected. Here the code sees
the arguments of its calls and nothing else, and what it returns arrives as plain data. Objects that
aren't data stay where they are; tests hold a `Remote` of them.

Runs in the sandbox's own processes: standard library only.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

ATOMS = (type(None), bool, int, float, complex, str, bytes)
GROUPS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
DEEPEST = 50


class Failed(Exception):
    """The code that is tried has ended, or answers nothing that can be read."""


class Ended(Failed):
    """The code has ended; its exit code says how."""


class Unusable(Exception):
    """The tests ask for what cannot be asked across processes."""


def to_text(value: Any, keep: Callable[[Any], int]) -> str:
    """A literal. What is not exactly of a plain type is kept, and its number sent."""
    return repr(_plain(value, keep, 0))


def _plain(value: Any, keep: Callable[[Any], int], depth: int) -> Any:
    kind = type(value)
    if kind is float:
        return ("float", value.hex())
    if kind is complex:
        return ("complex", value.real.hex(), value.imag.hex())
    if kind in ATOMS:
        return value
    if isinstance(value, Remote):
        return ("remote", object.__getattribute__(value, "_number"))
    if depth < DEEPEST:
        for name, group in GROUPS.items():
            if kind is group:
                return (name, [_plain(x, keep, depth + 1) for x in value])
        if kind is dict:
            pairs = [[_plain(x, keep, depth + 1) for x in pair] for pair in value.items()]
            return ("dict", pairs)
    return ("remote", keep(value))


def from_text(text: str, find: Callable[[int], Any]) -> Any:
    return _value(ast.literal_eval(text), find)


def _value(plain: Any, find: Callable[[int], Any]) -> Any:
    if not isinstance(plain, tuple):
        return plain
    kind, *rest = plain
    if kind == "float":
        return float.fromhex(rest[0])
    if kind == "complex":
        return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
    if kind == "remote":
        return find(rest[0])
    if kind == "dict":
        return {_value(k, find): _value(v, find) for k, v in rest[0]}
    return GROUPS[kind](_value(x, find) for x in rest[0])


def send(fd: int, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    view = memoryview(struct.pack("<Q", len(data)) + data)
    while view:
        view = view[os.write(fd, view) :]


def receive(fd: int, most: int = 1 << 26) -> str | None:
    """None at the end. Raises Failed for more than `most` bytes."""
    head = read_exactly(fd, 8)
    if head is None:
        return None
    (length,) = struct.unpack("<Q", head)
    if length > most:
        raise Failed(f"a message of {length} bytes exceeds {most}")
    data = read_exactly(fd, length)
    return None if data is None else data.decode("utf-8", "surrogatepass")


def read_exactly(fd: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def serve(namespace: dict[str, Any], requests: int, answers: int) -> None:
    """Answers calls on what a program has defined, until the tests end."""
    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    names = [k for k, v in namespace.items() if callable(v) and not k.startswith("__")]
    send(answers, to_text(names, keep))
    while True:
        text = receive(requests)
        if text is None:
            return
        try:
            what, target, values, named = from_text(text, kept.__getitem__)
            thing = namespace[target] if isinstance(target, str) else kept[target]
            answer = (True, _apply(what, thing, values, named))
        except BaseException as error:  # noqa: BLE001 - it is the test's to judge
            answer = (False, [type(error).__name__, str(error)])
        try:
            reply = to_text(answer, keep)
        except Exception as error:  # noqa: BLE001
            reply = to_text((False, [type(error).__name__, "cannot be sent"]), keep)
        send(answers, reply)


def _apply(what: str, thing: Any, values: list[Any], named: dict[str, Any]) -> Any:
    if what == "call":
        return thing(*values, **named)
    if what == "get":
        return getattr(thing, *values)
    if what == "list":
        return list(thing)
    return {"len": len, "str": str, "item": lambda t, key: t[key]}[what](thing, *values)


class Remote:
    """Something in the other process: called, looked into, listed; equal to itself only."""

    def __init__(self, ask: Callable[..., Any], number: int | str) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self._ask("call", self._number, list(values), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", self._number, [name], {})

    def __iter__(self) -> Any:
        return iter(self._ask("list", self._number, [], {}))

    def __len__(self) -> int:
        return self._ask("len", self._number, [], {})

    def __str__(self) -> str:
        return self._ask("str", self._number, [], {})

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", self._number, [key], {})


def run_tests(tests: str, entry_point: str, requests: int, answers: int) -> tuple[str, str]:
    """(how they ended, detail) of tests against the code at the other end. How: as an
    `pool.Outcome`, or "left" when the code has ended before them.

    The tests see the names that the code has defined, and `candidate`, the entry point. A function
    `check` of theirs is called with it, and so is each `test_...` without arguments.
    """

    def ask(what: str, target: int | str, values: list[Any], named: dict[str, Any]) -> Any:
        question = to_text((what, target, values, named), _only_data)
        try:
            send(requests, question)
        except BrokenPipeError:
            raise Ended("the code has ended before its tests did") from None
        done, value = reply()
        if done:
            return value
        name, message = value
        kind = getattr(builtins, name, None)
        if inspect.isclass(kind) and issubclass(kind, Exception):
            raise kind(message)
        raise Failed(f"{name}: {message}")

    def reply() -> Any:
        text = receive(answers)
        if text is None:
            raise Ended("the code has ended before its tests did")
        try:
            return from_text(text, lambda number: Remote(ask, number))
        except (ValueError, SyntaxError, KeyError, TypeError, RecursionError) as error:
            raise Failed(f"an answer that cannot be read: {error}") from error

    try:
        compiled = compile(tests, "<tests>", "exec")
    except (SyntaxError, ValueError) as error:
        return "broken", f"{type(error).__name__}: {error}"
    try:
        names = [name for name in reply() if isinstance(name, str)]
        space: dict[str, Any] = {name: Remote(ask, name) for name in names}
        if entry_point:
            if entry_point not in space:
                return "wrong", f"the code does not define {entry_point!r}"
            space["candidate"] = space[entry_point]
        space["__name__"] = "tests"
        exec(compiled, space)
        # Not what the code has defined: a Remote of that name is no test.
        check = space.get("check")
        if inspect.isfunction(check):
            check(space["candidate"])
        for name, value in list(space.items()):
            if name.startswith("test_") and inspect.isfunction(value):
                value()
    except AssertionError as error:
        return "wrong", f"{_where(error)} does not hold{f': {error}' if str(error) else ''}"
    except Ended as error:
        return "left", str(error)
    except Unusable as error:
        return "broken", str(error)
    except MemoryError:
        return "memory", "too little memory"
    except BaseException as error:  # noqa: BLE001 - whatever the code raises
        return "error", f"{type(error).__name__}: {error}"
    return "ok", ""


def _only_data(value: Any) -> int:
    raise Unusable(f"tests can pass plain data to the code, not {type(value).__name__}")


def _where(error: BaseException) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<tests>"]
    return f"line {lines[-1]} of the tests" if lines else "an assertion"


def run_program(code: str, namespace: dict[str, Any]) -> int:
    """The exit code: that of `sys.exit`, 1 after an exception, 77 when memory was too little."""
    try:
        exec(compile(code, "<program>", "exec"), namespace)
    except SystemExit as leaving:
        if leaving.code is None:
            return 0
        if isinstance(leaving.code, int):
            return leaving.code & 0xFF
        print(leaving.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        return 1
    except MemoryError:
        return 77
    except BaseException:  # noqa: BLE001 - a program's own
        traceback.print_exc(limit=-5)
        return 1
    return 0
