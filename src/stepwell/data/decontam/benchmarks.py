"""Benchmarks as items with a question, choices, answers and a passage, out of files of rows with
the columns that published sets use."""

from __future__ import annotations

import base64
import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stepwell.data.files import file_sha256
from stepwell.data.sources.rows import Record, records
from stepwell.types import DataError, Dropped

ID_COLUMNS = ("id", "task_id", "question_id", "qid", "uid", "idx")
QUESTION_COLUMNS = (
    "question", "prompt", "problem", "query", "instruction", "goal", "ctx", "input", "messages",
    "context", "sentence", "text",
)  # fmt: skip
PASSAGE_COLUMNS = ("passage", "context", "article", "support", "story", "paragraph", "document")
CHOICE_COLUMNS = ("choices", "options", "endings")
ANSWER_COLUMNS = (
    "answer", "answers", "answerKey", "canonical_solution", "solution", "correct_answer", "target",
    "completion", "label",
)  # fmt: skip
LETTERED = re.compile(r"(?:^|\n)\s*\(?([A-Z])[.):]\s+")


@dataclass(frozen=True)
class Item:
    """answers: every text that counts as the right answer, as far as it is known."""

    id: str
    question: str
    choices: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    passage: str = ""


@dataclass(frozen=True)
class Benchmark:
    """sha256: of the file. own_ids: ids are the rows' own, not the numbers of their lines."""

    name: str
    sha256: str
    own_ids: bool
    items: tuple[Item, ...]
    dropped: tuple[Dropped, ...] = ()


def load_benchmark(path: str | Path, name: str | None = None) -> Benchmark:
    """A `.jsonl`, `.jsonl.gz` or `.parquet` file of rows; its name is the file's, without endings,
    unless given.

    Raises DataError for a file that can't be read or has no row with a question, and for a name
    with a slash.
    """
    rows = list(records(path))
    name = name or Path(path).name.split(".")[0]
    return make_benchmark(name, file_sha256(path), rows)


def make_benchmark(name: str, sha256: str, rows: Sequence[Record | Dropped]) -> Benchmark:
    """Rows without a question are dropped (`no_question`); raises DataError if none has one."""
    if not name or "/" in name:
        raise DataError(f"a benchmark's name {name!r} must be without a slash and not empty")
    whole = [row for row in rows if isinstance(row, Record)]
    dropped = [row for row in rows if isinstance(row, Dropped)]
    ids, own = item_ids(whole)
    items = []
    for item_id, row in zip(ids, whole, strict=True):
        item = make_item(item_id, row.values)
        if item is None:
            columns = ", ".join(row.values) or "nothing"
            dropped.append(Dropped(row.id, name, "no_question", f"the row has {columns}"))
        else:
            items.append(item)
    if not items:
        why = dropped[0].detail if dropped else "it has no rows"
        raise DataError(
            f"benchmark {name} has no item with a question (columns: "
            f"{', '.join(QUESTION_COLUMNS)}); the first problem: {why}"
        )
    return Benchmark(name, sha256, own, tuple(items), tuple(dropped))


def item_ids(rows: Sequence[Record]) -> tuple[list[str], bool]:
    """(ids, whether they are the rows' own): those of the first of ID_COLUMNS that every row has
    and no two rows share, else the numbers of the lines, from 1. A function of the file alone, so
    an evaluation gives its items the same ids as an index."""
    for column in ID_COLUMNS:
        ids = [str(row.values[column]) for row in rows if row.values.get(column) is not None]
        if ids and len(ids) == len(rows) == len(set(ids)):
            return ids, True
    return [row.id.rpartition(":")[2] for row in rows], False


KEY_CHARACTERS = 8


class Keys(NamedTuple):
    """What an item is known by, whatever its file and its id: 48 bits in base64 of its question
    (behind its passage) with its choices, and of that without. Case and white space don't count,
    punctuation does: 3 + 4 is another question than 3 - 4."""

    whole: str
    question: str


