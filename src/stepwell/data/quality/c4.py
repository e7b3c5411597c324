"""C4's rules (Raffel et al. 2019, 1910.10683, section 2.2), as the published pipeline
(TensorFlow Datasets' c4_utils) and datatrove's C4QualityFilter apply them: line by line, with the
rules about cookies and long words that the paper doesn't list.

Sentences end at Unicode's Sentence_Terminal characters, not after an initial ("J. Smith"); C4 used
NLTK's trained splitter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from stepwell.config import Flag, NonNegative, Positive
from stepwell.data.batches import EDITS, Outcome, texts_of, with_texts
from stepwell.data.quality.verdicts import Verdict, detail, drop
from stepwell.data.quality.words import CAPITAL, SENTENCE_END, char_flags
from stepwell.data.steps import DocumentStep
from stepwell.types import DataError

Cut = tuple[str, int, int]
JAVASCRIPT, LOREM = "javascript", "lorem ipsum"
PAGE_FAULTS = ("c4_lorem_ipsum", "c4_curly_bracket")
CLOSING_QUOTES = "\"'”"
# Of a line's characters as kinds: capital A, signs that may end a sentence . and !, quotes, others.
SENTENCE = re.compile(rb'(?:A\.|.)(?:[^.!A]++|A\.?)*[.!]+"?', re.DOTALL)
CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")


class C4(DocumentStep):
    """Lines that go: with a word of more than max_word_chars, without a sign of `line_ends` at the
    end (or with an ellipsis there), of fewer than min_line_words, or that name JavaScript or one of
    policy_phrases. Pages that go: with "lorem ipsum" or a curly bracket in a line that stays, with
    fewer than min_sentences left, or with a word of the file bad_words (one a line).

    citations: cut out [1], [edit] and [citation needed], as in Wikipedia.
    """

    kind: Literal["c4"] = "c4"
    min_sentences: NonNegative = 5
    min_line_words: NonNegative = 3
    max_word_chars: Positive = 1000
    line_ends: tuple[Annotated[str, Field(min_length=1)], ...] = (".", "?", "!", '"', "'")
    terminal_punctuation: Flag = True
    javascript: Flag = True
    policy_phrases: tuple[str, ...] = (
        "terms of use",
        "privacy policy",
        "cookie policy",
        "uses cookies",
        "use of cookies",
        "use cookies",
    )
    citations: Flag = True
    lorem_ipsum: Flag = True
    curly_brackets: Flag = True
    bad_words: str = ""

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        texts = texts_of(batch)
        pages = [clean_page(text, self) for text in texts]
        outcome = drop(batch, self.kind, [page.verdict for page in pages])
        kept = [i for i, page in enumerate(pages) if page.verdict is None]
        edits = [
            {
                "id": row_id, "source": source, "step": self.kind, "reason": reason,
                "start": start, "stop": stop, "replacement": "",
            }
            for row_id, source, i in zip(
                outcome.kept["id"].to_pylist(), outcome.kept["source"].to_pylist(), kept,
                strict=True,
            )
            for reason, start, stop in pages[i].cuts
        ]  # fmt: skip
        return Outcome(
            with_texts(outcome.kept, [pages[i].text for i in kept]),
            outcome.removed,
            pa.RecordBatch.from_pylist(edits, EDITS),
        )


@dataclass(frozen=True)
class Page:
    """cuts: (reason, start, stop) of what was taken out, in characters of the page as it was; lines
    of one reason that follow each other are one cut. White space around lines goes too, without
    being listed."""

    text: str
    verdict: Verdict
    cuts: tuple[Cut, ...]


def clean_page(text: str, limits: C4 | None = None) -> Page:
    """The lines that stay, joined by line breaks; with a verdict, the page goes as a whole.

    Raises DataError for a list of bad words that can't be read.
    """
    limits = limits or C4()
    with_citations = limits.citations and "[" in text
    present = needles_in(CITATION.sub("", text) if with_citations else text, limits)
    raws = text.splitlines(keepends=True)
    kept: list[str] = []
    faults: list[str] = []
    # Most lines of most pages end in none of these; a citation ends in a bracket.
    endings = {sign[-1] for sign in limits.line_ends} | {"]"}
    for raw in raws:
        whole = raw.strip()
        if (
            limits.terminal_punctuation
            and whole[-1:] not in endings
            and len(whole) <= limits.max_word_chars
        ):
            faults.append("c4_no_terminal_punctuation")
            continue
        line = CITATION.sub("", whole) if with_citations and "[" in whole else whole
        fault = line_fault(whole, line, present, limits)
        if fault in PAGE_FAULTS:
            return Page(text, (fault, ""), ())
        faults.append(fault)
        if not fault:
            kept.append(line)
    verdict = page_verdict(kept, limits)
    if verdict is not None:
        return Page(text, verdict, ())
    return Page("\n".join(kept).strip(), None, tuple(cuts_of(raws, faults, with_citations)))


def cuts_of(raws: Sequence[str], faults: Sequence[str], with_citations: bool) -> list[Cut]:
    """Lines with a fault, those of one fault that follow each other (blank ones between them) as
    one, and the citations of the other lines."""
    cuts: list[Cut] = []
    stop = 0
    for raw, fault in zip(raws, faults, strict=True):
        start, stop = stop, stop + len(raw)
        follows = bool(cuts) and cuts[-1][2] == start
        blank = bool(fault) and raw.isspace()
        if fault and follows and (blank or cuts[-1][0] == fault):
            cuts[-1] = (cuts[-1][0], cuts[-1][1], stop)
        elif fault and not blank:
            cuts.append((fault, start, stop))
        elif not fault and with_citations:
            found = CITATION.finditer(raw)
            cuts += [("c4_citation", start + m.start(), start + m.end()) for m in found]
    return cuts


def needles_in(text: str, limits: C4) -> frozenset[str]:
    """The forbidden phrases that occur somewhere, so that most lines needn't be searched."""
    lowered = text.lower()
    needles = [*limits.policy_phrases]
    needles += [JAVASCRIPT] * limits.javascript + [LOREM] * limits.lorem_ipsum
    needles += ["{"] * limits.curly_brackets
    return frozenset(needle for needle in needles if needle in lowered)


