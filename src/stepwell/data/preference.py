"""Rows of judged answers: pairs, labelled answers, answers judged step by step.

A row that cannot be used is dropped with a reason and counted. Answers are rendered as they are
for supervised fine-tuning, each with its own prompt: a template may render the same prompt
differently before different answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from stepwell.data.chat import UnusableRow, render_prompt
from stepwell.data.chat_formats import standard_messages
from stepwell.data.judged import (
    Ids,
    Labelled,
    Pair,
    Stepwise,
    cut_answer,
    cut_prompt,
    fit_pair,
    require_answer,
    split_answer,
)
from stepwell.data.judged import (
    Rendering as Rendering,
)
from stepwell.data.sft_data import Drops, render_row, summary
from stepwell.data.sources.rows import records
from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError, Dropped, nearest

LabelKind = Literal["bool", "number", "class"]
IGNORED = -100  # what data sets write where there is no label
SEPARATOR = "\n"


def load_pairs(
    path: str | Path,
    tokenizer: Tokenizer,
    seq_len: int,
    max_prompt_tokens: int | None = None,
    max_rows: int | None = None,
    max_length: int | None = None,
) -> tuple[list[Pair], Drops]:
    """Rows of `prompt`, `chosen`, `rejected` (texts or lists of messages), or of `chosen` and
    `rejected` that begin alike; with a number `margin` if they have one, `tools`, and `system`.

    A prompt keeps its last max_prompt_tokens tokens (bos stays). Then both answers are cut to one
    length, so that the two documents together have at most seq_len tokens, and each at most
    max_length. A pair with an answer that nothing is left of, or whose answers are the same, is
    dropped. Raises DataError for a file that cannot be read or has no usable row.
    """
    used = ("prompt", "chosen", "rejected", "margin", "tools", "system")

    def pair_of(row: Mapping[str, Any], item: str) -> Pair:
        chosen, rejected = (
            render_answer(tokenizer, prompt, answer, row) for prompt, answer in two_answers(row)
        )
        return fit_pair(
            chosen,
            rejected,
            seq_len,
            tokenizer.bos_id,
            max_prompt_tokens,
            max_length,
            margin=_margin(row),
            columns=_others(row, used),
            item=item,
        )

    return _load(path, pair_of, max_rows)


def load_labelled(
    path: str | Path,
    tokenizer: Tokenizer,
    seq_len: int,
    max_prompt_tokens: int | None = None,
    max_rows: int | None = None,
    kind: LabelKind = "bool",
    num_labels: int | None = None,
) -> tuple[list[Labelled], Drops]:
    """Rows of `prompt` and `completion` (or `messages`; but for kind "bool" also a whole `text`)
    with a `label`: true or false, a finite number, or a class below num_labels.

    -100 and null mean unlabelled, and such rows are dropped, as are rows too long to keep a token
    of the answer. Truncation and errors as in `load_pairs`.
    """
    used = ("prompt", "completion", "messages", "text", "label", "tools", "system")

    def labelled_of(row: Mapping[str, Any], item: str) -> Labelled:
        label = read_label(row, kind, num_labels)
        ids, mask = _labelled_text(tokenizer, row, kind)
        prompt, answer = split_answer(ids, mask)
        head = cut_prompt(prompt, max_prompt_tokens, tokenizer.bos_id)
        answer = cut_answer(answer, seq_len - len(head))
        require_answer(head, answer, seq_len)
        return Labelled(
            prompt_ids=head,
            completion_ids=answer[0],
            label=label,
            columns=_others(row, used),
            item=item,
            mask=None if all(answer[1]) else answer[1],
            truncated=len(head) + len(answer[0]) < len(ids),
        )

    return _load(path, labelled_of, max_rows)


def load_steps(
    path: str | Path,
    tokenizer: Tokenizer,
    seq_len: int,
    max_prompt_tokens: int | None = None,
    max_rows: int | None = None,
    separator: str = SEPARATOR,
) -> tuple[list[Stepwise], Drops]:
    """Rows of `prompt` (text or messages), `completions` (a text a step) and `labels` (true, false
    or a probability a step; -100 and null: not judged).

    Each step is encoded by itself and ends in `separator`, after which it is scored. Steps that
    seq_len has no room for are cut off; a row with no labelled step left is dropped.
    """
    used = ("prompt", "completions", "labels", "tools")

    def steps_of(row: Mapping[str, Any], item: str) -> Stepwise:
        texts, labels = _step_columns(row)
        prompt = step_prompt(tokenizer, row)
        head = cut_prompt(prompt, max_prompt_tokens, tokenizer.bos_id)
        steps = [
            tuple(tokenizer.encode(ended_step(text, separator), special=False)) for text in texts
        ]
        count, places = 0, len(head)
        while count < len(steps) and places + len(steps[count]) <= seq_len:
            places += len(steps[count])
            count += 1
        if all(label is None for label in labels[:count]):
            raise UnusableRow(
                "too_long",
                f"no labelled step ends within {seq_len} tokens: the prompt has {len(head)}; "
                "raise data.seq_len or cut the prompt by max_prompt_tokens",
            )
        ends = count == len(steps) and places < seq_len
        return Stepwise(
            prompt_ids=head,
            steps=tuple(steps[:count]),
            labels=tuple(labels[:count]),
            columns=_others(row, used),
            item=item,
            end_ids=(tokenizer.eos_id,) if ends else (),
            truncated=count < len(steps) or len(head) < len(prompt),
        )

    return _load(path, steps_of, max_rows)


def read_label(
    row: Mapping[str, Any], kind: LabelKind, num_labels: int | None = None
) -> bool | float | int:
    """The row's `label`. Raises UnusableRow for none, and for what is no label of this kind."""
    value = row.get("label")
    if value is None and "label" not in row:
        raise UnusableRow("missing_column", f"no 'label'{nearest('label', row)}")
    if value is None or (_is_number(value) and value == IGNORED):
        raise UnusableRow("unlabelled", f"the label is {value!r}, which means that there is none")
    number = _is_number(value)
    if kind == "bool" and (isinstance(value, bool) or (number and value in (0, 1))):
        return bool(value)
    if kind == "number" and number and math.isfinite(value):
        return float(value)
    is_class = isinstance(value, bool | int) or (isinstance(value, float) and value.is_integer())
    if kind == "class" and is_class and 0 <= value < (num_labels or math.inf):
        return int(value)
    rule = {
        "bool": "true or false (or 1 and 0)",
        "number": "a finite number",
        "class": f"a class from 0 to {'...' if num_labels is None else num_labels - 1}",
    }[kind]
    raise UnusableRow("bad_label", f"the label is {value!r:.80}; it must be {rule}")


