"""A run is a value: one frozen configuration that plan, engine and diagnose read.

Every rule that involves two fields is checked here, before torch is imported. Paths in a recipe
are relative to the working directory. See `docs/config.md`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, ValidationError, model_validator

from stepwell.schema import Section, assign, explain, read_toml
from stepwell.types import ConfigError

# Strict: pydantic would otherwise take true for 1, "7" for 7 and 1 for true.
Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]
Positive = Annotated[int, Field(strict=True, gt=0)]
Dimension = Annotated[int, Field(strict=True, gt=0, le=1 << 24)]
NonNegative = Annotated[int, Field(strict=True, ge=0)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]


class RopeScaling(Section):
    """Llama 3's frequency-dependent stretch (Llama 3 herd, 2407.21783, and its released config)."""

    kind: Literal["llama3"] = "llama3"
    factor: Annotated[float, Field(strict=True, ge=1)] = 8.0
    low_freq_factor: Annotated[float, Field(strict=True, gt=0)] = 1.0
    high_freq_factor: Annotated[float, Field(strict=True, gt=0)] = 4.0
    original_max_seq_len: Positive = 8192

    @model_validator(mode="after")
    def _rules(self) -> RopeScaling:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"model.rope_scaling.low_freq_factor={self.low_freq_factor} must be below "
                f"high_freq_factor={self.high_freq_factor}; the released models have 1 and 4"
            )
        return self


class ModelConfig(Section):
    """A decoder's dimensions: Llama, Qwen2, Qwen3 (dense) and Mistral are settings of these.

    family names the Hugging Face architecture that an export is written as.
    init: a folder to start from (a Stepwell checkpoint or a Hugging Face folder), or a .gguf file;
    the dimensions must then match, and may be left to `resolve_model`.
    """

    family: Literal["llama", "qwen2", "qwen3", "mistral"] = "llama"
    vocab_size: Dimension = 4096
    num_layers: Dimension = 6
    d_model: Dimension = 256
    num_heads: Dimension = 4
    num_kv_heads: Dimension = 2
    head_dim: Dimension = 64
    d_ff: Dimension = 704
    norm_eps: Annotated[float, Field(strict=True, gt=0)] = 1e-5
    rope_theta: Annotated[float, Field(strict=True, gt=0)] = 10_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: Flag = False
    qkv_bias: Flag = False
    tied: Flag = True
    sliding_window: Positive | None = None
    max_seq_len: Positive = 2048
    init_std: Annotated[float, Field(strict=True, gt=0)] = 0.02
    init: str | None = None

    @model_validator(mode="after")
    def _rules(self) -> ModelConfig:
        if self.num_heads % self.num_kv_heads:
            legal = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            best = min(legal, key=lambda k: abs(k - self.num_kv_heads))
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} must divide model.num_heads="
                f"{self.num_heads}; the nearest that does is {best}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.head_dim={self.head_dim} must be even (RoPE rotates pairs); "
                f"the nearest is {self.head_dim + 1}"
            )
        if self.qk_norm != (self.family == "qwen3"):
            raise ValueError(
                f"model.qk_norm={self.qk_norm} does not fit family {self.family!r}: "
                f"qwen3 has QK-norm, the others have none (set qk_norm={not self.qk_norm})"
            )
        if self.qkv_bias != (self.family == "qwen2"):
            raise ValueError(
                f"model.qkv_bias={self.qkv_bias} does not fit family {self.family!r}: "
                "qwen2 has biases on q, k and v, the others have none "
                f"(set qkv_bias={not self.qkv_bias})"
            )
        if self.sliding_window is not None and self.family != "mistral":
            raise ValueError(
                f"model.sliding_window={self.sliding_window} does not fit family "
                f"{self.family!r}: mistral has a sliding window, the others see the whole context "
                "(leave it out)"
            )
        return self


