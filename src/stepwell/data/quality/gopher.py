"""Gopher's quality rules (Rae et al. 2021, 2112.11446, appendix A.1.1), decided as datatrove's
GopherQualityFilter decides them when words are what white space separates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from stepwell.data.batches import Outcome, texts_of
from stepwell.data.quality.verdicts import Rule, Verdict, drop, first_broken, share
from stepwell.data.quality.words import Words, groups, split_words
from stepwell.data.steps import DocumentStep
from stepwell.schema import Fraction, NonNegative, Positive

ELLIPSES = ("...", "…")
# Where stop words are looked for first; most texts have enough of them here.
HEAD_CHARS = 500


class GopherQuality(DocumentStep):
    """Words of nothing but marks count neither in the number of words nor in their mean length.
    Blank lines are lines. bullets: what a line of a list begins with."""

    kind: Literal["gopher-quality"] = "gopher-quality"
    min_words: NonNegative = 50
    max_words: Positive = 100_000
    min_mean_word_length: Annotated[float, Field(strict=True, ge=0)] = 3.0
    max_mean_word_length: Annotated[float, Field(strict=True, gt=0)] = 10.0
    max_hashes_per_word: Annotated[float, Field(strict=True, ge=0)] = 0.1
    max_ellipses_per_word: Annotated[float, Field(strict=True, ge=0)] = 0.1
    max_bullet_lines: Fraction = 0.9
    max_ellipsis_lines: Fraction = 0.3
    min_words_with_letter: Fraction = 0.8
    min_stop_words: NonNegative = 2
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")
    bullets: tuple[str, ...] = ("•", "-")

    @model_validator(mode="after")
    def _rules(self) -> GopherQuality:
        for what in ("words", "mean_word_length"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if low > high:
                raise ValueError(
                    f"min_{what}={low} exceeds max_{what}={high}, so nothing could pass; set it to "
                    f"at most {high}"
                )
        if self.min_stop_words > len(set(self.stop_words)):
            raise ValueError(
                f"min_stop_words={self.min_stop_words} exceeds the number of stop_words, so "
                f"nothing could pass; set it to at most {len(set(self.stop_words))}"
            )
        return self

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        return drop(batch, self.kind, gopher_quality_verdicts(texts_of(batch), self))


def gopher_quality(text: str, limits: GopherQuality | None = None) -> Verdict:
    """The first rule that the text breaks, as (reason, detail); None for a good one."""
    return gopher_quality_verdicts([text], limits)[0]


def gopher_quality_verdicts(
    texts: Sequence[str], limits: GopherQuality | None = None
) -> list[Verdict]:
    limits = limits or GopherQuality()
    verdicts: list[Verdict] = []
    for group in groups(texts):
        verdicts += first_broken(gopher_rules(group, split_words(group), limits), len(group))
    return verdicts


def gopher_rules(texts: Sequence[str], words: Words, limits: GopherQuality) -> list[Rule]:
    """What the rules measure of each text, in the order in which they are asked."""
    all_words = words.num_words
    has_letter_W, only_marks_W = words.kinds()
    real_W = ~only_marks_W
    num_words = words.per_text(real_W)
    mean_length = share(words.per_text(words.lengths * real_W), num_words)
    hashes = np.array([text.count("#") for text in texts])
    ellipses = np.array([text.count("...") + text.count("…") for text in texts])
    # No more lines can begin with a mark than there are marks; that spares splitting most texts.
    marks = np.array([sum(map(text.count, limits.bullets)) for text in texts])
    begins = lambda line: line.lstrip().startswith(limits.bullets)
    ends = lambda line: line.rstrip().endswith(ELLIPSES)
    bullets = line_share(texts, marks, limits.max_bullet_lines, begins)
    cut_off = line_share(texts, ellipses, limits.max_ellipsis_lines, ends)
    with_letter = share(words.per_text(has_letter_W), all_words)
    wanted = frozenset(limits.stop_words)
    stop_words = np.array([num_stop_words(t, wanted, limits.min_stop_words) for t in texts])
    return [
        Rule("gopher_too_few_words", num_words, "<", limits.min_words),
        Rule("gopher_too_many_words", num_words, ">", limits.max_words),
        Rule("gopher_short_words", mean_length, "<", limits.min_mean_word_length),
        Rule("gopher_long_words", mean_length, ">", limits.max_mean_word_length),
        Rule("gopher_hashes", share(hashes, all_words), ">", limits.max_hashes_per_word),
        Rule("gopher_ellipses", share(ellipses, all_words), ">", limits.max_ellipses_per_word),
        Rule("gopher_bullet_lines", bullets, ">", limits.max_bullet_lines),
        Rule("gopher_ellipsis_lines", cut_off, ">", limits.max_ellipsis_lines),
        Rule("gopher_few_letters", with_letter, "<", limits.min_words_with_letter),
        Rule("gopher_stop_words", stop_words, "<", limits.min_stop_words),
    ]


def num_stop_words(text: str, stop_words: frozenset[str], enough: int) -> int:
    """How many different ones the text has, in this very spelling, or at least `enough`."""
    found = stop_words.intersection(text[:HEAD_CHARS].split()[:-1])
    return len(found if len(found) >= enough else stop_words.intersection(text.split()))


def line_share(
    texts: Sequence[str], at_most: np.ndarray, limit: float, is_such: Callable[[str], bool]
) -> np.ndarray:
    """The share of each text's lines that `is_such` holds for. at_most: a bound on their number;
    0 is given where that already keeps the share within the limit."""
    shares = np.zeros(len(texts))
    for i in np.flatnonzero(at_most).tolist():
        if at_most[i] > limit * texts[i].count("\n"):
            lines = texts[i].splitlines()
            shares[i] = sum(map(is_such, lines)) / len(lines)
    return shares
