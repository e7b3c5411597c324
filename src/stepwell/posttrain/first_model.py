"""What methods must have that go on from a trained model. No torch."""

from __future__ import annotations

from stepwell.config import Run
from stepwell.types import ConfigError


def require_model(run: Run, weights: object | None) -> None:
    """Raises ConfigError for a run that would train random weights on answers or rewards."""
    if run.model.init is None and run.checkpoint.branch_from is None and weights is None:
        raise ConfigError(
            f"model.init is not set, and {run.method.kind} needs a model to start from: a run's "
            "folder (its last checkpoint), a checkpoint, a Hugging Face folder, a .gguf file, or "
            "'smollm2'"
        )
