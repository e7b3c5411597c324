"""Rows with a prompt, as sampling, reinforcement and evaluation read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepwell.data.chat import UnusableRow, render_prompt
from stepwell.data.pipeline import Drops
from stepwell.data.sources import records
from stepwell.posttrain.rollout import Prompt
from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError, Dropped


def read_prompts(
    path: str | Path, tokenizer: Tokenizer, max_tokens: int
) -> tuple[list[Prompt], Drops]:
    """The prompts of a JSONL or Parquet file; their other columns go to the verifier.

    A row has `prompt` (text, taken as it is, or a list of messages, put into the chat template) or
    `messages` (a final answer in it is left away). One that is longer than max_tokens, or has no
    prompt, is dropped with its reason. Raises DataError when none is left.
    """
    prompts: list[Prompt] = []
    drops = Drops()
    for record in records(path):
        item = record if isinstance(record, Dropped) else None
        if item is None:
            found = _prompt(record.values, tokenizer, max_tokens)  # type: ignore[union-attr]
            if isinstance(found, Prompt):
                prompts.append(found)
                continue
            item = Dropped(record.id, str(path), *found)
        drops.add(item)
    if not prompts:
        reasons = ", ".join(f"{count} {reason}" for reason, count in drops.by_reason.items())
        raise DataError(f"no row of {path} has a prompt that can be used: {reasons}")
    return prompts, drops


def encode_prompt(prompt: str | Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[int]:
    """Text as it is (after a bos, where the tokenizer uses one); messages through the template."""
    if not isinstance(prompt, str):
        return render_prompt(tokenizer, [dict(message) for message in prompt])
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return start + tokenizer.encode(prompt, special=False)


def _prompt(
    row: Mapping[str, Any], tokenizer: Tokenizer, max_tokens: int
) -> Prompt | tuple[str, str]:
    """The prompt of a row, or why there is none."""
    prompt = row.get("prompt")
    if prompt is None and isinstance(row.get("messages"), list):
        messages = row["messages"]
        answered = bool(messages) and messages[-1].get("role") == "assistant"
        prompt = messages[:-1] if answered else messages
    if not isinstance(prompt, str | list) or not prompt:
        return "no_prompt", f"no `prompt` and no `messages`: {', '.join(row)}"
    try:
        ids = encode_prompt(prompt, tokenizer)
    except UnusableRow as error:
        return "unusable_row", str(error)
    if len(ids) > max_tokens:
        return "too_long", f"{len(ids)} tokens, at most {max_tokens}"
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    columns = {key: value for key, value in row.items() if key not in ("prompt", "messages")}
    return Prompt(text, tuple(ids), columns)
