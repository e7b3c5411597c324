"""Words of many texts and their n-grams as 64-bit hashes, computed in numpy.

A word is a run of letters, digits and marks after Unicode's NFKC and case folding; apostrophes and
invisible characters inside it don't count, everything else separates, also a line end that is
written `\\n`, as in raw JSON. In scripts that are written without blanks every character is a word.
Case, punctuation, line ends and wrapping thus change no hash.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

# Stored indexes name it: another number is another set of hashes.
VERSION = 1
# A longer word is told by its first bytes and its length.
WORD_BYTES = 64

SEPARATOR, LETTER, INVISIBLE, ALONE = range(4)
APOSTROPHES = "'`\u2018\u2019\u02bc\u2032"
ESCAPES = ("\\n", "\\r", "\\t", "\\N", "\\R", "\\T")
# Han, kana, Thai, Lao, Tibetan, Burmese, Khmer.
UNSPACED = (
    (0x0E00, 0x0EFF), (0x0F00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF),
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0x20000, 0x3FFFF),
)  # fmt: skip

MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Words:
    """hashes: uint64, the words of all texts in order. bounds: int64, the words of text i are
    hashes[bounds[i]:bounds[i + 1]]."""

    hashes: np.ndarray
    bounds: np.ndarray

    def of(self, i: int) -> np.ndarray:
        return self.hashes[self.bounds[i] : self.bounds[i + 1]]


def normalise(text: str) -> str:
    """The words of a text with single blanks between them."""
    return " ".join(_plain(text).decode("utf-8").split())


def hash_words(texts: Sequence[str]) -> Words:
    """The words of each text; a hash depends on nothing but its word."""
    parts = [_plain(text) for text in texts]
    lengths = np.fromiter((len(part) + 1 for part in parts), np.int64, len(parts))
    ends = np.cumsum(lengths)
    # The last word's eight bytes may be read beyond the end.
    data = np.frombuffer(b" ".join([*parts, bytes(8).replace(b"\0", b" ")]), np.uint8)
    is_word = data != 32
    edges = np.flatnonzero(is_word[1:] != is_word[:-1]) + 1
    if len(data) and is_word[0]:
        edges = np.concatenate([[0], edges])
    starts, stops = edges[::2], edges[1::2]
    bounds = np.concatenate([[0], np.searchsorted(starts, ends)])
    return Words(_hash_spans(data, starts, stops - starts), bounds)


def ngrams(words: Words, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(hashes, places) of the n-grams that lie within one text; a place is the index of the first
    word. n-grams of different length have different hashes."""
    hashes = rolling(words.hashes, n)
    inside = np.repeat(words.bounds[1:], np.diff(words.bounds))[: len(hashes)]
    places = np.flatnonzero(np.arange(n, n + len(hashes)) <= inside)
    return hashes[places], places


def rolling(hashes: np.ndarray, n: int) -> np.ndarray:
    """The hash of every window of n words."""
    count = max(len(hashes) - n + 1, 0)
    total = np.full(count, n, np.uint64) * STEP
    for i in range(n):
        total *= MIX_1
        total += hashes[i : i + count]
    return _mixed(total)


def word_spans(text: str) -> Iterator[tuple[int, int]]:
    """(start, stop) in `text` for each of its words, in order: the stretch between blanks that the
    word came out of. Slow; for showing places to people."""
    for piece in re.finditer(r"\S+", text):
        for _ in normalise(piece[0]).split():
            yield piece.span()


def _hash_spans(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """A hash for each span of bytes, eight bytes a round; few words need more than two."""
    eights = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    left = np.minimum(lengths, WORD_BYTES)
    out = _mixed((eights[starts] & _MASKS[np.minimum(left, 8)]) + lengths.astype(np.uint64) * STEP)
    rows = np.flatnonzero(left > 8)
    for offset in range(8, WORD_BYTES, 8):
        if not len(rows):
            break
        chunk = eights[starts[rows] + offset] & _MASKS[np.minimum(left[rows] - offset, 8)]
        out[rows] = _mixed(out[rows] * MIX_2 ^ chunk)
        rows = rows[left[rows] > offset + 8]
    return out


_MASKS = np.array([(1 << 8 * k) - 1 for k in range(9)], np.uint64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Every bit of the result depends on every bit of x (splitmix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * MIX_1
    x = (x ^ (x >> np.uint64(27))) * MIX_2
    return x ^ (x >> np.uint64(31))


def _plain(text: str) -> bytes:
    """UTF-8 in which every byte but the blank belongs to a word."""
    if "\\" in text:
        for escape in ESCAPES:
            text = text.replace(escape, " ")
    if text.isascii():
        return text.encode("ascii").translate(_ASCII, b"'`")
    # NFKC would make a blank and a mark of the acute accent that is typed for an apostrophe.
    folded = unicodedata.normalize("NFKC", text.replace("\u00b4", "'")).casefold()
    folded = unicodedata.normalize("NFKC", folded)
    points = np.frombuffer(folded.encode("utf-32-le", "surrogatepass"), "<u4")
    kinds = _kinds()[points]
    points = np.where(kinds == SEPARATOR, np.uint32(32), points)
    if (kinds == ALONE).any():
        # The character, then a blank; the blank before it stands in its own place.
        widths = np.where(kinds == ALONE, 3, 1)
        places = np.cumsum(widths) - widths + (kinds == ALONE)
        spread = np.full(int(widths.sum()), 32, np.uint32)
        visible = kinds != INVISIBLE
        spread[places] = np.where(visible, points, 0)
        points = spread[spread != 0]
    else:
        points = points[kinds != INVISIBLE]
    plain = points.astype("<u4").tobytes().decode("utf-32-le")
    # A mark may have come to stand behind another letter than before.
    return unicodedata.normalize("NFC", plain).encode("utf-8")


_ASCII = bytes(ord(chr(i).lower()) if i < 128 and chr(i).isalnum() else 32 for i in range(256))


@lru_cache(maxsize=1)
def _kinds() -> np.ndarray:
    """What each code point is."""
    kinds = np.zeros(sys.maxunicode + 1, np.uint8)
    for point in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(point))
        if category[0] in "LMN":
            kinds[point] = LETTER
        elif category == "Cf":
            kinds[point] = INVISIBLE
    for first, last in UNSPACED:
        block = kinds[first : last + 1]
        block[block == LETTER] = ALONE
    # Variation selectors are marks that change no letter.
    kinds[0xFE00:0xFE10] = INVISIBLE
    kinds[[ord(c) for c in APOSTROPHES]] = INVISIBLE
    return kinds