class LayoutConfig(Section):
    """How the ranks are arranged: pp x dp_replicate x dp_shard x cp x tp of them, in this order,
    the last varying fastest. -1 for dp_shard: all ranks that remain.

    zero: what the ranks of dp_shard x cp divide among them (ZeRO, 1910.02054): 0 nothing, 1
    optimiser state, 2 gradients too, 3 parameters too. reshard_after_forward (zero 3): gather a
    block's parameters a second time for the backward pass, keep them, or keep a copy within the
    node. reduce_gradients: sum them over the ranks after every micro-batch (which keeps them
    sharded) or once a step; auto follows `zero`. prefetch_*: how many blocks' parameters are
    gathered ahead of the one at work.
    pp_schedule, pp_stages_per_rank, pp_layers: blocks of each stage in the model's order, None for
    an even split (the embedding and the head count as a block each).
    cp_method: ring (2310.01889) or all-to-all (Ulysses, 2309.14509).
    """

    pp: Positive = 1
    pp_schedule: Literal["gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev"] = "1f1b"
    pp_stages_per_rank: Positive = 1
    pp_layers: tuple[NonNegative, ...] | None = None
    dp_replicate: Positive = 1
    dp_shard: Whole = -1
    cp: Positive = 1
    cp_method: Literal["ring", "ulysses"] = "ring"
    tp: Positive = 1
    zero: Literal[0, 1, 2, 3] = 3
    reshard_after_forward: Literal["always", "never", "node"] = "always"
    reduce_gradients: Literal["auto", "step", "micro_batch"] = "auto"
    prefetch_forward: NonNegative = 1
    prefetch_backward: Positive = 1
    compile: Flag = False
    deterministic: Flag = False

    @model_validator(mode="after")
    def _rules(self) -> LayoutConfig:
        if self.dp_shard == 0 or self.dp_shard < -1:
            raise ValueError(
                f"layout.dp_shard={self.dp_shard} must be positive, or -1 for all ranks that "
                f"remain; the nearest is {1 if self.dp_shard == 0 else -1}"
            )
        return self


class RematConfig(Section):
    """Activation checkpointing: what a block keeps for its backward pass instead of computing it
    again. full: only its input. every: full for each `every`-th block. sqrt: groups of about
    sqrt(layers) blocks keep the input of the group (1604.06174). selective: attention and the
    products stay, what is cheap is computed again. budget: as little recomputation as keeps the
    activations of a micro-batch within budget_bytes."""

    mode: Literal["none", "full", "every", "sqrt", "selective", "budget"] = "none"
    every: Positive = 2
    budget_bytes: Positive | None = None

    @model_validator(mode="after")
    def _rules(self) -> RematConfig:
        if (self.mode == "budget") != (self.budget_bytes is not None):
            raise ValueError(
                f"remat.budget_bytes={self.budget_bytes} and remat.mode={self.mode!r} go together: "
                "mode 'budget' needs a number of bytes, the other modes have none"
            )
        return self


class OffloadConfig(Section):
    """What lives on the host. optimizer: master weights and optimiser state, which step there
    (ZeRO-Offload, 2101.06840). parameters: shards and gradients too. activations: what blocks save
    for the backward pass."""

    optimizer: Flag = False
    parameters: Flag = False
    activations: Flag = False


class Fp8Config(Section):
    """Linear layers in 8 bits (2209.05433): E4M3 forward, E5M2 for gradients.

    tensorwise: one scale a tensor from its current maximum; delayed: from the largest of the last
    `history` steps; rowwise: a scale a row. keep: patterns of further linears that stay in
    precision.compute, besides the embedding, the head, norms and routers. min_dim: products with a
    smaller dimension stay too. wgrad_high_precision: the weight's gradient is computed in
    precision.compute. shadow_every: every so many steps the step is also computed without fp8, and
    a relative difference of the gradients above shadow_tolerance is reported.
    """

    recipe: Literal["none", "tensorwise", "delayed", "rowwise"] = "none"
    history: Positive = 16
    keep: tuple[str, ...] = ()
    min_dim: Positive = 16
    wgrad_high_precision: Flag = False
    shadow_every: NonNegative = 0
    shadow_tolerance: Annotated[float, Field(strict=True, gt=0)] = 0.2


class LossScaleConfig(Section):
    """fp16 only: the loss is multiplied by a factor that halves when a gradient overflows and
    doubles after growth_steps steps without (1710.03740)."""

    initial: Annotated[float, Field(strict=True, gt=0)] = 65536.0
    growth_steps: Positive = 2000


