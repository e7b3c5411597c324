"""How well a language model of Stepwell's predicts each document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import pyarrow as pa
from pydantic import Field, model_validator

from stepwell.data.batches import Outcome, texts_of, with_column
from stepwell.data.files import stamp
from stepwell.data.quality.perplexity import Limit, out_of_limits
from stepwell.data.quality.verdicts import Verdict, drop
from stepwell.data.steps import DocumentStep
from stepwell.schema import Positive
from stepwell.types import CheckpointError, ConfigError

if TYPE_CHECKING:
    from stepwell.tokenizer import Tokenizer
    from stepwell.train.engine import Engine

LONGEST_DEFAULT = 1024
SHORTEST_ROW = 32


class Perplexity(DocumentStep):
    """Adds the labels `perplexity` (of a token) and `bits_per_byte`, float32, and removes documents
    outside the limits. A text without characters has no value, and stays.

    model: a run's folder (its last checkpoint), a checkpoint, a Hugging Face folder or a .gguf
    file. tokenizer: where the model comes without one. seq_len: tokens of context (by default the
    model's, up to 1,024); a longer text is read in windows that overlap by half. max_chars: only
    the beginning of each text is scored.
    """

    kind: Literal["perplexity"] = "perplexity"
    model: Annotated[str, Field(min_length=1)]
    tokenizer: str | None = None
    dtype: Literal["fp32", "bf16"] = "fp32"
    seq_len: Positive | None = None
    max_chars: Positive | None = None
    min_perplexity: Limit = None
    max_perplexity: Limit = None
    min_bits_per_byte: Limit = None
    max_bits_per_byte: Limit = None

    @model_validator(mode="after")
    def _rules(self) -> Perplexity:
        for name in ("perplexity", "bits_per_byte"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low is not None and high is not None and low > high:
                raise ValueError(
                    f"min_{name}={low:g} exceeds max_{name}={high:g}, so nothing could pass; set "
                    f"it to at most {high:g}"
                )
        return self

    def adds(self) -> dict[str, pa.DataType]:
        return {"perplexity": pa.float32(), "bits_per_byte": pa.float32()}

    def check(self) -> None:
        load_scorer(self.model, self.tokenizer, self.dtype, self.seq_len)

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        scores = [self.score(text) for text in texts_of(batch)]
        for name, values in (
            ("perplexity", [s and s.perplexity for s in scores]),
            ("bits_per_byte", [s and s.bits_per_byte for s in scores]),
        ):
            batch = with_column(batch, name, values, pa.float32())
        return drop(batch, self.kind, [self.verdict(s) for s in scores])

    def score(self, text: str) -> Score | None:
        if not text:
            return None
        scorer = load_scorer(self.model, self.tokenizer, self.dtype, self.seq_len)
        return scorer.score(text[: self.max_chars])

    def verdict(self, score: Score | None) -> Verdict:
        if score is None:
            return None
        return out_of_limits(
            "perplexity", score.perplexity, self.min_perplexity, self.max_perplexity
        ) or out_of_limits(
            "bits_per_byte", score.bits_per_byte, self.min_bits_per_byte, self.max_bits_per_byte
        )


@dataclass(frozen=True)
class Score:
    """perplexity: of a token, so it depends on the tokenizer. bits_per_byte: of UTF-8."""

    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class Scorer:
    engine: Engine
    tokenizer: Tokenizer
    seq_len: int

    def score(self, text: str) -> Score:
        """Each text is computed alone, in rows whose length depends on the text only, so that
        nothing else can change the last bit of its score."""
        from stepwell.eval.tasks import bits_per_byte

        num_tokens = len(self.tokenizer.encode(text, special=False))
        found = bits_per_byte(self.engine, [text], self.tokenizer, self._row_length(num_tokens))
        bits_per_token = found.value * found.num_bytes / found.num_tokens
        return Score(2.0**bits_per_token, found.value)

    def _row_length(self, num_tokens: int) -> int:
        length = SHORTEST_ROW
        while length < num_tokens:
            length *= 2
        return min(length, self.seq_len)


def load_scorer(model: str, tokenizer: str | None, dtype: str, seq_len: int | None) -> Scorer:
    """Raises CheckpointError where there is no model or no tokenizer, and ConfigError for a
    tokenizer or a seq_len that doesn't fit the model."""
    from stepwell.train.run_checkpoints import is_run, latest

    folder = Path(model)
    if is_run(folder):
        last = latest(folder)
        if last is None:
            raise CheckpointError(f"{model} holds no finished checkpoint")
        folder = last
    stamps = (stamp(folder), stamp(tokenizer) if tokenizer else ())
    return _load_scorer(folder, tokenizer, dtype, seq_len, stamps)


@lru_cache(maxsize=2)
def _load_scorer(
    folder: Path, tokenizer: str | None, dtype: str, seq_len: int | None, _stamps: object
) -> Scorer:
    from stepwell.config import Run
    from stepwell.train.engine import Engine
    from stepwell.train.weights import initial_weights, read_model

    cfg = read_model(str(folder))
    if seq_len is not None and seq_len > cfg.max_seq_len:
        raise ConfigError(
            f"seq_len={seq_len} exceeds the model's max_seq_len, {cfg.max_seq_len}, which is the "
            "nearest legal value"
        )
    context = seq_len or min(cfg.max_seq_len, LONGEST_DEFAULT)
    reader = open_tokenizer(folder, tokenizer, cfg.vocab_size)
    run = Run.parse(
        {
            "model": cfg.model_dump(exclude_none=True),
            "precision": {"compute": dtype},
            "data": {"seq_len": context},
        }
    )
    weights = initial_weights(cfg.model_copy(update={"init": str(folder)}))
    return Scorer(Engine(run, weights), reader, context)


def open_tokenizer(model: Path, tokenizer: str | None, vocab_size: int) -> Tokenizer:
    """The one that is named, else the model's own."""
    from stepwell.models.gguf import export_gguf_tokenizer
    from stepwell.tokenizer import Tokenizer
    from stepwell.train.weights import check_tokenizer, gguf_path, kind_of

    if tokenizer is None and kind_of(str(model)) == "gguf":
        with TemporaryDirectory(prefix="stepwell-tokenizer-") as name:
            export_gguf_tokenizer(gguf_path(str(model)), Path(name) / "tokenizer")
            return Tokenizer.load(Path(name) / "tokenizer")
    place = tokenizer or next((str(p) for p in known_places(model) if p.exists()), None)
    if place is None:
        raise CheckpointError(f"{model} comes without a tokenizer; name one with `tokenizer`")
    found = Tokenizer.load(place)
    if found.vocab_size > vocab_size:
        raise CheckpointError(
            f"the tokenizer {place} has {found.vocab_size} ids but the model knows {vocab_size}; "
            "they do not belong together"
        )
    check_tokenizer(model, found, place)
    return found


def known_places(model: Path) -> Sequence[Path]:
    """Where the model's own tokenizer may be: beside a Hugging Face model, or where the recipe of a
    checkpoint's run says."""
    from stepwell.config import Run

    recipe = model.parent.parent / "run.toml"
    if (model / "tokenizer.json").is_file():
        return [model]
    if not recipe.is_file():
        return []
    named = Run.load(recipe).data.tokenizer
    return [Path(named)] if named else []
