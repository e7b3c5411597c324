"""The rules that FineWeb added (Penedo et al. 2024, 2406.17557, section 3.6), decided as
datatrove's FineWebQualityFilter decides them when words are what white space separates."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from stepwell.data.batches import Outcome
from stepwell.data.quality.lines import Lines, groups, split_lines
from stepwell.data.quality.verdicts import Rule, Verdict, drop, first_broken, share
from stepwell.data.quality.words import SENTENCE_END, char_flags
from stepwell.data.steps import DocumentStep
from stepwell.schema import Fraction, Positive


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
        return drop(batch, self.kind, fineweb_quality_verdicts(batch["text"], self))


def fineweb_quality(text: str, limits: FineWeb | None = None) -> Verdict:
    """The first rule that the text breaks, as (reason, detail)."""
    return fineweb_quality_verdicts(pa.array([text], pa.large_string()), limits)[0]


def fineweb_quality_verdicts(texts: pa.Array, limits: FineWeb | None = None) -> list[Verdict]:
    """texts: large_string without nulls."""
    limits = limits or FineWeb()
    verdicts: list[Verdict] = []
    for group in groups(texts):
        verdicts += group_verdicts(split_lines(group), limits)
    return verdicts


def group_verdicts(lines: Lines, limits: FineWeb) -> list[Verdict]:
    is_line_L, chars_L = ~lines.blank(), lines.num_chars()
    ends_L = char_flags(lines.last_chars()) & SENTENCE_END != 0
    num_lines = lines.per_text(is_line_L)
    short = share(lines.per_text(is_line_L & (chars_L <= limits.short_line_chars)), num_lines)
    punctuated = share(lines.per_text(is_line_L & ends_L), num_lines)
    # What takes longer is asked of those texts only that pass so far.
    passes = (
        (num_lines > 0) & (punctuated >= limits.min_punctuated_lines)
        & (short <= limits.max_short_lines)
    )  # fmt: skip
    repeats_L = lines.repeats(is_line_L & np.repeat(passes, np.diff(lines.first_D1)))
    duplicate = share(lines.per_text(chars_L * repeats_L), lines.per_text(chars_L))
    newlines = share(lines.num_newlines, lines.num_words())
    rules = [
        Rule("fineweb_unpunctuated_lines", punctuated, "<", limits.min_punctuated_lines),
        Rule("fineweb_short_lines", short, ">", limits.max_short_lines),
        Rule("fineweb_duplicate_lines", duplicate, ">", limits.max_duplicate_line_chars),
        Rule("fineweb_newlines", newlines, ">", limits.max_newlines_per_word),
    ]
    verdicts = first_broken(rules, len(passes))
    for i in np.flatnonzero(num_lines == 0).tolist():
        verdicts[i] = ("fineweb_empty", "")
    return verdicts
