"""Documents as sets of hashed word n-grams ("shingles"; Broder 1997).

A word is a run of letters, digits and marks, in lower case, after NFKC; what lies between words
(white space, punctuation, symbols) doesn't count. In scripts that are written without blanks (Han,
Kana, Thai, Lao, Khmer, Myanmar) each character is a word: there a shingle is a character n-gram.

Everything is done on the bytes of an Arrow column, many words at once; no Python string is made.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import xxhash

from stepwell.data.dedup.exact import normalise

pc: Any = pyarrow.compute
# Bounds what is held beside the text: about 20 times this.
SLICE_BYTES = 1 << 20
SEPARATOR, WORD, ALONE = 0, 1, 2
# Scripts without blanks: first and last code point.
UNSPACED = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x1950, 0x19DF), (0x1A20, 0x1AAF),
    (0x3005, 0x3007), (0x3040, 0x30FF), (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF),
    (0xAA60, 0xAA7F), (0xF900, 0xFAFF), (0x20000, 0x3FFFF),
)  # fmt: skip
KNOWN_CODE_POINTS = 0x40000
LETTERS = "LNM"
BLANK = 0x20
LOWER = bytes(
    c if c >= 0x80 else ord(chr(c).lower()) if chr(c).isalnum() else BLANK for c in range(256)
)
# Of splitmix64 (Steele, Lea, Flood 2014).
GOLDEN, MIX_1, MIX_2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
FIRST_BYTES = np.array([(1 << (8 * n)) - 1 for n in range(9)], np.uint64)


def shingle_sets(texts: pa.Array, ngram: int) -> pa.LargeListArray:
    """The distinct shingles of each text, ascending (list<uint64>).

    A text of fewer than `ngram` words has one shingle, its whole sequence of words; one without a
    word (`...`) has one too, its normalised text; a blank one has none. texts: string or
    large_string; null counts as blank.
    """
    parts = [_sets(part, ngram) for part in slices(_clean(texts))]
    if not parts:
        return pa.array([], pa.large_list(pa.uint64()))
    sizes = np.concatenate([np.diff(offsets) for _, offsets in parts])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    values = pa.array(np.concatenate([flat for flat, _ in parts]))
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)


def shingles_of(text: str, ngram: int) -> np.ndarray:
    """The distinct shingles of one text, ascending (uint64)."""
    return shingle_sets(pa.array([text], pa.large_string()), ngram).values.to_numpy()


def set_digests(sets: pa.LargeListArray) -> pa.FixedSizeBinaryArray:
    """128 bits that are equal for equal sets."""
    flat, offsets = flat_of(sets)
    view, places = memoryview(flat.data).cast("B"), (8 * offsets).tolist()
    digests = [xxhash.xxh3_128_digest(view[start:stop]) for start, stop in pairwise(places)]
    return pa.array(digests, pa.binary(16))


def flat_of(sets: pa.LargeListArray) -> tuple[np.ndarray, np.ndarray]:
    """The values of all lists, one after the other, and where each begins (and the last ends)."""
    offsets = sets.offsets.to_numpy()
    flat = sets.values.to_numpy(zero_copy_only=True)[offsets[0] : offsets[-1]]
    return flat, offsets - offsets[0]


def slices(texts: pa.LargeStringArray, max_bytes: int = SLICE_BYTES) -> Iterator[pa.Array]:
    """Consecutive texts of at most max_bytes together, or a single longer one."""
    ends = _offsets(texts)
    start = 0
    while start < len(texts):
        stop = int(np.searchsorted(ends, ends[start] + max_bytes, "right")) - 1
        stop = min(max(stop, start + 1), len(texts))
        yield texts.slice(start, stop - start)
        start = stop


def words(texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
    """A hash for each word (uint64), and for each text the number of words before it, with the
    total at the end."""
    is_ascii = pc.string_is_ascii(texts)
    if not pc.all(is_ascii).as_py():
        folded = pc.utf8_lower(pc.utf8_normalize(texts.filter(pc.invert(is_ascii)), "NFKC"))
        texts = pc.replace_with_mask(texts, pc.invert(is_ascii), folded)
    ends = _offsets(texts)
    start, stop = int(ends[0]), int(ends[-1])
    padding = b" " * 8
    raw = (texts.buffers()[2] or pa.py_buffer(b""))[start:stop].to_pybytes() + padding
    buffer = raw.translate(LOWER)
    starts, stops = _borders(np.frombuffer(buffer, np.uint8), (ends - start)[:-1])
    return _word_hashes(buffer, starts, stops), np.searchsorted(starts, ends - start)


def ngram_hashes(
    word_hashes: np.ndarray, places: np.ndarray, ngram: int
) -> tuple[np.ndarray, np.ndarray]:
    """The shingles of each text in order, with repeats, from `words`; and their places."""
    num_words = np.diff(places)
    total = len(word_hashes)
    is_last = np.zeros(total, bool)
    for back in range(1, ngram):
        tail = places[1:] - back
        is_last[tail[tail >= places[:-1]]] = True
    sums = np.zeros(total, np.uint64)
    for k, factor in enumerate(_factors(ngram)):
        sums[: max(total - k, 0)] += word_hashes[k:] * factor
    short = np.flatnonzero((num_words > 0) & (num_words < ngram))
    first = places[:-1][short]
    sums[first] = _short_sums(word_hashes, first, num_words[short], ngram)
    is_last[first] = False
    sizes = np.where(num_words > 0, np.maximum(num_words - ngram + 1, 1), 0)
    return mix(sums[~is_last]), np.concatenate([[0], np.cumsum(sizes)])


def mix(values: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers that leaves no pattern (splitmix64's finaliser)."""
    values = (values ^ (values >> np.uint64(30))) * MIX_1
    values = (values ^ (values >> np.uint64(27))) * MIX_2
    return values ^ (values >> np.uint64(31))


