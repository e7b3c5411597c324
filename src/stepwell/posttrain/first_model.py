"""What methods must have that go on from a trained model. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepwell.config import Run
from stepwell.types import ConfigError

if TYPE_CHECKING:
    from stepwell.tokenizer import Tokenizer


def require_model(run: Run, weights: object | None) -> None:
    """Raises ConfigError for a run that would train random weights on answers or rewards."""
    if run.model.init is None and run.checkpoint.branch_from is None and weights is None:
        raise ConfigError(
            f"model.init is not set, and {run.method.kind} needs a model to start from: a run's "
            "folder (its last checkpoint), a checkpoint, a Hugging Face folder, a .gguf file, or "
            "'smollm2'"
        )


def check_first_model(run: Run, tokenizer: Tokenizer, weights: object | None) -> None:
    """Raises ConfigError without a model to start from, and with another tokenizer than its own."""
    from stepwell.train.weights import check_tokenizer

    require_model(run, weights)
    if run.model.init is not None:
        check_tokenizer(run.model.init, tokenizer, run.data.tokenizer)
