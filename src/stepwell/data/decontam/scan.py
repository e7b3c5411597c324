"""Which items of an index a document contains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.data.decontam.index import Index, Table
from stepwell.data.decontam.rules import Rule, covered_words, own_words, share_found
from stepwell.data.decontam.texts import Part
from stepwell.data.word_hashes import Words, hash_words, ngrams

# Strongest first: a document gets one Hit an item, for the strongest.
PARTS = ("question+answer", "question", "answer", "passage")
# Of an n-gram that a document repeats, only so many places are looked at.
MAX_PLACES = 16


@dataclass(frozen=True)
class Hit:
    """part: one of PARTS. share: what the rule measured. n: words of its n-grams. word: the
    document's first word in a found n-gram."""

    item: int
    part: str
    share: float
    n: int
    word: int


@dataclass(frozen=True)
class _Found:
    """A text in a document. word: the first one in a found n-gram. ends: where the text would end,
    by each of its found n-grams."""

    text: int
    share: float
    n: int
    word: int
    ends: np.ndarray


def find_hits(
    texts: Sequence[str], index: Index, rule: Rule, min_share: float | None = None
) -> list[list[Hit]]:
    """For each document the items it contains, strongest first, then by share and order in the
    index. min_share: in place of the rule's own."""
    words = hash_words(texts)
    wanted = rule.min_share if min_share is None else min_share
    hits: list[list[Hit]] = [[] for _ in texts]
    rows = _matches(words, index.tables[rule.table])
    for doc, group in _groups(rows[:, 0], rows):
        document = words.of(doc)
        found = [
            f
            for text, pairs in _groups(group[:, 1], group[:, 2:])
            if (f := _judge(index, rule, wanted, text, pairs, document)) is not None
        ]
        hits[doc] = _hits(index, found, document)
    return hits


def _matches(words: Words, table: Table) -> np.ndarray:
    """(document, text, place in the text, place in the document) of equal n-grams; int64, sorted
    by document and text."""
    found: list[np.ndarray] = [np.zeros((0, 4), np.int64)]
    for n in table.lengths:
        grams, places = ngrams(words, n)
        maybe = np.flatnonzero(table.maybe(grams))
        grams, places = grams[maybe], places[maybe]
        first = np.searchsorted(table.grams_G, grams, "left")
        count = np.searchsorted(table.grams_G, grams, "right") - first
        real = np.flatnonzero(count)
        docs = np.searchsorted(words.bounds, places[real], "right") - 1
        few = _first_of_each(docs, first[real], MAX_PLACES)
        real, docs = real[few], docs[few]
        count = count[real]
        entries = np.repeat(first[real] - (np.cumsum(count) - count), count)
        entries += np.arange(len(entries))
        rows = [
            np.repeat(docs, count),
            table.owners_G[entries],
            table.places_G[entries],
            np.repeat(places[real] - words.bounds[docs], count),
        ]
        found.append(np.stack([np.asarray(column, np.int64) for column in rows], axis=1))
    rows = np.concatenate(found)
    return rows[np.lexsort(rows.T[::-1])]


def _first_of_each(docs: np.ndarray, grams: np.ndarray, limit: int) -> np.ndarray:
    """The rows that are among the first `limit` of their (document, gram), in order."""
    order = np.lexsort([np.arange(len(docs)), grams, docs])
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(docs[order]) != 0) | (np.diff(grams[order]) != 0)
    starts = np.flatnonzero(new)
    rank = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    return np.sort(order[rank < limit])


def _groups(keys: np.ndarray, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Stretches of equal keys."""
    cuts = np.flatnonzero(np.diff(keys)) + 1
    if len(keys):
        for part in np.split(np.arange(len(keys)), cuts):
            yield int(keys[part[0]]), rows[part[0] : part[-1] + 1]


def _judge(
    index: Index, rule: Rule, wanted: float, text: int, pairs: np.ndarray, document: np.ndarray
) -> _Found | None:
    """What the rule says of a text whose n-grams were found at `pairs`."""
    n = index.length_of(rule, text)
    words, shared = index.words_of(text), index.shared_of(rule, text)
    if rule.measure == "words" and len(pairs) * n < wanted * (len(words) - n * shared.sum()):
        return None  # even if no two of them overlap
    if lead := int(index.leads_T[text]):
        missed = own_words(shared, n) & ~covered_words(pairs[:, 0].tolist(), len(words), n)
        if missed[:lead].any():
            return None
    share = share_found(rule, pairs, words, document, n, shared)
    if share < wanted:
        return None
    ends = np.unique(pairs[:, 1] - pairs[:, 0] + len(words))[:MAX_PLACES]
    return _Found(text, share, n, int(pairs[:, 1].min()), ends)


def _hits(index: Index, found: Sequence[_Found], document: np.ndarray) -> list[Hit]:
    best: dict[int, Hit] = {}
    for one in found:
        item = int(index.items_T[one.text])
        part = _part(index, one, found, document)
        hit = Hit(item, part, one.share, one.n, one.word)
        if item not in best or _strength(hit) < _strength(best[item]):
            best[item] = hit
    return sorted(best.values(), key=_strength)


def _strength(hit: Hit) -> tuple[int, float, int]:
    return PARTS.index(hit.part), -hit.share, hit.item


def _part(index: Index, one: _Found, found: Sequence[_Found], document: np.ndarray) -> str:
    match Part(int(index.parts_T[one.text])):
        case Part.FOLLOWED_BY_ANSWER:
            return "question+answer"
        case Part.ANSWER:
            return "answer"
        case Part.PASSAGE:
            return "passage"
        case Part.QUESTION | Part.FOLLOWED_BY_CHOICES:
            item = int(index.items_T[one.text])
            whole = {f.text for f in found}
            seen = any(
                answer in whole or _stands_after(index, answer, one, item, document)
                for answer in index.answers.get(item, [])
            )
            return "question+answer" if seen else "question"


def _stands_after(index: Index, text: int, one: _Found, item: int, document: np.ndarray) -> bool:
    """Whether an answer stands as a whole within its window after the question."""
    answer = index.words_of(text)
    window = int(index.windows_I[item]) + len(answer)
    ends = np.clip(one.ends, 0, len(document)).tolist()
    return any(_contains(document[end : end + window], answer) for end in ends)


def _contains(document: np.ndarray, words: np.ndarray) -> bool:
    for start in np.flatnonzero(document == words[0]).tolist():
        if np.array_equal(document[start : start + len(words)], words):
            return True
    return False
