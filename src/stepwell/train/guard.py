"""Refuses steps that would harm the weights: non-finite ones, and spikes of the loss, the gradient
norm or the update norm. Decides what is done about them: skip, rewind or stop.

Going back to before a spike and leaving out the batches around it is what PaLM's training did by
hand (2204.02311, section 5.1).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from stepwell.sections.optim import GuardConfig
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
    (None where the value is not finite; the ceiling of the loss has no median).
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
LOSS_SPIKE_NATS = 3.0
# What the state of an earlier version may lack.
NEWER = {"first_loss", "any_good", "recent"}


class GuardStop(TrainingError):
    """The guard has given up. verdict, grad_norm: of the step that it refused last."""

    def __init__(self, message: str, verdict: Verdict, grad_norm: float):
        super().__init__(message)
        self.verdict, self.grad_norm = verdict, grad_norm


class Guard:
    """Judges every step from values that are the same on all ranks, so all ranks agree.

    Spikes are measured against the median of the last `window` good values, and looked for once
    there are min_history of them (a run begins with a steep loss and large norms). A norm of zero
    (nothing to learn, as in a rollout of dead groups) is good, but no measure of the others. The
    loss has a ceiling besides, from the second step on: `loss_spike` nats above that of a blind
    guess, ln(vocab_size), or above the first good one, whichever is higher.

    vocab_size: of the model; None for a loss that is not in nats a token, which has no ceiling and
    of which no spike is looked for unless loss_spike says what one is. compute: the run's
    precision, for the advice.

    rewinds: how many there were. lr_scale: on all learning rates, until step `cooldown_until`
    (None: for good). jumped: batches that are left out, [first, last] of each stream by its name,
    counted from 1. recent: (stream, batch) of the last steps, as far as a rewind may want them.
    """

    def __init__(self, config: GuardConfig, vocab_size: int | None = None, compute: str = "bf16"):
        self.config, self.compute = config, compute
        self.blind_loss = math.log(vocab_size) if vocab_size else None
        usual = LOSS_SPIKE_NATS if vocab_size else 0.0
        self.loss_spike = usual if config.loss_spike is None else config.loss_spike
        self.first_loss: float | None = None
        self.any_good = False
        self.good: dict[str, deque[float]] = {key: deque(maxlen=config.window) for key in WATCHED}
        self.skips_in_a_row = 0
        self.num_skips = 0
        self.rewinds = 0
        self.lr_scale = 1.0
        self.cooldown_until: int | None = None
        self.jumped: dict[str, list[list[int]]] = {}
        self.recent: deque[tuple[str, int]] = deque(maxlen=config.suspect_steps)

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
        if self.first_loss is None:
            self.first_loss = loss
        self.any_good = True
        self.skips_in_a_row = 0
        return TAKEN

    def _first_bad(self, values: Mapping[str, float]) -> Verdict | None:
        for key, value in values.items():
            if not math.isfinite(value):
                return Verdict("skip", f"the {NAMES[key]} is {value}", key, value)
        if values["loss"] > self.ceiling:
            return self._above_ceiling(values["loss"])
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

    @property
    def ceiling(self) -> float:
        """What no loss may exceed; infinite while there is nothing to measure it by."""
        if self.blind_loss is None or self.first_loss is None or not self.loss_spike:
            return math.inf
        return max(self.blind_loss, self.first_loss) + self.loss_spike

    def _above_ceiling(self, loss: float) -> Verdict:
        assert self.blind_loss is not None
        assert self.first_loss is not None
        base = f"the {self.blind_loss:.4g} of a blind guess, ln(model.vocab_size)"
        if self.first_loss > self.blind_loss:
            base = f"the first good one, {self.first_loss:.4g}"
        margin = self.loss_spike
        reason = f"the loss, {loss:.4g}, is more than guard.loss_spike={margin:g} above {base}"
        return Verdict("skip", reason, "loss", loss, None, self.ceiling)

    def _margin(self, key: str) -> float:
        return self.loss_spike if key == "loss" else getattr(self.config, MARGINS[key])

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
            f"{trouble}; the weights are as the last good step left them. "
            f"{advice(bad, config, self.compute, any_good=self.any_good)}",
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

    def takes(self, stream: str, number: int) -> None:
        """Notes the batch of the next step, so that a rewind knows the last ones."""
        if self.config.action == "rewind" and (stream, number) not in self.recent:
            self.recent.append((stream, number))

    def rewound(self, before: Mapping[str, Any], step: int, stream: str, number: int) -> None:
        """Adds a rewind, after the state of an earlier checkpoint was loaded.

        before: the state at the bad step `step` (counted from 1), which knew of earlier rewinds
        and of the last batches; `number`: the batch of that step in its stream.
        """
        config = self.config
        self.num_skips, self.rewinds = before["num_skips"], before["rewinds"] + 1
        self.any_good = before.get("any_good", True)
        self.jumped = {name: [list(s) for s in spans] for name, spans in before["jumped"].items()}
        for name, batch in suspects(before.get("recent", []), stream, number, config.suspect_steps):
            self.jumped[name] = merged([*self.jumped.get(name, []), [batch, batch]])
        until = before["cooldown_until"]
        cooling = until is None or step <= until
        self.lr_scale = config.lr_factor * (before["lr_scale"] if cooling else 1.0)
        self.cooldown_until = step + config.cooldown_steps if config.cooldown_steps else None

    def branched(self) -> None:
        """Begins anew as a run that branches off: without what had gone wrong, skips, rewinds and
        the learning rate's factor. The medians and the batches that are left out stay."""
        self.skips_in_a_row = self.num_skips = self.rewinds = 0
        self.lr_scale, self.cooldown_until = 1.0, None

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
            "first_loss": self.first_loss,
            "any_good": self.any_good,
            "recent": [list(pair) for pair in self.recent],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError for what an earlier version of Stepwell has written."""
        if missing := sorted(self.state().keys() - state.keys() - NEWER):
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
        self.first_loss = state.get("first_loss", next(iter(self.good["loss"]), None))
        self.any_good = bool(state.get("any_good", True))
        recent = ((str(name), int(number)) for name, number in state.get("recent", []))
        self.recent = deque(recent, maxlen=self.config.suspect_steps)


def suspects(
    recent: Iterable[Sequence[Any]], stream: str, number: int, count: int
) -> list[tuple[str, int]]:
    """The last `count` batches up to batch `number` of `stream`, the last one first. recent: the
    (stream, batch) of the last steps; before these the batches of their first one's stream come."""
    found = [(str(name), int(batch)) for name, batch in recent]
    if not found or found[-1] != (stream, number):
        found.append((stream, number))
    found = found[::-1][:count]
    name, first = found[-1]
    return found + [(name, batch) for batch in range(first - 1, 0, -1)][: count - len(found)]


