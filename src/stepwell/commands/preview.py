"""`stepwell sft RECIPE --preview [N]`: what of each row is trained, before anything is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from stepwell.commands.inputs import counted
from stepwell.config import Run
from stepwell.types import ConfigError, DataError, Dropped

if TYPE_CHECKING:
    from stepwell.data.sft_data import Drops
    from stepwell.tokenizer import Tokenizer

OPTION = "--preview"
HELP = "  --preview [N]  show N rows (3) with what of them is trained, without training"
NUM_SHOWN = 3
NUM_LOOKED_AT = 1000
# Where there is no colour, what is trained stands between these.
BEGIN, END = "⟦", "⟧"


@dataclass(frozen=True)
class Shown:
    """A row as it would be trained on, its text in runs (text, is trained)."""

    id: str
    num_tokens: int
    num_trained: int
    cut: bool
    parts: list[tuple[str, bool]]


@dataclass
class Preview:
    """What the first rows of a file come to. tokens, trained_tokens: of those that are kept, within
    data.seq_len; too_long: kept rows that are cut before their first trained token."""

    path: str
    drops: Drops
    rows: int = 0
    kept: int = 0
    too_long: int = 0
    truncated: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    more: bool = False
    shown: list[Shown] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.trained_tokens / self.tokens if self.tokens else 0.0


def take_option(argv: Sequence[str]) -> tuple[list[str], int | None]:
    """The words without --preview [N], and N (None: it is not among them). Raises ConfigError."""
    words, number = [], None
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        if name != OPTION:
            words.append(word)
            continue
        if number is not None:
            raise ConfigError(f"{OPTION} is given twice; give it once")
        if not has_value and rest and rest[0].lstrip("-").isdigit():
            value, has_value = rest.pop(0), "="
        number = _count(value) if has_value else NUM_SHOWN
    return words, number


def _count(value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"{OPTION} {value!r} must be a whole number of rows, at least 1")
    return int(value)


def show(run: Run, number: int, as_json: bool) -> int:
    """Prints the first `number` usable rows of data.path with their masks. Needs no model.

    Raises ConfigError without data or a tokenizer, DataError if no row can be trained on.
    """
    found = look(run, number)
    if as_json:
        print(json.dumps(as_values(found), ensure_ascii=False))
    else:
        print_preview(found, Console(highlight=False, soft_wrap=True))
    require_usable(found, run.data.seq_len)
    return 0


def require_usable(found: Preview, seq_len: int) -> None:
    """Raises DataError if nothing of the rows that were looked at would be trained."""
    from stepwell.data.sft_data import summary

    if found.kept > found.too_long:
        return
    which = f"the first {found.rows:,} rows" if found.more else "the rows"
    if not found.too_long:
        raise DataError(
            f"none of {which} of {found.path} can be trained on: {summary(found.drops)}"
        )
    raise DataError(
        f"all {counted(found.too_long, 'usable row')} among {which} of {found.path} are cut before "
        f"their first trained token: raise data.seq_len={seq_len}"
    )


def warnings_of(found: Preview) -> list[str]:
    """What of these rows will not be trained on."""
    if not found.drops.total:
        return []
    reasons = ", ".join(f"{count:,} x {name}" for name, count in found.drops.by_reason.items())
    first = f"the first {found.rows:,}" if found.more else f"{found.rows:,}"
    return [
        f"{found.path}: {found.drops.total:,} of {first} rows cannot be used ({reasons}); "
        "`stepwell sft RECIPE --preview` shows why"
    ]


def look(run: Run, number: int) -> Preview:
    """Renders the first NUM_LOOKED_AT rows (or `number`, or method.max_rows)."""
    from stepwell.data.chat_formats import chat_rules
    from stepwell.data.sft_data import Drops, rendered_row
    from stepwell.data.sources.rows import records
    from stepwell.sections.methods import SFT

    method, path = run.method, run.data.path
    assert isinstance(method, SFT)
    if path is None:
        raise ConfigError("data.path is not set; name a JSONL or Parquet file of chat rows")
    tokenizer, rules = _tokenizer(run), chat_rules(method)
    most = min(max(number, NUM_LOOKED_AT), method.max_rows or max(number, NUM_LOOKED_AT))
    found = Preview(path, Drops())
    for record in islice(records(path), most + 1):
        if found.rows == most:
            found.more = method.max_rows is None or most < method.max_rows
            break
        found.rows += 1
        rendered = rendered_row(tokenizer, record, path, rules)
        if isinstance(rendered, Dropped):
            found.drops.add(rendered)
            continue
        _add(found, tokenizer, record.id, *rendered, seq_len=run.data.seq_len, number=number)
    return found


def _tokenizer(run: Run) -> Tokenizer:
    from stepwell.tokenizer import Tokenizer

    if run.data.tokenizer is None:
        raise ConfigError("data.tokenizer is not set; name a tokenizer.json or its folder")
    return Tokenizer.load(run.data.tokenizer)


def _add(
    found: Preview,
    tokenizer: Tokenizer,
    item: str,
    ids: list[int],
    mask: list[int],
    seq_len: int,
    number: int,
) -> None:
    from stepwell.data.chat import parts

    mask = [0, *mask[1:]]  # nothing predicts the first token
    kept = mask[:seq_len]
    found.kept += 1
    found.truncated += len(ids) > seq_len
    if any(kept):
        found.tokens += len(kept)
        found.trained_tokens += sum(kept)
    else:
        found.too_long += 1
    if len(found.shown) < number:
        cut = len(ids) > seq_len
        runs = parts(tokenizer, ids[:seq_len], kept)
        found.shown.append(Shown(item, len(ids), sum(mask), cut, runs))


def as_values(found: Preview) -> dict[str, Any]:
    """What --json prints."""
    drops = found.drops
    return {
        "path": found.path,
        "rows": found.rows,
        "more_rows": found.more,
        "kept": found.kept,
        "truncated": found.truncated,
        "too_long": found.too_long,
        "dropped": drops.by_reason,
        "examples": {reason: list(items) for reason, items in drops.examples.items()},
        "tokens": found.tokens,
        "trained_tokens": found.trained_tokens,
        "trained_share": found.share,
        "shown": [
            {
                "id": row.id,
                "tokens": row.num_tokens,
                "trained_tokens": row.num_trained,
                "truncated": row.cut,
                "parts": [{"text": text, "trained": trained} for text, trained in row.parts],
            }
            for row in found.shown
        ],
    }


def print_preview(found: Preview, console: Console) -> None:
    in_colour = console.is_terminal and not console.no_color
    for row in found.shown:
        share = f"{row.num_trained} trained ({row.num_trained / row.num_tokens:.0%})"
        cut = ", cut at data.seq_len" if row.cut else ""
        console.print(Text(f"{row.id}: {counted(row.num_tokens, 'token')}, {share}{cut}"))
        console.print(_text(row.parts, in_colour))
        console.print()
    for line in _summary(found, in_colour):
        console.print(Text(line))


def _text(runs: list[tuple[str, bool]], in_colour: bool) -> Text:
    text = Text()
    for part, is_trained in runs:
        part = _visible(part)
        if in_colour:
            text.append(part, style="bold green" if is_trained else "dim")
        else:
            text.append(f"{BEGIN}{part}{END}" if is_trained else part)
    return text


def _visible(text: str) -> str:
    """Control characters of the data as pictures, so that they don't steer the terminal."""
    return "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else "\u2421" if c == "\x7f" else c
        for c in text
    )


def _summary(found: Preview, in_colour: bool) -> Iterator[str]:
    from stepwell.data.sft_data import example_text

    first = f"the first {counted(found.rows, 'row')}" if found.more else counted(found.rows, "row")
    how = "green" if in_colour else f"between {BEGIN} and {END}"
    yield f"{found.path}: {first}, {found.kept:,} usable; what is trained stands {how}"
    if found.tokens:
        yield (
            f"  {counted(found.tokens, 'token')}, {found.trained_tokens:,} trained "
            f"({found.share:.1%}); {found.truncated:,} rows are cut at data.seq_len"
        )
    if found.too_long:
        yield f"  {counted(found.too_long, 'row')} cut before the first trained token (too_long)"
    for reason, count in found.drops.by_reason.items():
        example = _visible(example_text(found.drops.examples[reason][0]))
        yield f"  dropped: {count:,} x {reason}, e.g. {example}"
