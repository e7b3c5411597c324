"""Which language a text is in: py3langid's model, many texts at once, and fastText models.

py3langid scores a text by a naive Bayes over byte n-grams, which an automaton (Aho-Corasick) finds
in one pass over the bytes; in Python that pass costs most of the time. Here all texts are cut into
lanes of equal length and the automaton takes one step in all lanes at a time. What it knows of the
past is at most the longest n-gram, so a lane that is started a few bytes early is in the right
state when its own bytes begin.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from stepwell.data.files import stamp
from stepwell.types import ConfigError, DataError

LANE_BYTES = 256
CHUNK_BYTES = 1 << 20
# Members of a macrolanguage by which people mean it, where the macrolanguage has a two-letter code.
MACRO = {
    "arb": "ar", "azj": "az", "cmn": "zh", "ekk": "et", "fil": "tl", "gug": "gn", "kmr": "ku",
    "khk": "mn", "lvs": "lv", "nob": "no", "npi": "ne", "ory": "or", "pes": "fa", "plt": "mg",
    "quy": "qu", "swh": "sw", "tgl": "tl", "uzn": "uz", "ydd": "yi", "zsm": "ms",
    "gaz": "om", "hbs": "sh", "knc": "kr", "ayr": "ay",
}  # fmt: skip


class Guess(NamedTuple):
    """language: an ISO 639-1 code where there is one, else 639-3; probability: the model's own."""

    language: str
    probability: float


class Predictor(Protocol):
    @property
    def languages(self) -> frozenset[str]: ...

    def predict(self, texts: Sequence[str]) -> list[Guess | None]:
        """None for a text in which the model finds nothing to go by."""
        ...


@lru_cache(maxsize=4096)
def iso_code(label: str) -> str:
    """A model's label as an ISO 639-1 code where there is one, else 639-3: `__label__eng_Latn`,
    `eng` and `en` are all `en`. A dialect that has a code of its own keeps it (`arz`, `yue`)."""
    code, *script = re.split(r"[_-]", label.removeprefix("__label__"))
    code = code.lower()
    if code == "als":
        # ISO 639-3 calls Tosk Albanian so, as GlotLID does; Wikipedia and lid.176 Alemannic.
        return "sq" if script else "gsw"
    return MACRO.get(code) or _two_letters(code)


@lru_cache(maxsize=4096)
def _two_letters(code: str) -> str:
    if len(code) != 3:
        return code
    import langcodes

    return langcodes.Language.get(code).language or code


def load_model(model: str) -> Predictor:
    """`py3langid`, or the path of a fastText model (a file, or a folder that holds model.bin).

    Raises ConfigError for a path where there is none, DataError for a file that is none.
    """
    if model == "py3langid":
        return _load_model(None, ())
    path = Path(model)
    path = path / "model.bin" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"there is no language model {path}; model is 'py3langid' or the path of a fastText "
            "model such as lid.176.bin"
        )
    return _load_model(path, stamp(path))


@lru_cache(maxsize=4)
def _load_model(path: Path | None, _stamp: object) -> Predictor:
    return ByteNgrams.load() if path is None else FastText.load(path)


@dataclass(frozen=True)
class FastText:
    model: Any
    languages: frozenset[str]

    @classmethod
    def load(cls, path: Path) -> FastText:
        import fasttext

        try:
            model = fasttext.load_model(str(path))
        except (ValueError, RuntimeError) as error:
            raise DataError(f"{path} is not a fastText model: {error}") from error
        return cls(model, frozenset(iso_code(str(label)) for label in model.labels))

    def predict(self, texts: Sequence[str]) -> list[Guess | None]:
        # fastText reads no further than its own sign for a line's end.
        lines = [text.replace("\n", " ").replace("</s>", "< /s>") for text in texts]
        labels, probabilities = self.model.predict(lines)
        return [
            # fastText's softmax may exceed 1 by its rounding.
            Guess(iso_code(label[0]), min(float(p[0]), 1.0)) if len(label) else None
            for label, p in zip(labels, probabilities, strict=True)
        ]


