"""Answers that were judged, as token ids, and how they are cut to fit a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepwell.data.chat_template import UnusableRow

Ids = tuple[int, ...]
Rendering = tuple[Ids, Ids]


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, the first of which is preferred.

    chosen_ids, rejected_ids: from the first trained token to the end. margin: by how much it is
    preferred. columns: what else the row holds. item: names it within its file.
    rejected_prompt_ids: set where the rejected answer's prompt is rendered differently.
    chosen_mask, rejected_mask: which tokens of the answer are trained (None: all).
    truncated: whether the prompt or an answer was cut.
    """

    prompt_ids: Ids
    chosen_ids: Ids
    rejected_ids: Ids
    margin: float | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    item: str = ""
    rejected_prompt_ids: Ids | None = None
    chosen_mask: Ids | None = None
    rejected_mask: Ids | None = None
    truncated: bool = False

    @property
    def chosen(self) -> Rendering:
        """ids and mask of the prompt with the chosen answer."""
        return _whole(self.prompt_ids, self.chosen_ids, self.chosen_mask)

    @property
    def rejected(self) -> Rendering:
        own = self.rejected_prompt_ids
        prompt = self.prompt_ids if own is None else own
        return _whole(prompt, self.rejected_ids, self.rejected_mask)


@dataclass(frozen=True)
class Labelled:
    """An answer with a label: a bool (desirable or not), a number, or a class. See Pair."""

    prompt_ids: Ids
    completion_ids: Ids
    label: bool | float | int
    columns: Mapping[str, Any] = field(default_factory=dict)
    item: str = ""
    mask: Ids | None = None
    truncated: bool = False

    @property
    def rendering(self) -> Rendering:
        """ids and mask of the prompt with the answer."""
        return _whole(self.prompt_ids, self.completion_ids, self.mask)


@dataclass(frozen=True)
class Stepwise:
    """An answer in steps. labels: the probability that a step is right, None where nobody judged.

    steps: each step's ids, with what separates it from the next. end_ids: what follows the last
    step (eos), empty where steps were cut off.
    """

    prompt_ids: Ids
    steps: tuple[Ids, ...]
    labels: tuple[float | None, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    item: str = ""
    end_ids: Ids = ()
    truncated: bool = False

    @property
    def ids(self) -> Ids:
        return (*self.prompt_ids, *(i for step in self.steps for i in step), *self.end_ids)

    @property
    def step_ends(self) -> Ids:
        """The place of each step's last token in `ids`."""
        ends, place = [], len(self.prompt_ids) - 1
        for step in self.steps:
            place += len(step)
            ends.append(place)
        return tuple(ends)


def fit_pair(
    chosen: tuple[Sequence[int], Sequence[int]],
    rejected: tuple[Sequence[int], Sequence[int]],
    seq_len: int,
    bos_id: int | None = None,
    max_prompt_tokens: int | None = None,
    max_length: int | None = None,
    **fields: Any,
) -> Pair:
    """A pair of two whole renderings, truncated as `preference.load_pairs` says. fields: further
    ones of Pair.

    Raises UnusableRow if an answer has no token left or the answers are the same.
    """
    prompts, answers = [], []
    for rendering in (chosen, rejected):
        prompt, answer = split_answer(*rendering)
        prompts.append(cut_prompt(prompt, max_prompt_tokens, bos_id))
        answers.append(answer)
    if prompts[0] == prompts[1] and answers[0] == answers[1]:
        raise UnusableRow("identical_answers", "chosen and rejected are the same")
    lengths = [len(p) + len(a[0]) for p, a in zip(prompts, answers, strict=True)]
    limit = pair_limit(*lengths, seq_len=seq_len, max_length=max_length)
    kept = [cut_answer(a, limit - len(p)) for p, a in zip(prompts, answers, strict=True)]
    for prompt, answer in zip(prompts, kept, strict=True):
        require_answer(prompt, answer, limit)
    if prompts[0] == prompts[1] and kept[0] == kept[1]:
        raise UnusableRow(
            "identical_answers",
            f"chosen and rejected are the same up to the {limit} tokens that are kept of each",
        )
    masks = [None if all(mask) else mask for _, mask in kept]
    whole = sum(len(ids) for ids, _ in (chosen, rejected))
    return Pair(
        prompt_ids=prompts[0],
        chosen_ids=kept[0][0],
        rejected_ids=kept[1][0],
        rejected_prompt_ids=None if prompts[1] == prompts[0] else prompts[1],
        chosen_mask=masks[0],
        rejected_mask=masks[1],
        truncated=sum(len(p) + len(a[0]) for p, a in zip(prompts, kept, strict=True)) < whole,
        **fields,
    )


def cut_prompt(prompt: Ids, max_prompt_tokens: int | None, bos_id: int | None = None) -> Ids:
    """The prompt's last tokens; a bos that it begins with stays and counts."""
    if max_prompt_tokens is None or len(prompt) <= max_prompt_tokens:
        return prompt
    head = prompt[:1] if bos_id is not None and prompt[0] == bos_id else ()
    rest = max_prompt_tokens - len(head)
    return head + (prompt[-rest:] if rest else ())


def pair_limit(chosen: int, rejected: int, seq_len: int, max_length: int | None = None) -> int:
    """The greatest length that both documents of a pair may be cut to, so that together they have
    at most seq_len tokens: what the shorter leaves, or half."""
    shorter = min(chosen, rejected)
    room = seq_len - shorter if 2 * shorter <= seq_len else seq_len // 2
    limit = seq_len if chosen + rejected <= seq_len else room
    return limit if max_length is None else min(limit, max_length)


def split_answer(ids: Any, mask: Any) -> tuple[Ids, Rendering]:
    """The prompt, and ids and mask from the first trained token on."""
    first = next((i for i, trained in enumerate(mask) if trained), len(ids))
    return tuple(ids[:first]), (tuple(ids[first:]), tuple(mask[first:]))


def cut_answer(answer: Rendering, length: int) -> Rendering:
    length = max(length, 0)
    return answer[0][:length], answer[1][:length]


def require_answer(prompt: Ids, answer: Rendering, limit: int) -> None:
    """Something must be left to predict; the very first token of a document never is."""
    if len(prompt) + len(answer[0]) < 2 or not any(answer[1][0 if prompt else 1 :]):
        raise UnusableRow(
            "too_long",
            f"no token of the answer is left within {limit} tokens: the prompt has {len(prompt)}; "
            "raise data.seq_len or cut the prompt by max_prompt_tokens",
        )


def _whole(prompt: Ids, answer: Ids, mask: Ids | None) -> Rendering:
    return prompt + answer, (0,) * len(prompt) + ((1,) * len(answer) if mask is None else mask)
