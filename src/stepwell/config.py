"""A run is a value: one frozen configuration that plan, engine and diagnose read.

Its sections are declared in `sections`; every rule that involves two of them is checked here,
before torch is imported. Paths in a recipe are relative to the working directory. See
`docs/config.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError, model_validator

from stepwell.files import write_text
from stepwell.schema import Flag, NonNegative, Positive, Section, assign, explain, read_toml
from stepwell.sections.data import DataConfig, first_step
from stepwell.sections.layout import LayoutConfig, OffloadConfig, PrecisionConfig, RematConfig
from stepwell.sections.methods import PPO, Method, Pretrain, RewardModel, SampledMethod
from stepwell.sections.model import LoraConfig, ModelConfig
from stepwell.sections.optim import CheckpointConfig, GuardConfig, LossConfig, OptimConfig
from stepwell.types import ConfigError


class TrainConfig(Section):
    """A step sees global_batch_rows rows of data.seq_len tokens over all ranks; each rank takes
    micro_batch_rows at a time. (Methods that count pairs, rows or prompts pack them, and refuse
    global_batch_rows.) Every eval_every steps, and at the end, the same eval_rows held-out rows
    are scored."""

    steps: Positive = 1000
    global_batch_rows: Positive = 32
    micro_batch_rows: Positive = 8
    seed: NonNegative = 0
    log_every: Positive = 1
    eval_every: NonNegative = 0
    eval_rows: Positive = 64


class LogConfig(Section):
    """profile_step: the step that is traced into `<dir>/traces`; 0: none."""

    profile_step: NonNegative = 0
    tensorboard: Flag = False
    wandb_project: str | None = None


class Run(Section):
    """The whole run. `Run.load` reads TOML plus dotted overrides, `save` writes it resolved."""

    name: str = "run"
    dir: str = "runs/run"
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    layout: LayoutConfig = LayoutConfig()
    remat: RematConfig = RematConfig()
    offload: OffloadConfig = OffloadConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    loss: LossConfig = LossConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    train: TrainConfig = TrainConfig()
    log: LogConfig = LogConfig()
    method: Method = Pretrain()

    @model_validator(mode="before")
    @classmethod
    def _head_of_method(cls, values: Any) -> Any:
        """A method that needs a score has it without being told."""
        if not isinstance(values, Mapping):
            return values
        model, method = values.get("model", {}), values.get("method", {})
        if isinstance(model, Mapping) and isinstance(method, Mapping) and "head" not in model:
            head = "score" if method.get("kind") == "reward" else None
            if method.get("kind") == "ppo" and method.get("critic") == "shared":
                head = "both"
            if head:
                return {**values, "model": {**model, "head": head}}
        return values

    @model_validator(mode="after")
    def _rules(self) -> Run:
        schedule, steps = self.optim.schedule, self.train.steps
        if schedule.warmup_steps + schedule.decay_steps > steps:
            raise ValueError(
                f"optim.schedule.warmup_steps={schedule.warmup_steps} plus decay_steps="
                f"{schedule.decay_steps} exceed train.steps={steps}; lower them or raise "
                f"train.steps to {schedule.warmup_steps + schedule.decay_steps}"
            )
        if schedule.decay_steps and schedule.kind != "wsd":
            raise ValueError(
                f"optim.schedule.decay_steps={schedule.decay_steps} belongs to kind 'wsd'; "
                f"kind {schedule.kind!r} decays over all steps after warm-up (leave it at 0)"
            )
        if self.log.profile_step > steps:
            raise ValueError(
                f"log.profile_step={self.log.profile_step} is after the last step; the nearest "
                f"legal value is train.steps={steps}"
            )
        if self.data.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"data.seq_len={self.data.seq_len} exceeds model.max_seq_len="
                f"{self.model.max_seq_len}; the nearest legal value is {self.model.max_seq_len}"
            )
        self._check_head()
        self._check_stages()
        self._check_heldout()
        self._check_idle_keys()
        self._check_rewind()
        if self.precision.param == "fp64" and self.precision.compute != "fp64":
            raise ValueError(
                "precision.param='fp64' is for exact comparisons and needs precision.compute="
                f"'fp64', not {self.precision.compute!r}"
            )
        rows, ranks = self.train.global_batch_rows, self.layout.dp_replicate
        if self.method.row_steps and rows % ranks:
            raise ValueError(
                f"train.global_batch_rows={rows} must be a multiple of layout.dp_replicate={ranks}"
                f"; the nearest is {max(1, round(rows / ranks)) * ranks}"
            )
        if (
            isinstance(self.method, SampledMethod)
            and self.method.max_new_tokens >= self.data.seq_len
        ):
            raise ValueError(
                f"method.max_new_tokens={self.method.max_new_tokens} leaves no room for a prompt "
                f"in data.seq_len={self.data.seq_len}; lower it below {self.data.seq_len} or "
                f"raise data.seq_len above {self.method.max_new_tokens}"
            )
        return self

    def _check_head(self) -> None:
        method, head = self.method, self.model.head
        wanted = "score" if method.kind == "reward" else "lm"
        if isinstance(method, PPO) and method.critic == "shared":
            wanted = "both"
        if head != wanted:
            raise ValueError(
                f"model.head={head!r} does not fit {method.kind}"
                f"{' with a shared critic' if wanted == 'both' else ''}, which trains a model with "
                f"model.head={wanted!r} (leave it out)"
            )
        if method.kind != "reward" and self.model.num_labels != 1:
            what = "a critic's score is one number" if head == "both" else "it has no score"
            raise ValueError(
                f"model.num_labels={self.model.num_labels} is of a reward model's score; {what} in "
                f"{method.kind}: the nearest legal value is 1"
            )
        if isinstance(method, RewardModel):
            legal = {"bradley-terry": 1, "regression": 1, "process": 2}.get(method.objective)
            if legal is not None and self.model.num_labels > legal:
                raise ValueError(
                    f"model.num_labels={self.model.num_labels} does not fit method.objective="
                    f"{method.objective!r}; the nearest legal value is {legal}"
                )

    def _check_stages(self) -> None:
        """Stages and orders belong to pretraining, and every stage must have steps."""
        data, schedule, steps = self.data, self.optim.schedule, self.train.steps
        kind = self.method.kind
        if data.stages and kind != "pretrain":
            raise ValueError(
                f"data.stages ({len(data.stages)} given) belong to pretrain, not {kind}; leave "
                "them out"
            )
        orders = self.method.orders
        if data.order not in orders:
            owners = "pretrain" if data.order == "quality-ascending" else "pretrain, sft and reward"
            raise ValueError(
                f"data.order={data.order!r} belongs to {owners}, not {kind}; the nearest legal "
                f"value is {orders[-1]!r}"
            )
        decays = schedule.decay_steps
        steady = schedule.kind == "constant" or schedule.kind == "wsd"
        present = {
            "warmup": schedule.warmup_steps > 0,
            "stable": steady and schedule.warmup_steps + decays < steps,
            "decay": decays > 0,
        }
        advice = {
            "warmup": "set optim.schedule.warmup_steps to 1 or more",
            "stable": "set optim.schedule.kind='wsd', with warmup_steps + decay_steps below "
            f"train.steps={steps}",
            "decay": "set optim.schedule.kind='wsd' and decay_steps to 1 or more",
        }
        for stage in data.stages:
            if stage.phase is not None and not present[stage.phase]:
                raise ValueError(
                    f"data.stages has a stage of phase={stage.phase!r}, which the schedule (kind="
                    f"{schedule.kind!r}, warmup_steps={schedule.warmup_steps}, decay_steps="
                    f"{decays}) does not have; {advice[stage.phase]}, or give the stage a `start`"
                )
        firsts = [
            first_step(stage.start, steps) for stage in data.stages if stage.start is not None
        ]
        if len(set(firsts)) < len(firsts):
            starts = ", ".join(str(stage.start) for stage in data.stages)
            raise ValueError(
                f"data.stages with starts {starts} begin at steps {', '.join(map(str, firsts))} of "
                f"train.steps={steps}, so one would have no step; move them apart"
            )

    def _check_idle_keys(self) -> None:
        """What a method does not read stays at its default."""
        method, kind = self.method, self.method.kind
        rows, usual = self.train.global_batch_rows, TrainConfig.model_fields["global_batch_rows"]
        if not method.row_steps and rows != usual.default:
            raise ValueError(
                f"train.global_batch_rows={rows} belongs to pretrain and sft; a step of {kind} is "
                f"{method.step_key}={method.units_per_step}: set that, and leave "
                "train.global_batch_rows out"
            )
        for key in ("z_loss", "label_smoothing"):
            value = getattr(self.loss, key)
            if value and not method.loss_in_nats:
                own = kind in ("dpo", "online-dpo") and key == "label_smoothing"
                raise ValueError(
                    f"loss.{key}={value:g} belongs to the cross-entropy of pretrain and sft, not "
                    f"to {kind}; leave it at 0{', or set method.loss.label_smoothing' * own}"
                )
        if not (self.data.document_mask or method.masks_windows or self.data.heldout):
            raise ValueError(
                f"data.document_mask=false belongs to windows of token stores, and {kind} packs "
                "documents that never see each other; leave it at true"
            )

    def _check_rewind(self) -> None:
        """Some checkpoint must be older than the suspects, whenever the bad step comes."""
        guard, keep = self.guard, self.checkpoint
        kept_steps = keep.every_steps * (keep.keep_last - 1) + 1
        if guard.action == "rewind" and kept_steps < guard.suspect_steps:
            needed = -(-(guard.suspect_steps - 1) // keep.every_steps) + 1
            raise ValueError(
                f"guard.action='rewind' goes back over guard.suspect_steps={guard.suspect_steps} "
                f"steps, but checkpoint.keep_last={keep.keep_last} with every_steps="
                f"{keep.every_steps} may have only {kept_steps} behind it; the nearest legal "
                f"values are keep_last={needed}, or suspect_steps={kept_steps}"
            )

    def _check_heldout(self) -> None:
        """Held-out data, evaluation and keeping the best each need the one before."""
        data, kind, every = self.data, self.method.kind, self.train.eval_every
        given = [k for k in ("heldout", "heldout_path") if getattr(data, k)]
        if data.heldout_path and not self.method.heldout_rows:
            raise ValueError(
                f"data.heldout_path={data.heldout_path!r} belongs to sft, dpo and reward, not to "
                f"{kind}; leave it out{', or use data.heldout' if kind == 'pretrain' else ''}"
            )
        if data.heldout and kind not in ("pretrain", "sft"):
            raise ValueError(
                f"data.heldout names token stores, which pretrain and sft score, not {kind}; leave "
                f"it out{', or use data.heldout_path' if self.method.heldout_rows else ''}"
            )
        if len(given) == 2:
            raise ValueError(
                "data.heldout and data.heldout_path exclude each other: one held-out loss is kept"
            )
        if not self.method.evaluates and (every or given):
            what = f"train.eval_every={every}" if every else f"data.{given[0]}"
            raise ValueError(
                f"{what} belongs to pretrain, sft, dpo and reward; {kind} shows its rewards, and "
                "`stepwell eval` scores its checkpoints (leave it out)"
            )
        if every and not given:
            also = " or data.heldout_path" if self.method.heldout_rows else ""
            raise ValueError(
                f"train.eval_every={every} needs held-out data: set data.heldout{also}, or leave "
                "eval_every at 0"
            )
        if self.checkpoint.keep_best and not every:
            raise ValueError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} needs train.eval_every above 0 "
                "(the best are chosen by held-out loss); set it, or leave keep_best at 0"
            )

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Run:
        """Reads a TOML recipe and applies `overrides` (dotted key -> value).

        Raises ConfigError for a missing file, broken TOML, unknown keys and broken rules.
        """
        return cls.parse(read_toml(path), overrides, where=f"the recipe {path}")

    @classmethod
    def parse(
        cls,
        values: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        where: str = "the configuration",
    ) -> Run:
        """`values` with `overrides` (dotted key -> value or its text) applied, validated once.

        Raises ConfigError, which lists every problem; `where` names the origin of the values.
        """
        values = assign(values, overrides or {}, cls)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(explain(error, cls, where)) from error

    def save(self, path: str | Path) -> None:
        """Writes the resolved run as TOML, whole or not at all; `Run.load` gives an equal value."""
        write_text(path, tomli_w.dumps(self.model_dump(exclude_none=True)))
