"""What a run is: the sections `model` and `lora`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from stepwell.schema import Above0, Dimension, Flag, NonNegative, Positive, Section


class RopeScaling(Section):
    """Llama 3's frequency-dependent stretch (Llama 3 herd, 2407.21783, and its released config)."""

    kind: Literal["llama3"] = "llama3"
    factor: Annotated[float, Field(strict=True, ge=1)] = 8.0
    low_freq_factor: Above0 = 1.0
    high_freq_factor: Above0 = 4.0
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
    head: lm gives the next token's distribution, score num_labels numbers a token (a reward model,
    a critic), both the two (a policy that shares its trunk with its critic).
    """

    family: Literal["llama", "qwen2", "qwen3", "mistral"] = "llama"
    vocab_size: Dimension = 4096
    num_layers: Dimension = 6
    d_model: Dimension = 256
    num_heads: Dimension = 4
    num_kv_heads: Dimension = 2
    head_dim: Dimension = 64
    d_ff: Dimension = 704
    norm_eps: Above0 = 1e-5
    rope_theta: Above0 = 10_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: Flag = False
    qkv_bias: Flag = False
    tied: Flag = True
    sliding_window: Positive | None = None
    max_seq_len: Positive = 2048
    init_std: Above0 = 0.02
    init: str | None = None
    head: Literal["lm", "score", "both"] = "lm"
    num_labels: Positive = 1

    @property
    def has_lm_head(self) -> bool:
        return self.head != "score"

    @property
    def has_score(self) -> bool:
        return self.head != "lm"

    @property
    def shares_embedding(self) -> bool:
        """Whether the embedding is the head's weight, too."""
        return self.tied and self.has_lm_head

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


class LoraConfig(Section):
    """Low-rank adapters (LoRA, 2106.09685): with a rank above 0, only they are trained.

    targets: regular expressions that a linear layer's whole name must match, e.g.
    "blocks.0.attn.wq". alpha: the product is scaled by alpha / rank, or alpha / sqrt(rank) with
    rslora (2312.03732). dora: the weight's length is trained apart (2402.09353). quantize: the
    frozen layers that are adapted are held in 4 bits (QLoRA, 2305.14314), their scales in 8 with
    double_quantize. init: an adapter to go on from (a PEFT folder or a run with adapters).
    """

    rank: NonNegative = 0
    alpha: Above0 = 16.0
    dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    targets: tuple[str, ...] = (r"blocks\.\d+\.attn\.w[qkvo]", r"blocks\.\d+\.mlp\.w_\w+")
    dora: Flag = False
    rslora: Flag = False
    quantize: Literal["none", "nf4"] = "none"
    double_quantize: Flag = True
    init: str | None = None

    @model_validator(mode="after")
    def _rules(self) -> LoraConfig:
        fields = type(self).model_fields
        given = [key for key, field in fields.items() if getattr(self, key) != field.default]
        if self.rank == 0 and self.init is None and given:
            raise ValueError(
                f"lora.{given[0]} is set but lora.rank=0 means no adapters; set lora.rank (16 is "
                "usual), or leave it out"
            )
        for target in self.targets:
            try:
                re.compile(target)
            except re.error as error:
                raise ValueError(
                    f"lora.targets: {target!r} is not a regular expression: {error}"
                ) from error
        return self
