"""Values that every room shares. No torch, no numpy: importing this costs nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class StepwellError(Exception):
    """An error that the user can act on: it names the value, the rule and the nearest legal value.

    The command line prints its message without a traceback and exits with `exit_code`.
    """

    exit_code = 1


class ConfigError(StepwellError):
    """A run that cannot be: refused before a model is built."""

    exit_code = 2


class DataError(StepwellError):
    """Input that cannot be used (a single bad document is dropped with a reason instead)."""

    exit_code = 3


class CheckpointError(StepwellError):
    """A checkpoint that is damaged, incomplete or of another architecture."""

    exit_code = 4


class TrainingError(StepwellError):
    """Training that cannot go on, e.g. too many non-finite steps in a row."""

    exit_code = 5


class RankMissing(TrainingError):
    """Another rank has died, failed, or does not answer; the message names it."""

    exit_code = 6


class Interrupted(StepwellError):
    """Stopped by a signal after saving; the message says how to go on."""

    exit_code = 130


def nearest(name: str, options: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the closest option, or an empty string when none is close.
    Capitals do not count; what begins with the name is closest, of several the shortest."""
    folded = {option.casefold(): option for option in options}
    sought = name.casefold()
    begun = [option for option in folded if len(sought) > 2 and option.startswith(sought)]
    close = [min(begun, key=len)] if begun else []
    close = close or difflib.get_close_matches(sought, folded, n=1, cutoff=0.5)
    return f" (did you mean {folded[close[0]]!r}?)" if close else ""


@dataclass(frozen=True)
class Document:
    """One document on its way through curation.

    id: unique within a source (an integer id of 0 is as good as any, so ids are strings).
    source: where it came from, e.g. "stdlib-code"; mixture weights are keyed by it.
    meta: whatever else is known (path, language, scores), carried along untouched.
    """

    id: str
    text: str
    source: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Dropped:
    """A document that was removed, and why. `reason` is a short stable key that gets counted."""

    id: str
    source: str
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Completion:
    """One sampled answer, token in and token out: `token_ids` are never re-rendered.

    logprobs: log-probability of each sampled id at the sampling temperature (full support).
    Tokens that an environment put between two turns have 0 there.
    text: what the policy wrote; its turns are separated by a line break.
    finish_reason: "stop" (eos or stop string) or "length".
    policy_version: the number of optimiser steps that the sampling weights had seen.
    from_policy: which tokens the policy sampled (None: all). Others are neither trained nor part of
    a divergence.
    turns: of a sample with an environment what was said, as (role, text): the messages that it
    began with, if the environment did so, the policy's turns and the observations between them.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    policy_version: int = 0
    from_policy: tuple[bool, ...] | None = None
    turns: tuple[tuple[str, str], ...] = ()

    @property
    def mask(self) -> list[int]:
        """1 for each token that the policy sampled, 0 for an environment's."""
        if self.from_policy is None:
            return [1] * len(self.token_ids)
        return [int(sampled) for sampled in self.from_policy]