class PrecisionConfig(Section):
    """compute: dtype of activations and of the weights as used; master weights are float32."""

    compute: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    reduce: Literal["bf16", "fp32", "fp64"] = "fp32"
    param: Literal["fp32", "fp64"] = "fp32"
    fp8: Fp8Config = Fp8Config()
    loss_scale: LossScaleConfig = LossScaleConfig()


class SourceConfig(Section):
    """A token store and its share of the samples. max_epochs: how often the whole run may read it;
    then its share goes to the others, in proportion to their weights."""

    path: str
    weight: Annotated[float, Field(strict=True, gt=0)] = 1.0
    max_epochs: Annotated[float, Field(strict=True, gt=0)] | None = None


class StageConfig(Section):
    """A part of the run that reads its own sources: a phase of the schedule, or all steps from the
    fraction `start` of train.steps until the next stage's."""

    phase: Literal["warmup", "stable", "decay"] | None = None
    start: Annotated[float, Field(strict=True, ge=0, lt=1)] | None = None
    sources: tuple[SourceConfig, ...]

    @model_validator(mode="after")
    def _rules(self) -> StageConfig:
        if (self.phase is None) == (self.start is None):
            raise ValueError(
                f"a stage of data.stages has phase={self.phase!r} and start={self.start}, but "
                'needs one of them: phase = "decay", or start = 0.8'
            )
        if not self.sources:
            raise ValueError(
                f"the stage of {self.where} has no sources; name at least one token store"
            )
        return self

    @property
    def where(self) -> str:
        return f"phase={self.phase!r}" if self.phase else f"start={self.start}"


# What the section [data] had once, and what says the same now.
FORMER_DATA_KEYS = {
    "decay_sources": """a [[data.stages]] table with phase = "decay" and these as its sources""",
    "shuffle": """data.order = "shuffled" (for true) or "sequential" (for false)""",
}


class DataConfig(Section):
    """sources: what a pretraining run reads in the steps to which no stage of `stages` applies.

    order: of a store's rows within an epoch. quality-ascending: by the mean score of their tokens,
    the best last; the store must have scores.
    path: a JSONL or Parquet file of `messages` or `prompt`+`completion` rows (sft), or of prompts
    with an `answer` column (grpo).
    heldout: stores that are scored during training (pretrain, sft), never trained on;
    heldout_path: rows like those of `path` instead (sft).
    tokenizer: a folder or file with a `tokenizer.json`.
    """

    sources: tuple[SourceConfig, ...] = ()
    stages: tuple[StageConfig, ...] = ()
    heldout: tuple[SourceConfig, ...] = ()
    path: str | None = None
    heldout_path: str | None = None
    tokenizer: str | None = None
    seq_len: Positive = 512
    document_mask: Flag = True
    order: Literal["shuffled", "sequential", "quality-ascending"] = "shuffled"

    @model_validator(mode="before")
    @classmethod
    def _former_keys(cls, values: Any) -> Any:
        for key, now in FORMER_DATA_KEYS.items():
            if isinstance(values, Mapping) and key in values:
                raise ValueError(f"data.{key} is no longer a key; write {now}")
        return values

    @model_validator(mode="after")
    def _rules(self) -> DataConfig:
        for key, sources in [
            ("data.sources", self.sources),
            *((f"data.stages.{i}.sources", stage.sources) for i, stage in enumerate(self.stages)),
        ]:
            paths = [os.path.normpath(source.path) for source in sources]
            twice = next((path for path in paths if paths.count(path) > 1), None)
            if twice is not None:
                raise ValueError(
                    f"{key} lists {twice} twice; list it once, with the sum of weights"
                )
        self._check_stages()
        self._check_caps()
        return self

    def _check_caps(self) -> None:
        """A cap is on what the whole run reads of a store, so the run must agree on it."""
        caps: dict[str, tuple[str, float | None]] = {}
        for key, sources in [
            ("data.sources", self.sources),
            *((f"data.stages.{i}.sources", stage.sources) for i, stage in enumerate(self.stages)),
        ]:
            for source in sources:
                where, cap = caps.setdefault(os.path.abspath(source.path), (key, source.max_epochs))
                if cap != source.max_epochs:
                    raise ValueError(
                        f"{source.path} has {cap_text(cap)} in {where} and "
                        f"{cap_text(source.max_epochs)} in {key}, but a cap is on what the whole "
                        "run reads of a store; write the same max_epochs in both (or in neither)"
                    )

    def _check_stages(self) -> None:
        capped = next((s for s in self.heldout if s.max_epochs is not None), None)
        if capped is not None:
            raise ValueError(
                f"data.heldout: max_epochs={capped.max_epochs} belongs to sources that are trained "
                "on; held-out rows are scored once (leave it out)"
            )
        phases = [stage.phase for stage in self.stages if stage.phase]
        starts = [stage.start for stage in self.stages if stage.start is not None]
        if phases and starts:
            raise ValueError(
                f"data.stages mix phases ({', '.join(phases)}) and fractions "
                f"({', '.join(map(str, starts))}), which could overlap; give all of them `phase`, "
                "or all of them `start`"
            )
        if len(set(phases)) < len(phases):
            raise ValueError(
                f"data.stages name a phase twice ({', '.join(phases)}); a phase has one stage"
            )
        if any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(
                f"data.stages have starts {', '.join(map(str, starts))}, which must ascend; in "
                f"order they are {', '.join(map(str, sorted(set(starts))))}"
            )


