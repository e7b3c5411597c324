"""Answers of several turns: the policy writes, the environment answers, the policy goes on.

Token in, token out: what was sampled is never rendered again; an environment's answer is rendered
once and put behind it. All samples take a turn together, each turn is one call of the sampler with
the whole conversation so far as its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from stepwell.data.chat import Message, render_prompt
from stepwell.eval.grade import Prompt, Verdict, answer_seeds
from stepwell.generate import Request, Sampling
from stepwell.posttrain.sampling.environments import (
    Answer,
    Factory,
    Failure,
    Turns,
    Worker,
    answer_of,
    role_of,
)
from stepwell.tokenizer import Tokenizer
from stepwell.types import Completion, ConfigError, StepwellError


class Sampler(Protocol):
    """The engine's side of sampling."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        tokenizer: Tokenizer | None = None,
    ) -> list[Completion]: ...


@dataclass(frozen=True)
class Episode:
    """A completion, and what the environment said of it: the sum of its rewards (None: it gave
    none), or how it failed."""

    completion: Completion
    reward: float | None = None
    failure: Failure | None = None
    num_turns: int = 1

    def verdict(self, scored: Verdict) -> Verdict:
        """The reward and the environment's together."""
        if self.failure is not None:
            return Verdict(None, self.failure.kind, self.failure.detail)
        if self.reward is None:
            return scored
        known = scored.reward if scored.reward is not None else None
        total = self.reward + (known or 0.0) if not scored.failure else None
        return replace(scored, reward=total, scores={**scored.scores, "environment": self.reward})


