"""Rows to train on out of a model's own scored answers: pairs (2305.18290 and its relatives learn
from them), or the right answers alone (rejection sampling: 2204.05862, 2307.09288)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stepwell.data.chat_formats import NEEDED
from stepwell.data.sources.rows import Record, records
from stepwell.eval.grade import Prompt
from stepwell.eval.items import make_prompt
from stepwell.posttrain.preference.pairing import NoPair, best_and_worst, right_and_wrong
from stepwell.posttrain.rollout import Group
from stepwell.tokenizer import Tokenizer
from stepwell.types import ConfigError, DataError

Pairing = Literal["best-worst", "right-wrong"]
# What training reads, and what would render the prompt in another way than it was sampled from.
TAKEN = {
    *(name for names in NEEDED.values() for name in names),
    *("input", "text", "chosen", "rejected", "margin", "label", "labels", "completions"),
    *("score", "score_chosen", "score_rejected", "tools", "system"),
}


@dataclass(frozen=True)
class Choice:
    """pairing: the best with the worst answer, or each right one with each wrong one. right_at: the
    score from which an answer is right (None: nobody knows, as of learnt scores). most: pairs or
    answers kept of a prompt. keep_cut: answers that were cut off at their limit may be chosen,
    though training then ends them there."""

    pairing: Pairing = "best-worst"
    right_at: float | None = 0.99
    most: int = 4
    keep_cut: bool = False

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ConfigError(f"{self.most} rows of a prompt are none; the nearest value is 1")
        if self.pairing == "right-wrong" and self.right_at is None:
            raise ConfigError("pairing 'right-wrong' needs right_at, e.g. 0.99")

    def is_right(self, score: float) -> bool:
        return self.right_at is not None and score >= self.right_at


@dataclass
class Counts:
    """What became of prompts and answers. prompts: those sampled; without: of them those that made
    no row, by reason. answers: those sampled; unused: of them those that could be in no row, by
    reason (blank, timeout, error, not_applicable, cut_off: only not as a chosen one). right: None
    where nobody knows."""

    rows: int = 0
    prompts: int = 0
    without: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    unused: Counter[str] = field(default_factory=Counter)
    scored: int = 0
    score_sum: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf
    right: int | None = None
    dropped_prompts: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "prompts": self.prompts,
            "dropped_prompts": dict(self.dropped_prompts),
            "prompts_without": dict(self.without),
            "answers": self.answers,
            "unused_answers": dict(self.unused),
            "mean_score": self.score_sum / self.scored if self.scored else None,
            "score_range": [self.lowest, self.highest] if self.scored else None,
            "right": self.right / self.scored if self.scored and self.right is not None else None,
        }


def load_sources(
    path: str | Path, tokenizer: Tokenizer, longest: int, limit: int | None = None
) -> tuple[list[tuple[Prompt, Any]], Counter[str]]:
    """Prompts of at most `longest` tokens, each with `prompt` (or `messages`) as it stands in its
    row; how many others there are, by reason. Raises DataError if there are no prompts."""
    found: list[tuple[Prompt, Any]] = []
    dropped: Counter[str] = Counter()
    example = ""
    for record in records(path):
        if len(found) == limit:
            break
        if not isinstance(record, Record):
            dropped[record.reason] += 1
            example = example or record.detail
            continue
        columns = {k: v for k, v in record.values.items() if k not in ("prompt", "messages")}
        value = record.values.get("prompt", record.values.get("messages"))
        try:
            prompt = make_prompt(tokenizer, value, columns)
        except DataError as error:
            dropped["bad_prompt"] += 1
            example = example or f"{record.id}: {error}"
            continue
        if len(prompt.ids) > longest:
            dropped["too_long"] += 1
            example = example or (
                f"{record.id}: {len(prompt.ids)} tokens, and the model's context leaves {longest}"
            )
            continue
        found.append((prompt, value))
    if not found:
        reasons = ", ".join(f"{n} x {reason}" for reason, n in dropped.items()) or "it has no row"
        first = f"; the first problem: {example}" if example else ""
        raise DataError(f"{path} has no usable prompt: {reasons}{first}")
    return found, dropped


def pair_rows(group: Group, value: Any, choice: Choice, counts: Counts) -> Iterator[dict[str, Any]]:
    """Rows of `prompt`, `chosen`, `rejected`, `margin` (by how much the chosen one scores more),
    `score_chosen` and `score_rejected`, with the prompt's other columns."""
    scores = usable_scores(group, choice, counts)
    pairs = _pairs(group, scores, choice)
    if isinstance(pairs, NoPair):
        counts.without[pairs.reason] += 1
        return
    for i, j in pairs:
        better, worse = scores[i], scores[j]
        assert better is not None
        assert worse is not None
        counts.rows += 1
        yield {
            "prompt": value,
            "chosen": _answer(value, group.completions[i].text),
            "rejected": _answer(value, group.completions[j].text),
            "margin": better - worse,
            "score_chosen": better,
            "score_rejected": worse,
            **_others(group.prompt),
        }


