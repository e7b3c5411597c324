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
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import Field

from stepwell.data.batches import EDITS, Outcome, with_texts
from stepwell.data.files import stamp
from stepwell.data.quality.lines import (
    ASCII_SPACE,
    MAY_END_SPACE,
    Lines,
    byte_table,
    groups,
    split_lines,
)
from stepwell.data.quality.verdicts import Verdict, detail, drop
from stepwell.data.quality.words import CAPITAL, SENTENCE_END, SENTENCE_ENDS, char_flags
from stepwell.data.steps import DocumentStep
from stepwell.schema import Flag, NonNegative, Positive
from stepwell.types import DataError

Cut = tuple[str, int, int]
JAVASCRIPT, LOREM = "javascript", "lorem ipsum"
PAGE_FAULTS = ("c4_lorem_ipsum", "c4_curly_bracket")
LINE_FAULTS = (
    "", "c4_no_terminal_punctuation", "c4_few_words", "c4_long_word", "c4_javascript", "c4_policy",
)  # fmt: skip
CLOSING_QUOTES = "\"'”"
# Of a line's characters as kinds: capital A, signs that may end a sentence . and !, quotes, others.
SENTENCE = re.compile(rb'(?:A\.|.)(?:[^.!A]++|A\.?)*[.!]+"?', re.DOTALL)
ASCII_KINDS = bytes(
    ord(
        "." if c == "."
        else "A" if c.isupper()
        else "!" if c in SENTENCE_ENDS
        else '"' if c in CLOSING_QUOTES
        else "x"
    )
    for c in map(chr, range(256))
)  # fmt: skip
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

    def check(self) -> None:
        if self.bad_words:
            bad_words_pattern(self.bad_words)

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        pages = clean_pages(batch["text"], self)
        outcome = drop(batch, self.kind, [page.verdict for page in pages])
        kept = [page for page in pages if page.verdict is None]
        cuts = [cut for page in kept for cut in page.cuts]
        rows = np.repeat(np.arange(len(kept)), [len(page.cuts) for page in kept])
        num = len(cuts)
        columns = [
            outcome.kept["id"].take(pa.array(rows)),
            outcome.kept["source"].take(pa.array(rows)),
            pa.array([self.kind] * num, pa.string()),
            pa.array([reason for reason, _, _ in cuts], pa.string()),
            pa.array([start for _, start, _ in cuts], pa.int64()),
            pa.array([stop for _, _, stop in cuts], pa.int64()),
            pa.array([""] * num, pa.string()),
        ]
        return Outcome(
            with_texts(outcome.kept, [page.text for page in kept]),
            outcome.removed,
            pa.RecordBatch.from_arrays(columns, schema=EDITS),
        )


@dataclass(frozen=True)
class Page:
    """text: empty for a page that goes. cuts: (reason, start, stop) of what was taken out, in
    characters of the page as it was; lines of one reason that follow each other are one cut. White
    space around lines goes too, without being listed."""

    text: str
    verdict: Verdict
    cuts: tuple[Cut, ...]


def clean_page(text: str, limits: C4 | None = None) -> Page:
    """The lines that stay, joined by line breaks; with a verdict, the page goes as a whole.

    Raises DataError for a list of bad words that can't be read.
    """
    return clean_pages(pa.array([text], pa.large_string()), limits)[0]


def clean_pages(texts: pa.Array, limits: C4 | None = None) -> list[Page]:
    """texts: large_string without nulls. Most lines of most pages end in no sign that ends a
    sentence, which their last bytes show; only the others are looked at one by one."""
    limits = limits or C4()
    pages: list[Page] = []
    for group in groups(texts):
        lines = split_lines(group, universal=True)
        chosen = np.flatnonzero(may_stay(lines, limits))
        places = zip(
            lines.start_L[chosen].tolist(), lines.next_starts[chosen].tolist(), strict=True
        )
        raws = [lines.text(start, stop) for start, stop in places]
        bounds = np.searchsorted(chosen, lines.first_D1).tolist()
        judged = [judge(raws[first:last], limits) for first, last in pairwise(bounds)]
        cuts = cuts_of(lines, chosen, judged)
        pages += [Page(j.text, j.verdict, cuts[i]) for i, j in enumerate(judged)]
    return pages


def may_stay(lines: Lines, limits: C4) -> np.ndarray:
    """False for lines that lack their terminal punctuation for sure, and for those without a
    character."""
    if not limits.terminal_punctuation:
        return lines.next_starts > lines.start_L
    # A citation ends in a bracket. White space that isn't passed over here may hide an end.
    endings = byte_table([*(sign.encode()[-1] for sign in limits.line_ends), ord("]")])
    stop_L = lines.stop_L
    for _ in range(3):
        stop_L = stop_L - (ASCII_SPACE[lines.bytes_B[stop_L - 1]] & (stop_L > lines.start_L))
    may_end = (endings | MAY_END_SPACE)[lines.bytes_B[stop_L - 1]] & (stop_L > lines.start_L)
    return may_end | (lines.lengths > limits.max_word_chars)