@dataclass
class _Talk:
    """A sample under way."""

    request: Request
    worker: Worker
    role: str
    turns: list[tuple[str, str]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    from_policy: list[bool] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    finish_reason: str = ""
    failure: Failure | None = None
    policy_version: int = 0
    num_sampled: int = 0

    def take(self, completion: Completion) -> None:
        """The policy's turn."""
        self.tokens += completion.token_ids
        self.logprobs += completion.logprobs
        self.from_policy += [True] * len(completion.token_ids)
        self.texts.append(completion.text)
        self.turns.append(("assistant", completion.text))
        self.policy_version = completion.policy_version
        self.num_sampled += len(completion.token_ids)

    def put_in(self, ids: Sequence[int], observation: str) -> None:
        """The environment's turn."""
        self.turns.append((self.role, observation))
        self.tokens += ids
        self.logprobs += [0.0] * len(ids)
        self.from_policy += [False] * len(ids)

    def fail(self, failure: Failure) -> None:
        self.failure, self.finish_reason = failure, "stop"

    def next_request(self, sampling: Sampling) -> Request:
        wanted = self.request.max_new_tokens or sampling.max_new_tokens
        return replace(
            self.request,
            prompt_ids=(*self.request.prompt_ids, *self.tokens),
            max_new_tokens=wanted - self.num_sampled,
        )

    def episode(self) -> Episode:
        completion = Completion(
            request_id=self.request.id,
            prompt_ids=self.request.prompt_ids,
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            text="\n".join(self.texts),
            finish_reason=self.finish_reason,
            policy_version=self.policy_version,
            from_policy=tuple(self.from_policy),
            turns=tuple(self.turns),
        )
        reward = sum(self.rewards) if self.rewards else None
        return Episode(completion, reward, self.failure, len(self.texts))


def group_requests(prompts: Sequence[Prompt], group_size: int, seed: int) -> list[Request]:
    """`group_size` requests a prompt, their seeds drawn from (seed, prompt, number in the group).
    Raises ConfigError for group_size < 1."""
    if group_size < 1:
        raise ConfigError(f"group_size={group_size} must be at least 1")
    return [
        Request(p * group_size + i, tuple(prompt.ids), seed=child)
        for p, prompt in enumerate(prompts)
        for i, child in enumerate(answer_seeds(seed, prompt.ids, group_size))
    ]


def sample_episodes(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    tokenizer: Tokenizer,
    seed: int,
    environment: Factory | None = None,
    max_turns: int = 1,
    max_len: int | None = None,
    timeout_s: float = 10.0,
) -> list[Episode]:
    """group_size answers to each prompt, in their order.

    max_new_tokens bounds what the policy samples in all its turns, max_len the prompt and all
    turns together; a sample that either of them, or max_turns, ends has the finish reason "length".
    An environment that raises, or takes longer than timeout_s for a call, ends its own sample.
    """
    requests = group_requests(prompts, group_size, seed)
    if environment is None:
        completions = sampler.generate(requests, sampling, tokenizer)
        return [Episode(completion) for completion in completions]
    owners = [prompt for prompt in prompts for _ in range(group_size)]
    role = role_of(environment)
    talks = [_Talk(request, Worker(environment, timeout_s), role) for request in requests]
    limit = _Limit(max_turns, max_len, sampling)
    try:
        _reset(talks, owners, tokenizer, limit)
        turns = Turns.of(tokenizer, role)
        while open_talks := [talk for talk in talks if not talk.finish_reason]:
            _turn(sampler, open_talks, sampling, tokenizer, turns, limit)
    finally:
        for talk in talks:
            talk.worker.close()
    return [talk.episode() for talk in talks]


@dataclass(frozen=True)
class _Limit:
    max_turns: int
    max_len: int | None
    sampling: Sampling

    def leaves_room(self, num_tokens: int) -> bool:
        """For at least one more token."""
        return self.max_len is None or num_tokens < self.max_len


def _reset(
    talks: Sequence[_Talk], owners: Sequence[Prompt], tokenizer: Tokenizer, limit: _Limit
) -> None:
    for talk, prompt in zip(talks, owners, strict=True):
        talk.worker.begin("reset", {**prompt.columns, "prompt": prompt.text})
    for talk in talks:
        messages = talk.worker.result()
        if isinstance(messages, Failure):
            talk.fail(messages)
        elif messages is not None:
            _begin_with(talk, messages, tokenizer, limit)


def _begin_with(talk: _Talk, messages: Any, tokenizer: Tokenizer, limit: _Limit) -> None:
    try:
        ids = tuple(render_prompt(tokenizer, messages))
    except StepwellError as error:
        talk.fail(Failure("environment_error", f"reset(): {error}"))
        return
    talk.request = replace(talk.request, prompt_ids=ids)
    talk.turns += [(m["role"], _content(m)) for m in messages]
    if not limit.leaves_room(len(ids)):
        talk.fail(
            Failure(
                "environment_error",
                f"reset(): a prompt of {len(ids)} tokens leaves no room in {limit.max_len}",
            )
        )


def _content(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content, default=str)


def _turn(
    sampler: Sampler,
    talks: Sequence[_Talk],
    sampling: Sampling,
    tokenizer: Tokenizer,
    turns: Turns,
    limit: _Limit,
) -> None:
    """One turn of every open sample, and its environment's answer."""
    requests = []
    for talk in talks:
        request = talk.next_request(sampling)
        if limit.max_len is not None:
            room = limit.max_len - len(request.prompt_ids)
            request = replace(request, max_new_tokens=min(request.max_new_tokens or room, room))
        requests.append(request)
    completions = sampler.generate(requests, sampling, tokenizer)
    for talk, completion in zip(talks, completions, strict=True):
        talk.take(completion)
        talk.worker.begin("step", completion.text)
    for talk, completion in zip(talks, completions, strict=True):
        answer = answer_of(talk.worker.result())
        if isinstance(answer, Failure):
            talk.fail(answer)
        else:
            _answered(talk, completion, answer, turns, limit)


def _answered(
    talk: _Talk, completion: Completion, answer: Answer, turns: Turns, limit: _Limit
) -> None:
    if answer.reward is not None:
        talk.rewards.append(answer.reward)
    if answer.done:
        talk.finish_reason = completion.finish_reason
        return
    assert answer.observation is not None
    wanted = talk.request.max_new_tokens or limit.sampling.max_new_tokens
    ids = turns.ids(completion.token_ids, answer.observation)
    num_tokens = len(talk.request.prompt_ids) + len(talk.tokens) + len(ids)
    ended = completion.finish_reason == "length" or talk.num_sampled >= wanted
    if ended or len(talk.texts) >= limit.max_turns or not limit.leaves_room(num_tokens):
        talk.finish_reason = "length"
        return
    talk.put_in(ids, answer.observation)
