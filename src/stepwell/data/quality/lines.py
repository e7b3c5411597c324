"""The lines of many texts at once, as places in the UTF-8 bytes of an Arrow column: what the rules
about lines count with. Decoding the texts and splitting them in Python would take most of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from stepwell.data.quality.words import SPACE, char_flags

# Texts are worked on together up to so many bytes, which suits the caches.
GROUP_BYTES = 1 << 20
# What is behind the last text, so that a few bytes can be read at any place.
PADDING = bytes(8)
SPACES = tuple(c.encode() for c in map(chr, range(0x3001)) if c.isspace())
# Odd, so that multiplying by it loses nothing modulo 2^64.
FACTOR = np.uint64(0x9E3779B97F4A7C15)


def byte_table(values: Iterable[int]) -> np.ndarray:
    table = np.zeros(256, bool)
    table[list(values)] = True
    return table


MAY_BEGIN_SPACE = byte_table(sign[0] for sign in SPACES)
MAY_END_SPACE = byte_table(sign[-1] for sign in SPACES)
ASCII_SPACE = byte_table(i for i in range(128) if chr(i).isspace())
BEGINS_WIDE = byte_table(range(0xC0, 256))
ASCII_BREAK = byte_table(b"\n\v\f\r\x1c\x1d\x1e")
IS_CONTROL = byte_table(i for i in range(32) if not chr(i).isspace())


@dataclass(frozen=True)
class Lines:
    """B bytes, L lines, D texts.

    bytes_B: the texts, each with a line feed behind it, and then PADDING. start_L, stop_L: where
    each line lies, without its line break. first_D1: the number of each text's first line, and L;
    each text has a line, and an empty last one if it ends in a break. start_D, stop_D: where each
    text lies. marks_N: where the bytes below 32 are, and those that begin a character beyond ASCII;
    kinds_N: these bytes.
    """

    bytes_B: np.ndarray
    start_L: np.ndarray
    stop_L: np.ndarray
    first_D1: np.ndarray
    start_D: np.ndarray
    stop_D: np.ndarray
    marks_N: np.ndarray
    kinds_N: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """In bytes."""
        return self.stop_L - self.start_L

    @property
    def num_newlines(self) -> np.ndarray:
        return np.diff(self.first_D1) - 1

    @property
    def text_numbers(self) -> np.ndarray:
        """The number of each line's text."""
        return np.repeat(np.arange(len(self.start_D)), np.diff(self.first_D1))

    def per_text(self, values_L: np.ndarray) -> np.ndarray:
        """The sum over each text's lines."""
        return np.add.reduceat(values_L, self.first_D1[:-1], dtype=np.int64)

    def marks(self, table: np.ndarray) -> np.ndarray:
        """Of marks_N those whose byte the table (byte_table) has."""
        return self.marks_N[table[self.kinds_N]]

    @property
    def next_starts(self) -> np.ndarray:
        """Where each line's break ends; where a text's last line ends."""
        next_L = np.append(self.start_L[1:], len(self.bytes_B))
        next_L[self.first_D1[1:] - 1] = self.stop_D
        return next_L

    def chars_before(self, places: np.ndarray) -> np.ndarray:
        """How many characters begin before each of these bytes, which begin one themselves."""
        wide_N = self.marks(BEGINS_WIDE)
        lead_N = self.bytes_B[wide_N]
        further = np.cumsum(1 + (lead_N >= 0xE0) + (lead_N >= 0xF0), dtype=np.int64)
        return places - np.append(0, further)[np.searchsorted(wide_N, places)]

    def num_chars(self) -> np.ndarray:
        """Of each line, where line feeds alone end lines."""
        return np.diff(self.chars_before(np.append(self.start_L, self.stop_L[-1:] + 1))) - 1

    def blank(self) -> np.ndarray:
        """Whether each line is empty or white space."""
        first_L = self.bytes_B[self.start_L]
        last_L = self.bytes_B[self.stop_L - 1]
        blank_L = self.lengths == 0
        maybe = ~blank_L & MAY_BEGIN_SPACE[first_L] & MAY_END_SPACE[last_L]
        for i in np.flatnonzero(maybe).tolist():
            blank_L[i] = self.line(i).isspace()
        return blank_L

    def line(self, i: int) -> str:
        return self.text(int(self.start_L[i]), int(self.stop_L[i]))

    def text(self, start: int, stop: int) -> str:
        return str(self.bytes_B.data[start:stop], "utf-8")

    def last_chars(self) -> np.ndarray:
        """The code point of each line's last character; 0 for an empty line."""
        last_L = self.bytes_B[self.stop_L - 1].astype(np.uint32) * (self.lengths > 0)
        wide = np.flatnonzero(last_L >= 0x80)
        begins = self.stop_L[wide] - 2
        for _ in range(2):
            begins -= (self.bytes_B[begins] & 0xC0) == 0x80
        last_L[wide] = decode_at(self.bytes_B, begins)
        return last_L

    def repeats(self, of_L: np.ndarray) -> np.ndarray:
        """Whether each line, of those that of_L holds for, is the same as an earlier one of its
        text."""
        repeats_L = np.zeros(len(self.start_L), bool)
        lines = np.flatnonzero(of_L)
        texts = self.text_numbers[lines]
        hashes = self._hashes(lines, texts)
        order = np.argsort(hashes)
        hashes = hashes[order]
        equal = np.flatnonzero(hashes[1:] == hashes[:-1])
        is_alike = np.zeros(len(lines), bool)
        is_alike[order[equal]] = is_alike[order[equal + 1]] = True
        # The same hash doesn't mean the same line; few lines come so far.
        alike = lines[is_alike]
        keys = (texts[is_alike] << 32) | self._numbers(alike)
        order = np.argsort(keys, kind="stable")
        is_same = keys[order[1:]] == keys[order[:-1]]
        repeats_L[alike[order[1:][is_same]]] = True
        return repeats_L

    def _numbers(self, lines: np.ndarray) -> np.ndarray:
        """The same number for the same line."""
        bounds = np.append(self.start_L, len(self.bytes_B) - len(PADDING))
        buffers = [None, pa.py_buffer(bounds), pa.py_buffer(self.bytes_B)]
        with_feeds = pa.Array.from_buffers(pa.large_binary(), len(self.start_L), buffers)
        return with_feeds.take(pa.array(lines)).dictionary_encode().indices.to_numpy()

    def _hashes(self, lines: np.ndarray, texts: np.ndarray) -> np.ndarray:
        """Of each line's text, length, and eight bytes at its beginning and end."""
        eight = np.ndarray((len(self.bytes_B) - 7,), "<u8", self.bytes_B.data, strides=(1,))
        begins, ends = self.start_L[lines], self.stop_L[lines]
        beyond = np.maximum(ends - begins - 8, 0)
        # Of a short line's eight bytes those behind it are pushed out.
        push = np.maximum(8 - np.maximum(ends - begins, 1), 0).astype(np.uint64) * 8
        hashes = (texts << 32 | (ends - begins)).view(np.uint64)
        for place in (begins, begins + beyond):
            hashes = (hashes ^ (hashes >> 29) ^ (eight[place] << push)) * FACTOR
        return hashes

    def num_words(self) -> np.ndarray:
        """Of each text; a word is what white space separates (`str.split`)."""
        spaces_B = self._spaces()
        begins_B = ~spaces_B
        begins_B[1:] &= spaces_B[:-1]
        before = num_true_before(begins_B, np.concatenate([self.start_D, self.stop_D]))
        return np.diff(before.reshape(2, -1), axis=0)[0]

    def _spaces(self) -> np.ndarray:
        """Whether each byte is one of a white-space character, as str.isspace says."""
        spaces_B = self.bytes_B <= ord(" ")
        spaces_B[self.marks(IS_CONTROL)] = False
        begins = self.marks(MAY_BEGIN_SPACE & BEGINS_WIDE)
        begins = begins[char_flags(decode_at(self.bytes_B, begins)) & SPACE != 0]
        spaces_B[begins] = spaces_B[begins + 1] = True
        spaces_B[begins[self.bytes_B[begins] >= 0xE0] + 2] = True
        return spaces_B