def _sets(texts: pa.LargeStringArray, ngram: int) -> tuple[np.ndarray, np.ndarray]:
    hashes, places = words(texts)
    flat, offsets = ngram_hashes(hashes, places, ngram)
    flat, offsets = _with_wordless(texts, flat, offsets)
    borders = offsets.tolist()
    for start, stop in pairwise(borders):
        flat[start:stop].sort()
    is_new = np.ones(len(flat), bool)
    is_new[1:] = flat[1:] != flat[:-1]
    is_new[offsets[:-1][np.diff(offsets) > 0]] = True
    before = np.concatenate([[0], np.cumsum(is_new)])
    return flat[is_new], before[offsets]


def _with_wordless(
    texts: pa.LargeStringArray, flat: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Texts of punctuation and symbols alone have one shingle."""
    rows = np.flatnonzero(np.diff(offsets) == 0)
    plain = [normalise(text) for text in texts.take(pa.array(rows)).to_pylist()]
    found = [(row, _text_hash(text)) for row, text in zip(rows, plain, strict=True) if text]
    if not found:
        return flat, offsets
    at, values = zip(*found, strict=True)
    more = np.zeros(len(offsets), np.int64)
    more[np.array(at) + 1] = 1
    flat = np.insert(flat, offsets[list(at)], np.array(values, np.uint64))
    return flat, offsets + np.cumsum(more)


def _text_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _clean(texts: pa.Array) -> pa.LargeStringArray:
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    return pc.fill_null(texts.cast(pa.large_string()), "")


def _offsets(texts: pa.LargeStringArray) -> np.ndarray:
    buffer = texts.buffers()[1]
    if buffer is None or not len(texts):
        return np.zeros(1, np.int64)
    return np.frombuffer(buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]


def _borders(chars: np.ndarray, text_starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where words start and stop in bytes that end in blanks."""
    in_word = chars != BLANK
    opens = np.ones(len(chars), bool)
    np.logical_not(in_word[:-1], out=opens[1:])
    opens[text_starts] = True
    leads = np.flatnonzero(chars >= 0xC0)
    if len(leads):
        _classify(chars, leads, in_word, opens)
        opens[1:] |= ~in_word[:-1]
    opens &= in_word
    closes = ~in_word[1:]
    closes |= opens[1:]
    closes &= in_word[:-1]
    return np.flatnonzero(opens), np.flatnonzero(closes) + 1


def _classify(chars: np.ndarray, leads: np.ndarray, in_word: np.ndarray, opens: np.ndarray) -> None:
    """Marks in place the characters beyond ASCII that are separators or words of their own."""
    first = chars[leads]
    width = 2 + (first >= 0xE0).astype(np.int64) + (first >= 0xF0)
    points = first.astype(np.int64) & (0x7F >> width)
    for k in (1, 2, 3):
        more = width > k
        points[more] = (points[more] << 6) | (chars[leads[more] + k] & 0x3F)
    classes = _classes()[np.minimum(points, KNOWN_CODE_POINTS)]
    alone = classes == ALONE
    opens[leads[alone]] = True
    opens[leads[alone] + width[alone]] = True
    for k in range(4):
        apart = (classes == SEPARATOR) & (width > k)
        in_word[leads[apart] + k] = False


@lru_cache(maxsize=1)
def _classes() -> np.ndarray:
    """The class of each code point; private and unassigned ones separate."""
    kinds = [unicodedata.category(chr(point))[0] in LETTERS for point in range(KNOWN_CODE_POINTS)]
    classes = np.array([*kinds, False], np.uint8)
    for first, last in UNSPACED:
        classes[first : last + 1] *= ALONE
    return classes


def _word_hashes(buffer: bytes, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """The sum of hashes of a word's pieces of 8 bytes, each with its number."""
    eight = np.ndarray((len(buffer) - 7,), "<u8", buffer, strides=(1,))
    sizes = stops - starts
    hashes = mix(eight[starts] & FIRST_BYTES[np.minimum(sizes, 8)])
    longer = np.flatnonzero(sizes > 8)
    if not len(longer):
        return hashes
    num_more = (sizes[longer] - 1) >> 3
    begin = np.cumsum(num_more) - num_more
    number = np.arange(int(num_more.sum())) - np.repeat(begin, num_more) + 1
    of = np.repeat(longer, num_more)
    size = np.minimum(sizes[of] - 8 * number, 8)
    pieces = eight[starts[of] + 8 * number] & FIRST_BYTES[size]
    pieces = mix(pieces + number.astype(np.uint64) * GOLDEN)
    hashes[longer] += np.add.reduceat(pieces, begin)
    return hashes


def _short_sums(
    word_hashes: np.ndarray, first: np.ndarray, num_words: np.ndarray, ngram: int
) -> np.ndarray:
    """As for a full n-gram, with the number of words, so that no other text has it."""
    sums = num_words.astype(np.uint64) * GOLDEN
    for k, factor in enumerate(_factors(ngram)):
        has = num_words > k
        sums[has] += word_hashes[first[has] + k] * factor
    return sums


def _factors(ngram: int) -> np.ndarray:
    """Odd, so that multiplying loses nothing."""
    return mix(np.arange(1, ngram + 1, dtype=np.uint64) * GOLDEN) | np.uint64(1)
