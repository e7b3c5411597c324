"""The words of many texts at once, as arrays: what the rules about words count with.

A word is what white space separates (`str.split`). Positions count the characters of the texts
joined by line breaks.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

SPACE, LETTER, ALPHANUMERIC, MARK, CAPITAL, SENTENCE_END = 1, 2, 4, 8, 16, 32
PLANE = 1 << 16
# Texts are worked on together up to so many characters, which bounds memory and suits the caches.
GROUP_CHARS = 1 << 21


def code_points(ranges: str) -> frozenset[str]:
    pairs = [part.partition("-") for part in ranges.split()]
    return frozenset(chr(c) for a, _, b in pairs for c in range(int(a, 16), int(b or a, 16) + 1))


# What may end a sentence, in any script: Unicode's property Sentence_Terminal.
SENTENCE_ENDS = code_points("""
    21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e
    1735-1736 17d4-17d6 17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e
    1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7
    a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb fe52 fe56-fe57 ff01 ff0e ff1f ff61
    10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 111c5-111c6 111cd
    111de-111df 11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642
    1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44
    16a6e-16a6f 16af5 16b37-16b38 16b44 16e98 1bc9f 1da88
""")
# A word of nothing else is no word: CCNet's set (1911.00359), the ends of sentences, and control
# characters.
MARKS = (
    SENTENCE_ENDS
    | code_points("0-8 b-1f 7f-9f")
    | frozenset(
        "!/—”:％１〈&(、━\\【#%「」，】；+^]~“《„';’{|∶´[=-`*．（–？！：$～«〉,><》)?）。…@_.\"}►»"
    )
)


@dataclass(frozen=True)
class Words:
    """C characters, W words, D texts.

    flags_C: SPACE, LETTER, ... of each character; a text's characters are followed by one SPACE.
    start_W, stop_W: where each word lies. first_D1: the number of each text's first word, and W.
    num_chars_D: the length of each text.
    """

    chars_C: np.ndarray
    flags_C: np.ndarray
    start_W: np.ndarray
    stop_W: np.ndarray
    first_D1: np.ndarray
    num_chars_D: np.ndarray

    @property
    def num_words(self) -> np.ndarray:
        return np.diff(self.first_D1)

    @property
    def lengths(self) -> np.ndarray:
        return self.stop_W - self.start_W

    def kinds(self) -> tuple[np.ndarray, np.ndarray]:
        """(whether the word has a letter, whether it is nothing but marks)."""
        has_letter_W = self.flags_C[self.start_W] & LETTER != 0
        only_marks_W = np.zeros(len(has_letter_W), bool)
        # Most words begin with a letter, which is no mark; only the others are read through.
        rest = np.flatnonzero(~has_letter_W)
        if len(rest):
            lengths = self.lengths[rest]
            ends = np.cumsum(lengths)
            at = np.arange(ends[-1]) + np.repeat(self.start_W[rest] - (ends - lengths), lengths)
            flags, begins = self.flags_C[at], ends - lengths
            has_letter_W[rest] = np.bitwise_or.reduceat(flags, begins) & LETTER != 0
            only_marks_W[rest] = np.bitwise_and.reduceat(flags, begins) & MARK != 0
        return has_letter_W, only_marks_W

    def per_text(self, values_W: np.ndarray) -> np.ndarray:
        """The sum over each text's words."""
        total = np.concatenate([[0], np.cumsum(values_W, dtype=np.int64)])
        return total[self.first_D1[1:]] - total[self.first_D1[:-1]]

    def ids(self) -> np.ndarray:
        """A number for each word, which counts up as different ones first appear."""
        letters = self.chars_C[(self.flags_C & SPACE) == 0]
        offsets = np.concatenate([[0], np.cumsum(4 * self.lengths, dtype=np.int64)])
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(letters)]
        words = pa.Array.from_buffers(pa.large_binary(), len(self.start_W), buffers)
        return words.dictionary_encode().indices.to_numpy()


def split_words(texts: Sequence[str]) -> Words:
    chars_C = np.frombuffer("".join(f"{t}\n" for t in texts).encode("utf-32-le"), np.uint32)
    flags_C = char_flags(chars_C)
    inside = np.zeros(len(flags_C) + 1, bool)
    inside[1:] = (flags_C & SPACE) == 0
    bounds = np.flatnonzero(inside[1:] != inside[:-1])
    num_chars_D = np.fromiter(map(len, texts), np.int64, len(texts))
    text_start_D = np.cumsum(num_chars_D + 1) - num_chars_D - 1
    start_W = bounds[::2]
    first_D1 = np.searchsorted(start_W, np.append(text_start_D, len(chars_C)))
    return Words(chars_C, flags_C, start_W, bounds[1::2], first_D1, num_chars_D)


def char_flags(chars: np.ndarray) -> np.ndarray:
    """SPACE, LETTER, ALPHANUMERIC, CAPITAL, SENTENCE_END and MARK of each code point, as Python's
    str methods and unicodedata say."""
    highest = int(chars.max()) if len(chars) else 0
    return _flag_table(highest // PLANE + 1).take(chars)


@lru_cache(maxsize=17)
def _flag_table(num_planes: int) -> np.ndarray:
    return np.array(
        [
            SPACE * c.isspace() | LETTER * c.isalpha() | ALPHANUMERIC * c.isalnum()
            | CAPITAL * (unicodedata.category(c) == "Lu") | SENTENCE_END * (c in SENTENCE_ENDS)
            | MARK * (c in MARKS)
            for c in map(chr, range(num_planes * PLANE))
        ],
        np.uint8,
    )  # fmt: skip


def groups(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts in order, together up to GROUP_CHARS."""
    begin, chars = 0, 0
    for i, text in enumerate(texts):
        if chars and chars + len(text) > GROUP_CHARS:
            yield texts[begin:i]
            begin, chars = i, 0
        chars += len(text)
    if begin < len(texts):
        yield texts[begin:]