@dataclass(frozen=True)
class ByteNgrams:
    """py3langid's model: S automaton states, R distinct rows of transitions, F n-grams, C classes.

    rows_S: where a state's row begins in next_R256 (the state after a byte). ngram_S: the n-gram
    that is complete in a state, or -1. log_likelihood_FC, log_prior_C: of the naive Bayes. codes:
    of the distinct languages; code_C: which of them a class is. depth_bytes: the longest n-gram.
    """

    rows_S: np.ndarray
    next_R256: np.ndarray
    ngram_S: np.ndarray
    log_likelihood_FC: np.ndarray
    log_prior_C: np.ndarray
    codes: tuple[str, ...]
    code_C: np.ndarray
    depth_bytes: int

    @classmethod
    def load(cls) -> ByteNgrams:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        model = LanguageIdentifier.from_model_file(MODEL_FILE)
        next_R256 = np.asarray(model.tk_nextmove, np.int32)
        rows = np.asarray(model.tk_row, np.int64)
        names = [iso_code(name) for name in model.nb_classes]
        codes = tuple(dict.fromkeys(names))
        return cls(
            (rows << 8).astype(np.int32),
            next_R256,
            np.asarray(model.tk_output, np.int32),
            np.asarray(model.nb_ptc, np.float32),
            np.asarray(model.nb_pc, np.float32),
            codes,
            np.array([codes.index(name) for name in names]),
            _depth(next_R256.reshape(-1, 256), rows),
        )

    @property
    def languages(self) -> frozenset[str]:
        return frozenset(self.codes)

    def predict(self, texts: Sequence[str]) -> list[Guess | None]:
        return [guess for chunk in _chunks(_encode(t) for t in texts) for guess in self._all(chunk)]

    def _all(self, texts: list[bytes]) -> list[Guess | None]:
        scores_BC, num_ngrams_B = self._scores(texts)
        # A temperature of sqrt(bytes) keeps the probabilities calibrated over lengths (py3langid).
        lengths_B = np.maximum([len(t) for t in texts], 1).astype(np.float32)
        scores_BC *= (1 / np.sqrt(lengths_B))[:, None]
        np.exp(scores_BC - scores_BC.max(axis=1, keepdims=True), out=scores_BC)
        scores_BC /= scores_BC.sum(axis=1, keepdims=True)
        by_code = np.zeros((len(texts), len(self.codes)), np.float32)
        for column, code in enumerate(self.code_C):
            by_code[:, code] += scores_BC[:, column]
        best = by_code.argmax(axis=1)
        top = np.minimum(by_code[np.arange(len(texts)), best], 1)
        return [
            Guess(self.codes[code], p) if n else None
            for code, p, n in zip(best.tolist(), top.tolist(), num_ngrams_B.tolist(), strict=True)
        ]

    def _scores(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """log p(class, text) up to a constant, and how many different n-grams each text has."""
        from scipy.sparse import csr_array

        doc_N, ngram_N = self._ngrams(texts)
        keys = (doc_N.astype(np.int64) << 32) | ngram_N
        keys.sort()
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        counts = np.diff(first, append=len(keys)).astype(np.float32)
        keys = keys[first]
        bounds = np.searchsorted(keys, np.arange(len(texts) + 1, dtype=np.int64) << 32)
        counts_BF = csr_array(
            (np.log1p(counts), keys & 0xFFFFFFFF, bounds),
            shape=(len(texts), len(self.log_likelihood_FC)),
        )
        return counts_BF @ self.log_likelihood_FC + self.log_prior_C, np.diff(bounds)

    def _ngrams(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Every n-gram occurrence, as (number of the text, number of the n-gram)."""
        lanes = _lanes(texts, self.depth_bytes)
        state_L = np.zeros(len(lanes.doc_L), np.int32)
        for bytes_L in lanes.bytes_TL[: self.depth_bytes]:
            state_L = self.next_R256.take(self.rows_S.take(state_L) + bytes_L)
        state_L[lanes.begins_L] = 0
        found_TL = np.empty((LANE_BYTES, len(state_L)), np.int32)
        for bytes_L, found_L in zip(lanes.bytes_TL[self.depth_bytes :], found_TL, strict=True):
            state_L = self.next_R256.take(self.rows_S.take(state_L) + bytes_L)
            self.ngram_S.take(state_L, out=found_L, mode="clip")
        found_TL[np.arange(LANE_BYTES)[:, None] >= lanes.length_L] = -1
        found_N = found_TL.ravel()
        places_N = np.flatnonzero(found_N >= 0)
        return lanes.doc_L[places_N % max(len(state_L), 1)], found_N[places_N]


class _Lanes(NamedTuple):
    """L pieces of texts. bytes_TL: a few bytes before each piece and then the piece itself,
    length_L bytes of which are its text's; doc_L: which text; begins_L: the piece is its first."""

    bytes_TL: np.ndarray
    doc_L: np.ndarray
    begins_L: np.ndarray
    length_L: np.ndarray


def _lanes(texts: list[bytes], warmup: int) -> _Lanes:
    lengths = np.array([len(t) for t in texts], np.int64)
    starts = np.cumsum(lengths) - lengths
    counts = -(-lengths // LANE_BYTES)
    doc_L = np.repeat(np.arange(len(texts), dtype=np.int32), counts)
    number_L = np.arange(len(doc_L)) - np.repeat(np.cumsum(counts) - counts, counts)
    start_L = starts[doc_L] + number_L * LANE_BYTES
    stop_L = np.minimum(start_L + LANE_BYTES, (starts + lengths)[doc_L])
    joined = np.frombuffer(bytes(warmup) + b"".join(texts) + bytes(LANE_BYTES), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(joined, warmup + LANE_BYTES)
    bytes_TL = np.ascontiguousarray(windows[start_L].T)
    return _Lanes(bytes_TL, doc_L, number_L == 0, stop_L - start_L)


def _depth(next_RB: np.ndarray, row_S: np.ndarray) -> int:
    """The longest way from the start to a state that is first reached so."""
    known = np.zeros(len(row_S), bool)
    known[0] = True
    front, depth = np.array([0]), -1
    while len(front):
        depth += 1
        reached = np.zeros_like(known)
        reached[next_RB[row_S[front]]] = True
        front = np.flatnonzero(reached & ~known)
        known |= reached
    return depth


def _encode(text: str) -> bytes:
    """As py3langid reads a text."""
    if text.isupper():
        text = text.lower()
    return unicodedata.normalize("NFC", text).encode("utf-8", "surrogatepass")


def _chunks(texts: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Bounded work at a time. What a text's scores are doesn't depend on its neighbours."""
    chunk, size_bytes = [], 0
    for text in texts:
        chunk.append(text)
        size_bytes += len(text)
        if size_bytes >= CHUNK_BYTES or len(chunk) >= 4096:
            yield chunk
            chunk, size_bytes = [], 0
    if chunk:
        yield chunk