def split_lines(column: pa.Array, universal: bool = False) -> Lines:
    """The lines of a column of large_string without nulls: what line feeds separate
    (`str.split("\n")`), or all that `str.splitlines` knows as line breaks."""
    offset_D1 = offsets_of(column)
    data = memoryview(column.buffers()[2] or b"")
    texts = [data[start:stop] for start, stop in pairwise(offset_D1.tolist())]
    bytes_B = np.frombuffer(b"\n".join([*texts, PADDING]), np.uint8)
    # Below 32 (which wraps around) or from 192 on: one search for all that is sought.
    marks_N = np.flatnonzero(bytes_B[: -len(PADDING)] - np.uint8(32) >= 192 - 32)
    kinds_N = bytes_B[marks_N]
    if universal:
        stop_L, size_L = breaks_among(marks_N, bytes_B)
    else:
        stop_L, size_L = marks_N[kinds_N == ord("\n")], 1
    start_L = np.zeros_like(stop_L)
    start_L[1:] = (stop_L + size_L)[:-1]
    stop_D = np.cumsum(np.diff(offset_D1) + 1) - 1
    start_D = stop_D - np.diff(offset_D1)
    first_D1 = np.append(np.searchsorted(start_L, start_D), len(start_L))
    return Lines(bytes_B, start_L, stop_L, first_D1, start_D, stop_D, marks_N, kinds_N)


