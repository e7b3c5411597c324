"""What a source of a reward's dimension stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepwell.eval.grade import Prompt, Verdict, Verifier, required_columns, verify_each
from stepwell.posttrain.rewards import Scorer
from stepwell.posttrain.verifiers.find import find_verifier
from stepwell.types import Completion

if TYPE_CHECKING:
    from stepwell.config import Run
    from stepwell.parallel.mesh import Mesh
    from stepwell.tokenizer import Tokenizer


def open_scorer(
    source: str,
    timeout_s: float,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
    run: Run | None = None,
) -> Scorer:
    """Raises ConfigError for a source that is unknown, cannot be read or lacks its package."""
    return in_process(find_verifier(source), timeout_s)


def in_process(verifier: Verifier, timeout_s: float) -> Scorer:
    def score(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Verdict]:
        return verify_each(
            verifier,
            [p.text for p in prompts],
            [c.text for c in completions],
            [p.columns for p in prompts],
            timeout_s,
        )

    return Scorer(score, tuple(required_columns(verifier)))
