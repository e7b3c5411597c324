"""Toxic language: by word lists, which are blunt and explain themselves, and by a classifier."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from stepwell.data.batches import Outcome, Removal, split, texts_of, with_column
from stepwell.data.files import stamp
from stepwell.data.quality.classifier import load_classifier
from stepwell.data.steps import DocumentStep
from stepwell.schema import Flag, Fraction, NonNegative
from stepwell.types import ConfigError, DataError, nearest

# What separates words: blanks and the punctuation of any script, but for the apostrophe. Marks
# that belong to letters (vowel signs) don't, other than in \w.
WORD = re.compile(
    r"[^\s!-&(-/:-@\[-`{-~¡-©«-´¶-¹»-¿\u2000-\u206f\u3000-\u303f\uff00-\uff0f\uff1a-\uff20।॥،؛؟]+"
)
# Scripts that put no blanks between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese.
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
INVISIBLE = re.compile("[\u00ad\u200b-\u200d\u2060\ufeff]")


@dataclass(frozen=True)
class WordList:
    """words: single ones. phrases: by their first word, what comes after it and the entry as it is
    shown. substrings: entries found anywhere, also inside words: those of a script without blanks,
    and those with signs in them, which must not touch a letter."""

    words: frozenset[str]
    phrases: dict[str, tuple[tuple[str, ...], ...]]
    substrings: tuple[str, ...]


class ToxicWords(DocumentStep):
    """Adds `toxic_words`, how many words and phrases of a list a document has (no value where the
    document's language has no list), and removes documents with too many.

    lists: a folder of LANGUAGE.txt (an entry a line) or LANGUAGE.json (an array of entries), or
    one such file. languages: of the folder's lists only these. by_language: a document with a
    `language` is held against the lists of that language only; one without against all.
    max_hits: documents with more go. max_fraction: those go of whose characters more than this
    share is in hits. Neither given: nothing goes.

    A list's word counts as a whole word only, however it is cased; of Chinese, Japanese and Thai,
    which put no blanks between words, anywhere.
    """

    kind: Literal["toxic-words"] = "toxic-words"
    lists: str
    languages: tuple[str, ...] = ()
    by_language: Flag = True
    max_hits: NonNegative | None = None
    max_fraction: Fraction | None = None

    def adds(self) -> dict[str, pa.DataType]:
        return {"toxic_words": pa.int32()}

    def check(self) -> None:
        read_lists(self.lists, self.languages)

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        lists = read_lists(self.lists, self.languages)
        spoken = [None] * batch.num_rows
        if self.by_language and "language" in batch.schema.names:
            spoken = batch["language"].to_pylist()
        hits = [
            toxic_words(text, chosen) if (chosen := _lists_for(language, lists)) else None
            for text, language in zip(texts_of(batch), spoken, strict=True)
        ]
        counts = [None if h is None else h.total() for h in hits]
        labelled = with_column(batch, "toxic_words", counts, pa.int32())
        removals = [self._removal(h, t) for h, t in zip(hits, texts_of(batch), strict=True)]
        return split(labelled, self.kind, removals)

    def _removal(self, hits: Counter[str] | None, text: str) -> Removal | None:
        if not hits:
            return None
        share = sum(len(entry) * n for entry, n in hits.items()) / max(len(text), 1)
        if self.max_hits is not None and hits.total() > self.max_hits:
            detail = f"{hits.total()} > {self.max_hits}: {masked(hits)}"
        elif self.max_fraction is not None and share > self.max_fraction:
            detail = f"{share:.4f} > {self.max_fraction:g} of its characters: {masked(hits)}"
        else:
            return None
        return Removal("toxic_words", detail)


def toxic_words(text: str, lists: Sequence[WordList]) -> Counter[str]:
    """How often each entry of the lists comes in the text."""
    text = normalised(text)
    words = [word.strip("'") for word in WORD.findall(text)]
    present = set(words)
    found: Counter[str] = Counter()
    for each in lists:
        found.update(_single(words, present, each))
        found.update(_phrases(words, present, each))
        found.update(_substrings(text, each))
    return found


def normalised(text: str) -> str:
    """Compatibility forms and case folded, apostrophes made one, invisible characters left out."""
    text = unicodedata.normalize("NFKC", text).casefold().replace("’", "'")
    return text if text.isascii() else INVISIBLE.sub("", text)


def masked(hits: Counter[str], most: int = 5) -> str:
    """The entries that come most often, with only the first letter of each word shown."""
    top = sorted(hits.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{_masked_entry(entry)} x{n}" for entry, n in top[:most]]
    return ", ".join(shown) + (f" and {len(top) - most} more" if len(top) > most else "")


def _masked_entry(entry: str) -> str:
    return " ".join(word[0] + "*" * max(1, len(word) - 1) for word in entry.split())


def _single(words: list[str], present: set[str], each: WordList) -> Counter[str]:
    bad = each.words & present
    return Counter(word for word in words if word in bad) if bad else Counter()


def _phrases(words: list[str], present: set[str], each: WordList) -> Iterator[str]:
    firsts = {first for first in each.phrases.keys() & present if _may_follow(first, present, each)}
    if not firsts:
        return
    for i, word in enumerate(words):
        if word in firsts:
            for rest in each.phrases[word]:
                if tuple(words[i + 1 : i + 1 + len(rest)]) == rest:
                    yield " ".join((word, *rest))


def _may_follow(first: str, present: set[str], each: WordList) -> bool:
    return any(present.issuperset(rest) for rest in each.phrases[first])


def _substrings(text: str, each: WordList) -> Iterator[str]:
    for entry in each.substrings:
        place = text.find(entry)
        while place >= 0:
            stop = place + len(entry)
            if UNSPACED.search(entry) or not _touches_letter(text, place, stop):
                yield entry
            place = text.find(entry, stop)


def _touches_letter(text: str, start: int, stop: int) -> bool:
    return text[max(0, start - 1) : start].isalnum() or text[stop : stop + 1].isalnum()


def _lists_for(language: str | None, lists: dict[str, WordList]) -> list[WordList]:
    if language is None:
        return list(lists.values())
    return [each for name, each in lists.items() if _language_of(name) in (language, "")]


def _language_of(name: str) -> str:
    """`fr` of `fr-CA-u-sd-caqc`; a single file, whose name is no language, is for every one."""
    code = name.split("-")[0].lower()
    code = "tl" if code == "fil" else code
    return code if 2 <= len(code) <= 3 and code.isalpha() else ""


def read_lists(path: str, languages: tuple[str, ...] = ()) -> dict[str, WordList]:
    """The lists of a folder, or a single file's, by the file's name without its ending.

    Raises ConfigError for a path where there is none and for a language that the folder lacks,
    DataError for a file that is no list.
    """
    return _read_lists(path, languages, stamp(path))


@lru_cache(maxsize=8)
def _read_lists(path: str, languages: tuple[str, ...], _stamp: object) -> dict[str, WordList]:
    place = Path(path)
    if place.is_file():
        files = [place]
    elif place.is_dir():
        files = sorted(f for f in place.iterdir() if f.suffix in (".txt", ".json"))
        files = [f for f in files if f.suffix == ".txt" or _entries(f) is not None]
    else:
        raise ConfigError(f"there is no word list {path}; lists is a folder or a file")
    if not files:
        raise ConfigError(f"{path} holds no word lists; they are called LANGUAGE.txt or .json")
    known = {_language_of(f.stem) for f in files}
    for language in languages:
        if language not in known:
            raise ConfigError(
                f"{path} has no list for {language!r}{nearest(language, known)}; it has lists for "
                f"{' '.join(sorted(known))}"
            )
    chosen = [f for f in files if not languages or _language_of(f.stem) in languages]
    return {f.stem: _word_list(f) for f in chosen}


def _word_list(path: Path) -> WordList:
    entries = _entries(path)
    if not entries:
        raise DataError(
            f"{path} is no word list: it needs an entry a line, or a JSON array of text"
        )
    words: set[str] = set()
    phrases: dict[str, set[tuple[str, ...]]] = {}
    substrings: set[str] = set()
    for entry in map(normalised, entries):
        parts = [part.strip("'") for part in WORD.findall(entry)]
        signs = re.sub(r"[\s'.-]", "", entry) != "".join(parts).replace("'", "")
        if UNSPACED.search(entry) or signs or not parts:
            substrings.add(entry.strip())
        elif len(parts) == 1:
            words.add(parts[0])
        else:
            phrases.setdefault(parts[0], set()).add(tuple(parts[1:]))
    ordered = {first: tuple(sorted(rests)) for first, rests in phrases.items()}
    return WordList(frozenset(words), ordered, tuple(sorted(substrings - {""})))


def _entries(path: Path) -> list[str] | None:
    """None for a JSON file that is no array of text, such as a package.json."""
    try:
        text = path.read_text("utf-8")
        if path.suffix != ".json":
            return [line.strip() for line in text.splitlines() if line.strip()]
        values = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is no word list: {error}") from error
    is_list = isinstance(values, list) and all(isinstance(v, str) for v in values)
    return [v.strip() for v in values if v.strip()] if is_list else None


class Toxicity(DocumentStep):
    """Adds `toxicity`, a trained classifier's probability that a document is toxic, and removes
    documents above max_score (none given: nothing goes). A document without words has no value.

    model: a folder that `stepwell train-quality-classifier` wrote, with toxic texts as its
    positives. chunk_characters: a document is scored by pieces of at most this size and has the
    score of the worst, because a long document dilutes an ugly passage.
    """

    kind: Literal["toxicity"] = "toxicity"
    model: Annotated[str, Field(min_length=1)]
    max_score: Fraction | None = None
    chunk_characters: Annotated[int, Field(strict=True, ge=100)] = 1_000

    def adds(self) -> dict[str, pa.DataType]:
        return {"toxicity": pa.float32()}

    def check(self) -> None:
        load_classifier(self.model)

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        scores = toxicity(texts_of(batch), self.model, self.chunk_characters)
        labelled = with_column(batch, "toxicity", scores, pa.float32())
        limit = self.max_score
        removals = [
            Removal("toxic", f"{score:.3f} > {limit:g}")
            if limit is not None and score is not None and score > limit
            else None
            for score in scores
        ]
        return split(labelled, self.kind, removals)


def toxicity(texts: Sequence[str], model: str, chunk_characters: int = 1_000) -> list[float | None]:
    """The highest probability of being a positive over each text's pieces; None for a text without
    words. Raises DataError for a folder that holds no classifier, ConfigError for one of scores
    from 0 to 5."""
    classifier = load_classifier(model)
    if classifier.kind != "binary":
        raise ConfigError(
            f"{model} is a classifier of kind {classifier.kind!r}; toxicity needs one of kind "
            "'binary', trained with toxic texts as the positives"
        )
    size = min(chunk_characters, classifier.card["settings"]["max_chars"])
    pieces = [pieces_of(text, size) for text in texts]
    scores = classifier.score([piece for each in pieces for piece in each]).tolist()
    ends = np.cumsum([len(each) for each in pieces]).tolist()
    return [
        min(max(scores[end - len(each) : end]), 1.0) if each else None
        for end, each in zip(ends, pieces, strict=True)
    ]


def pieces_of(text: str, num_characters: int) -> list[str]:
    """The text on one line, cut between words into pieces of at most num_characters."""
    line = " ".join(text.split())
    pieces, start = [], 0
    while start < len(line):
        stop = min(start + num_characters, len(line))
        blank = line.rfind(" ", start + 1, stop + 1) if stop < len(line) else -1
        stop = blank if blank > 0 else stop
        pieces.append(line[start:stop])
        start = stop + (line[stop : stop + 1] == " ")
    return pieces
