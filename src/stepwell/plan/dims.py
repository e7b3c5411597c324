"""The model that a plan is about: by a preset's name, a config.json, or dimensions. No
torch.

Models that the engine cannot train can be planned for all the same; `Subject.missing` says why a
plan of one cannot be started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from stepwell.config import Run
from stepwell.models.hf_config import (
    ARCHITECTURES,
    SIZES,
    check_heads,
    check_sizes,
    config_from_hf,
)
from stepwell.plan.job import Dims, Experts, Mlp, dims_of
from stepwell.presets import PRESETS
from stepwell.sections.model import ModelConfig
from stepwell.types import CheckpointError, ConfigError, nearest

# Dimensions of models that the engine has no modules for. Mixtral: 2401.04088; Qwen3: its released
# config.json; GPT-3: 2005.14165, vocabulary padded as in 2104.04473; Nemotron-4: 2406.11704.
PLANNED: dict[str, Dims] = {
    "mixtral-8x7b": Dims(
        name="mixtral-8x7b",
        num_layers=32,
        d_model=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        d_ff=14336,
        vocab_size=32000,
        experts=Experts(num_experts=8, top_k=2, d_ff=14336),
    ),
    "qwen3-30b-a3b": Dims(
        name="qwen3-30b-a3b",
        num_layers=48,
        d_model=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        d_ff=6144,
        vocab_size=151936,
        biases=2 * 128,
        qk_norm=True,
        experts=Experts(num_experts=128, top_k=8, d_ff=768),
    ),
    "qwen3-235b-a22b": Dims(
        name="qwen3-235b-a22b",
        num_layers=94,
        d_model=4096,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        d_ff=12288,
        vocab_size=151936,
        biases=2 * 128,
        qk_norm=True,
        experts=Experts(num_experts=128, top_k=8, d_ff=1536),
    ),
    "gpt3-175b": Dims(
        name="gpt3-175b",
        num_layers=96,
        d_model=12288,
        num_heads=96,
        num_kv_heads=96,
        head_dim=128,
        d_ff=49152,
        vocab_size=51200,
        mlp="gelu",
        tied=True,
        learned_positions=2048,
        biases=11 * 12288,
    ),
    "nemotron-4-340b": Dims(
        name="nemotron-4-340b",
        num_layers=96,
        d_model=18432,
        num_heads=96,
        num_kv_heads=8,
        head_dim=192,
        d_ff=73728,
        vocab_size=256000,
        mlp="squared_relu",
    ),
}
# Dimensions of experts on the command line: `model.` and a field of `Experts`.
EXPERT_KEYS = {
    "model.num_experts": "num_experts",
    "model.top_k": "top_k",
    "model.expert_d_ff": "d_ff",
    "model.num_shared_experts": "num_shared",
    "model.num_dense_layers": "num_dense_layers",
}
# Keys of a config.json that may be 0: without experts, without what is given.
_MAY_BE_NONE = ("num_experts", "num_local_experts", "shared_expert_intermediate_size")
NARROW = 256  # a width of toys, whose heads may be of any size
NEEDED = ("model.num_layers", "model.d_model")  # without a name
# Of Hugging Face's kinds of model: those whose MLP is gated, and what the others' is.
_GATED = [
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmo", "olmo2"),
    *("olmoe", "gemma", "gemma2", "phi3", "granite", "starcoder", "internlm2"),
]
_PLAIN: dict[str, Mlp] = {
    "gpt2": "gelu",
    "gpt_neox": "gelu",
    "opt": "gelu",
    "starcoder2": "gelu",
    "phi": "gelu",
    "nemotron": "squared_relu",
}
# Those with biases of all matrices and norms, and the key that says otherwise of matrices.
_BIASED = {"gpt2": "", "opt": "enable_bias", "gpt_neox": "", "starcoder2": "use_bias", "phi": ""}
_NORMS_OF_HEADS = ("qwen3", "qwen3_moe")
# Those whose attention may have a window.
_WINDOWED = ("mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma2", "phi3")
_WINDOWED += ("starcoder2",)
_USUAL_WINDOW = {"mistral": 4096, "gemma2": 4096}  # where config.json leaves the key out
# Other names of the same keys, by the key that they stand for.
_ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "num_experts": ("num_local_experts",),
    "n_positions": ("max_position_embeddings",),
}


@dataclass(frozen=True)
class Subject:
    """config: the engine's, or None; then `missing` says what the engine lacks. assumed: dimensions
    that nobody gave, and how they follow from those that were. released: it is one that weights
    exist of, as far as is known."""

    dims: Dims
    config: ModelConfig | None
    missing: str = ""
    assumed: tuple[str, ...] = ()
    released: bool = True

    @property
    def name(self) -> str:
        return self.dims.name


def find_model(name: str | None, dimensions: Mapping[str, Any] | None = None) -> Subject:
    """name: a preset, or a config.json or its folder. dimensions: `model.*` keys that override it,
    and those of `EXPERT_KEYS`; without a name, those of `NEEDED` and whatever else is known: the
    rest follows from them (`derived`).

    Raises ConfigError for an unknown name, key or value and for dimensions that are missing,
    CheckpointError for a broken file.
    """
    dimensions = dict(dimensions or {})
    experts = {EXPERT_KEYS[key]: dimensions.pop(key) for key in [*dimensions] if key in EXPERT_KEYS}
    if name is None:
        found = _derived_subject(dimensions)
    elif (found := _named(name)).config is None:
        found = _dims_changed(found, dimensions) if dimensions else found
    elif dimensions:
        values = {"model": found.config.model_dump(exclude_none=True)}
        config = Run.parse(values, dimensions, where="the command line").model
        found = Subject(dims_of(config, f"{name} (changed)"), config)
    return with_experts(found, experts) if experts else found


def _derived_subject(dimensions: Mapping[str, Any]) -> Subject:
    missing = [f"--{key}" for key in NEEDED if key not in dimensions]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be given: without --model a model needs its depth and "
            "width; the rest can be derived"
        )
    wide = _count("--model.d_model", dimensions["model.d_model"])
    given = {key: str(value) for key, value in dimensions.items()}
    more, said = derived(wide, given)
    config = Run.parse({"model": {}}, {**more, **given}, where="the command line").model
    return Subject(dims_of(config, "model"), config, assumed=said, released=False)


def derived(d_model: int, given: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What is not among the dimensions given, in Llama's proportions (2302.13971: heads of 128,
    d_ff of 8/3 d_model rounded up to a multiple of 256; 2407.21783: its vocabulary): keys with
    values, and in words. Raises ConfigError for a width that cannot be divided into heads."""
    found: dict[str, Any] = {}
    said: list[str] = []

    def assume(key: str, value: Any, why: str) -> None:
        if f"model.{key}" not in given:
            found[f"model.{key}"] = value
            said.append(f"{why} (--model.{key})")

    if "model.num_heads" in given:
        heads = _count("--model.num_heads", given["model.num_heads"])
        size = d_model // heads
    else:
        size = _count("--model.head_dim", given.get("model.head_dim") or _head_dim(d_model))
        heads = max(1, d_model // size)
    width = 256 * ceil(8 * d_model / 3 / 256)
    assume("num_heads", heads, f"{heads} heads")
    assume("head_dim", size, f"heads of {size}")
    assume("num_kv_heads", heads, "as many key/value heads as heads")
    assume("d_ff", width, f"an MLP of {width:,}, 8/3 of the width")
    assume("vocab_size", 128256, "a vocabulary of 128,256, Llama 3's")
    assume("tied", False, "an output layer of its own, not tied to the embedding")
    return found, tuple(said)


def _head_dim(d_model: int) -> int:
    """128, or the largest power of two that divides the width; of narrow ones below 32, too."""
    for size in (128, 64, 32, 16, 8, 4, 2):
        if d_model % size == 0 and (size >= 32 or d_model < NARROW):
            return size
    if d_model >= NARROW:
        near = 64 * round(d_model / 64)
        raise ConfigError(
            f"--model.d_model {d_model} must be a multiple of 32, the least width of heads; "
            f"the nearest multiple of 64 is {near} (or give --model.num_heads)"
        )
    raise ConfigError(
        f"--model.d_model {d_model} must be even (rotations turn pairs); the nearest is "
        f"{d_model + 1}"
    )


def _named(name: str) -> Subject:
    key, path = name.strip().lower(), Path(name)
    if key in PRESETS:
        return Subject(dims_of(PRESETS[key], key), PRESETS[key])
    if key in PLANNED:
        return Subject(PLANNED[key], None, missing_of(PLANNED[key]))
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return from_file(path)
    known = [*PRESETS, *PLANNED]
    raise ConfigError(
        f"--model {name!r} is no preset, and no config.json or folder with one"
        f"{nearest(key, known)}; presets: {', '.join(known)}"
    )


def missing_of(dims: Dims) -> str:
    """What of a model the engine has not; empty if it has everything."""
    lacks = []
    if dims.experts:
        lacks.append("mixture-of-experts layers")
    if dims.mlp != "swiglu":
        lacks.append(f"MLPs of kind {dims.mlp}")
    if dims.learned_positions:
        lacks.append("learned positions")
    return " and ".join(lacks)


def with_experts(subject: Subject, given: Mapping[str, Any]) -> Subject:
    """The model with experts in place of its MLPs. Raises ConfigError for counts that cannot be."""
    values = {key: _count(f"--model.{key}", value) for key, value in given.items()}
    if "num_experts" not in values and subject.dims.experts is None:
        raise ConfigError(
            f"--model.{next(iter(given))} belongs to a mixture of experts; give --model.num_experts"
        )
    before = subject.dims.experts or Experts(1, 1, subject.dims.d_ff)
    experts, said = replace(before, **values), list(subject.assumed)
    if subject.dims.experts is None and "top_k" not in values:
        said.append("1 expert for a token (--model.top_k)")
    if subject.dims.experts is None and "d_ff" not in values:
        said.append(f"experts of {experts.d_ff:,}, the MLP's width (--model.expert_d_ff)")
    if not 1 <= experts.top_k <= experts.num_experts:
        near = min(max(experts.top_k, 1), experts.num_experts)
        raise ConfigError(
            f"--model.top_k {experts.top_k} must be between 1 and --model.num_experts "
            f"{experts.num_experts}; the nearest is {near}"
        )
    if experts.num_dense_layers >= subject.dims.num_layers:
        raise ConfigError(
            f"--model.num_dense_layers {experts.num_dense_layers} leaves no layer for experts; the "
            f"nearest legal value is {subject.dims.num_layers - 1}"
        )
    dims = replace(subject.dims, experts=experts)
    return Subject(dims, None, missing_of(dims), tuple(said))


def _dims_changed(subject: Subject, dimensions: Mapping[str, Any]) -> Subject:
    names = ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "vocab_size")
    changes = {}
    for key, value in dimensions.items():
        short = key.removeprefix("model.")
        if short not in names:
            raise ConfigError(
                f"--{key} cannot be changed for {subject.name}{nearest(short, names)}; "
                f"these can: {', '.join(names)}"
            )
        changes[short] = _count(f"--{key}", value)
    dims = replace(subject.dims, name=f"{subject.name} (changed)", **changes)
    heads, groups = dims.num_heads, dims.num_kv_heads
    if heads % groups:
        legal = (n for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(
            f"--model.num_kv_heads {groups} must divide --model.num_heads {heads}; the nearest "
            f"legal value is {min(legal, key=lambda n: abs(n - groups))}"
        )
    return Subject(dims, None, subject.missing)


def _count(name: str, value: Any) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ConfigError(f"{name} {value!r} must be a whole number") from None
    if number < (0 if name.endswith(("num_shared", "num_dense_layers")) else 1):
        raise ConfigError(f"{name} {value} must be positive; the nearest legal value is 1")
    return number


# --- Hugging Face ----------------------------------------------------------------------------


def from_file(path: Path) -> Subject:
    """Raises CheckpointError for a file that is no JSON object, ConfigError for a model whose
    dimensions cannot be told."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the model's {path}: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is no JSON object")
    name = path.parent.name if path.name == "config.json" else path.stem
    if values.get("model_type") not in ARCHITECTURES:
        dims = dims_from_hf(values, name, str(path))
        return Subject(dims, None, missing_of(dims) or f"{values['model_type']} models")
    try:
        config = config_from_hf(values, str(path))
    except ConfigError as refusal:
        return Subject(dims_from_hf(values, name, str(path)), None, str(refusal))
    return Subject(dims_of(config, name), config)


def dims_from_hf(values: Mapping[str, Any], name: str, where: str) -> Dims:
    """The dimensions in a config.json, of kinds that the engine does not have as well.

    Raises ConfigError for a kind whose layers are of another form, for keys that are missing, and
    for values that are no sizes.
    """
    if values.get("model_type") is None:
        raise ConfigError(f"{where} lacks model_type, which says of what form its layers are")
    kind = str(values["model_type"])
    if kind not in _GATED and kind not in _PLAIN:
        raise ConfigError(
            f"{where}: models of type {kind!r} cannot be planned{nearest(kind, [*_GATED, *_PLAIN])}"
            f"; these can: {', '.join([*_GATED, *_PLAIN])} (or give dimensions, --model.num_layers "
            "and so on)"
        )
    full = dict(values)
    for key, others in _ALIASES.items():
        found = [values[other] for other in others if values.get(other) is not None]
        if full.get(key) is None and found:
            full[key] = found[0]
    others = [key for keys in _ALIASES.values() for key in keys if key not in _MAY_BE_NONE]
    check_sizes(values, where, others)
    check_sizes(full, where, [*SIZES, "num_experts_per_tok", "moe_intermediate_size"])
    check_sizes(values, where, _MAY_BE_NONE, least=0)
    check_heads(full, where)
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [key for key in needed if full.get(key) is None]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    width, heads = full["hidden_size"], full["num_attention_heads"]
    window, in_layers = _window(full, kind, where)
    bare = kind in ("gpt2", "opt")
    return Dims(
        name=name,
        num_layers=full["num_hidden_layers"],
        d_model=width,
        num_heads=heads,
        num_kv_heads=full.get("num_key_value_heads") or heads,
        head_dim=full.get("head_dim") or width // heads,
        d_ff=full.get("intermediate_size") or 4 * width,
        vocab_size=full["vocab_size"],
        mlp=_PLAIN.get(kind, "swiglu"),
        tied=bool(full.get("tie_word_embeddings", bare)),
        learned_positions=full.get("n_positions", 0) if bare else 0,
        biases=_biases(full, kind),
        qk_norm=kind in _NORMS_OF_HEADS,
        experts=_experts(full, where),
        window=window,
        num_window_layers=in_layers,
    )


def _biases(full: Mapping[str, Any], kind: str) -> int:
    """Parameters of a layer beside its matrices and norms' weights: biases of projections, as the
    kind always has them or the file says, of layer norms, and norms of heads."""
    width, heads = full["hidden_size"], full["num_attention_heads"]
    head_dim = full.get("head_dim") or width // heads
    d_ff = full.get("intermediate_size") or 4 * width
    inputs = head_dim * (heads + 2 * (full.get("num_key_value_heads") or heads))
    number = 2 * (full.get("head_dim") or 128) if kind in _NORMS_OF_HEADS else 0
    everywhere = kind in _BIASED and full.get(_BIASED[kind], True)
    if everywhere or full.get("attention_bias"):
        number += inputs + width
    elif kind in ("qwen2", "qwen2_moe") and full.get("qkv_bias", True):
        number += inputs
    if everywhere or full.get("mlp_bias"):
        number += d_ff * (1 if kind in _PLAIN else 2) + width
    return number + (2 * width if kind in _BIASED else 0)


def _window(full: Mapping[str, Any], kind: str, where: str) -> tuple[int | None, int | None]:
    """Keys that a token sees at most, and in how many layers (None: in all), by `layer_types` or
    else as the kind of model has it: Qwen's from a layer on if asked for, Gemma 2's in every second
    layer (2408.00118), Mistral's and others' in all."""
    num_layers = full["num_hidden_layers"]
    window = full.get("sliding_window", _USUAL_WINDOW.get(kind))
    if window is None or kind not in _WINDOWED or full.get("use_sliding_window") is False:
        return None, None
    check_sizes(full, where, ["sliding_window"])
    check_sizes(full, where, ["max_window_layers"], least=0)
    types = full.get("layer_types")
    if isinstance(types, list):
        number = types.count("sliding_attention")
    elif kind.startswith("qwen"):
        first = full.get("max_window_layers", 28) if full.get("use_sliding_window") else num_layers
        number = max(0, num_layers - first)
    else:
        number = (num_layers + 1) // 2 if kind == "gemma2" else num_layers
    return (window, number) if number else (None, None)


def _experts(full: Mapping[str, Any], where: str) -> Experts | None:
    number = full.get("num_experts")
    if not number:
        return None
    top_k = full.get("num_experts_per_tok") or 1
    if top_k > number:
        raise ConfigError(
            f"{where}: num_experts_per_tok={top_k} is more than the {number} experts; the nearest "
            f"legal value is {number}"
        )
    width = full.get("moe_intermediate_size") or full["intermediate_size"]
    shared = full.get("shared_expert_intermediate_size") or 0
    dense = full.get("mlp_only_layers") or []
    return Experts(
        num_experts=number,
        top_k=top_k,
        d_ff=width,
        num_shared=-(-shared // width),
        num_dense_layers=len(dense),
    )
