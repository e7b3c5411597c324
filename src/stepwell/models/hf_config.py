"""Hugging Face's config.json <-> ModelConfig, and its parameter names <-> ours. Pure functions; no
torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from stepwell.schema import explain
from stepwell.sections.model import ModelConfig
from stepwell.types import CheckpointError, ConfigError, nearest

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
# Their relatives with a score instead of a next token, by what they score.
SCORED = {"sequence": "ForSequenceClassification", "token": "ForTokenClassification"}
# What the architecture's own configuration class assumes for a key that the file leaves out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
}
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
SIZES = (*REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")
# key -> (values that are fine, what another value would mean)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": ((None, "silu", "swish"), "the MLP is SwiGLU with silu"),
    "attention_bias": ((None, False), "only qwen2 has attention biases, on q, k and v"),
    "mlp_bias": ((None, False), "the MLP has no biases"),
    "attention_dropout": ((None, 0, 0.0), "attention has no dropout; the nearest value is 0.0"),
    "is_causal": ((None, True), "a token never sees what comes after it"),
    "partial_rotary_factor": ((None, 1, 1.0), "RoPE rotates the whole head"),
    "quantization_config": ((None,), "weights must be stored in floating point"),
    "auto_map": ((None,), "code that a checkpoint carries is never run"),
}
TOP_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "score.weight": "score.weight",
    "score.bias": "score.bias",  # of token classifiers
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn.wq": "self_attn.q_proj",
    "attn.wk": "self_attn.k_proj",
    "attn.wv": "self_attn.v_proj",
    "attn.wo": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.w_gate": "mlp.gate_proj",
    "mlp.w_up": "mlp.up_proj",
    "mlp.w_down": "mlp.down_proj",
}


def config_from_hf(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Hugging Face's keys (of Transformers 4 and 5) -> ModelConfig.

    Raises ConfigError that names an architecture or a feature that this decoder does not have.
    """
    family = values.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: model_type {family!r} is not supported{nearest(str(family), ARCHITECTURES)};"
            f" supported: {', '.join(ARCHITECTURES)}"
        )
    check_sizes(values, where)
    check_sizes(values, where, ("max_window_layers",), least=0)
    _check_kinds(values, where)
    head, num_labels = _head_from_hf(family, values, where)
    for key, (legal, why) in REFUSED.items():
        if values.get(key) not in legal:
            raise ConfigError(f"{where}: {key}={values[key]!r} is not supported: {why}")
    missing = [key for key in REQUIRED if values.get(key) is None]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")

    full = {**DEFAULTS[family], **values}
    heads = full["num_attention_heads"]
    rope_theta, rope_scaling = _rope_from_hf(full, where)
    dims = {
        "family": family,
        "vocab_size": full["vocab_size"],
        "num_layers": full["num_hidden_layers"],
        "d_model": full["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": full.get("num_key_value_heads") or heads,
        "head_dim": full.get("head_dim") or _head_dim(full["hidden_size"], heads, where),
        "d_ff": full["intermediate_size"],
        "norm_eps": full.get("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "qk_norm": family == "qwen3",
        "qkv_bias": family == "qwen2",
        "tied": full.get("tie_word_embeddings", False),
        "sliding_window": _window_from_hf(family, full, where),
        "max_seq_len": full["max_position_embeddings"],
        "init_std": full.get("initializer_range") or 0.02,
        "head": head,
        "num_labels": num_labels,
    }
    try:
        return ModelConfig.model_validate(dims)
    except ValidationError as error:
        raise ConfigError(explain(error, ModelConfig, where)) from error


def check_sizes(
    values: Mapping[str, Any], where: str, keys: Sequence[str] = SIZES, least: int = 1
) -> None:
    """Raises ConfigError for a size that is no whole number or less than `least`. A key that is
    missing or null is fine."""
    for key in keys:
        value = values.get(key)
        if value is None or (type(value) is int and value >= least):
            continue
        rule = "must be a whole number"
        if type(value) is int:
            rule = f"must be at least {least}; the nearest legal value is {least}"
        raise ConfigError(f"{where}: {key}={value!r} {rule}")


def _check_kinds(values: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for a table or a list of names that is none."""
    for key in ("rope_scaling", "rope_parameters", "id2label"):
        if not isinstance(values.get(key) or {}, Mapping):
            raise ConfigError(f"{where}: {key}={values[key]!r} must be a table, or null")
    for key in ("architectures", "layer_types"):
        value = values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{where}: {key}={value!r} must be a list of names, or null")


def check_heads(values: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for key/value heads that do not divide the heads, and for a width that
    does not divide into heads. Sizes are whole numbers (`check_sizes`), or missing."""
    heads, groups = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if heads and values.get("hidden_size") and not values.get("head_dim"):
        _head_dim(values["hidden_size"], heads, where)
    if heads and groups and heads % groups:
        legal = (n for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(
            f"{where}: num_key_value_heads={groups} must divide num_attention_heads={heads}; the "
            f"nearest legal value is {min(legal, key=lambda n: abs(n - groups))}"
        )


def architecture(family: str, scored: str | None = None) -> str:
    """Transformers' class: for next tokens, or with a score of a "sequence" or a "token"."""
    if scored is None:
        return ARCHITECTURES[family]
    return ARCHITECTURES[family].removesuffix("ForCausalLM") + SCORED[scored]


def _head_from_hf(family: str, values: Mapping[str, Any], where: str) -> tuple[str, int]:
    """ "lm" or "score", and the number of labels (2 is what Transformers assumes)."""
    named = values.get("architectures") or [ARCHITECTURES[family]]
    if ARCHITECTURES[family] in named:
        return "lm", 1
    if not any(architecture(family, scored) in named for scored in SCORED):
        legal = [ARCHITECTURES[family], *(architecture(family, scored) for scored in SCORED)]
        raise ConfigError(
            f"{where}: architectures={named} is no model that loads{nearest(named[0], legal)}; "
            f"these do: {', '.join(legal)}"
        )
    labels = values.get("id2label")
    return "score", len(labels) if labels else values.get("num_labels") or 2


def _head_dim(hidden_size: int, num_heads: int, where: str) -> int:
    if hidden_size % num_heads:
        raise ConfigError(
            f"{where}: hidden_size={hidden_size} is no multiple of num_attention_heads="
            f"{num_heads} and head_dim is not given; the nearest is "
            f"{num_heads * max(1, round(hidden_size / num_heads))}"
        )
    return hidden_size // num_heads


def _rope_from_hf(values: Mapping[str, Any], where: str) -> tuple[float, dict[str, Any] | None]:
    """Transformers 5 keeps everything in `rope_parameters`; 4 has `rope_theta`, `rope_scaling`."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ConfigError(f"{where}: RoPE parameters that differ by layer are not supported")
    theta = rope.get("rope_theta") or values.get("rope_theta") or 10_000.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"{where}: partial_rotary_factor={rope['partial_rotary_factor']} is not supported: "
            "RoPE rotates the whole head"
        )
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(
            f"{where}: rope_type {kind!r} is not supported; supported: 'default', 'llama3'"
        )
    needed = ("factor", "low_freq_factor", "high_freq_factor")
    missing = [key for key in needed if key not in rope]
    if missing:
        raise ConfigError(f"{where}: rope_type 'llama3' lacks {', '.join(missing)}")
    original = rope.get("original_max_position_embeddings", values["max_position_embeddings"])
    return theta, {**{key: rope[key] for key in needed}, "original_max_seq_len": original}


def _window_from_hf(family: str, values: Mapping[str, Any], where: str) -> int | None:
    """Mistral's window on every layer. Qwen's, from layer `max_window_layers` on, is refused."""
    window = values.get("sliding_window")
    if family == "llama" or window is None:
        return None
    num_layers = values["num_hidden_layers"]
    types = values.get("layer_types")
    if family.startswith("qwen"):
        first = values.get("max_window_layers", 28) if values.get("use_sliding_window") else None
        if types is None and first is not None:
            types = ["sliding_attention"] * max(0, num_layers - first)
        sliding = (types or []).count("sliding_attention")
        if sliding:
            raise ConfigError(
                f"{where}: use_sliding_window with a window of {window} on {sliding} of "
                f"{num_layers} layers is not supported; the nearest is use_sliding_window=false"
            )
        return None
    if types and set(types) != {"sliding_attention"}:
        raise ConfigError(f"{where}: layer_types that mix kinds of attention are not supported")
    return window


def config_to_hf(
    cfg: ModelConfig, dtype: torch.dtype | str = "float32", scored: str | None = None
) -> dict[str, Any]:
    """ModelConfig -> config.json's values, in keys that Transformers 4 and 5 both read.

    scored: of a model with a score, what that is of: a "sequence" or a "token".
    Raises ConfigError for dimensions that Transformers refuses in this family.
    """
    if cfg.family == "llama" and cfg.d_model % cfg.num_heads:
        nearest_width = cfg.num_heads * max(1, round(cfg.d_model / cfg.num_heads))
        raise ConfigError(
            f"model.d_model={cfg.d_model} must be a multiple of model.num_heads={cfg.num_heads} "
            f"to be exported as a Llama; the nearest is {nearest_width}"
        )
    values: dict[str, Any] = {
        "architectures": [architecture(cfg.family, scored)],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "max_position_embeddings": cfg.max_seq_len,
        "initializer_range": cfg.init_std,
        "tie_word_embeddings": cfg.tied,
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if scored is not None:
        names = {str(i): f"LABEL_{i}" for i in range(cfg.num_labels)}
        values["id2label"] = names
        values["label2id"] = {name: int(i) for i, name in names.items()}
    if scored == "token":
        values["classifier_dropout"] = 0.0
    if cfg.family in ("llama", "qwen3"):
        values["attention_bias"] = False
    if cfg.family == "llama":
        values["mlp_bias"] = False
    if cfg.family == "mistral":
        values["sliding_window"] = cfg.sliding_window
    if cfg.family.startswith("qwen"):
        values["use_sliding_window"] = False
    if cfg.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": cfg.rope_scaling.factor,
            "low_freq_factor": cfg.rope_scaling.low_freq_factor,
            "high_freq_factor": cfg.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": cfg.rope_scaling.original_max_seq_len,
        }
        values["rope_scaling"] = scaling
        values["rope_parameters"] = {**scaling, "rope_theta": cfg.rope_theta}
    return values


_OURS_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
_HF_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_OURS_TOP = {hf: ours for ours, hf in TOP_NAMES.items()}
_OURS_IN_BLOCK = {hf: ours for ours, hf in BLOCK_NAMES.items()}


def hf_name(name: str) -> str:
    """Our global name -> Hugging Face's; CheckpointError for a name that has none."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = _OURS_BLOCK.fullmatch(name)
    if match is None or match[2] not in BLOCK_NAMES:
        raise CheckpointError(f"the parameter {name!r} has no Hugging Face name")
    return f"model.layers.{match[1]}.{BLOCK_NAMES[match[2]]}.{match[3]}"


def our_name(name: str) -> str | None:
    """Hugging Face's name -> ours, or None for a name that no supported family has."""
    if name in _OURS_TOP:
        return _OURS_TOP[name]
    match = _HF_BLOCK.fullmatch(name)
    if match is None or match[2] not in _OURS_IN_BLOCK:
        return None
    return f"blocks.{match[1]}.{_OURS_IN_BLOCK[match[2]]}.{match[3]}"
