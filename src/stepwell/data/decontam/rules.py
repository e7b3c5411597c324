"""When a document counts as containing a benchmark's text: the published rules, as functions of
which of the text's word n-grams were found in the document.

Papers count tokens of their own tokenizers; here a token is a word of `data.word_hashes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stepwell.data.word_hashes import rolling

RuleName = Literal["gpt3", "tulu3", "ngram-share", "llama2", "llama3"]
GPT3_LENGTHS = (8, 13)
SKIPS = 4
# An n-gram of fewer different words (a row of ones, closing tags) is no evidence.
DISTINCT_WORDS = 4
# An n-gram that more items of one benchmark hold is their template: no evidence for any of them.
MAX_HOLDERS = 3


@dataclass(frozen=True)
class Rule:
    """A text is found when at least one of its n-grams is, and the share that `measure` gives is
    at least min_share.

    n: words of an n-gram; None: 8 to 13, chosen for each benchmark by `gpt3_length`.
    measure: `words`, the share of the text's words that lie in a found n-gram; `ngrams`, the share
    of its n-grams that are found; `spans`, the share of its words that lie in spans which begin
    with a found n-gram and then may differ in SKIPS words. n-grams of a template are never found,
    and words and n-grams that are nothing else don't count among the text's.
    """

    name: RuleName
    n: int | None
    measure: Literal["words", "ngrams", "spans"]
    min_share: float
    paper: str

    @property
    def table(self) -> str:
        """The n-grams it looks up: rules of one length share them."""
        return "gpt3" if self.n is None else str(self.n)


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        # One collision condemns; the paper's training filter cuts 200 characters around it.
        Rule("gpt3", None, "words", 0.0, "2005.14165, appendix C"),
        Rule("tulu3", 8, "words", 0.5, "2411.15124, section 3.2"),
        Rule("ngram-share", 8, "ngrams", 0.5, "tulu3's threshold on n-grams, which is stricter"),
        # "Dirty" in the paper; below 0.2 it says "clean".
        Rule("llama2", 10, "spans", 0.8, "2307.09288, appendix A.6"),
        # The paper sets the share for each benchmark; 0.8 is ours.
        Rule("llama3", 8, "words", 0.8, "2407.21783, section 5.1.4"),
    )
}


def gpt3_length(word_counts: Sequence[int]) -> int:
    """N of a benchmark: the 5th percentile of its examples' lengths in words, within 8 to 13
    (2005.14165, appendix C)."""
    low, high = GPT3_LENGTHS
    return int(np.clip(np.percentile(word_counts, 5), low, high)) if len(word_counts) else high


def telling(hashes: np.ndarray, places: np.ndarray, n: int) -> np.ndarray:
    """Which of the n-grams that begin at `places` have DISTINCT_WORDS different words: bool."""
    if not len(places):
        return np.zeros(0, bool)
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(hashes, n)[places], axis=1)
    return (windows[:, 1:] != windows[:, :-1]).sum(axis=1) + 1 >= DISTINCT_WORDS


def covered_words(places: Iterable[int], num_words: int, n: int) -> np.ndarray:
    """Which words lie in an n-gram that begins at one of `places`: bool, num_words."""
    steps = np.zeros(num_words + 1, np.int64)
    starts = np.unique(np.fromiter(places, np.int64))
    steps[starts] += 1
    np.add.at(steps, starts + n, -1)
    return np.cumsum(steps[:-1]) > 0


def own_words(shared: np.ndarray, n: int) -> np.ndarray:
    """Which words of a text lie in an n-gram that is not of a template: bool. shared: whether the
    n-gram that begins at a word is."""
    if not shared.any():
        return np.ones(len(shared), bool)
    places = np.flatnonzero(~shared[: len(shared) - n + 1])
    return covered_words(places.tolist(), len(shared), n)


def share_of_words(places: Iterable[int], own: np.ndarray, n: int) -> float:
    return float(covered_words(places, len(own), n)[own].mean())


def share_of_ngrams(places: Iterable[int], shared: np.ndarray, n: int) -> float:
    return len(set(places)) / int((~shared[: len(shared) - n + 1]).sum())


def share_of_spans(
    pairs: Iterable[tuple[int, int]],
    text: np.ndarray,
    document: np.ndarray,
    own: np.ndarray,
    n: int,
) -> float:
    """pairs: (place in the text, place in the document) of found n-grams. The span that begins
    with one goes on over at most SKIPS differing words and ends with an equal one."""
    covered = np.zeros(len(text), bool)
    for at, there in pairs:
        length = min(len(text) - at, len(document) - there)
        equal = text[at : at + length] == document[there : there + length]
        in_budget = np.cumsum(~equal) <= SKIPS
        last = int(np.flatnonzero(equal & in_budget)[-1])
        covered[at : at + max(last + 1, n)] = True
    return float(covered[own].mean())


def share_found(
    rule: Rule,
    pairs: np.ndarray,
    text: np.ndarray,
    document: np.ndarray,
    n: int,
    shared: np.ndarray,
) -> float:
    """The share that the rule measures. pairs: int64, (found n-grams, 2), as in
    `share_of_spans`, at least one; text, document: hashes of their words; shared: as in
    `own_words`."""
    match rule.measure:
        case "words":
            return share_of_words(pairs[:, 0].tolist(), own_words(shared, n), n)
        case "ngrams":
            return share_of_ngrams(pairs[:, 0].tolist(), shared, n)
        case "spans":
            return share_of_spans(pairs.tolist(), text, document, own_words(shared, n), n)


def matching_places(
    text: np.ndarray, document: np.ndarray, n: int, shared: np.ndarray
) -> np.ndarray:
    """(place in the text, place in the document) of every pair of equal n-grams that are not of a
    template; int64, (pairs, 2). For one text and one document; an index does the same for many."""
    there: dict[int, list[int]] = {}
    for place, gram in enumerate(rolling(document, n).tolist()):
        there.setdefault(gram, []).append(place)
    grams = rolling(text, n)
    places = np.arange(len(grams))
    places = places[telling(text, places, n) & ~shared[: len(places)]]
    pairs = [(at, place) for at in places.tolist() for place in there.get(int(grams[at]), [])]
    return np.array(pairs, np.int64).reshape(-1, 2)


def is_found(
    rule: Rule,
    text: np.ndarray,
    document: np.ndarray,
    n: int,
    min_share: float | None = None,
    shared: np.ndarray | None = None,
) -> bool:
    """Whether the document contains the text by the rule. A text of fewer than n words is one
    n-gram of its own length: it must be there as a whole. shared: as in `own_words`; none is by
    default."""
    n = min(n, len(text))
    shared = np.zeros(len(text), bool) if shared is None else shared
    pairs = matching_places(text, document, n, shared)
    wanted = rule.min_share if min_share is None else min_share
    return len(pairs) > 0 and share_found(rule, pairs, text, document, n, shared) >= wanted