def cap_text(max_epochs: float | None) -> str:
    return "no max_epochs" if max_epochs is None else f"max_epochs={max_epochs:g}"


def first_step(start: float, steps: int) -> int:
    """The step (0 is the first) at which a stage begins that starts at the fraction `start`."""
    return int(start * steps + 1e-9)


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


class OptimConfig(Section):
    """Decay applies to matrices, never to norms and biases. clip_norm 0: no clipping.

    muon takes hidden matrices only (Muon, 2502.16982); embeddings, the head, norms and biases stay
    with AdamW at `lr`. adamw8bit keeps AdamW's moments in 8 bits (2110.02861).
    release_gradients: step each parameter as soon as its gradient is there, and free the gradient.
    """

    kind: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    release_gradients: Flag = False
    lr: Annotated[float, Field(strict=True, gt=0)] = 1e-3
    muon_lr: Annotated[float, Field(strict=True, gt=0)] = 2e-2
    beta1: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(strict=True, gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(strict=True, ge=0)] = 0.1
    clip_norm: Annotated[float, Field(strict=True, ge=0)] = 1.0
    schedule: ScheduleConfig = ScheduleConfig()


class GuardConfig(Section):
    """What is done about a step that would harm the weights: its loss, gradient norm or update norm
    is not finite, or spikes against the running median of the last `window` good steps.

    action: "none" lets it through; in all others it changes nothing. skip goes on with the next
    batch; stop ends the run. rewind goes back to the last checkpoint before the last
    `suspect_steps` batches, leaves these out, and lowers the learning rate to `lr_factor` of itself
    until `cooldown_steps` after the bad step (0: for good).
    Spikes: a loss more than loss_spike (nats a token) above its median, a gradient norm above
    spike_factor times its median, an update's norm over the learning rate above
    update_spike_factor times its median. loss_spike or update_spike_factor 0: not looked for.
    From the second step on, a loss is bad too that is more than loss_spike above ln(vocab_size) and
    above the first good loss.
    """

    action: Literal["none", "skip", "rewind", "stop"] = "skip"
    loss_spike: Annotated[float, Field(strict=True, ge=0)] = 3.0
    spike_factor: Annotated[float, Field(strict=True, gt=1)] = 20.0
    update_spike_factor: Annotated[float, Field(strict=True, ge=0)] = 10.0
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
    z_loss: Annotated[float, Field(strict=True, ge=0)] = 0.0
    label_smoothing: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0


class Pretrain(Section):
    kind: Literal["pretrain"] = "pretrain"


class SFT(Section):
    """epochs bounds the run together with train.steps: whichever ends first (None: steps only)."""

    kind: Literal["sft"] = "sft"
    epochs: Annotated[float, Field(strict=True, gt=0)] | None = None
    max_rows: Positive | None = None


