"""How a run learns: the sections `optim`, `guard`, `checkpoint` and `loss`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stepwell.schema import (
    Above0,
    AtLeast0,
    Flag,
    Fraction,
    NonNegative,
    Positive,
    Section,
    check_idle,
)


class ScheduleConfig(Section):
    """The learning rate over the run, as a fraction of optim.lr.

    wsd: warm-up, stable, then `decay_steps` to `final_fraction` (shape: 1-sqrt, linear, cosine;
    2405.18392). cosine and linear decay from the end of warm-up to the last step.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "wsd"
    warmup_steps: NonNegative = 0
    decay_steps: NonNegative = 0
    decay_shape: Literal["1-sqrt", "linear", "cosine"] = "1-sqrt"
    final_fraction: Fraction = 0.0

    @model_validator(mode="after")
    def _rules(self) -> ScheduleConfig:
        where = f"with optim.schedule.kind={self.kind!r}"
        if self.kind != "wsd":
            check_idle(self, "optim.schedule", ["decay_shape"], where)
        if self.kind == "constant":
            check_idle(self, "optim.schedule", ["final_fraction"], where)
        return self


class OptimConfig(Section):
    """Decay applies to matrices, never to norms and biases. clip_norm 0: no clipping.

    muon takes hidden matrices only (Muon, 2502.16982); embeddings, the head, norms and biases stay
    with AdamW at `lr`. adamw8bit keeps AdamW's moments in 8 bits (2110.02861).
    release_gradients: step each parameter as soon as its gradient is there, and free the gradient.
    """

    kind: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    release_gradients: Flag = False
    lr: Above0 = 1e-3
    muon_lr: Above0 = 2e-2
    beta1: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.95
    eps: Above0 = 1e-8
    weight_decay: AtLeast0 = 0.1
    clip_norm: AtLeast0 = 1.0
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _rules(self) -> OptimConfig:
        if self.kind != "muon":
            check_idle(self, "optim", ["muon_lr"], f"with optim.kind={self.kind!r}")
        return self


class GuardConfig(Section):
    """What is done about a step that would harm the weights: its loss, gradient norm or update norm
    is not finite, or spikes against the running median of the last `window` good steps.

    action: "none" lets it through; in all others it changes nothing. skip goes on with the next
    batch; stop ends the run. rewind goes back to the last checkpoint before the last
    `suspect_steps` batches, leaves these out, and lowers the learning rate to `lr_factor` of itself
    until `cooldown_steps` after the bad step (0: for good).
    Spikes: a loss more than loss_spike above its median (none: 3 nats where the loss is in nats a
    token, in pretrain and sft; 0 in other methods, whose losses have scales of their own), a
    gradient norm above
    spike_factor times its median, an update's norm over the learning rate above
    update_spike_factor times its median. loss_spike or update_spike_factor 0: not looked for.
    From the second step on, a loss in nats is bad too that is more than loss_spike above
    ln(vocab_size) and above the first good loss.
    """

    action: Literal["none", "skip", "rewind", "stop"] = "skip"
    loss_spike: AtLeast0 | None = None
    spike_factor: Annotated[float, Field(strict=True, gt=1)] = 20.0
    update_spike_factor: AtLeast0 = 10.0
    window: Positive = 64
    min_history: Positive = 16
    max_skips_in_a_row: Positive = 5
    suspect_steps: Positive = 10
    max_rewinds: Positive = 3
    lr_factor: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.5
    cooldown_steps: NonNegative = 100

    @model_validator(mode="after")
    def _rules(self) -> GuardConfig:
        if self.min_history > self.window:
            raise ValueError(
                f"guard.min_history={self.min_history} can never be reached within guard.window="
                f"{self.window} steps; the nearest legal value is {self.window}"
            )
        if 0 < self.update_spike_factor <= 1:
            raise ValueError(
                f"guard.update_spike_factor={self.update_spike_factor:g} would refuse every second "
                "step; it must be above 1, or 0 to look for no spike"
            )
        return self


class CheckpointConfig(Section):
    """keep_best: that many of the lowest held-out loss stay besides keep_last; each evaluation then
    ends in a checkpoint. branch_from: a checkpoint, or a run's folder, whose whole state (weights,
    optimiser, step, data position) this run starts from, e.g. to branch a decay off a stable
    phase."""

    every_steps: Positive = 200
    keep_last: Positive = 2
    keep_best: NonNegative = 0
    asynchronous: Flag = True
    branch_from: str | None = None


class LossConfig(Section):
    """z_loss: weight of log(Z)^2 (PaLM, 2204.02311). keep_logits: hold the logits of the
    micro-batch in compute precision for the backward pass instead of computing them twice;
    auto keeps them while they are under 256 MiB."""

    chunk_tokens: Positive = 1024
    keep_logits: Literal["auto", "always", "never"] = "auto"
    z_loss: AtLeast0 = 0.0
    label_smoothing: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
