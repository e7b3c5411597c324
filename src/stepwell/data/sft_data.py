"""Rows of conversations to a token store with loss masks; every row left out is counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from stepwell.data.chat import UnusableRow, render_chat, render_completion
from stepwell.data.chat_formats import STANDARD, ChatRules, standard_row
from stepwell.data.sources.rows import Record, records
from stepwell.data.store import StoreWriter, TokenStore
from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError, Dropped

PREVIEW_HINT = "look at them with `stepwell sft RECIPE --preview`"
NUM_EXAMPLES = 3
DETAIL_CHARACTERS = 200


@dataclass
class Drops:
    """How many were dropped for each reason, with the first few of each as examples."""

    by_reason: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.by_reason.values())

    def add(self, item: Dropped) -> None:
        self.by_reason[item.reason] = self.by_reason.get(item.reason, 0) + 1
        examples = self.examples.setdefault(item.reason, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append(
                {"id": item.id, "source": item.source, "detail": item.detail[:DETAIL_CHARACTERS]}
            )


@dataclass
class SFTReport:
    """rows: read; tokens: all that were kept; trained_tokens: those with loss, which a row's first
    token never has: nothing predicts it."""

    rows: int = 0
    kept: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    drops: Drops = field(default_factory=Drops)


def build_sft_store(
    path: str | Path,
    tokenizer: Tokenizer,
    folder: str | Path,
    max_rows: int | None = None,
    rules: ChatRules = STANDARD,
) -> tuple[TokenStore, SFTReport]:
    """Renders a JSONL or Parquet file of chat rows into a store with masks.

    Raises DataError for a file that cannot be read, and when no row can be used.
    """
    return write_sft_store(islice(records(path), max_rows), tokenizer, folder, str(path), rules)


def write_sft_store(
    rows: Iterable[Record | Dropped],
    tokenizer: Tokenizer,
    folder: str | Path,
    where: str = "the rows",
    rules: ChatRules = STANDARD,
) -> tuple[TokenStore, SFTReport]:
    report = SFTReport()
    with StoreWriter(folder, tokenizer.fingerprint, tokenizer.vocab_size, with_mask=True) as writer:
        for row in rows:
            report.rows += 1
            rendered = rendered_row(tokenizer, row, where, rules)
            if isinstance(rendered, Dropped):
                report.drops.add(rendered)
                continue
            ids, mask = rendered
            writer.add(ids, mask)
            report.kept += 1
            report.tokens += len(ids)
            report.trained_tokens += sum(mask[1:])
        if not report.kept:
            raise DataError(nothing_usable(where, report.drops))
    return TokenStore.open(folder), report


def render_row(
    tokenizer: Tokenizer, row: Mapping[str, Any], rules: ChatRules = STANDARD
) -> tuple[list[int], list[int]]:
    """ids and mask of a row in one of the formats of `chat_formats`.

    Of prompt and completion only the completion is trained, also when the prompt is a conversation
    with earlier answers. Raises UnusableRow.
    """
    found = standard_row(row, rules)
    if "messages" in found:
        messages, train_from = found["messages"], 0
    elif isinstance(found["prompt"], str):
        return render_completion(tokenizer, found["prompt"], found["completion"], rules.train_on)
    else:
        messages = [*found["prompt"], *found["completion"]]
        train_from = len(found["prompt"])
    return render_chat(
        tokenizer,
        messages,
        found["tools"],
        train_from,
        train_on=rules.train_on,
        last_turn_only=rules.last_turn_only,
    )


def summary(drops: Drops) -> str:
    """Each reason with its count and an example."""
    parts = [
        f"{count} x {reason} (e.g. {example_text(drops.examples[reason][0])})"
        for reason, count in drops.by_reason.items()
    ]
    return "; ".join(parts) or "it has none"


def example_text(example: Mapping[str, str]) -> str:
    """Which row it is, and what is wrong with it where the reason does not say all."""
    return f"{example['id']}: {example['detail']}" if example["detail"] else example["id"]


def nothing_usable(where: str, drops: Drops) -> str:
    """What to say of rows none of which can be trained on."""
    return f"no row of {where} can be trained on: {summary(drops)}; {PREVIEW_HINT}"


def rendered_row(
    tokenizer: Tokenizer, record: Record | Dropped, where: str, rules: ChatRules = STANDARD
) -> tuple[list[int], list[int]] | Dropped:
    """ids and mask, or why there are none."""
    if isinstance(record, Dropped):
        return record
    try:
        return render_row(tokenizer, record.values, rules)
    except UnusableRow as error:
        return Dropped(record.id, where, error.reason, str(error))
