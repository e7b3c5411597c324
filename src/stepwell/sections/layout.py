"""Where and how a run computes: the sections `layout`, `remat`, `offload` and `precision`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ValidationInfo, field_validator, model_validator

from stepwell.schema import Above0, Flag, NonNegative, Positive, Section, Whole, check_idle


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
        if self.mode != "every":
            check_idle(self, "remat", ["every"], f"with remat.mode={self.mode!r}")
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
    shadow_tolerance: Above0 = 0.2


class LossScaleConfig(Section):
    """fp16 only: the loss is multiplied by a factor that halves when a gradient overflows and
    doubles after growth_steps steps without (1710.03740)."""

    initial: Above0 = 65536.0
    growth_steps: Positive = 2000


class PrecisionConfig(Section):
    """compute: dtype of activations and of the weights as used; master weights are float32."""

    compute: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    reduce: Literal["bf16", "fp32", "fp64"] = "fp32"
    param: Literal["fp32", "fp64"] = "fp32"
    fp8: Fp8Config = Fp8Config()
    loss_scale: LossScaleConfig = LossScaleConfig()

    @field_validator("compute", "reduce", "param", mode="before")
    @classmethod
    def _eight_bits(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and value.casefold() in ("fp8", "float8", "e4m3", "e5m2"):
            raise ValueError(
                f"precision.{info.field_name}={value!r} is none of its dtypes: products in 8 bits "
                "are precision.fp8.recipe='tensorwise' (or another recipe); leave this one as it is"
            )
        return value