def merged(spans: list[list[int]]) -> list[list[int]]:
    """The same numbers in as few [first, last] as can be, in order."""
    found: list[list[int]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1] + 1:
            found[-1][1] = max(found[-1][1], last)
        else:
            found.append([first, last])
    return found


def advice(bad: Verdict, config: GuardConfig, compute: str = "bf16", any_good: bool = True) -> str:
    """What to change, by the keys' names. any_good: whether the run has taken a step."""
    look = "look at the layer, the weights and the sample ids in events.jsonl"
    precision = f"try precision.compute='bf16' instead of {compute!r}"
    narrow = compute in ("fp16", "fp8")
    if bad.threshold is None and not any_good:
        return (
            "No step was good, so this is no matter of the learning rate: "
            f"{look}{f', and {precision}' if narrow else ''}; the weights that the run starts from "
            "(model.init, model.init_std) or its data are at fault."
        )
    if bad.threshold is None:
        return (
            "Go on from an earlier checkpoint (checkpoint.branch_from) with a lower optim.lr or a "
            f"longer optim.schedule.warmup_steps{f', {precision},' if narrow else ''} and {look}"
            + _or_rewind(config)
        )
    if bad.median is None:
        return (
            "Lower optim.lr or lengthen optim.schedule.warmup_steps, and start again or go on from "
            "an earlier checkpoint (checkpoint.branch_from)" + _or_rewind(config)
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