def line_fault(whole: str, line: str, present: frozenset[str], limits: C4) -> str:
    """The first rule that the line breaks, or an empty string. line: `whole` without citations,
    which count as words all the same."""
    long = limits.max_word_chars
    if len(whole) > long and max(map(len, whole.split()), default=0) > long:
        return "c4_long_word"
    unfinished = not line.endswith(limits.line_ends) or line.endswith("...")
    if unfinished and limits.terminal_punctuation:
        return "c4_no_terminal_punctuation"
    if len(whole.split(None, limits.min_line_words)) < limits.min_line_words:
        return "c4_few_words"
    if not present:
        return ""
    lowered = line.lower()
    if LOREM in present and LOREM in lowered:
        return "c4_lorem_ipsum"
    if JAVASCRIPT in present and JAVASCRIPT in lowered:
        return "c4_javascript"
    if "{" in present and "{" in line:
        return "c4_curly_bracket"
    if any(phrase in present and phrase in lowered for phrase in limits.policy_phrases):
        return "c4_policy"
    return ""


def page_verdict(kept: Sequence[str], limits: C4) -> Verdict:
    # Every line that stays is a sentence at least; most pages need no more counting.
    sentences = len(kept)
    if sentences < limits.min_sentences:
        sentences = sum(map(num_sentences, kept))
    if sentences < limits.min_sentences:
        return ("c4_few_sentences", detail(sentences, "<", limits.min_sentences))
    if limits.bad_words:
        found = bad_words_pattern(limits.bad_words).search("\n".join(kept).lower())
        if found is not None:
            return ("c4_bad_word", f"a word of {limits.bad_words}")
    return None


def num_sentences(line: str) -> int:
    """At least 1. A sentence begins with any character, ends at the first sign that may end one
    (not after a capital with a full stop, unless there is no other), and takes further signs and a
    closing quotation mark along."""
    chars = np.frombuffer(line.encode("utf-32-le"), np.uint32)
    flags = char_flags(chars)
    kinds = np.full(len(chars), ord("x"), np.uint8)
    kinds[flags & CAPITAL != 0] = ord("A")
    kinds[flags & SENTENCE_END != 0] = ord("!")
    kinds[chars == ord(".")] = ord(".")
    for quote in CLOSING_QUOTES:
        kinds[chars == ord(quote)] = ord('"')
    text, number, found = kinds.tobytes(), 0, SENTENCE.match(kinds.tobytes())
    while found is not None:
        number += 1
        found = SENTENCE.match(text, found.end())
    return max(number, 1)


@lru_cache(maxsize=8)
def bad_words_pattern(path: str) -> re.Pattern[str]:
    try:
        words = [line.strip().lower() for line in Path(path).read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"bad_words={path!r} must be a UTF-8 file with a word a line: {error}"
        ) from error
    words = [re.escape(word) for word in words if word]
    if not words:
        raise DataError(f"bad_words={path!r} holds no word; leave it out to drop none")
    return re.compile(rf"(?:\W|^)(?:{'|'.join(words)})(?:\W|$)")
