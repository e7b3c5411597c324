"""Rows of conversations to a token store with loss masks; every row left out is counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from stepwell.data.chat import UnusableRow, render_chat, render_completion
from stepwell.data.sources.rows import Record, records
from stepwell.data.store import StoreWriter, TokenStore
from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError, Dropped, nearest

COLUMNS = ("messages", "prompt", "completion")
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
    """rows: read; tokens: all that were kept; trained_tokens: those with loss."""

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
) -> tuple[TokenStore, SFTReport]:
    """Renders a JSONL or Parquet file of `messages`, or of `prompt` + `completion` (both text, or
    both lists of messages), into a store with masks.

    Raises DataError for a file that cannot be read, and when no row can be used.
    """
    return write_sft_store(islice(records(path), max_rows), tokenizer, folder, where=str(path))


def write_sft_store(
    rows: Iterable[Record | Dropped],
    tokenizer: Tokenizer,
    folder: str | Path,
    where: str = "the rows",
) -> tuple[TokenStore, SFTReport]:
    report = SFTReport()
    with StoreWriter(folder, tokenizer.fingerprint, tokenizer.vocab_size, with_mask=True) as writer:
        for row in rows:
            report.rows += 1
            rendered = row if isinstance(row, Dropped) else _rendered(tokenizer, row, where)
            if isinstance(rendered, Dropped):
                report.drops.add(rendered)
                continue
            ids, mask = rendered
            writer.add(ids, mask)
            report.kept += 1
            report.tokens += len(ids)
            report.trained_tokens += sum(mask)
        if not report.kept:
            raise DataError(f"no row of {where} can be trained on: {summary(report.drops)}")
    return TokenStore.open(folder), report


def render_row(tokenizer: Tokenizer, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """ids and mask of a row with `messages` (and perhaps `tools`), or `prompt` and `completion`.

    Only the completion is trained, also when the prompt is a conversation with earlier answers.
    Raises UnusableRow.
    """
    messages, prompt, completion = (row.get(column) for column in COLUMNS)
    tools = row.get("tools")
    if messages is not None:
        return render_chat(tokenizer, messages, tools)
    if prompt is None or completion is None:
        missing = "prompt" if prompt is None else "completion"
        raise UnusableRow(
            "missing_column",
            f"a row needs `messages`, or `prompt` and `completion`: no {missing!r}"
            f"{nearest(missing, row)}",
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        return render_completion(tokenizer, prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        return render_chat(tokenizer, [*prompt, *completion], tools, train_from=len(prompt))
    raise UnusableRow(
        "wrong_type",
        "prompt and completion must both be text or both lists of messages, not "
        f"{type(prompt).__name__} and {type(completion).__name__}",
    )


def summary(drops: Drops) -> str:
    """Each reason with its count and an example."""
    parts = [
        f"{count} x {reason} (e.g. {drops.examples[reason][0]['detail']})"
        for reason, count in drops.by_reason.items()
    ]
    return "; ".join(parts) or "it has none"


def _rendered(
    tokenizer: Tokenizer, record: Record, where: str
) -> tuple[list[int], list[int]] | Dropped:
    try:
        return render_row(tokenizer, record.values)
    except UnusableRow as error:
        return Dropped(record.id, where, error.reason, str(error))
