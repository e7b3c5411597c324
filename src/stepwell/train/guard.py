"""Refuses steps that would harm the weights: non-finite ones, and spikes of the gradient norm."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from stepwell.config import GuardConfig
from stepwell.types import TrainingError


class Verdict(NamedTuple):
    """ok: take the step. reason: "" or why not, with the numbers."""

    ok: bool
    reason: str = ""


class Guard:
    """Judges every step from values that are the same on all ranks, so all ranks agree.

    A spike is a norm above spike_factor times the median of the last `window` good norms; it is
    looked for once there are min_history of them (the early norms of a run fall by themselves).
    A norm of zero (nothing to learn, as in a rollout of dead groups) is good, but no measure of
    the others.
    """

    def __init__(self, config: GuardConfig):
        self.config = config
        self.good_norms: deque[float] = deque(maxlen=config.window)
        self.skips_in_a_row = 0
        self.num_skips = 0

    def judge(self, loss: float, grad_norm: float) -> Verdict:
        """Raises TrainingError once more than max_skips_in_a_row steps in a row are refused."""
        reason = self._reason(loss, grad_norm)
        if not reason:
            if grad_norm > 0:
                self.good_norms.append(grad_norm)
            self.skips_in_a_row = 0
            return Verdict(True)
        self.skips_in_a_row += 1
        self.num_skips += 1
        if self.skips_in_a_row > self.config.max_skips_in_a_row:
            raise TrainingError(
                f"{self.skips_in_a_row} steps in a row were refused, the last one because "
                f"{reason}; the weights are as the last good step left them. "
                f"{_advice(loss, grad_norm)}"
            )
        return Verdict(False, reason)

    def _reason(self, loss: float, grad_norm: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        if len(self.good_norms) < self.config.min_history:
            return ""
        median = statistics.median(self.good_norms)
        if grad_norm > self.config.spike_factor * median:
            return (
                f"the gradient norm {grad_norm:.4g} is more than guard.spike_factor="
                f"{self.config.spike_factor:g} times the median {median:.4g} of the last "
                f"{len(self.good_norms)} good steps"
            )
        return ""

    def state(self) -> dict[str, Any]:
        """JSON-able; `load` of it goes on exactly."""
        return {
            "good_norms": list(self.good_norms),
            "skips_in_a_row": self.skips_in_a_row,
            "num_skips": self.num_skips,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        norms = (norm for norm in state["good_norms"] if norm > 0)
        self.good_norms = deque(norms, maxlen=self.config.window)
        self.skips_in_a_row = int(state["skips_in_a_row"])
        self.num_skips = int(state["num_skips"])


def _advice(loss: float, grad_norm: float) -> str:
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return (
            "If the norm has risen for good, raise guard.spike_factor; otherwise lower optim.lr or "
            "lengthen optim.schedule.warmup_steps and go on from an earlier checkpoint."
        )
    return (
        "Go on from an earlier checkpoint with a lower optim.lr or a longer warm-up, try "
        "precision.compute='fp32', and look at the skipped steps' sample ids in events.jsonl."
    )