def _load(
    path: str | Path, make: Callable[[Mapping[str, Any], str], Any], max_rows: int | None
) -> tuple[list[Any], Drops]:
    items, drops = [], Drops()
    for record in islice(records(path), max_rows):
        if isinstance(record, Dropped):
            drops.add(record)
            continue
        try:
            items.append(make(record.values, record.id))
        except UnusableRow as error:
            drops.add(Dropped(record.id, str(path), error.reason, str(error)))
    if not items:
        raise DataError(f"no row of {path} can be trained on: {summary(drops)}")
    return items, drops


def two_answers(row: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """(prompt, answer) of the chosen and of the rejected: both texts or both lists."""
    for column in ("chosen", "rejected"):
        if row.get(column) is None:
            raise UnusableRow("missing_column", f"no {column!r}{nearest(column, row)}")
    prompt, chosen, rejected = (_answer(row.get(name)) for name in ("prompt", "chosen", "rejected"))
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise UnusableRow(
            "wrong_type",
            "chosen and rejected must both be text or both lists of messages, not "
            f"{type(chosen).__name__} and {type(rejected).__name__}",
        )
    if prompt is not None and not isinstance(prompt, str | list):
        raise UnusableRow(
            "wrong_type",
            f"prompt must be text or a list of messages, not {type(prompt).__name__}",
        )
    if isinstance(chosen, str):
        if prompt is None:
            start = _common_text(chosen, rejected)
            prompt, chosen, rejected = chosen[:start], chosen[start:], rejected[start:]
        return [(prompt, chosen), (prompt, rejected)]
    if isinstance(prompt, list):
        # Some repeat the prompt in front of the answers.
        both = chosen[: len(prompt)] == prompt == rejected[: len(prompt)]
        return [(prompt, answer[len(prompt) * both :]) for answer in (chosen, rejected)]
    common = _common_messages(chosen, rejected)
    if prompt is None or (common and not _is_answer(chosen[0])):
        # Whole conversations; a prompt text beside them repeats what they begin with.
        return [(chosen[:common], chosen[common:]), (rejected[:common], rejected[common:])]
    return [(prompt, chosen), (prompt, rejected)]


def _answer(value: Any) -> Any:
    """Messages in their standard form; one that stands alone as a list of it. Texts as they are."""
    if isinstance(value, Mapping):
        value = [value]
    return standard_messages(value)


def _common_text(first: str, second: str) -> int:
    """Where two texts part: before the word that differs, whose leading space goes with it."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    blank = next((i for i in range(low - 1, -1, -1) if first[i].isspace()), -1)
    return blank if blank >= 0 and first[blank] == " " else blank + 1


def _common_messages(first: list[Any], second: list[Any]) -> int:
    """How many messages both begin with, of which the last of either is none."""
    most = max(min(len(first), len(second)) - 1, 0)
    return next((i for i in range(most) if first[i] != second[i]), most)


def _is_answer(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def render_answer(
    tokenizer: Tokenizer, prompt: Any, answer: Any, row: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    return render_row(
        tokenizer,
        {
            "prompt": prompt,
            "completion": answer,
            "tools": row.get("tools"),
            "system": row.get("system"),
        },
    )


def _labelled_text(
    tokenizer: Tokenizer, row: Mapping[str, Any], kind: LabelKind
) -> tuple[list[int], list[int]]:
    text = row.get("text")
    if kind != "bool" and isinstance(text, str) and text and row.get("prompt") is None:
        return render_row(tokenizer, {"prompt": "", "completion": text})
    return render_row(tokenizer, row)


def _step_columns(row: Mapping[str, Any]) -> tuple[list[str], list[float | None]]:
    for column in ("prompt", "completions", "labels"):
        if row.get(column) is None:
            raise UnusableRow("missing_column", f"no {column!r}{nearest(column, row)}")
    texts, labels = row["completions"], row["labels"]
    if not isinstance(texts, list) or not all(isinstance(t, str) and t.strip() for t in texts):
        raise UnusableRow("wrong_type", "completions must be a list of texts, none of them blank")
    if not isinstance(labels, list) or len(labels) != len(texts) or not texts:
        found = len(labels) if isinstance(labels, list) else type(labels).__name__
        raise UnusableRow(
            "wrong_type", f"labels must be a list, one for each of {len(texts)} steps: {found}"
        )
    read = [_step_label(label) for label in labels]
    if all(label is None for label in read):
        raise UnusableRow("unlabelled", "no step has a label")
    return texts, read


def _step_label(value: Any) -> float | None:
    if value is None or (_is_number(value) and value == IGNORED):
        return None
    if isinstance(value, bool) or (_is_number(value) and 0 <= value <= 1):
        return float(value)
    raise UnusableRow(
        "bad_label",
        f"a step's label is {value!r:.80}; it must be true, false, a probability from 0 to 1, or "
        f"{IGNORED} where there is none",
    )


def step_prompt(tokenizer: Tokenizer, row: Mapping[str, Any]) -> Ids:
    prompt = row["prompt"]
    if isinstance(prompt, list):
        return tuple(render_prompt(tokenizer, prompt, row.get("tools")))
    if not isinstance(prompt, str):
        raise UnusableRow(
            "wrong_type", f"prompt must be text or a list of messages, not {type(prompt).__name__}"
        )
    head = () if tokenizer.bos_id is None else (tokenizer.bos_id,)
    return (*head, *tokenizer.encode(prompt, special=False))


def ended_step(text: str, separator: str) -> str:
    return text if text.endswith(separator) else text + separator


def _margin(row: Mapping[str, Any]) -> float | None:
    value = row.get("margin")
    if value is None:
        return None
    if not _is_number(value) or not math.isfinite(value):
        raise UnusableRow("bad_margin", f"margin is {value!r:.80}; it must be a finite number")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _others(row: Mapping[str, Any], used: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in used}
