"""Gopher's repetition rules (Rae et al. 2021, 2112.11446, table A1), decided as datatrove's
GopherRepetitionFilter decides them when words are what white space separates.

Shares are of characters, white space included. An n-gram is a sequence of words; a duplicate one
is found reading on: after one that has occurred before, its words are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from stepwell.data.batches import Outcome, texts_of
from stepwell.data.quality.verdicts import Rule, Verdict, detail, drop, first_broken, share
from stepwell.data.quality.words import Words, groups, split_words
from stepwell.data.steps import DocumentStep
from stepwell.schema import Fraction

TOP = (2, 3, 4)
DUPLICATE = (5, 6, 7, 8, 9, 10)
# Odd, so that multiplying by it loses nothing modulo 2^64 (Knuth's golden ratio).
BASE = np.uint64(0x9E3779B97F4A7C15)


class GopherRepetition(DocumentStep):
    """max_duplicate_lines, max_duplicate_paragraphs: of their number; the others of characters.
    max_top_Ngram_chars: those of the most frequent N-gram, also where it occurs only once."""

    kind: Literal["gopher-repetition"] = "gopher-repetition"
    max_duplicate_paragraphs: Fraction = 0.30
    max_duplicate_paragraph_chars: Fraction = 0.20
    max_duplicate_lines: Fraction = 0.30
    max_duplicate_line_chars: Fraction = 0.20
    max_top_2gram_chars: Fraction = 0.20
    max_top_3gram_chars: Fraction = 0.18
    max_top_4gram_chars: Fraction = 0.16
    max_duplicate_5gram_chars: Fraction = 0.15
    max_duplicate_6gram_chars: Fraction = 0.14
    max_duplicate_7gram_chars: Fraction = 0.13
    max_duplicate_8gram_chars: Fraction = 0.12
    max_duplicate_9gram_chars: Fraction = 0.11
    max_duplicate_10gram_chars: Fraction = 0.10

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        return drop(batch, self.kind, gopher_repetition_verdicts(texts_of(batch), self))


def gopher_repetition(text: str, limits: GopherRepetition | None = None) -> Verdict:
    """The first rule that the text breaks, as (reason, detail)."""
    return gopher_repetition_verdicts([text], limits)[0]


def gopher_repetition_verdicts(
    texts: Sequence[str], limits: GopherRepetition | None = None
) -> list[Verdict]:
    limits = limits or GopherRepetition()
    verdicts: list[Verdict] = []
    for group in groups(texts):
        found = first_broken(line_rules(group, limits), len(group))
        rest = [i for i, verdict in enumerate(found) if verdict is None]
        words = split_words([group[i] for i in rest])
        for i, verdict in zip(rest, ngram_verdicts(words, limits), strict=True):
            found[i] = verdict
        verdicts += found
    return verdicts


# --- lines and paragraphs ------------------------------------------------------------------------


def duplicates(pieces: Sequence[str]) -> tuple[int, int]:
    """How many pieces repeat an earlier one, and their characters."""
    different = set(pieces)
    if len(different) == len(pieces):
        return 0, 0
    return len(pieces) - len(different), sum(map(len, pieces)) - sum(map(len, different))


def lines_of(text: str) -> list[str]:
    """What line breaks separate, any number of them; an empty line where the text begins or ends
    with one."""
    ends = text.startswith("\n") + text.endswith("\n")
    return [line for line in text.split("\n") if line] + [""] * ends


def paragraphs_of(text: str) -> list[str]:
    """What two or more line breaks separate."""
    pieces = [piece.lstrip("\n") for piece in text.strip().split("\n\n")]
    return [piece for piece in pieces if piece]


def line_rules(texts: Sequence[str], limits: GopherRepetition) -> list[Rule]:
    rows = []
    for text in texts:
        paragraphs = paragraphs_of(text)
        lines = lines_of(text)
        rows.append((len(text), len(paragraphs), *duplicates(paragraphs), len(lines),
                     *duplicates(lines)))  # fmt: skip
    chars, paragraphs, same_paragraphs, paragraph_chars, lines, same_lines, line_chars = np.array(
        rows, np.float64
    ).T
    values = {
        "duplicate_paragraphs": share(same_paragraphs, paragraphs),
        "duplicate_paragraph_chars": share(paragraph_chars, chars),
        "duplicate_lines": share(same_lines, lines),
        "duplicate_line_chars": share(line_chars, chars),
    }
    return [
        Rule(f"gopher_{name}", shares, ">", getattr(limits, f"max_{name}"))
        for name, shares in values.items()
    ]


# --- n-grams -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """The W words of D texts behind each other.

    keys_W: a random-looking number for each different word. ends_W1: the characters of all words
    before each one, without white space. chars_D: the characters of each text.
    """

    keys_W: np.ndarray
    text_W: np.ndarray
    ends_W1: np.ndarray
    chars_D: np.ndarray

    def of_texts(self, keep_D: np.ndarray) -> Tokens:
        """Only the words of some texts, whose numbers stay as they are."""
        if keep_D.all():
            return self
        keep_W = keep_D[self.text_W]
        lengths = np.diff(self.ends_W1)[keep_W]
        return Tokens(self.keys_W[keep_W], self.text_W[keep_W], sums(lengths), self.chars_D)


@dataclass(frozen=True)
class Grams:
    """G n-grams that end in the text in which they start.

    start_G: the first word. key_G: the number of the text in the upper bits, then those of a
    polynomial of the words' keys. Two n-grams of a text are taken for the same when these agree.
    """

    n: int
    start_G: np.ndarray
    key_G: np.ndarray
    text_bits: int

    def counts(self, num_texts: int) -> tuple[np.ndarray, np.ndarray]:
        """(how often the most frequent n-gram of each text occurs, how many n-grams have occurred
        before)."""
        key_G = np.sort(self.key_G)
        first = np.concatenate([[True], key_G[1:] != key_G[:-1]])[: len(key_G)]
        start_U = np.flatnonzero(first)
        count_U = np.diff(np.append(start_U, len(key_G)))
        text_U = (key_G[start_U] >> np.uint64(64 - self.text_bits)).astype(np.int64)
        begins = np.flatnonzero(np.concatenate([[True], text_U[1:] != text_U[:-1]])[: len(text_U)])
        most_D, again_D = np.zeros((2, num_texts), np.int64)
        if len(begins):
            texts = text_U[begins]
            most_D[texts] = np.maximum.reduceat(count_U, begins)
            again_D[texts] = np.add.reduceat(count_U - 1, begins)
        return most_D, again_D

    def numbered(self) -> tuple[np.ndarray, np.ndarray]:
        """(a number for each n-gram, which counts up as different ones appear; whether it appears
        for the first time)."""
        id_G = pa.array(self.key_G).dictionary_encode().indices.to_numpy().astype(np.int64)
        highest = np.maximum.accumulate(id_G)
        first = np.concatenate([[True], highest[1:] > highest[:-1]])[: len(id_G)]
        return id_G, first


def ngram_verdicts(words: Words, limits: GopherRepetition) -> list[Verdict]:
    tokens = tokens_of(words)
    verdicts: list[Verdict] = [None] * len(words.num_chars_D)
    open_D = np.ones(len(verdicts), bool)
    for n in TOP:
        limit = getattr(limits, f"max_top_{n}gram_chars")
        chars = top_gram_chars(tokens, grams_of(tokens, n), limit)
        settle(f"gopher_top_{n}gram_chars", chars, limit, tokens, verdicts, open_D)
    for n in DUPLICATE:
        limit = getattr(limits, f"max_duplicate_{n}gram_chars")
        least = min(getattr(limits, f"max_duplicate_{m}gram_chars") for m in DUPLICATE if m >= n)
        tokens = tokens.of_texts(open_D)
        grams = grams_of(tokens, n)
        # What duplicate (n+1)-grams cover is covered by duplicate n-grams too, so a text whose
        # cover is within all limits that are left can break none of them.
        again_D = grams.counts(len(verdicts))[1]
        open_D &= again_D * longest_gram(tokens, grams) > least * tokens.chars_D
        if not open_D.any():
            break
        tokens = tokens.of_texts(open_D)
        chars, covered = duplicate_chars(tokens, grams_of(tokens, n), limit)
        settle(f"gopher_duplicate_{n}gram_chars", chars, limit, tokens, verdicts, open_D)
        open_D &= covered > least * tokens.chars_D
    return verdicts


def settle(
    reason: str, chars: np.ndarray, limit: float, tokens: Tokens, verdicts: list[Verdict],
    open_D: np.ndarray,
) -> None:  # fmt: skip
    """Enters the verdict on the texts that are open and have more of such characters."""
    shares = share(chars, tokens.chars_D) * open_D
    for i in np.flatnonzero(shares > limit):
        verdicts[i] = (reason, detail(shares[i], ">", limit))
    open_D &= shares <= limit


def tokens_of(words: Words) -> Tokens:
    text_W = np.repeat(np.arange(len(words.num_chars_D)), words.num_words)
    ids_W = words.ids()
    keys = mix(np.arange(ids_W.max(initial=0) + 1, dtype=np.uint64))
    return Tokens(keys[ids_W], text_W, sums(words.lengths), words.num_chars_D)


def mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers after which neighbours have nothing in common (SplitMix64,
    Steele et al. 2014)."""
    x = x + BASE
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def grams_of(tokens: Tokens, n: int) -> Grams:
    num = max(len(tokens.keys_W) - n + 1, 0)
    keys = tokens.keys_W[:num].copy()
    for i in range(1, n):
        keys *= BASE
        keys += tokens.keys_W[i : i + num]
    start_G = np.flatnonzero(tokens.text_W[:num] == tokens.text_W[n - 1 : n - 1 + num])
    bits = max(len(tokens.chars_D) - 1, 1).bit_length()
    texts = tokens.text_W[start_G].astype(np.uint64) << np.uint64(64 - bits)
    return Grams(n, start_G, texts | keys[start_G] >> np.uint64(bits), bits)