def breaks_among(places: np.ndarray, bytes_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the line breaks of `str.splitlines` begin, and their bytes."""
    first, second, third = (bytes_B[places + i] for i in range(3))
    follows_return = (first == ord("\n")) & (bytes_B[places - 1] == ord("\r"))
    sizes = (ASCII_BREAK[first] & ~follows_return).astype(np.int64)
    sizes[(first == ord("\r")) & (second == ord("\n"))] = 2
    sizes[(first == 0xC2) & (second == 0x85)] = 2
    sizes[(first == 0xE2) & (second == 0x80) & ((third == 0xA8) | (third == 0xA9))] = 3
    is_break = sizes > 0
    return places[is_break], sizes[is_break]


def offsets_of(column: pa.Array) -> np.ndarray:
    """Where each text begins in the column's buffer, and where the last one ends."""
    if not len(column):
        return np.zeros(1, np.int64)
    offsets = np.frombuffer(column.buffers()[1], np.int64)
    return offsets[column.offset : column.offset + len(column) + 1]


def groups(column: pa.Array) -> Iterator[pa.Array]:
    """The texts in order, together up to GROUP_BYTES."""
    offset_D1 = offsets_of(column)
    begin = 0
    while begin < len(column):
        limit = offset_D1[begin] + GROUP_BYTES
        stop = max(int(np.searchsorted(offset_D1, limit, side="right")) - 1, begin + 1)
        yield column.slice(begin, stop - begin)
        begin = stop


def num_true_before(mask: np.ndarray, places: np.ndarray) -> np.ndarray:
    """How many are true before each place, counted in eights."""
    eights = np.append(mask, np.zeros(8 - len(mask) % 8, bool)).view(np.uint64)
    before = np.append(0, np.cumsum(np.bitwise_count(eights), dtype=np.int64))
    number, rest = places >> 3, (places & 7).astype(np.uint64)
    below = eights[number] & ((np.uint64(1) << (rest * 8)) - np.uint64(1))
    return before[number] + np.bitwise_count(below)


def decode_at(bytes_B: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The code points of the characters that begin at these places, which are none of ASCII's."""
    first, second = bytes_B[places].astype(np.uint32), bytes_B[places + 1] & np.uint8(0x3F)
    codes = ((first & 0x1F) << 6) | second
    longer = np.flatnonzero(first >= 0xE0)
    codes[longer] = (codes[longer] << 6) & 0xFFFF | (bytes_B[places[longer] + 2] & 0x3F)
    longer = longer[first[longer] >= 0xF0]
    codes[longer] = (codes[longer] << 6) & 0x1FFFFF | (bytes_B[places[longer] + 3] & 0x3F)
    return codes
