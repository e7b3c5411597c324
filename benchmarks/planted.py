"""Real documents cut into pages, with near-duplicates of known similarity planted among them, and
the truth about all pairs: exact Jaccard similarity on word 5-grams, by an inverted index.

The truth shares no code with what is measured: words by a regular expression, n-grams numbered
(not hashed), sets of Python.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.workload import ROOT

CORPUS = ROOT / ".cache" / "corpus"
SOURCES = (
    "books/austen", "books/kjv", "books/moby-dick", "books/sotu", "text/python-docs",
    "text/anarchism", "licences/installed", "mail/spam-assassin", "reference/foldoc",
    "reference/gcide", "code/stdlib",
)  # fmt: skip
NGRAM, THRESHOLD = 5, 0.8
PAGE_WORDS, LEAST_WORDS = 500, 60
SHARE_PLANTED, MOST_COPIES = 0.25, 4
WORD = re.compile(r"[^\W_]+")


def texts_of(folder: Path) -> Iterator[str]:
    """In an order that has nothing to do with their names."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    paths.sort(key=lambda p: hashlib.sha256(str(p.relative_to(folder)).encode()).digest())
    for path in paths:
        body = path.read_text("utf-8", "replace")
        if path.suffix == ".jsonl":
            yield from (json.loads(row)["text"] for row in body.splitlines())
        else:
            yield body


def pages(text: str) -> Iterator[str]:
    """Cut at line ends, of PAGE_WORDS words or a little more; a short rest is left out."""
    page, num_words = [], 0
    for line in text.splitlines(keepends=True):
        page.append(line)
        num_words += len(line.split())
        if num_words >= PAGE_WORDS:
            yield "".join(page)
            page, num_words = [], 0
    if num_words >= LEAST_WORDS:
        yield "".join(page)


def edited(page: str, similarity: float, rng: random.Random) -> str:
    """A copy of about this similarity: words replaced far enough apart to cost NGRAM each."""
    parts = re.split(r"(\s+)", page)
    places = [i for i, part in enumerate(parts) if WORD.fullmatch(part)]
    num_shingles = max(len(WORD.findall(page)) - NGRAM + 1, 1)
    num_edits = round((1 - similarity) / (1 + similarity) * num_shingles / NGRAM)
    spaced = places[:: 2 * NGRAM]
    for place in rng.sample(spaced, min(num_edits, len(spaced))):
        parts[place] = f"zq{rng.randrange(10**8)}"
    return "".join(parts)


def build(megabytes: float, seed: int = 0) -> list[str]:
    """Shuffled pages; a share of them copies of others, of similarities from .5 to 1."""
    rng = random.Random(seed)
    originals, size = [], 0
    streams = [texts_of(CORPUS / source) for source in SOURCES]
    while streams and size < (1 - SHARE_PLANTED) * megabytes * 1e6:
        for stream in list(streams):
            text = next(stream, None)
            if text is None:
                streams.remove(stream)
                continue
            for page in pages(text[:200_000]):
                originals.append(page)
                size += len(page.encode())
    copies = []
    while size < megabytes * 1e6:
        page = rng.choice(originals)
        for _ in range(rng.randint(1, MOST_COPIES)):
            copies.append(edited(page, rng.uniform(0.5, 1.0), rng))
            size += len(copies[-1].encode())
    texts = originals + copies
    rng.shuffle(texts)
    return texts


def similar_pairs(texts: list[str], threshold: float = THRESHOLD) -> dict[tuple[int, int], float]:
    """All pairs at or above the threshold, exactly. A pair that reaches it shares an n-gram among
    the rarest of each (prefix filtering; Chaudhuri et al. 2006)."""
    sets = ngram_sets(texts)
    frequency = np.bincount(np.concatenate(sets))
    docs, grams = [], []
    for number, ids in enumerate(sets):
        rarest = ids[np.lexsort((ids, frequency[ids]))]
        prefix = rarest[: len(ids) - int(np.ceil(threshold * len(ids) - 1e-9)) + 1]
        docs.append(np.full(len(prefix), number))
        grams.append(prefix)
    doc_of, gram = np.concatenate(docs), np.concatenate(grams)
    order = np.lexsort((doc_of, gram))
    doc_of, gram = doc_of[order], gram[order]
    pairs = set()
    begins = np.flatnonzero(np.concatenate([[True], gram[1:] != gram[:-1]]))
    ends = np.append(begins[1:], len(gram))
    for start, stop in zip(begins.tolist(), ends.tolist(), strict=True):
        members = doc_of[start:stop].tolist()
        pairs.update((a, b) for i, a in enumerate(members) for b in members[i + 1 :])
    plain = [frozenset(ids.tolist()) for ids in sets]
    found = {}
    for a, b in pairs:
        shared = len(plain[a] & plain[b])
        similarity = shared / (len(plain[a]) + len(plain[b]) - shared)
        if similarity >= threshold:
            found[a, b] = similarity
    return found


def ngram_sets(texts: list[str]) -> list[np.ndarray]:
    """The numbers of each text's distinct word n-grams; equal numbers mean equal n-grams."""
    vocabulary: dict[str, int] = {}
    word_ids, places = [], [0]
    for text in texts:
        own = [vocabulary.setdefault(w, len(vocabulary)) for w in WORD.findall(text.lower())]
        # Words that no text has, so that a short text has an n-gram of its own.
        own += [-1 - len(own)] * (NGRAM - len(own))
        word_ids.append(np.array(own, np.int64))
        places.append(places[-1] + len(own))
    words = np.concatenate(word_ids) + NGRAM + 1
    numbers = words
    for k in range(1, NGRAM):
        joined = numbers[:-1] * (len(vocabulary) + NGRAM + 1) + words[k:]
        numbers = np.unique(joined, return_inverse=True)[1]
    return [np.unique(numbers[start : stop - NGRAM + 1]) for start, stop in pairwise(places)]


def template_pages(num_pages: int, share: float, seed: int = 0) -> list[str]:
    """Pages of 200 common words and `share` times as many of their own."""
    rng = random.Random(seed)
    words = [f"word{i}" for i in range(20_000)]
    template = " ".join(rng.choices(words, k=200))
    own = round(200 * share)
    return [f"{template} {' '.join(rng.choices(words, k=own))}" for _ in range(num_pages)]
