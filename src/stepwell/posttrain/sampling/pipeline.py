"""Rollouts in their order, sampled while the step before is trained, or right away.

Rollout n is sampled with the weights that the loop had when it asked for rollout n - max_staleness
(the first ones: with the first weights). That is fixed by the loop alone, whatever the timing; a
queue holds at most max_staleness rollouts that wait or are being sampled, in one thread, on copies
of the weights. What is sampled is written down as it comes, in `rollouts/`, and the queue is
complete before a checkpoint is, so a run that is killed gets the same rollouts again.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stepwell.eval.grade import Prompt
from stepwell.generate import Progress, Request, Sampling, Snapshot
from stepwell.models.decode import prefill
from stepwell.parallel.mesh import all_reduce_max, on_main
from stepwell.posttrain.rollout import Rollouts, Scorer, about, scored
from stepwell.posttrain.sampling.environments import Factory
from stepwell.posttrain.sampling.episodes import Episode, sample_episodes
from stepwell.posttrain.sampling.gauge import check_replayable
from stepwell.posttrain.sampling.journal import Journal, Journaled, Source, Stopped
from stepwell.posttrain.sampling.served import ServedPolicy
from stepwell.sections.methods import SampledMethod
from stepwell.tokenizer import Tokenizer
from stepwell.train import run_checkpoints
from stepwell.train.session import Session
from stepwell.types import StepwellError

FOLDER = "rollouts"
# Beside the loop's own, what a checkpoint's `extra` says of rollouts: how many it has asked for.
COUNT = "rollouts"


@dataclass(frozen=True)
class Job:
    """A rollout to be sampled on this rank. head: what it depends on, for its file."""

    number: int
    prompts: tuple[Prompt, ...]
    seed: int
    source: Source
    fingerprint: str
    head: dict[str, Any]
    path: Path


@dataclass(frozen=True)
class Sampled:
    """whole: a rollout that was read from its file, with its verdicts. is_lost: it should have been
    in the queue of the run that goes on, and was sampled with the weights as they are now."""

    job: Job
    episodes: tuple[Episode, ...]
    journal: Journal | None
    seconds: float
    whole: Rollouts | None = None
    is_lost: bool = False


class RolloutStream:
    """See `rollout_stream`."""

    def __init__(
        self,
        session: Session,
        prompts_of: Callable[[int], Sequence[Prompt]],
        rewards: Scorer,
        tokenizer: Tokenizer,
        environment: Factory | None = None,
        source_of: Callable[[Snapshot], Source] | None = None,
    ):
        method = session.run.method
        assert isinstance(method, SampledMethod)
        self.session, self.method = session, method
        self.sampling = Sampling(
            temperature=method.temperature,
            eos_ids=tokenizer.stop_ids,
            max_new_tokens=method.max_new_tokens,
        )
        check_replayable(self.sampling)
        self.waited_s = self.sampling_s = 0.0
        self._prompts_of, self._rewards, self._tokenizer = prompts_of, rewards, tokenizer
        if method.server is not None and source_of is None:
            source_of = ServedPolicy(session, tokenizer).source_of
        self._environment, self._source_of = environment, source_of
        self._folder = Path(session.run.dir) / FOLDER
        self._rank = f"rank{session.engine.mesh.rank:04d}"
        self._jobs: dict[int, Future[Sampled]] = {}
        self._goes_on = True  # the queue is that of the run, or the step, that goes on
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(1, "sampling") if method.max_staleness else None
        for path in self._folder.glob(f".*.{self._rank}.*.tmp*"):  # of a process that was killed
            path.unlink(missing_ok=True)

    def take(self, number: int, extra: Mapping[str, Any]) -> Rollouts:
        """Rollout `number` with its verdicts: this rank's share. Every rank must call it together,
        with numbers that rise (and fall only after `rewind`).

        extra: what a checkpoint of this moment holds; if a signal stops the sampling, it is saved
        and Interrupted is raised. Errors of the sampling are raised here.
        """
        last = number + self.method.max_staleness
        was_queued = self._goes_on and number > 0
        self._goes_on = False
        started = time.perf_counter()
        self._jobs = {n: job for n, job in self._jobs.items() if n >= number}
        for n in range(number, last + 1):
            if n not in self._jobs:
                self._submit(n, was_queued and n < last)
        sampled = self._finish(self._jobs.pop(number), extra)
        self.waited_s, self.sampling_s = time.perf_counter() - started, sampled.seconds
        if sampled.is_lost:
            self.session.log.event(
                "rollout_lost",
                self.session.engine.step,
                rollout=number,
                reason=f"its samples of earlier weights are not in {self._folder}; sampled anew",
            )
        return self._score(sampled)

    def take_more(
        self, number: int, attempt: int, prompts: Sequence[Prompt], extra: Mapping[str, Any]
    ) -> Rollouts:
        """Answers to other prompts in rollout `number`, with the weights as they are now: refill
        `attempt` (from 1) of it."""
        job = self._job(number, prompts, attempt)
        sampled: Future[Sampled] = Future()
        _resolve(sampled, lambda: self._sample(job, False))
        return self._score(self._finish(sampled, extra))

    def after_step(self, extra: dict[str, Any], save: bool = False) -> None:
        """`session.after_step`, with the queue complete before a checkpoint is written: its errors
        are raised instead. save: whether one is due in any case."""
        due = self.session.due()
        due = due._replace(save=due.save or save)
        if due.save and not self.session.finished:
            for future in self._jobs.values():
                future.result()
        self.session.after_step(extra, due)
        if due.save:
            self._prune()

    def rewind(self, number: int) -> None:
        """The loop went back to a checkpoint; the next rollout that it takes is `number`."""
        for future in self._jobs.values():
            future.exception()
        self._jobs, self._goes_on = {}, True

    def metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """How stale this rank's rollouts are, in updates, and what sampling took: the loop's wait,
        and all of it."""
        stale = rollouts.staleness(self.session.engine.updates) if rollouts.groups else 0
        failures = rollouts.num_environment_failures
        return {
            "rollout/staleness": stale,
            **({"rollout/environment_failures": failures} if self._environment else {}),
            "time/rollout_wait_s": self.waited_s,
            "time/sampling_s": self.sampling_s,
        }

    def close(self) -> None:
        """Ends the sampling under way; what it has is written down."""
        self._closed.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    # --- inside ------------------------------------------------------------------------------

    def _submit(self, number: int, is_queued: bool) -> None:
        """is_queued: sampled with earlier weights before the run was stopped, if it was."""
        job, future = self._job(number, self._prompts_of(number)), Future[Sampled]()
        self._jobs[number] = future
        if self._pool is None:
            _resolve(future, lambda: self._sample(job, False))
        else:
            self._pool.submit(_resolve, future, lambda: self._sample(job, is_queued))

    def _job(self, number: int, prompts: Sequence[Prompt], attempt: int = 0) -> Job:
        snapshot, method = self.session.engine.snapshot(), self.method
        seed = rollout_seed(self.session.run.train.seed, number) + attempt * 2**32
        head = {
            "number": number,
            "seed": seed,
            "sampling": repr(self.sampling),
            "group_size": method.group_size,
            "environment": method.environment,
            "max_turns": method.max_turns,
            "server": method.server,
            "prompts": _digest([prompt.ids for prompt in prompts]),
        }
        refill = f".{attempt}" if attempt else ""
        return Job(
            number,
            tuple(prompts),
            seed,
            snapshot if self._source_of is None else self._source_of(snapshot),
            fingerprint_of(snapshot),
            head,
            self._folder / f"{number:08d}{refill}.{self._rank}.jsonl",
        )

    def _sample(self, job: Job, is_queued: bool) -> Sampled:
        started = time.perf_counter()
        stamp = {"version": job.source.version, "fingerprint": job.fingerprint}
        known = about(job.path)
        if _fits(known, job.head, None if is_queued else stamp):
            whole = Rollouts.load(job.path)
            return Sampled(job, (), None, time.perf_counter() - started, whole)
        source, path = job.source, job.path.with_suffix(".partial")
        head = about_partial(path)
        if is_queued and not _fits(head, job.head, None):
            return replace(self._sample(job, False), is_lost=True)
        if is_queued:
            source, stamp = _Recorded(head["version"]), _stamp(head)
        journal = Journal(path, {**job.head, **stamp})
        try:
            episodes = self._episodes(job, Journaled(source, journal, self._is_stopped))
        except _NotRecorded:  # the weights that the rest needs are gone
            journal.remove()
            return replace(self._sample(job, False), is_lost=True)
        except BaseException:
            journal.close()
            raise
        return Sampled(job, tuple(episodes), journal, time.perf_counter() - started)

    def _episodes(self, job: Job, sampler: Journaled) -> list[Episode]:
        run = self.session.run
        return sample_episodes(
            sampler,
            job.prompts,
            self.method.group_size,
            self.sampling,
            self._tokenizer,
            job.seed,
            self._environment,
            self.method.max_turns,
            min(run.data.seq_len, run.model.max_seq_len),
            self.method.reward_timeout_s,
        )

    def _is_stopped(self) -> bool:
        """The queue is sampled to its end after a signal: the checkpoint needs it whole."""
        signalled = self._pool is None and bool(self.session.requests.first)
        return self._closed.is_set() or signalled

    def _finish(self, future: Future[Sampled], extra: Mapping[str, Any]) -> Sampled:
        """The sampled rollout, once every rank has its own. Raises Interrupted if one was told to
        stop."""
        error = future.exception()
        mesh = self.session.engine.mesh
        stopped = torch.tensor(int(isinstance(error, Stopped)))
        if int(all_reduce_max(stopped, mesh)):
            self.after_step(dict(extra))
        return future.result()

    def _score(self, sampled: Sampled) -> Rollouts:
        """Adds the verdicts and writes the rollout down."""
        if sampled.whole is not None:
            return sampled.whole
        job, journal = sampled.job, sampled.journal
        assert journal is not None
        rollouts = scored(job.prompts, self.method.group_size, sampled.episodes, self._rewards)
        version = rollouts.policy_version if rollouts.groups else job.source.version
        stamp = {"version": version, "fingerprint": job.fingerprint}
        rollouts.save(job.path, {**job.head, **stamp})
        journal.remove()
        return rollouts

    def _prune(self) -> None:
        """Removes the rollouts that no checkpoint goes back to."""
        session = self.session
        # Asked of the rank that removes checkpoints: to another one they vanish as it reads.
        states = on_main(lambda: run_checkpoints.loop_states(session.dir), session.engine.mesh)
        first = min((state.get(COUNT, 0) for state in states), default=0)
        for path in self._folder.glob(f"*.{self._rank}.*"):
            if int(path.name[:8]) < first:
                path.unlink(missing_ok=True)


@contextmanager
def rollout_stream(
    session: Session,
    prompts_of: Callable[[int], Sequence[Prompt]],
    rewards: Scorer,
    tokenizer: Tokenizer,
    environment: Factory | None = None,
    source_of: Callable[[Snapshot], Source] | None = None,
) -> Iterator[RolloutStream]:
    """Where a loop of a SampledMethod gets its rollouts.

    prompts_of: this rank's prompts of a rollout, by its number; the same on a resume.
    source_of: what samples in place of the engine's own weights, given these (by default the
    method's server, if there is one).

        with rollout_stream(session, prompts_of, rewards, tokenizer) as stream:
            while not session.finished:
                rollouts = stream.take(number, {"rollouts": number})
                ...
                stream.after_step({"rollouts": number + 1})
    """
    stream = RolloutStream(session, prompts_of, rewards, tokenizer, environment, source_of)
    try:
        yield stream
    finally:
        stream.close()


def rollout_seed(seed: int, number: int) -> int:
    return seed * 1_000_003 + number


def fingerprint_of(snapshot: Snapshot) -> str:
    """Of the weights' arithmetic: a digest of their logits after a few tokens. Other weights, or
    another machine's rounding, give another one."""
    weights = snapshot.weights
    tokens = torch.arange(min(8, weights.cfg.vocab_size), device=weights.device)
    with torch.inference_mode():
        _, logits_V = prefill(weights, weights.rope(len(tokens)), tokens)
    return hashlib.sha256(logits_V.float().cpu().numpy().tobytes()).hexdigest()[:16]


def about_partial(path: Path) -> Any:
    """The first line of a journal, None without one."""
    try:
        with path.open("rb") as file:
            return json.loads(file.readline())
    except (FileNotFoundError, ValueError):
        return None


class _NotRecorded(StepwellError):
    """An answer that a journal has not whole."""


@dataclass(frozen=True)
class _Recorded:
    """In the place of weights that are gone: whatever has to be sampled is an error."""

    version: int

    def stream(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        tokenizer: Tokenizer | None = None,
        every_tokens: int = 0,
    ) -> Iterator[Progress]:
        raise _NotRecorded(f"{len(requests)} answers are not whole")


def _fits(known: Any, head: Mapping[str, Any], stamp: Mapping[str, Any] | None) -> bool:
    """Whether a file is of this rollout; stamp: and of these weights."""
    if not isinstance(known, dict):
        return False
    return all(known.get(key) == value for key, value in {**head, **(stamp or {})}.items())


def _stamp(head: Mapping[str, Any]) -> dict[str, Any]:
    return {key: head[key] for key in ("version", "fingerprint")}


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _resolve(future: Future[Sampled], work: Callable[[], Sampled]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - handed to whoever takes the rollout
        future.set_exception(error)
