"""Refuses steps that would harm the weights: non-finite ones, and spikes of the loss, the gradient
norm or the update norm. Decides what is done about them: skip, rewind or stop.

Going back to before a spike and leaving out the batches around it is what PaLM's training did by
hand (2204.02311, section 5.1).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from stepwell.config import GuardConfig
from stepwell.types import CheckpointError, TrainingError

Watched = Literal["loss", "grad_norm", "update_norm"]
WATCHED: tuple[Watched, ...] = ("loss", "grad_norm", "update_norm")
NAMES = {"loss": "loss", "grad_norm": "gradient norm", "update_norm": "update norm"}
MARGINS = {
    "loss": "loss_spike",
    "grad_norm": "spike_factor",
    "update_norm": "update_spike_factor",
}


class Verdict(NamedTuple):
    """What is done with a step. action: "" takes it. reason: "" or why not, with the numbers.

    watched: which value was bad; value: it; median, threshold: what a spike was measured against
    (None where the value is not finite).
    """

    action: Literal["", "skip", "rewind", "stop"] = ""
    reason: str = ""
    watched: str = ""
    value: float = 0.0
    median: float | None = None
    threshold: float | None = None

    @property
    def ok(self) -> bool:
        return not self.action


TAKEN = Verdict()


class GuardStop(TrainingError):
    """The guard has given up. verdict, grad_norm: of the step that it refused last."""

    def __init__(self, message: str, verdict: Verdict, grad_norm: float):
        super().__init__(message)
        self.verdict, self.grad_norm = verdict, grad_norm


class Guard:
    """Judges every step from values that are the same on all ranks, so all ranks agree.

    Spikes are measured against the median of the last `window` good values, and looked for once
    there are min_history of them (a run begins with a steep loss and large norms). A norm of zero
    (nothing to learn, as in a rollout of dead groups) is good, but no measure of the others.

    rewinds: how many there were. lr_scale: on all learning rates, until step `cooldown_until`
    (None: for good). jumped: batches that are left out, [first, last] of each stream by its name,
    counted from 1.
    """

    def __init__(self, config: GuardConfig):
        self.config = config
        self.good: dict[str, deque[float]] = {key: deque(maxlen=config.window) for key in WATCHED}
        self.skips_in_a_row = 0
        self.num_skips = 0
        self.rewinds = 0
        self.lr_scale = 1.0
        self.cooldown_until: int | None = None
        self.jumped: dict[str, list[list[int]]] = {}

    @property
    def watches_updates(self) -> bool:
        """Whether `judge` wants to know the update's norm."""
        return self.config.action != "none" and self.config.update_spike_factor > 0

    def judge(
        self, loss: float, grad_norm: float, update_norm: float | None = None, lr: float = 1.0
    ) -> Verdict:
        """What is to be done with this step.

        update_norm: of the change that the step would make; it is measured in units of `lr`.
        Raises GuardStop when the run must end: at once with action "stop", and with more than
        max_skips_in_a_row or max_rewinds.
        """
        if self.config.action == "none":
            return TAKEN
        values = {"loss": loss, "grad_norm": grad_norm}
        if update_norm is not None and lr > 0:
            values["update_norm"] = update_norm / lr
        bad = self._first_bad(values)
        if bad is not None:
            return self._refuse(bad, grad_norm)
        for key, value in values.items():
            if key == "loss" or value > 0:
                self.good[key].append(value)
        self.skips_in_a_row = 0
        return TAKEN

    def _first_bad(self, values: Mapping[str, float]) -> Verdict | None:
        for key, value in values.items():
            if not math.isfinite(value):
                return Verdict("skip", f"the {NAMES[key]} is {value}", key, value)
        for key, value in values.items():
            if len(self.good[key]) < self.config.min_history:
                continue
            median = statistics.median(self.good[key])
            threshold, rule = self._threshold(key, median)
            if value > threshold and self._margin(key):
                per = " over the learning rate" if key == "update_norm" else ""
                reason = (
                    f"the {NAMES[key]}{per}, {value:.4g}, is more than {rule} the median "
                    f"{median:.4g} of the last {len(self.good[key])} good steps"
                )
                return Verdict("skip", reason, key, value, median, threshold)
        return None

    def _margin(self, key: str) -> float:
        return getattr(self.config, MARGINS[key])

    def _threshold(self, key: str, median: float) -> tuple[float, str]:
        margin = self._margin(key)
        rule = f"guard.{MARGINS[key]}={margin:g}"
        if key == "loss":
            return median + margin, f"{rule} above"
        return median * margin, f"{rule} times"

    def _refuse(self, bad: Verdict, grad_norm: float) -> Verdict:
        config, action = self.config, self.config.action
        self.num_skips += 1
        self.skips_in_a_row += 1
        if action == "stop":
            trouble = f"guard.action='stop', and {bad.reason}"
        elif action == "skip" and self.skips_in_a_row > config.max_skips_in_a_row:
            trouble = (
                f"{self.skips_in_a_row} steps in a row were refused, the last one because "
                f"{bad.reason}"
            )
        elif action == "rewind" and self.rewinds >= config.max_rewinds:
            trouble = (
                f"{bad.reason}, after guard.max_rewinds={config.max_rewinds} rewinds that left out "
                f"{self.num_jumped} batches"
            )
        else:
            return bad._replace(action=action)
        raise GuardStop(
            f"{trouble}; the weights are as the last good step left them. {advice(bad, config)}",
            bad._replace(action="stop"),
            grad_norm,
        )

    # --- what a rewind changes -------------------------------------------------------------------

    @property
    def num_jumped(self) -> int:
        return sum(b - a + 1 for spans in self.jumped.values() for a, b in spans)

    def lr_scale_at(self, step: int) -> float:
        """What the learning rate of step `step` (0 is the first) is multiplied with."""
        over = self.cooldown_until is not None and step >= self.cooldown_until
        return 1.0 if over else self.lr_scale

    def is_jumped(self, stream: str, number: int) -> bool:
        """Whether batch `number` of a stream (1 is the first) is left out."""
        return any(first <= number <= last for first, last in self.jumped.get(stream, ()))

    def rewound(self, before: Mapping[str, Any], step: int, stream: str, number: int) -> None:
        """Adds a rewind, after the state of an earlier checkpoint was loaded.

        before: the state at the bad step `step` (counted from 1), which knew of earlier rewinds;
        `number`: the batch of that step in its stream.
        """
        config = self.config
        self.num_skips, self.rewinds = before["num_skips"], before["rewinds"] + 1
        self.jumped = {name: [list(s) for s in spans] for name, spans in before["jumped"].items()}
        first = max(1, number - config.suspect_steps + 1)
        self.jumped[stream] = merged([*self.jumped.get(stream, []), [first, number]])
        until = before["cooldown_until"]
        cooling = until is None or step <= until
        self.lr_scale = config.lr_factor * (before["lr_scale"] if cooling else 1.0)
        self.cooldown_until = step + config.cooldown_steps if config.cooldown_steps else None

    # --- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON-able; `load` of it goes on exactly."""
        return {
            "good": {key: list(values) for key, values in self.good.items()},
            "skips_in_a_row": self.skips_in_a_row,
            "num_skips": self.num_skips,
            "rewinds": self.rewinds,
            "lr_scale": self.lr_scale,
            "cooldown_until": self.cooldown_until,
            "jumped": self.jumped,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError for what an earlier version of Stepwell has written."""
        if missing := sorted(self.state().keys() - state.keys()):
            raise CheckpointError(
                f"the guard's state in the checkpoint has no {', '.join(missing)}: an earlier "
                "version of Stepwell wrote it; start from its weights alone, with model.init"
            )
        window = self.config.window
        self.good = {key: deque(state["good"][key], maxlen=window) for key in WATCHED}
        self.skips_in_a_row = int(state["skips_in_a_row"])
        self.num_skips = int(state["num_skips"])
        self.rewinds = int(state["rewinds"])
        self.lr_scale = float(state["lr_scale"])
        self.cooldown_until = state["cooldown_until"]
        self.jumped = {name: [list(s) for s in spans] for name, spans in state["jumped"].items()}


def merged(spans: list[list[int]]) -> list[list[int]]:
    """The same numbers in as few [first, last] as can be, in order."""
    found: list[list[int]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1] + 1:
            found[-1][1] = max(found[-1][1], last)
        else:
            found.append([first, last])
    return found


def advice(bad: Verdict, config: GuardConfig) -> str:
    """What to change, by the keys' names."""
    if bad.threshold is None:
        return (
            "Go on from an earlier checkpoint (checkpoint.branch_from) with a lower optim.lr or a "
            "longer optim.schedule.warmup_steps, try precision.compute='fp32', and look at the "
            "sample ids and the layer in events.jsonl" + _or_rewind(config)
        )
    return (
        f"If the {NAMES[bad.watched]} has risen for good, raise guard.{MARGINS[bad.watched]}; "
        "otherwise lower optim.lr or lengthen optim.schedule.warmup_steps and go on from an "
        "earlier checkpoint (checkpoint.branch_from)" + _or_rewind(config)
    )


def _or_rewind(config: GuardConfig) -> str:
    if config.action == "rewind":
        return "; or leave out more with a larger guard.suspect_steps or guard.max_rewinds."
    return "; guard.action='rewind' goes back by itself."
