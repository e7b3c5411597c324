"""Environments that answer between the turns of a sample: what they are, how one is run so that it
costs at most its own sample, and how its answers become tokens.

An environment is used for one sample only. `reset(row)` gets the columns of the prompt's row (with
`prompt`) and may return the messages of a conversation to begin with instead of the prompt.
`step(text)` gets what the policy wrote in its turn and returns (observation or None, reward or
None, done). Both may be coroutines. `close()`, if there is one, is called at the end; `role`, if
there is one, is the observations' role in the chat template ("user" by default).
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from stepwell.data.chat import OPEN, Message, render_text
from stepwell.posttrain.user_code import attribute, load
from stepwell.tokenizer import Tokenizer
from stepwell.types import ConfigError, DataError, nearest

SHIPPED = ("calculator",)


class Environment(Protocol):
    def reset(self, row: Mapping[str, Any]) -> Any: ...

    def step(self, text: str) -> Any: ...


Factory = Callable[[], Environment]


@dataclass(frozen=True)
class Failure:
    """kind: "environment_error" or "environment_timeout"."""

    kind: str
    detail: str


@dataclass(frozen=True)
class Answer:
    """What `step` returned."""

    observation: str | None
    reward: float | None
    done: bool


class _Abandoned(BaseException):
    """Not an Exception, so that an environment's own handler does not swallow it."""


class Worker:
    """One environment in a thread of its own, from its making to its end.

    A call that takes longer than timeout_s fails; its thread is told to stop, which Python code
    hears and a call into C does not: that thread stays behind, without a part in anything.
    """

    def __init__(self, factory: Factory, timeout_s: float):
        self.timeout_s = timeout_s
        self._factory, self._deadline = factory, 0.0
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self._thread.start()

    def begin(self, method: str, *arguments: Any) -> None:
        """Starts a call; `result` ends it. So the calls of many environments run side by side."""
        self._deadline = time.monotonic() + self.timeout_s
        self._calls.put((method, arguments))

    def result(self) -> Any:
        """What the call returned, or a Failure."""
        try:
            return self._results.get(timeout=max(self._deadline - time.monotonic(), 0.001))
        except queue.Empty:
            self._abandon()
            return Failure("environment_timeout", f"took longer than {self.timeout_s} s")

    def close(self) -> None:
        self._calls.put(None)

    def _abandon(self) -> None:
        self._calls.put(None)
        thread = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Abandoned))

    def _run(self) -> None:
        loop = asyncio.new_event_loop()

        def call(function: Callable[..., Any], *arguments: Any) -> Any:
            found = function(*arguments)
            return loop.run_until_complete(found) if inspect.isawaitable(found) else found

        environment: Any = None
        try:
            while (wanted := self._calls.get()) is not None:
                method, arguments = wanted
                try:
                    environment = environment or self._factory()
                    self._results.put(call(getattr(environment, method), *arguments))
                except (Exception, SystemExit) as error:  # noqa: BLE001 - anyone's code; counted
                    detail = f"{type(error).__name__}: {error}"
                    self._results.put(Failure("environment_error", detail))
            if hasattr(environment, "close"):
                call(environment.close)
        except _Abandoned:
            environment = None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - after the end: nobody waits for it
            self._results.put(Failure("environment_error", f"close: {error}"))
        finally:
            loop.close()


def answer_of(value: Any) -> Answer | Failure:
    """Checks what `step` returned."""
    if isinstance(value, Failure):
        return value
    try:
        observation, reward, done = value
    except (TypeError, ValueError):
        return _wrong(f"step() returned {value!r:.80}, not (observation, reward, done)")
    if not (observation is None or isinstance(observation, str)):
        return _wrong(f"the observation is {type(observation).__name__}, not text or None")
    if isinstance(reward, bool) or not (reward is None or isinstance(reward, int | float)):
        return _wrong(f"the reward is {reward!r:.80}, not a number or None")
    if reward is not None and not -float("inf") < reward < float("inf"):
        return _wrong(f"the reward is {reward}, not finite")
    if not isinstance(done, bool):
        return _wrong(f"done is {done!r:.80}, not true or false")
    if observation is None and not done:
        return _wrong("there is no observation, yet the sample is not done")
    return Answer(observation, None if reward is None else float(reward), done)


