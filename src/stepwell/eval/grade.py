"""Prompts with known answers, and graders that may fail without stopping a run.

A verifier is `f(prompts, completions, **columns) -> list[float | None]`; columns are the other
fields of the prompts' rows, one list each. None means "not applicable" and is not a score; an
exception means that the grader failed, which is not a wrong answer either.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepwell.types import ConfigError, DataError, nearest

Verifier = Callable[..., Sequence[float | None]]


@dataclass(frozen=True)
class Prompt:
    """text: what the verifier sees. ids: what the model sees, rendered and encoded once.
    columns: the other fields of the row, passed to the verifier, e.g. {"answer": "42"}. item: names
    it within its file."""

    text: str
    ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    item: str = field(default="", compare=False)


def answer_seeds(seed: int, prompt_ids: Sequence[int], count: int) -> list[int]:
    """Seeds for `count` answers, drawn from (seed, prompt): the same wherever the prompt stands
    in a list, and on whichever rank. A negative seed counts modulo 2**64, as in `uniforms`."""
    entropy = np.random.SeedSequence([seed % 2**64, len(prompt_ids), *prompt_ids])
    return [int(s) for s in entropy.generate_state(count, np.uint64)]


def required_columns(verifier: Verifier) -> list[str]:
    """The columns that a verifier takes by name and has no default for."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    # The first two are the prompts and the completions.
    later = _parameters(verifier)[2:]
    return [p.name for p in later if p.kind in by_name and p.default is p.empty]


def columns_for(verifier: Verifier, row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """A row's columns as the verifier takes them; those that are named like its first two
    parameters (`prompts`, `completions`) are left out."""
    taken = [p.name for p in _parameters(verifier)[:2]] or ["prompts", "completions"]
    return {name: [value] for name, value in row.items() if name not in taken}


def _parameters(verifier: Verifier) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(verifier).parameters.values())
    except (TypeError, ValueError):  # some callables written in C have none to be seen
        return []


def check_columns(verifier: Verifier, prompts: Sequence[Prompt]) -> None:
    """Raises DataError if a row lacks a column that the verifier requires."""
    for name in required_columns(verifier):
        lacking = [prompt for prompt in prompts if name not in prompt.columns]
        if lacking:
            there = ", ".join(repr(column) for column in lacking[0].columns) or "none"
            raise DataError(
                f"the verifier needs the column {name!r}, which {len(lacking)} of {len(prompts)} "
                f"rows lack{nearest(name, lacking[0].columns)}; beside the prompt they have: "
                f"{there}"
            )


@dataclass(frozen=True)
class Verdict:
    """reward None: not applicable, or the grader failed; `failure` then says how ("timeout",
    "error"), else it is empty. detail: what there is to say, e.g. how a program ended.

    Of a reward of several dimensions: scores, each one's own (None as above); failures, of those
    whose grader failed; details, of each. disagreement: the standard deviation of several reward
    models about the answer, in the reward's unit; members: the scores of each of them.
    """

    reward: float | None
    failure: str = ""
    detail: str = ""
    scores: Mapping[str, float | None] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)
    disagreement: float | None = None
    members: tuple[float, ...] = ()


def verify_each(
    verifier: Verifier,
    prompts: Sequence[str],
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    timeout_s: float = 10.0,
) -> list[Verdict]:
    """Scores one by one, so that a grader that fails or hangs costs its own item only.

    A grader that takes longer than timeout_s is interrupted by SIGALRM, which reaches Python code
    and regular expressions, in the main thread. What can be awaited is. Raises ConfigError in
    another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("verifiers run in the main thread: elsewhere they could not be stopped")
    verdicts, runner = [], asyncio.Runner()
    for prompt, text, row in zip(prompts, completions, rows, strict=True):
        columns = columns_for(verifier, row)
        try:
            with _time_limit(timeout_s):
                scores = verifier([prompt], [text], **columns)
                if inspect.isawaitable(scores):
                    scores = runner.run(_awaited(scores))
            verdicts.append(one_verdict(scores))
        except _TooSlow:
            verdicts.append(Verdict(None, "timeout", f"took longer than {timeout_s} s"))
            runner.close()
            runner = asyncio.Runner()
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - anyone's code; counted
            verdicts.append(Verdict(None, "error", f"{type(error).__name__}: {error}"))
    runner.close()
    return verdicts


async def _awaited(scores: Awaitable[Any]) -> Any:
    return await scores


def one_verdict(scores: Any) -> Verdict:
    """Of what a verifier says about a single answer. Raises ValueError for anything but one finite
    number or None."""
    try:
        (score,) = scores
    except (TypeError, ValueError):
        raise ValueError(f"a list of one score was due, not {_shown(scores)}") from None
    if score is None:
        return Verdict(None)
    try:
        value = float(score)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"a score is a number or None, not {_shown(score)}") from None
    if isinstance(score, str) or not math.isfinite(value):
        raise ValueError(f"a score is a finite number or None, not {_shown(score)}")
    return Verdict(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


class _TooSlow(BaseException):
    """Not an Exception, so that a grader's own handler does not swallow it."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def interrupt(signum: int, frame: Any) -> None:
        raise _TooSlow

    handler = signal.signal(signal.SIGALRM, interrupt)
    started = time.monotonic()
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:  # someone else's timer goes on
            left = max(remaining - (time.monotonic() - started), 0.001)
            signal.setitimer(signal.ITIMER_REAL, left, interval)
