"""Scores texts with a quality classifier that `stepwell train-quality-classifier` has made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from stepwell.data.batches import Outcome, texts_of, with_column
from stepwell.data.files import file_sha256, stamp
from stepwell.data.quality.labels import Label
from stepwell.data.steps import DocumentStep
from stepwell.types import DataError

Kind = Literal["binary", "scores"]
FORMAT = 1
MODEL, CARD = "model.bin", "card.json"
# The number of a label is its level.
LABELS: dict[Kind, tuple[str, ...]] = {
    "binary": ("negative", "positive"),
    "scores": tuple(map(str, range(6))),
}


class QualityScore(DocumentStep):
    """Adds a label, float32: the probability that a text is a positive one, or the expected score
    from 0 to 5. model: a folder that `stepwell train-quality-classifier` wrote."""

    kind: Literal["quality-score"] = "quality-score"
    model: Annotated[str, Field(min_length=1)]
    label: Label = "quality"

    def adds(self) -> dict[str, pa.DataType]:
        return {self.label: pa.float32()}

    def check(self) -> None:
        load_classifier(self.model)

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        scores = load_classifier(self.model).score(texts_of(batch))
        return Outcome(with_column(batch, self.label, scores, pa.float32()))


@dataclass(frozen=True)
class Classifier:
    """card: what is known of it (data, settings, metrics on held-out texts)."""

    card: dict[str, Any]
    model: Any

    @property
    def kind(self) -> Kind:
        return self.card["kind"]

    def score(self, texts: Sequence[str]) -> np.ndarray:
        """float32, one for each text: what the labels' levels are on average, by the model's
        probabilities. A text's score doesn't depend on the others."""
        lines = [prepare(text, self.card["settings"]["max_chars"]) for text in texts]
        if not lines:
            return np.zeros(0, np.float32)
        level_of = {f"__label__{name}": i for i, name in enumerate(LABELS[self.kind])}
        labels, probabilities = self.model.predict(lines, k=-1)
        scores = np.empty(len(lines))
        for i, (names, shares) in enumerate(zip(labels, probabilities, strict=True)):
            levels = np.array([level_of[name] for name in names])
            scores[i] = (levels * shares).sum() / shares.sum()
        return scores.astype(np.float32)


def load_classifier(folder: str) -> Classifier:
    """`read_classifier`, kept as long as the folder stays as it is."""
    return _load_classifier(folder, stamp(folder))


@lru_cache(maxsize=4)
def _load_classifier(folder: str, _stamp: object) -> Classifier:
    return read_classifier(folder)


def read_classifier(folder: str) -> Classifier:
    """Raises DataError for a folder that holds none, or one whose model is not the card's."""
    import fasttext

    path = Path(folder)
    try:
        card = json.loads((path / CARD).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder!r} holds no quality classifier ({CARD} and {MODEL}): {error}; make one with "
            "stepwell train-quality-classifier"
        ) from error
    if card.get("format") != FORMAT or card.get("kind") not in LABELS:
        raise DataError(
            f"{path / CARD} has format {card.get('format')!r} and kind {card.get('kind')!r}; this "
            f"version reads format {FORMAT} of kind {' or '.join(LABELS)}"
        )
    if _sha256(path / MODEL) != card.get("model_sha256"):
        raise DataError(
            f"{path / MODEL} is not the model that {CARD} describes (another sha256): it is "
            "damaged or was exchanged; train it again"
        )
    return Classifier(card, fasttext.load_model(str(path / MODEL)))


def prepare(text: str, max_chars: int) -> str:
    """The beginning of a text as one line, without what means something to fastText: a label, and
    its sign for the end of a line."""
    line = " ".join(text[:max_chars].replace("\0", " ").split())
    line = line.replace("__label__", "__label ").replace("</s>", "< /s>")
    return line.encode("utf-8", "replace").decode("utf-8")


def _sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