def _wrong(detail: str) -> Failure:
    return Failure("environment_error", detail)


@dataclass(frozen=True)
class Turns:
    """What stands between the policy's turn and its next one: head, observation, tail, as the chat
    template has them; without a template both are empty.

    head begins with what ends the policy's turn; the part of it that the policy itself has sampled
    (its stop token) is not put in again.
    """

    head: str
    tail: str
    tokenizer: Tokenizer

    @classmethod
    def of(cls, tokenizer: Tokenizer, role: str = "user") -> Turns:
        """Raises DataError for a template that can't have an answer between two turns."""
        if tokenizer.chat_template is None:
            return cls("", "", tokenizer)
        said, seen = "stepwellsaid", "stepwellseen"
        messages: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": said},
            {"role": role, "content": seen},
        ]
        text = render_text(tokenizer, messages, add_generation_prompt=True)
        _, found, rest = text.rpartition(said)
        head, seen_too, tail = rest.partition(seen)
        if not found or not seen_too:
            raise DataError(
                f"the chat template leaves out an assistant's message, or one of the role "
                f"{role!r} after it, so an environment cannot answer between two turns; give the "
                "environment another `role`, or take another template"
            )
        return cls(head, tail, tokenizer)

    def ids(self, sampled: Sequence[int], observation: str) -> list[int]:
        """What follows the sampled tokens of a turn, rendered once. Control tokens inside an
        observation are read as text."""
        encode = self.tokenizer.encode
        last = self.tokenizer.token(sampled[-1]) if sampled else None
        head = self.head
        if last is not None and last in self.tokenizer.special_tokens:
            head = head.removeprefix(last)
        if any(token in observation for token in (*self.tokenizer.special_tokens, OPEN)):
            return [*encode(head), *encode(observation, special=False), *encode(self.tail)]
        return encode(head + observation + self.tail)


def find_environment(source: str) -> Factory:
    """`calculator`, or python:FILE.py:CLASS. Raises ConfigError for anything else."""
    if source == "calculator":
        from stepwell.posttrain.sampling.calculator import Calculator

        return Calculator
    kind, _, place = source.partition(":")
    file, _, name = place.rpartition(":")
    if kind != "python" or not file or not name:
        raise ConfigError(
            f"method.environment={source!r} is unknown{nearest(source, SHIPPED)}; known are "
            f"{', '.join(SHIPPED)} and python:FILE.py:CLASS"
        )
    return _from_file(file, name)


def _from_file(file: str, name: str) -> Factory:
    what = "method.environment"
    factory = attribute(load(file, what), name, what, "class")
    for method in ("reset", "step"):
        if isinstance(factory, type) and not callable(getattr(factory, method, None)):
            raise ConfigError(f"{what}: {name!r} of {file} has no {method}()")
    return cast(Factory, factory)


def turns_of(factory: Factory, tokenizer: Tokenizer, name: str) -> Turns:
    """How the observations of the environment `name` are rendered. Raises ConfigError for a role
    that the tokenizer's template does not know."""
    role = role_of(factory)
    try:
        return Turns.of(tokenizer, role)
    except DataError as error:
        raise ConfigError(
            f"method.environment={name!r} answers in the role {role!r}, which the tokenizer's chat "
            f'template cannot render: {error}; the nearest legal value is `role = "user"` in '
            "the environment, or take a tokenizer whose template has that role"
        ) from error


def role_of(factory: Factory) -> str:
    """The observations' role. Raises ConfigError for one that is no text."""
    role = getattr(factory, "role", "user")
    if not isinstance(role, str):
        raise ConfigError(f"method.environment: its role is {role!r:.80}, and no text like 'tool'")
    return role