def keys_of(item: Item) -> Keys:
    question = [item.passage, item.question]
    return Keys(_key([*question, *item.choices]), _key(question))


def _key(texts: Iterable[str]) -> str:
    plain = [" ".join(unicodedata.normalize("NFKC", text).casefold().split()) for text in texts]
    content = "\0".join(plain).encode("utf-8", "surrogatepass")
    return base64.b64encode(hashlib.sha256(content).digest())[:KEY_CHARACTERS].decode()


def make_item(item_id: str, row: Mapping[str, Any]) -> Item | None:
    """None for a row without a question."""
    name = next((c for c in QUESTION_COLUMNS if _text(row.get(c)).strip()), None)
    if name is None:
        return None
    choices = _choices(row)
    passages = (_text(row.get(c)) for c in PASSAGE_COLUMNS if c != name)
    return Item(
        item_id,
        _text(row[name]),
        choices,
        _answers(row, choices, _labels(row)),
        next((p for p in passages if p.strip()), ""),
    )


def _text(value: Any) -> str:
    """A text, or the last message of a user."""
    if isinstance(value, list):
        turns = [m for m in value if isinstance(m, Mapping) and m.get("role") == "user"]
        value = turns[-1].get("content") if turns else None
    return value if isinstance(value, str) else ""


def _choices(row: Mapping[str, Any]) -> tuple[str, ...]:
    for name in CHOICE_COLUMNS:
        value = row.get(name)
        if isinstance(value, Mapping):
            value = value.get("text", list(value.values()))
        if isinstance(value, str):
            value = split_lettered(value)
        if isinstance(value, Sequence):
            texts = [str(c.get("text", "")) if isinstance(c, Mapping) else str(c) for c in value]
            if texts:
                return tuple(texts)
    pair = [row.get("sol1"), row.get("sol2")]
    return tuple(c for c in pair if isinstance(c, str))


def _labels(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What the row itself calls its choices, in their order; nothing where it doesn't say."""
    value = next((row[name] for name in CHOICE_COLUMNS if row.get(name)), None)
    if isinstance(value, Mapping):
        labels = value.get("label", ()) if "text" in value else value
        return tuple(map(str, labels))
    if isinstance(value, list) and all(isinstance(c, Mapping) and "label" in c for c in value):
        return tuple(str(choice["label"]) for choice in value)
    return ()


def split_lettered(text: str) -> list[str]:
    """The choices of "A. one\\nB. two"; the whole text where there are no letters."""
    marks = list(LETTERED.finditer(text))
    if not marks:
        return [text]
    ends = [m.start() for m in marks[1:]] + [len(text)]
    return [text[m.end() : end].strip() for m, end in zip(marks, ends, strict=True)]


def _answers(
    row: Mapping[str, Any], choices: Sequence[str], labels: Sequence[str]
) -> tuple[str, ...]:
    for name in ANSWER_COLUMNS:
        values = list(_values(row.get(name)))
        if name == "label" and choices and not labels:
            # HellaSwag's are the numbers of its endings, as texts.
            values = [int(v) if isinstance(v, str) and v.isdecimal() else v for v in values]
        found = [text for value in values if (text := _answer(value, choices, labels))]
        if found:
            return tuple(dict.fromkeys(found))
    return ()


def _values(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        value = value.get("text", [])
    return value if isinstance(value, list) else [value]


def _answer(value: Any, choices: Sequence[str], labels: Sequence[str]) -> str:
    """The text of an answer that is given as a text, a number, or a choice's label, letter or
    index."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and choices:
        return choices[value] if 0 <= value < len(choices) else ""
    if value is None or not str(value).strip():
        return ""
    text = str(value).strip()
    if text in labels and labels.index(text) < len(choices):
        return choices[labels.index(text)]
    letter = ord(text) - ord("A") if len(text) == 1 else -1
    if 0 <= letter < len(choices):
        return choices[letter]
    marked = LETTERED.match(text)
    return text[marked.end() :].strip() if marked and choices else text