def longest_gram(tokens: Tokens, grams: Grams) -> np.ndarray:
    """The characters of each text's longest n-gram, one blank between words."""
    lengths = gram_lengths(tokens, grams.start_G, grams.n)
    result = np.zeros(len(tokens.chars_D), np.int64)
    text_G = tokens.text_W[grams.start_G]
    begins = np.flatnonzero(np.concatenate([[True], text_G[1:] != text_G[:-1]])[: len(text_G)])
    if len(begins):
        result[text_G[begins]] = np.maximum.reduceat(lengths, begins)
    return result


def gram_lengths(tokens: Tokens, start: np.ndarray, n: int) -> np.ndarray:
    return tokens.ends_W1[start + n] - tokens.ends_W1[start] + n - 1


def top_gram_chars(tokens: Tokens, grams: Grams, limit: float) -> np.ndarray:
    """The characters of each text's most frequent n-gram, one blank between words, times how often
    it occurs; of equally frequent ones, the first counts. 0 where it can't exceed the limit."""
    result = np.zeros(len(tokens.chars_D), np.int64)
    most_D, _ = grams.counts(len(result))
    near_D = most_D * longest_gram(tokens, grams) > limit * tokens.chars_D
    tokens = tokens.of_texts(near_D)
    grams = grams_of(tokens, grams.n)
    if not len(grams.start_G):
        return result
    id_G, first_G = grams.numbered()
    count_U, start_U = np.bincount(id_G), grams.start_G[first_G]
    text_U = tokens.text_W[start_U]
    # Stable: within a text the most frequent first, then the one that appeared first.
    order = np.lexsort((-count_U, text_U))
    texts, at = np.unique(text_U[order], return_index=True)
    best = order[at]
    result[texts] = gram_lengths(tokens, start_U[best], grams.n) * count_U[best]
    return result


