"""Evaluations on an engine: bits per byte, multiple choice, generate and match.

B rows, T places of a row. Scored texts are packed into rows with document borders, so short items
cost what their tokens cost. Every rank must call these together, with the same arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from stepwell.data.batch import Batch
from stepwell.data.packing import best_fit, pack_rows
from stepwell.eval import score
from stepwell.eval.grade import (
    Prompt,
    Verdict,
    Verifier,
    answer_seeds,
    check_columns,
    verify_each,
)
from stepwell.generate import Request, Sampling
from stepwell.tokenizer import Tokenizer
from stepwell.types import Completion, DataError

Normalise = Literal["bytes", "tokens", "none"]
ROWS_PER_CALL = 32


class Engine(Protocol):
    """What an evaluation needs of `train.engine.Engine`."""

    run: Any

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Tensor: ...

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, tokenizer: Tokenizer | None = None
    ) -> list[Completion]: ...


@dataclass(frozen=True)
class MultipleChoice:
    """choices continue `context` directly (with their own leading blank); answer is an index. id:
    names the item within its file."""

    context: str
    choices: tuple[str, ...]
    answer: int
    id: str = field(default="", compare=False)


@dataclass(frozen=True)
class BitsPerByte:
    """value: over all bytes. documents: bits per byte of each that was not empty."""

    value: float
    num_bytes: int
    num_tokens: int
    num_empty: int
    documents: tuple[float, ...]


@dataclass(frozen=True)
class Choices:
    """picked: the chosen index of each item. correct: 1.0 or 0.0."""

    accuracy: float
    interval: tuple[float, float]
    picked: tuple[int, ...]
    correct: tuple[float, ...]


@dataclass(frozen=True)
class Matches:
    """verdicts and completions: num_samples a prompt, in order. means: of each prompt, None where
    no answer was scored. pass_at: k -> mean pass@k over the prompts whose every answer was scored.
    Failed graders are counted, never taken as wrong."""

    accuracy: float
    interval: tuple[float, float]
    means: tuple[float | None, ...]
    pass_at: dict[int, float]
    completions: tuple[Completion, ...]
    verdicts: tuple[Verdict, ...]
    num_errors: int
    num_timeouts: int
    num_not_applicable: int


def bits_per_byte(
    engine: Engine,
    documents: Sequence[str],
    tokenizer: Tokenizer,
    seq_len: int | None = None,
    stride: int | None = None,
) -> BitsPerByte:
    """Bits per UTF-8 byte of whole texts, each after bos (or eos, where no bos is used), so that
    the first token is predicted too; an end token at the end is not scored.

    seq_len: the context (default: data.seq_len). A text longer than that is read in windows that
    move on by `stride` tokens (default: half the context); each token is scored once, in the
    first window that holds it. Raises DataError if there are no bytes at all.
    """
    places = seq_len or int(engine.run.data.seq_len)
    stride = min(stride or max(places // 2, 1), places)
    start = _start_id(tokenizer)
    texts = [text for text in documents if text]
    pieces: list[tuple[list[int], list[int]]] = []
    owners: list[int] = []
    for i, ids in enumerate(tokenizer.encode_batch(texts, special=False)):
        for piece in windows([start, *ids], places, stride):
            pieces.append(piece)
            owners.append(i)
    sums = np.zeros(len(texts))
    np.add.at(sums, owners, [lp.sum() for lp in score_tokens(engine, pieces, places)])
    sizes = [len(text.encode("utf-8")) for text in texts]
    if not texts:
        raise DataError(f"none of the {len(documents)} documents has any text")
    return BitsPerByte(
        value=score.bits_per_byte(float(sums.sum()), sum(sizes)),
        num_bytes=sum(sizes),
        num_tokens=sum(sum(mask) for _, mask in pieces),
        num_empty=len(documents) - len(texts),
        documents=tuple(score.bits_per_byte(float(s), n) for s, n in zip(sums, sizes, strict=True)),
    )


def windows(ids: Sequence[int], seq_len: int, stride: int) -> list[tuple[list[int], list[int]]]:
    """(ids, mask) of windows with at most seq_len predictions; each of ids[1:] has mask 1 once.
    Every window but the first predicts at most `stride` new tokens, after the longest context."""
    last = len(ids) - 1
    cuts = [min(seq_len, last), *range(seq_len + stride, last, stride)]
    if cuts[-1] < last:
        cuts.append(last)
    out, done = [], 0
    for stop in cuts:
        first = max(stop - seq_len, 0)
        window = list(ids[first : stop + 1])
        out.append((window, [int(first + j > done) for j in range(len(window))]))
        done = stop
    return out


def multiple_choice(
    engine: Engine,
    items: Sequence[MultipleChoice],
    tokenizer: Tokenizer,
    normalise: Normalise = "bytes",
    seq_len: int | None = None,
) -> Choices:
    """Picks the choice with the largest log p(choice | context), by default divided by the
    choice's UTF-8 bytes (without its leading blank): the "length-normalised" accuracy of published
    zero-shot tables. `tokens` divides by its tokens, `none` doesn't.

    Raises DataError for no items and for one longer than model.max_seq_len.
    """
    if not items:
        raise DataError("there are no items to evaluate")
    docs, lengths = [], []
    for number, item in enumerate(items):
        for choice in item.choices:
            ids, mask = choice_ids(tokenizer, item.context, choice)
            _check_length(len(ids) - 1, engine, number)
            docs.append((ids, mask))
            lengths.append(
                {"bytes": len(choice.strip().encode("utf-8")), "tokens": sum(mask), "none": 1}[
                    normalise
                ]
            )
    places = max(seq_len or engine.run.data.seq_len, *(len(ids) - 1 for ids, _ in docs))
    sums = [float(lp.sum()) for lp in score_tokens(engine, docs, places)]
    picked, at = [], 0
    for item in items:
        span = slice(at, at + len(item.choices))
        picked.append(score.pick(sums[span], lengths[span]))
        at = span.stop
    correct = [float(p == item.answer) for p, item in zip(picked, items, strict=True)]
    return Choices(
        score.accuracy(correct),
        score.bootstrap_interval(correct),
        tuple(picked),
        tuple(correct),
    )


def choice_ids(tokenizer: Tokenizer, context: str, choice: str) -> tuple[list[int], list[int]]:
    """ids of context + choice as one text, mask 1 on what differs from the context's own ids. bos
    comes first if the tokenizer uses one; an empty context is eos."""
    head = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    if not context and not head:
        head = [tokenizer.eos_id]
    alone = tokenizer.encode(context, special=False)
    whole = tokenizer.encode(context + choice, special=False)
    shared = 0
    while shared < min(len(alone), len(whole) - 1) and alone[shared] == whole[shared]:
        shared += 1
    if shared == 0 and not head:
        head = [tokenizer.eos_id]
    return head + whole, [0] * (len(head) + shared) + [1] * (len(whole) - shared)


def generate_and_match(
    engine: Engine,
    items: Sequence[Prompt],
    tokenizer: Tokenizer,
    sampling: Sampling,
    verifier: Verifier,
    num_samples: int = 1,
    seed: int = 0,
    timeout_s: float = 10.0,
) -> Matches:
    """Answers each prompt num_samples times and grades the answers. accuracy: the mean over prompts
    of the mean reward of what was scored, with a bootstrap interval over the prompts; a reward of 1
    counts for pass@k, which is left out where no prompt's every answer was scored.

    Raises DataError for no items, for items that lack a column of the verifier's, and when not one
    answer could be scored.
    """
    if not items:
        raise DataError("there are no items to evaluate")
    check_columns(verifier, items)
    owners = [item for item in items for _ in range(num_samples)]
    seeds = [s for item in items for s in answer_seeds(seed, item.ids, num_samples)]
    requests = [
        Request(i, tuple(item.ids), seed=s)
        for i, (item, s) in enumerate(zip(owners, seeds, strict=True))
    ]
    completions = engine.generate(requests, sampling, tokenizer)
    verdicts = verify_each(
        verifier,
        [item.text for item in owners],
        [c.text for c in completions],
        [item.columns for item in owners],
        timeout_s,
    )
    if all(v.reward is None for v in verdicts):
        failed = next((v for v in verdicts if v.failure), None)
        why = f"{failed.failure}: {failed.detail}" if failed else "the verifier says not applicable"
        raise DataError(f"none of the {len(verdicts)} answers could be scored; the first: {why}")
    groups = [
        [v.reward for v in verdicts[i : i + num_samples]]
        for i in range(0, len(verdicts), num_samples)
    ]
    means = [score.accuracy(g) if any(r is not None for r in g) else None for g in groups]
    full = [[r for r in g if r is not None] for g in groups if None not in g]
    sizes = {1, num_samples} | {2**i for i in range(num_samples.bit_length())} if full else set()
    failures = Counter(v.failure for v in verdicts if v.reward is None)
    return Matches(
        accuracy=score.accuracy(means),
        interval=score.bootstrap_interval([m for m in means if m is not None]),
        means=tuple(means),
        pass_at={
            k: score.accuracy(
                [score.pass_at_k(num_samples, sum(r >= 1 for r in g), k) for g in full]
            )
            for k in sorted(sizes)
        },
        completions=tuple(completions),
        verdicts=tuple(verdicts),
        num_errors=failures["error"],
        num_timeouts=failures["timeout"],
        num_not_applicable=failures[""],
    )


def score_tokens(
    engine: Engine, docs: Sequence[tuple[Sequence[int], Sequence[int]]], seq_len: int
) -> list[np.ndarray]:
    """log p of each document's tokens but the first, float64; zero where the mask is."""
    rows = best_fit([len(ids) - 1 for ids, _ in docs], seq_len)
    out: list[np.ndarray] = [np.zeros(0)] * len(docs)
    for at in range(0, len(rows), ROWS_PER_CALL):
        part = rows[at : at + ROWS_PER_CALL]
        numbers = [i for row in part for i in row]
        renumbered = _renumber([len(row) for row in part])
        batch = pack_rows([docs[i] for i in numbers], seq_len, rows=renumbered)
        scored_BT = engine.logprobs(batch).double().cpu().numpy()
        for row, members in zip(scored_BT, part, strict=True):
            place = 0
            for i in members:
                stop = place + len(docs[i][0]) - 1
                mask = np.asarray(docs[i][1][1:])
                out[i] = np.where(mask != 0, row[place:stop], 0.0)
                place = stop
    return out


def _renumber(sizes: Sequence[int]) -> list[list[int]]:
    ends = np.cumsum(sizes).tolist()
    return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def _start_id(tokenizer: Tokenizer) -> int:
    return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id


def _check_length(num_places: int, engine: Engine, number: int) -> None:
    limit = engine.run.model.max_seq_len
    if num_places > limit:
        raise DataError(
            f"item {number} needs {num_places} places, but model.max_seq_len is {limit}; "
            "shorten its context"
        )
