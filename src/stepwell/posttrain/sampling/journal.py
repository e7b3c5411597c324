"""What has been sampled so far, written down while it is sampled, so that a process that is killed
goes on in the middle of an answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from stepwell.generate import Progress, Request, Sampling
from stepwell.metrics import LineFile, cut_lines, decode
from stepwell.tokenizer import Tokenizer
from stepwell.types import Completion, DataError, StepwellError

EVERY_TOKENS = 16


class Stopped(StepwellError):
    """Sampling was asked to stop; what it had is in the journal."""


class Source(Protocol):
    """Where tokens come from: weights of one version."""

    @property
    def version(self) -> int: ...

    def stream(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        tokenizer: Tokenizer | None = None,
        every_tokens: int = 0,
    ) -> Iterator[Progress]: ...


@dataclass
class _Entry:
    """An answer so far; `end` is its finish reason and text once it has ended."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: tuple[str, str] | None = None


class Journal:
    """The file of one rollout. The first line says what the samples depend on beside their
    requests: another one's file is begun anew.

    An answer is known by its request's id and prompt, so that later turns of a conversation have
    entries of their own.
    """

    def __init__(self, path: Path, head: dict[str, Any]):
        self.path = path
        self._entries: dict[str, _Entry] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_lines(path, None)
        lines = _lines(path)
        if lines and lines[0] == head:
            for line in lines[1:]:
                self._take(line)
        else:
            path.unlink(missing_ok=True)
        self.num_known = sum(len(entry.tokens) for entry in self._entries.values())
        self._file = LineFile(path)
        if not lines or lines[0] != head:
            self._file.write(head)

    def entry(self, request: Request) -> _Entry:
        return self._entries.setdefault(_name(request.id, request.prompt_ids), _Entry())

    def note(self, completion: Completion) -> None:
        """Writes what is new of an answer."""
        name = _name(completion.request_id, completion.prompt_ids)
        known = len(self._entries.setdefault(name, _Entry()).tokens)
        line: dict[str, Any] = {
            "answer": name,
            "tokens": completion.token_ids[known:],
            "logprobs": completion.logprobs[known:],
        }
        if completion.finish_reason:
            line["end"] = (completion.finish_reason, completion.text)
        elif not line["tokens"]:
            return
        self._file.write(line)
        self._take(line)

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    def _take(self, line: dict[str, Any]) -> None:
        entry = self._entries.setdefault(line["answer"], _Entry())
        entry.tokens += line["tokens"]
        entry.logprobs += [float(x) for x in line["logprobs"]]
        if "end" in line:
            entry.end = tuple(line["end"])


@dataclass(frozen=True)
class Journaled:
    """A sampler that takes from the journal what is there, and writes down what it adds.

    stopped: asked between reports; True raises Stopped.
    """

    source: Source
    journal: Journal
    stopped: Callable[[], bool]
    every_tokens: int = EVERY_TOKENS

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        tokenizer: Tokenizer | None = None,
    ) -> list[Completion]:
        done: dict[int, Completion] = {}
        rest = []
        for request in requests:
            entry = self.journal.entry(request)
            if entry.end is not None:
                done[request.id] = self._completion(request, entry)
            else:
                rest.append(
                    replace(
                        request,
                        sampled=tuple(entry.tokens),
                        sampled_logprobs=tuple(entry.logprobs),
                    )
                )
        self._check_stopped()
        if rest:
            for report in self.source.stream(rest, sampling, tokenizer, self.every_tokens):
                for completion in (*report.done, *report.running):
                    self.journal.note(completion)
                done |= {c.request_id: c for c in report.done}
                self._check_stopped()
        return [done[request.id] for request in requests]

    def _check_stopped(self) -> None:
        if self.stopped():
            raise Stopped("sampling was stopped; the same command goes on from there")

    def _completion(self, request: Request, entry: _Entry) -> Completion:
        assert entry.end is not None
        reason, text = entry.end
        return Completion(
            request_id=request.id,
            prompt_ids=request.prompt_ids,
            token_ids=tuple(entry.tokens),
            logprobs=tuple(entry.logprobs),
            text=text,
            finish_reason=reason,
            policy_version=self.source.version,
        )


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            found.append(decode(json.loads(line)))
        except ValueError as error:
            raise DataError(
                f"{path}, line {number} is damaged: {error}; remove the file, and the rollout is "
                "sampled anew"
            ) from error
    return found


def _name(request_id: int, prompt_ids: Sequence[int]) -> str:
    digest = hashlib.sha256(repr(tuple(prompt_ids)).encode()).hexdigest()
    return f"{request_id}:{digest[:16]}"