def duplicate_chars(tokens: Tokens, grams: Grams, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """(the characters of each text's duplicate n-grams, those of the words that lie in an n-gram
    that has occurred before). The second is a bound of the first, which is counted only where the
    bound exceeds the limit, and else 0."""
    id_G, first_G = grams.numbered()
    n, again = grams.n, grams.start_G[~first_G]
    change = np.bincount(again, minlength=len(tokens.text_W) + 1)
    change -= np.bincount(again + n, minlength=len(tokens.text_W) + 1)
    lengths_W = np.diff(tokens.ends_W1) * (np.cumsum(change[:-1]) > 0)
    covered_D = np.bincount(tokens.text_W, lengths_W, len(tokens.chars_D)).astype(np.int64)
    chars_D = np.zeros(len(covered_D), np.int64)
    text_G = tokens.text_W[grams.start_G]
    for i in np.flatnonzero(covered_D > limit * tokens.chars_D):
        begin, end = np.searchsorted(text_G, [i, i + 1])
        first = grams.start_G[begin]
        ends = tokens.ends_W1[first : first + end - begin + n]
        chars_D[i] = reading_on(id_G[begin:end].tolist(), ends.tolist(), n)
    return chars_D, covered_D


def reading_on(ids: list[int], ends: list[int], n: int) -> int:
    """Characters of n-grams that have occurred before, each word counted once at most; one that
    begins within another duplicate isn't looked at."""
    seen: set[int] = set()
    chars = at = 0
    while at < len(ids):
        if ids[at] in seen:
            chars += ends[at + n] - ends[at]
            at += n
        else:
            seen.add(ids[at])
            at += 1
    return chars


def sums(lengths: np.ndarray) -> np.ndarray:
    """The sum before each, and of all."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
