"""Batched sampling with continuous batching.

B slots, R rows in use, V vocabulary. Finished rows leave their slot at once and the
next waiting prompt enters it before the next step; a prompt that several requests share is
prefilled once. Nothing is kept between calls, so new weights never meet old keys and values.

An answer that an earlier call left unfinished goes on from its tokens: they are fed one by one, as
they were when they were sampled, so the rest is bit-equal to that of one call.

A request's tokens depend on its prompt, its seed and the weights alone: every row is computed in a
fixed place of its slot, and each token takes one uniform number, a hash of (seed, position).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepwell.models.decode import (
    DecodeWeights,
    KVCache,
    bucketed,
    check_prompt,
    decode_step,
    prefill,
)
from stepwell.models.token_choice import BLOCK, sample, uniforms
from stepwell.sections.model import ModelConfig
from stepwell.tokenizer import Tokenizer
from stepwell.types import Completion, ConfigError, TrainingError

ROW_MULTIPLE = 8  # below 8 rows CPU kernels for float32 sum in another order


@dataclass(frozen=True)
class Request:
    """id: what `Completion.request_id` will say; distinct within a call.
    max_new_tokens: overrides the sampling's. sampled, sampled_logprobs: the answer's tokens so far,
    from the same weights, where an earlier call left it unfinished.
    """

    id: int
    prompt_ids: tuple[int, ...]
    seed: int = 0
    max_new_tokens: int | None = None
    sampled: tuple[int, ...] = ()
    sampled_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy (log-probabilities are then those at temperature 1).

    top_k 0 and top_p 1 keep all; both together: the k likeliest, then the nucleus of those
    (1904.09751). stop: strings that end a text and are not part of it. eos_ids: end a text too, and
    are the last of its token_ids. Raises ConfigError for values outside their range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] = ()
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be 0 (greedy) or positive")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must be positive, or 0 to keep all")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1 (1 keeps all)")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ConfigError(f"stop={self.stop!r} must be a tuple of non-empty strings")


@dataclass(frozen=True)
class Progress:
    """done: answers that have ended since the last report. running: those in a slot, as they are
    (finish_reason is empty). Other requests have not begun."""

    done: tuple[Completion, ...]
    running: tuple[Completion, ...]


@dataclass
class _Row:
    """A request in its slot."""

    request: Request
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def is_fed(self) -> bool:
        """Whether the next token is known from an earlier call."""
        return len(self.tokens) < len(self.request.sampled)


@dataclass(frozen=True)
class _Slots:
    """What lives on the device, one row a slot. A free slot has start and count 0."""

    cache: KVCache
    rope: Tensor
    logits_BV: Tensor  # at least float32, padded with -inf to whole blocks
    uniforms_BN: Tensor
    starts_B: Tensor  # position of the prompt's last token
    counts_B: Tensor  # tokens sampled
    last_B: Tensor  # the token sampled last


def generate(
    weights: DecodeWeights,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    tokenizer: Tokenizer | None = None,
    num_slots: int = 64,
    policy_version: int = 0,
) -> list[Completion]:
    """Completions in the order of `requests`.

    tokenizer: needed for stop strings; without one, `Completion.text` is empty. Ids it does not
    have (a model's vocabulary may be padded) are never chosen; log-probabilities are over the
    model's whole vocabulary all the same, as for top_k, so that a trainer can compute them again.
    num_slots: the largest number of rows at once. The cache takes
    2 * layers * kv_heads * head_dim * bytes for each of num_slots * (longest prompt + answer).

    A text ends at max_seq_len at the latest. Raises ConfigError for an empty prompt, one that
    leaves no room in max_seq_len, ids outside the vocabulary and repeated request ids, and
    TrainingError where the logits are not finite.
    """
    reports = stream(
        weights,
        requests,
        sampling,
        tokenizer=tokenizer,
        num_slots=num_slots,
        policy_version=policy_version,
    )
    done = {c.request_id: c for report in reports for c in report.done}
    return [done[r.id] for r in requests]


@torch.inference_mode()
def stream(
    weights: DecodeWeights,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    tokenizer: Tokenizer | None = None,
    num_slots: int = 64,
    policy_version: int = 0,
    every_tokens: int = 0,
) -> Iterator[Progress]:
    """`generate` with a report whenever rows have got every_tokens more, and at the end (0: then
    only). Whoever stops asking has all that is known in the reports so far."""
    _check(weights, requests, sampling, tokenizer, num_slots)
    waiting = deque(requests)
    sharers = Counter(r.prompt_ids for r in requests)
    prefixes: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    limits = [_limit(weights.cfg, r, sampling) for r in requests]
    slots = _allocate(weights, requests, limits, num_slots)
    rows: list[_Row | None] = [None] * slots.cache.num_slots
    done: list[Completion] = []
    num_ids = tokenizer.vocab_size if tokenizer else None
    num_steps, any_fed = 0, any(r.sampled for r in requests)
    while waiting or any(rows):
        chosen = _enter(weights, slots, rows, waiting, sampling, prefixes, sharers)
        if not chosen:
            if every_tokens and num_steps and num_steps % every_tokens == 0:
                running = [_complete(row, "", "", policy_version) for row in rows if row]
                yield Progress(tuple(done), tuple(running))
                done = []
            num_steps += 1
            chosen = _step(weights, slots, rows)
        tokens, logprobs = _sample_slots(slots, sampling, _num_used(slots, rows), chosen, num_ids)
        if any_fed:
            _feed(slots, rows, chosen, tokens, logprobs)
        for slot in chosen:
            row = rows[slot]
            assert row is not None
            row.tokens.append(tokens[slot])
            row.logprobs.append(logprobs[slot])
            if math.isnan(logprobs[slot]):
                raise _not_finite(row, sampling)
            ended = None if any_fed and row.is_fed else _ended(row, sampling, tokenizer)
            if ended is not None:
                done.append(_complete(row, *ended, policy_version))
                rows[slot] = None
                slots.starts_B[slot] = slots.counts_B[slot] = 0
    yield Progress(tuple(done), ())


@dataclass(frozen=True)
class Snapshot:
    """Weights of one moment to sample from, also in another thread while training goes on.

    version: the number of optimiser steps that they have seen; every completion carries it.
    """

    weights: DecodeWeights
    version: int

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        tokenizer: Tokenizer | None = None,
        num_slots: int = 64,
    ) -> list[Completion]:
        """As the function `generate`."""
        reports = self.stream(requests, sampling, tokenizer, num_slots=num_slots)
        done = {c.request_id: c for report in reports for c in report.done}
        return [done[r.id] for r in requests]

    def stream(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        tokenizer: Tokenizer | None = None,
        every_tokens: int = 0,
        num_slots: int = 64,
    ) -> Iterator[Progress]:
        """As the function `stream`."""
        return stream(
            self.weights,
            requests,
            sampling,
            tokenizer=tokenizer,
            num_slots=num_slots,
            policy_version=self.version,
            every_tokens=every_tokens,
        )


def _not_finite(row: _Row, sampling: Sampling) -> TrainingError:
    place = f"request {row.request.id}: token {len(row.tokens)} of the answer has no probability"
    return TrainingError(
        f"{place}: logits / temperature={sampling.temperature:g} are not finite, so the weights "
        "hold values that aren't, their activations overflow, or the temperature is too small "
        "(0 is greedy)"
    )


def _feed(
    slots: _Slots,
    rows: Sequence[_Row | None],
    chosen: Sequence[int],
    tokens: list[int],
    logprobs: list[float],
) -> None:
    """Puts the tokens of earlier calls in the place of what was sampled now."""
    for slot in chosen:
        row = rows[slot]
        if row is not None and row.is_fed:
            place = len(row.tokens)
            tokens[slot] = row.request.sampled[place]
            logprobs[slot] = row.request.sampled_logprobs[place]
            slots.last_B[slot] = tokens[slot]


def _allocate(
    weights: DecodeWeights, requests: Sequence[Request], limits: Sequence[int], num_slots: int
) -> _Slots:
    device, wide = weights.device, _wide(weights.dtype)
    if device.type == "cpu":  # kernels there give a row the same bits beside any number of others
        num_slots = min(num_slots, len(requests))
    B = -(-max(num_slots, 1) // ROW_MULTIPLE) * ROW_MULTIPLE
    longest = max((len(r.prompt_ids) + n for r, n in zip(requests, limits, strict=True)), default=1)
    cache = KVCache.empty(weights, B, bucketed(longest))
    padded_V = -(-weights.cfg.vocab_size // BLOCK) * BLOCK
    zeros_B = torch.zeros(B, dtype=torch.int64, device=device)
    return _Slots(
        cache=cache,
        rope=weights.rope(cache.length),
        logits_BV=torch.full((B, padded_V), float("-inf"), dtype=wide, device=device),
        uniforms_BN=torch.full((B, max(limits, default=1)), 0.5, dtype=wide, device=device),
        starts_B=zeros_B,
        counts_B=zeros_B.clone(),
        last_B=zeros_B.clone(),
    )


def _enter(
    weights: DecodeWeights,
    slots: _Slots,
    rows: list[_Row | None],
    waiting: deque[Request],
    sampling: Sampling,
    prefixes: dict[tuple[int, ...], tuple[Tensor, Tensor]],
    sharers: Counter[tuple[int, ...]],
) -> list[int]:
    """Fills free slots with waiting requests; their logits are then ready to sample from."""
    V, chosen = weights.cfg.vocab_size, []
    for slot in range(len(rows)):
        if rows[slot] is not None or not waiting:
            continue
        request = waiting.popleft()
        prompt, limit = request.prompt_ids, _limit(weights.cfg, request, sampling)
        if prompt not in prefixes:
            prefixes[prompt] = prefill(
                weights, slots.rope, torch.tensor(prompt, device=weights.device)
            )
        kv_LT, logits_V = prefixes[prompt]
        sharers[prompt] -= 1
        if not sharers[prompt]:
            del prefixes[prompt]
        slots.cache.put(slot, kv_LT)
        slots.logits_BV[slot, :V] = logits_V
        numbers = torch.from_numpy(uniforms(request.seed, len(prompt), limit))
        slots.uniforms_BN[slot, :limit] = numbers.to(slots.uniforms_BN)
        slots.starts_B[slot] = len(prompt) - 1
        rows[slot] = _Row(request, limit)
        chosen.append(slot)
    return chosen


def _step(weights: DecodeWeights, slots: _Slots, rows: Sequence[_Row | None]) -> list[int]:
    """Feeds every row the token it sampled last; new logits are then ready in each."""
    R, V = _num_used(slots, rows), weights.cfg.vocab_size
    positions_R = slots.starts_B[:R] + slots.counts_B[:R]
    longest = max(len(row.request.prompt_ids) + len(row.tokens) for row in rows if row)
    length = min(bucketed(longest), slots.cache.length)
    logits = decode_step(weights, slots.rope, slots.cache, slots.last_B[:R], positions_R, length)
    slots.logits_BV[:R, :V].copy_(logits)
    return [slot for slot, row in enumerate(rows) if row is not None]


def _sample_slots(
    slots: _Slots, sampling: Sampling, R: int, chosen: Sequence[int], num_ids: int | None
) -> tuple[list[int], list[float]]:
    """Samples for the first R slots and keeps the result for the chosen ones."""
    counts_R = slots.counts_B[:R].clamp(max=slots.uniforms_BN.shape[1] - 1)
    uniforms_R = slots.uniforms_BN[:R].gather(1, counts_R[:, None]).squeeze(1)
    tokens_R, logprobs_R = sample(
        slots.logits_BV[:R],
        uniforms_R,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        num_ids,
    )
    index = torch.tensor(chosen, device=tokens_R.device)
    slots.last_B.index_copy_(0, index, tokens_R[index])
    slots.counts_B.index_add_(0, index, torch.ones_like(index))
    return tokens_R.tolist(), logprobs_R.tolist()


def _num_used(slots: _Slots, rows: Sequence[_Row | None]) -> int:
    """How many slots a step computes: on CUDA all, so that shapes never change."""
    if slots.last_B.device.type != "cpu":
        return len(rows)
    used = max((slot + 1 for slot, row in enumerate(rows) if row is not None), default=1)
    return -(-used // ROW_MULTIPLE) * ROW_MULTIPLE


def _ended(row: _Row, sampling: Sampling, tokenizer: Tokenizer | None) -> tuple[str, str] | None:
    """(finish reason, text) if the row's last token ends it."""
    body, reason = row.tokens, None
    if row.tokens[-1] in sampling.eos_ids:
        body, reason = row.tokens[:-1], "stop"
    elif len(row.tokens) >= row.limit:
        reason = "length"
    if tokenizer is None:
        return None if reason is None else (reason, "")
    # A string that this token completes begins at most as many tokens back as it has bytes; three
    # more hold the bytes of a character that the window would cut.
    for stop in sampling.stop:
        if reason != "stop" and stop in tokenizer.decode(body[-len(stop.encode()) - 3 :]):
            reason = "stop"
    if reason is None:
        return None
    text = tokenizer.decode(body)
    cuts = [at for stop in sampling.stop if (at := text.find(stop)) >= 0]
    return reason, text[: min(cuts)] if cuts else text


def _complete(row: _Row, reason: str, text: str, policy_version: int) -> Completion:
    return Completion(
        request_id=row.request.id,
        prompt_ids=row.request.prompt_ids,
        token_ids=tuple(row.tokens),
        logprobs=tuple(row.logprobs),
        text=text,
        finish_reason=reason,
        policy_version=policy_version,
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _limit(cfg: ModelConfig, request: Request, sampling: Sampling) -> int:
    """How many tokens the request may get."""
    wanted = request.max_new_tokens or sampling.max_new_tokens
    return min(wanted, cfg.max_seq_len - len(request.prompt_ids))


def _check(
    weights: DecodeWeights,
    requests: Sequence[Request],
    sampling: Sampling,
    tokenizer: Tokenizer | None,
    num_slots: int,
) -> None:
    if num_slots < 1:
        raise ConfigError(f"num_slots={num_slots} must be at least 1")
    if sampling.stop and tokenizer is None:
        raise ConfigError(f"stop strings {sampling.stop} need a tokenizer")
    repeated = [i for i, n in Counter(r.id for r in requests).items() if n > 1]
    if repeated:
        raise ConfigError(f"request ids must be distinct; {repeated[0]} occurs more than once")
    for request in requests:
        if request.max_new_tokens is not None and request.max_new_tokens < 1:
            raise ConfigError(
                f"request {request.id}: max_new_tokens={request.max_new_tokens} must be at least 1"
            )
        _check_sampled(weights.cfg, request, _limit(weights.cfg, request, sampling))
        try:
            check_prompt(weights.cfg, request.prompt_ids)
        except ConfigError as error:
            raise ConfigError(f"request {request.id}: {error}") from error


def _check_sampled(cfg: ModelConfig, request: Request, limit: int) -> None:
    sampled = request.sampled
    if len(sampled) != len(request.sampled_logprobs):
        raise ConfigError(
            f"request {request.id}: {len(sampled)} sampled tokens have "
            f"{len(request.sampled_logprobs)} log-probabilities; each needs one"
        )
    if sampled and len(sampled) >= limit:
        raise ConfigError(
            f"request {request.id}: {len(sampled)} sampled tokens leave nothing of its {limit}; an "
            f"unfinished answer has at most {limit - 1}"
        )
    bad = [i for i in sampled if not 0 <= i < cfg.vocab_size]
    if bad:
        raise ConfigError(
            f"request {request.id}: the sampled tokens hold id {bad[0]}, but the vocabulary has "
            f"ids 0 to {cfg.vocab_size - 1}"
        )
