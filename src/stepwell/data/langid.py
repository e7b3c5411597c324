"""Language identification: labels documents with their language, and may keep only some languages.

See docs/langid.md for how well the default model does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BeforeValidator, Field, model_validator

from stepwell.data.batches import Outcome, Removal, split, with_column
from stepwell.data.langid_models import Guess, load_model
from stepwell.data.steps import DocumentStep
from stepwell.schema import Fraction, NonNegative
from stepwell.types import ConfigError, nearest


def _checked_thresholds(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(
            f"thresholds = {value!r}: must be a table of languages and scores, e.g. {{de = 0.7}}"
        )
    for code, score in value.items():
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
            near = ""
            if isinstance(score, int | float) and not isinstance(score, bool):
                near = f"; the nearest legal value is {0 if score < 0 else 1}"
            raise ValueError(f"thresholds.{code} = {score!r}: must be a number from 0 to 1{near}")
    return value


class LangId(DocumentStep):
    """Adds `language` (ISO 639-1 where there is a code, else 639-3) and `language_score` (the
    model's probability). A document whose language is unknown (it is short, or holds nothing that
    the model goes by) has no value in them.

    model: "py3langid", or a fastText model's path (lid.176.bin, GlotLID, one of your own).
    keep: the languages that stay; none: all.
    threshold: documents of a lower score go; thresholds: the same for single languages.
    unknown: whether documents of unknown language stay.
    min_characters: shorter documents (spaces aside) are of unknown language.
    max_characters: the model reads no more than this many, from the beginning.
    """

    kind: Literal["langid"] = "langid"
    model: str = "py3langid"
    keep: tuple[str, ...] = ()
    threshold: Fraction = 0.0
    thresholds: Annotated[dict[str, float], BeforeValidator(_checked_thresholds)] = Field(
        default_factory=dict
    )
    unknown: Literal["keep", "drop"] = "keep"
    min_characters: NonNegative = 20
    max_characters: Annotated[int, Field(strict=True, ge=20, le=1_000_000)] = 1_000

    @model_validator(mode="after")
    def _rules(self) -> LangId:
        if self.min_characters > self.max_characters:
            raise ValueError(
                f"min_characters={self.min_characters} must be at most max_characters="
                f"{self.max_characters}; that is the nearest legal value"
            )
        for code in self.thresholds:
            if self.keep and code not in self.keep:
                raise ValueError(
                    f"thresholds names {code!r}, which keep={list(self.keep)} removes anyway"
                    f"{nearest(code, self.keep)}"
                )
        return self

    def adds(self) -> dict[str, pa.DataType]:
        return {"language": pa.string(), "language_score": pa.float32()}

    def check(self) -> None:
        self._check_languages(load_model(self.model).languages)

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        self._check_languages(load_model(self.model).languages)
        # The rest of a long text is never decoded.
        prefix = pc.SliceOptions(0, self.max_characters)
        texts = pc.call_function("utf8_slice_codeunits", [batch["text"]], prefix).to_pylist()
        guesses = identify(texts, self.model, self.min_characters)
        languages = [g.language if g else None for g in guesses]
        scores = [g.probability if g else None for g in guesses]
        batch = with_column(batch, "language", languages, pa.string())
        batch = with_column(batch, "language_score", scores, pa.float32())
        return split(batch, self.kind, [self._removal(guess) for guess in guesses])

    def _removal(self, guess: Guess | None) -> Removal | None:
        if guess is None:
            detail = f"nothing to go by in {self.min_characters} characters or more"
            return Removal("language_uncertain", detail) if self.unknown == "drop" else None
        code, score = guess
        if self.keep and code not in self.keep:
            return Removal("language_unwanted", f"{code} {score:.3f}, keep {' '.join(self.keep)}")
        limit = self.thresholds.get(code, self.threshold)
        if score < limit:
            return Removal("language_uncertain", f"{code} {score:.3f} < {limit:g}")
        return None

    def _check_languages(self, known: frozenset[str]) -> None:
        for code in (*self.keep, *self.thresholds):
            if code not in known:
                raise ConfigError(
                    f"langid knows no language {code!r}{nearest(code, known)}; {self.model} has "
                    f"{' '.join(sorted(known))}"
                )


def identify(
    texts: Sequence[str], model: str = "py3langid", min_characters: int = 20
) -> list[Guess | None]:
    """Each text's language and its probability; None for a text of fewer characters (spaces aside)
    and for one in which the model finds nothing to go by.

    Raises ConfigError for a model that isn't there, DataError for a file that is none.
    """
    predictor = load_model(model)
    long_enough = [i for i, text in enumerate(texts) if _is_long_enough(text, min_characters)]
    guesses: list[Guess | None] = [None] * len(texts)
    for i, guess in zip(
        long_enough, predictor.predict([texts[i] for i in long_enough]), strict=True
    ):
        guesses[i] = guess
    return guesses


def _is_long_enough(text: str, min_characters: int) -> bool:
    # Most texts show it at once.
    head = text[: 4 * min_characters]
    return _num_visible(head) >= min_characters or (
        len(head) < len(text) and _num_visible(text) >= min_characters
    )


def _num_visible(text: str) -> int:
    return sum(map(len, text.split()))
