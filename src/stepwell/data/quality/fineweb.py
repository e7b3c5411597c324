"""The rules that FineWeb added (Penedo et al. 2024, 2406.17557, section 3.6), decided as
datatrove's FineWebQualityFilter decides them when words are what white space separates."""

from __future__ import annotations

from typing import Annotated, Literal

import pyarrow as pa
from pydantic import Field

from stepwell.config import Fraction, Positive
from stepwell.data.batches import Outcome, texts_of
from stepwell.data.quality.repetition import duplicates
from stepwell.data.quality.verdicts import Verdict, detail, drop
from stepwell.data.quality.words import SENTENCE_ENDS
from stepwell.data.steps import DocumentStep


class FineWeb(DocumentStep):
    """Blank lines don't count. short_line_chars: how long a short line may be. All limits are
    inclusive."""

    kind: Literal["fineweb"] = "fineweb"
    min_punctuated_lines: Fraction = 0.12
    max_short_lines: Fraction = 0.67
    short_line_chars: Positive = 30
    max_duplicate_line_chars: Fraction = 0.01
    max_newlines_per_word: Annotated[float, Field(strict=True, ge=0)] = 0.3

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        return drop(batch, self.kind, [fineweb_quality(text, self) for text in texts_of(batch)])


def fineweb_quality(text: str, limits: FineWeb | None = None) -> Verdict:
    """The first rule that the text breaks, as (reason, detail)."""
    limits = limits or FineWeb()
    lines = [line for line in text.split("\n") if line and not line.isspace()]
    if not lines:
        return ("fineweb_empty", "")
    punctuated = sum([line[-1] in SENTENCE_ENDS for line in lines]) / len(lines)
    if punctuated < limits.min_punctuated_lines:
        return (
            "fineweb_unpunctuated_lines",
            detail(punctuated, "<", limits.min_punctuated_lines),
        )
    short = sum([len(line) <= limits.short_line_chars for line in lines]) / len(lines)
    if short > limits.max_short_lines:
        return ("fineweb_short_lines", detail(short, ">", limits.max_short_lines))
    newlines = text.count("\n")
    duplicate = duplicates(lines)[1] / (len(text) - newlines)
    if duplicate > limits.max_duplicate_line_chars:
        return ("fineweb_duplicate_lines", detail(duplicate, ">", limits.max_duplicate_line_chars))
    ratio = newlines / num_words(text, newlines, limits.max_newlines_per_word)
    if ratio > limits.max_newlines_per_word:
        return ("fineweb_newlines", detail(ratio, ">", limits.max_newlines_per_word))
    return None


def num_words(text: str, newlines: int, limit: float) -> int:
    """How many words there are, or at least more than keep newlines per word within the limit."""
    enough = int(newlines / limit) + 1 if limit else -1
    return len(text.split(None, enough))
