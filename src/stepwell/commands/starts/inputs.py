"""What several methods start from."""

from __future__ import annotations

import os

from stepwell.config import Run
from stepwell.posttrain.first_model import check_first_model
from stepwell.tokenizer import Tokenizer
from stepwell.types import ConfigError, DataError


def require_data(run: Run, what: str) -> str:
    """data.path, and that it and data.heldout_path can be read. what: the rows that it holds.
    Raises ConfigError or DataError."""
    if run.data.path is None:
        raise ConfigError(
            f"data.path is not set; {run.method.kind} needs a JSONL or Parquet file of {what}"
        )
    for path in filter(None, (run.data.path, run.data.heldout_path)):
        if not os.access(path, os.R_OK):
            raise DataError(f"cannot read {path}: there is no such file, or it may not be read")
    return run.data.path


def require_start(run: Run, tokenizer: Tokenizer) -> None:
    """A model to start from, and one of this tokenizer. Raises ConfigError."""
    check_first_model(run, tokenizer, None)


def tokenizer_of(run: Run) -> Tokenizer:
    """Raises ConfigError where data.tokenizer is not set or does not fit the model."""
    if run.data.tokenizer is None:
        raise ConfigError("data.tokenizer is not set; name a tokenizer.json or its folder")
    tokenizer = Tokenizer.load(run.data.tokenizer)
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"the tokenizer {run.data.tokenizer} has {tokenizer.vocab_size} ids, but "
            f"model.vocab_size={run.model.vocab_size}; the nearest legal value is "
            f"{tokenizer.vocab_size}, or take the tokenizer that the model was trained with"
        )
    return tokenizer