class GRPO(Section):
    """Group-relative policy optimisation (2402.03300) with verifiable rewards.

    advantage: sample-standard-deviation, or none (Dr. GRPO, 2503.20783).
    """

    kind: Literal["grpo"] = "grpo"
    prompts_per_step: Positive = 16
    group_size: Annotated[int, Field(strict=True, ge=2)] = 8
    max_new_tokens: Positive = 64
    temperature: Annotated[float, Field(strict=True, gt=0)] = 1.0
    advantage: Literal["std", "none"] = "std"
    aggregate: Literal["token", "sequence"] = "token"
    clip_low: Fraction = 0.2
    clip_high: Annotated[float, Field(strict=True, gt=0)] = 0.28
    updates_per_rollout: Positive = 1
    verifier: str = "exact"


Method = Annotated[Pretrain | SFT | GRPO, Field(discriminator="kind")]


class TrainConfig(Section):
    """A step sees global_batch_rows rows of data.seq_len tokens over all ranks; each rank takes
    micro_batch_rows at a time. (grpo: rows are packed rollouts, global_batch_rows is ignored.)
    Every eval_every steps, and at the end, the same eval_rows held-out rows are scored."""

    steps: Positive = 1000
    global_batch_rows: Positive = 32
    micro_batch_rows: Positive = 8
    seed: NonNegative = 0
    log_every: Positive = 1
    eval_every: NonNegative = 0
    eval_rows: Positive = 64


class LogConfig(Section):
    tensorboard: Flag = False
    wandb_project: str | None = None


class Run(Section):
    """The whole run. `Run.load` reads TOML plus dotted overrides, `save` writes it resolved."""

    name: str = "run"
    dir: str = "runs/run"
    model: ModelConfig = ModelConfig()
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
        if self.data.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"data.seq_len={self.data.seq_len} exceeds model.max_seq_len="
                f"{self.model.max_seq_len}; the nearest legal value is {self.model.max_seq_len}"
            )
        self._check_stages()
        self._check_heldout()
        self._check_rewind()
        if self.precision.param == "fp64" and self.precision.compute != "fp64":
            raise ValueError(
                "precision.param='fp64' is for exact comparisons and needs precision.compute="
                f"'fp64', not {self.precision.compute!r}"
            )
        rows, ranks = self.train.global_batch_rows, self.layout.dp_replicate
        if self.method.kind != "grpo" and rows % ranks:
            raise ValueError(
                f"train.global_batch_rows={rows} must be a multiple of layout.dp_replicate={ranks}"
                f"; the nearest is {max(1, round(rows / ranks)) * ranks}"
            )
        if self.method.kind == "grpo" and self.method.max_new_tokens >= self.data.seq_len:
            raise ValueError(
                f"method.max_new_tokens={self.method.max_new_tokens} leaves no room for a prompt "
                f"in data.seq_len={self.data.seq_len}; lower it below {self.data.seq_len} or "
                f"raise data.seq_len above {self.method.max_new_tokens}"
            )
        return self

    def _check_stages(self) -> None:
        """Stages and orders belong to pretraining, and every stage must have steps."""
        data, schedule, steps = self.data, self.optim.schedule, self.train.steps
        kind = self.method.kind
        if data.stages and kind != "pretrain":
            raise ValueError(
                f"data.stages ({len(data.stages)} given) belong to pretrain, not {kind}; leave "
                "them out"
            )
        if data.order == "quality-ascending" and kind != "pretrain":
            raise ValueError(
                f"data.order='quality-ascending' belongs to pretrain, not {kind}; the nearest "
                "legal value is 'sequential'"
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
        if data.heldout_path and kind != "sft":
            raise ValueError(
                f"data.heldout_path={data.heldout_path!r} belongs to method.kind='sft', not "
                f"{kind!r}; leave it out{', or use data.heldout' if kind == 'pretrain' else ''}"
            )
        if len(given) == 2:
            raise ValueError(
                "data.heldout and data.heldout_path exclude each other: one held-out loss is kept"
            )
        if kind == "grpo" and (every or given):
            what = f"train.eval_every={every}" if every else f"data.{given[0]}"
            raise ValueError(
                f"{what} belongs to pretrain and sft; grpo shows its rewards, and `stepwell eval` "
                "scores its checkpoints (leave it out)"
            )
        if every and not given:
            also = " or data.heldout_path" if kind == "sft" else ""
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
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + f".tmp{os.getpid()}")
        try:
            temporary.write_text(tomli_w.dumps(self.model_dump(exclude_none=True)), "utf-8")
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            error.filename = error.filename or str(path)  # a full disk names no file
            raise