def sft_rows(group: Group, value: Any, choice: Choice, counts: Counts) -> Iterator[dict[str, Any]]:
    """Rows of `prompt`, `completion` and `score`: the group's right answers, each text once."""
    scores = usable_scores(group, choice, counts)
    right = [i for i, score in enumerate(scores) if score is not None and choice.is_right(score)]
    whole = [i for i in right if choice.keep_cut or not _is_cut(group, i)]
    texts = {group.completions[i].text: i for i in reversed(whole)}
    if not texts:
        counts.without["cut_off" if right else "none_right"] += 1
    for i in sorted(texts.values())[: choice.most]:
        counts.rows += 1
        yield {
            "prompt": value,
            "completion": _answer(value, group.completions[i].text),
            "score": scores[i],
            **_others(group.prompt),
        }


def usable_scores(group: Group, choice: Choice, counts: Counts) -> list[float | None]:
    """None for answers that cannot be in a row."""
    counts.prompts += 1
    found: list[float | None] = []
    for completion, verdict in zip(group.completions, group.verdicts, strict=True):
        counts.answers += 1
        score = verdict.reward
        if score is None:
            counts.unused[verdict.failure or "not_applicable"] += 1
        else:
            counts.scored += 1
            counts.score_sum += score
            counts.lowest, counts.highest = min(counts.lowest, score), max(counts.highest, score)
            if choice.right_at is not None:
                counts.right = (counts.right or 0) + choice.is_right(score)
            if completion.finish_reason == "length" and not choice.keep_cut:
                counts.unused["cut_off"] += 1
            if not completion.text.strip():
                counts.unused["blank"] += 1
                score = None
        found.append(score)
    return found


def _pairs(
    group: Group, scores: Sequence[float | None], choice: Choice
) -> list[tuple[int, int]] | NoPair:
    """Of answers of different texts, the chosen ones not cut off."""
    if choice.pairing == "right-wrong":
        assert choice.right_at is not None
        found = right_and_wrong(_choosable(group, scores, choice), choice.right_at, choice.most)
    else:
        found = _best_worst(group, scores, choice)
    if isinstance(found, NoPair):
        return found
    texts: dict[tuple[str, str], tuple[int, int]] = {}
    for i, j in found:
        chosen, rejected = group.completions[i].text, group.completions[j].text
        if chosen != rejected:
            texts.setdefault((chosen, rejected), (i, j))
    return list(texts.values()) or NoPair("same_text")


def _best_worst(
    group: Group, scores: Sequence[float | None], choice: Choice
) -> list[tuple[int, int]] | NoPair:
    found = best_and_worst(scores)
    if isinstance(found, NoPair):
        return found
    worst = scores[found[1]]
    assert worst is not None
    better = [
        (score, -i)
        for i, score in enumerate(scores)
        if score is not None and score > worst and (choice.keep_cut or not _is_cut(group, i))
    ]
    return [(-max(better)[1], found[1])] if better else NoPair("cut_off")


def _choosable(group: Group, scores: Sequence[float | None], choice: Choice) -> list[float | None]:
    """Without the right answers that were cut off: they can neither be chosen nor rejected."""
    return [
        None
        if score is not None
        and choice.is_right(score)
        and _is_cut(group, i)
        and not choice.keep_cut
        else score
        for i, score in enumerate(scores)
    ]


def _is_cut(group: Group, number: int) -> bool:
    return group.completions[number].finish_reason == "length"


def _answer(value: Any, text: str) -> Any:
    """In the form of its prompt."""
    return text if isinstance(value, str) else [{"role": "assistant", "content": text}]


def _others(prompt: Prompt) -> Mapping[str, Any]:
    return {name: value for name, value in prompt.columns.items() if name not in TAKEN}