class Judged(NamedTuple):
    """text: what stays of the page. faults: of each line that was looked at. citations: (number of
    the line, start, stop) of those in lines that stay."""

    text: str
    verdict: Verdict
    faults: Sequence[str] = ()
    citations: Sequence[tuple[int, int, int]] = ()


def judge(raws: Sequence[str], limits: C4) -> Judged:
    """raws: a page's lines that may stay, with their line breaks."""
    page = "".join(raws)
    with_citations = limits.citations and "[" in page
    present = needles_in(CITATION.sub("", page) if with_citations else page, limits)
    kept: list[str] = []
    faults: list[str] = []
    citations: list[tuple[int, int, int]] = []
    for raw in raws:
        line = whole = raw.strip()
        if with_citations and "[" in whole:
            line = CITATION.sub("", whole)
        fault = line_fault(whole, line, present, limits)
        if fault in PAGE_FAULTS:
            return Judged("", (fault, ""))
        if not fault:
            kept.append(line)
            if line is not whole:
                found = CITATION.finditer(raw)
                citations += [(len(faults), match.start(), match.end()) for match in found]
        faults.append(fault)
    verdict = page_verdict(kept, limits)
    if verdict is not None:
        return Judged("", verdict)
    return Judged("\n".join(kept).strip(), None, faults, citations)


def cuts_of(lines: Lines, chosen: np.ndarray, judged: Sequence[Judged]) -> list[tuple[Cut, ...]]:
    """Of each page: lines with a fault, those of one fault that follow each other as one, and the
    citations of the other lines. Blank lines go with what is cut before them, if anything is.

    chosen: the lines that were looked at; the others lack their terminal punctuation.
    """
    text_L = lines.text_numbers
    fault_L = np.full(len(text_L), LINE_FAULTS.index("c4_no_terminal_punctuation"))
    stays_D = np.array([page.verdict is None for page in judged])
    fault_L[chosen[stays_D[text_L[chosen]]]] = [
        LINE_FAULTS.index(fault) for page in judged for fault in page.faults
    ]
    is_first = np.zeros(len(text_L), bool)
    is_first[lines.first_D1[:-1]] = True
    blank_L = lines.blank() & (fault_L > 0)
    fault_L[blank_L & is_first] = 0
    fault_L = fault_L[np.maximum.accumulate(np.arange(len(text_L)) * (~blank_L | is_first))]
    fault_L[~stays_D[text_L]] = 0
    begins = np.flatnonzero(is_first | (np.diff(fault_L, prepend=0) != 0))
    runs = np.flatnonzero(fault_L[begins])
    ends = np.append(begins[1:], len(text_L)) - 1
    texts, reasons = text_L[begins[runs]], fault_L[begins[runs]]
    before_D = lines.chars_before(lines.start_D)
    starts = lines.chars_before(lines.start_L[begins[runs]]) - before_D[texts]
    stops = lines.chars_before(lines.next_starts[ends[runs]]) - before_D[texts]
    cuts: list[list[Cut]] = [[] for _ in judged]
    for text, reason, start, stop in zip(
        texts.tolist(), reasons.tolist(), starts.tolist(), stops.tolist(), strict=True
    ):
        cuts[text].append((LINE_FAULTS[reason], start, stop))
    add_citations(cuts, lines, chosen, judged)
    return [tuple(found) for found in cuts]


def add_citations(
    cuts: list[list[Cut]], lines: Lines, chosen: np.ndarray, judged: Sequence[Judged]
) -> None:
    first_D = np.searchsorted(chosen, lines.first_D1)
    for i, page in enumerate(judged):
        if page.citations:
            numbers = [first_D[i] + number for number, _, _ in page.citations]
            places = np.append(lines.start_D[i], lines.start_L[chosen[numbers]])
            base, *begins = lines.chars_before(places).tolist()
            cuts[i] += [
                ("c4_citation", begin - base + start, begin - base + stop)
                for begin, (_, start, stop) in zip(begins, page.citations, strict=True)
            ]
            cuts[i].sort(key=lambda cut: cut[1])


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
    kinds = line.encode().translate(ASCII_KINDS) if line.isascii() else kinds_of(line)
    # Up to the last sign that may end one every search succeeds, so all take linear time.
    return max(len(SENTENCE.findall(kinds.rstrip(b'xA"'))), 1)


def kinds_of(line: str) -> bytes:
    chars = np.frombuffer(line.encode("utf-32-le"), np.uint32)
    flags = char_flags(chars)
    kinds = np.full(len(chars), ord("x"), np.uint8)
    kinds[flags & CAPITAL != 0] = ord("A")
    kinds[flags & SENTENCE_END != 0] = ord("!")
    kinds[chars == ord(".")] = ord(".")
    for quote in CLOSING_QUOTES:
        kinds[chars == ord(quote)] = ord('"')
    return kinds.tobytes()


def bad_words_pattern(path: str) -> re.Pattern[str]:
    """Raises DataError for a list that can't be read or is empty."""
    return _bad_words_pattern(path, stamp(path))


@lru_cache(maxsize=8)
def _bad_words_pattern(path: str, _stamp: object) -> re.Pattern[str]:
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
