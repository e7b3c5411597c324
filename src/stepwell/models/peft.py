"""Adapters as PEFT keeps them: adapter_config.json beside adapter_model.safetensors, both ways.

PEFT's `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` is our
`blocks.0.attn.wq.lora_a.weight`, in the same shape; its `lora_magnitude_vector` is our
`lora_magnitude`. What is not an adapter of a linear layer in a block is refused, not left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stepwell.models.hf import whole_folder
from stepwell.models.hf_config import hf_name, our_name
from stepwell.models.lora_shapes import (
    MAGNITUDE,
    A,
    B,
    adapter_shapes,
    layer_of,
    linear_shapes,
    target_shapes,
)
from stepwell.sections.model import LoraConfig, ModelConfig
from stepwell.types import CheckpointError, ConfigError, nearest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LEAVES = {
    A: ("lora_A.weight",),
    B: ("lora_B.weight",),
    # As saved since PEFT 0.9, and under the module's own name.
    MAGNITUDE: ("lora_magnitude_vector", "lora_magnitude_vector.weight"),
}
# Setting -> (values that change nothing here, what another would mean).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "peft_type": (("LORA",), "only LoRA and its kin are read"),
    "bias": ((None, "none"), "biases stay frozen"),
    "lora_bias": ((None, False), "adapters have no biases"),
    "fan_in_fan_out": ((None, False), "weights are stored (out, in)"),
    "rank_pattern": ((None, {}), "all adapters have one rank"),
    "alpha_pattern": ((None, {}), "all adapters have one alpha"),
    "modules_to_save": ((None, []), "nothing but adapters is read"),
    "trainable_token_indices": ((None, {}, []), "the embedding stays frozen"),
    "use_qalora": ((None, False), "inputs are not pooled"),
    "megatron_config": ((None,), "the model's layers are Transformers'"),
}
# Ways to start that change the base itself.
_CHANGES_BASE = ("pissa", "olora", "corda", "eva_base", "loftq")


def is_peft(folder: str | Path) -> bool:
    return (Path(folder) / CONFIG).is_file()


def save_peft(
    folder: str | Path,
    cfg: ModelConfig,
    lora: LoraConfig,
    adapters: Iterable[tuple[str, Tensor]],
    base: str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a folder that `PeftModel.from_pretrained` loads over the base.

    adapters: (our name, full tensor) of every parameter of the adapters. base: what PEFT calls
    base_model_name_or_path. Raises CheckpointError for tensors that are missing, surplus or of a
    wrong shape, and for a folder that holds something.
    """
    shapes = adapter_shapes(cfg, lora)
    found = {name: tensor.detach().cpu().contiguous() for name, tensor in adapters}
    check_shapes(found, shapes, "the adapters")
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _modules(cfg, lora),
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with whole_folder(folder, overwrite) as temporary:
        (temporary / CONFIG).write_text(json.dumps(values, indent=2), "utf-8")
        stored = {peft_name(name): tensor for name, tensor in found.items()}
        save_file(stored, temporary / WEIGHTS, metadata={"format": "pt"})


def read_peft_config(folder: str | Path, cfg: ModelConfig) -> LoraConfig:
    """The adapter's settings; its targets are the layers that it has weights for.

    Raises CheckpointError where a file is missing or broken, ConfigError for a setting that would
    change what is computed, and for adapters of other modules than the blocks' linear layers.
    """
    path = Path(folder) / CONFIG
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    for key, (legal, meaning) in _REFUSED.items():
        value = values.get(key)
        if value not in legal:
            raise ConfigError(
                f"{path}: {key}={value!r} is not supported ({meaning}); the nearest legal value is "
                f"{legal[-1]!r}"
            )
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ConfigError(
            f"{path}: init_lora_weights={start!r} changes the base's own weights, so the adapter "
            "does not fit them as they were; save it converted to plain LoRA"
        )
    names = {layer_of(name) for name in _stored(folder)}
    known = linear_shapes(cfg)
    if surplus := sorted(names - known.keys()):
        raise ConfigError(
            f"{folder} has an adapter for {surplus[0]}, which is no linear layer in a block of "
            f"this model{nearest(surplus[0], known)}"
        )
    if not names:
        raise CheckpointError(f"{folder} holds no adapter weights")
    return LoraConfig(
        rank=values["r"],
        alpha=float(values.get("lora_alpha", 8)),
        dropout=float(values.get("lora_dropout") or 0.0),
        dora=bool(values.get("use_dora")),
        rslora=bool(values.get("use_rslora")),
        targets=patterns_of(names, cfg),
    )


def load_peft(
    folder: str | Path, cfg: ModelConfig, lora: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor) of every parameter of the adapters, one at a time, float32.

    Raises CheckpointError for tensors that are missing, surplus or of a wrong shape, before the
    first is read.
    """
    stored = _stored(folder)
    with _opened(folder) as handle:
        shapes = {name: handle.get_slice(at).get_shape() for name, at in stored.items()}
    wanted = adapter_shapes(cfg, lora)
    check_shapes(shapes, wanted, str(folder))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        with _opened(folder) as handle:
            for name in wanted:
                yield name, handle.get_tensor(stored[name]).to(torch.float32, copy=True)

    return tensors()


def check_shapes(found: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    """Raises CheckpointError unless names and shapes are the same. found: name -> tensor or shape;
    what: has them."""
    for name, shape in wanted.items():
        if name not in found:
            raise CheckpointError(f"{what} lack {name}{nearest(name, found)}")
        there = tuple(getattr(found[name], "shape", found[name]))
        if there != tuple(shape):
            raise CheckpointError(f"{name} in {what} has shape {there}, expected {tuple(shape)}")
    for name in found:
        if name not in wanted:
            raise CheckpointError(f"{what} have {name}, which the run's adapters have not")


def peft_name(name: str) -> str:
    """Our name of an adapter's parameter -> PEFT's."""
    layer = layer_of(name)
    module = hf_name(f"{layer}.weight").removesuffix("weight")
    return _PREFIX + module + _LEAVES[name.removeprefix(f"{layer}.")][0]


def our_adapter_name(name: str) -> str | None:
    """PEFT's name -> ours, or None for one that we have not."""
    for ours, leaves in _LEAVES.items():
        for leaf in leaves:
            if name.startswith(_PREFIX) and name.endswith(f".{leaf}"):
                module = name.removeprefix(_PREFIX).removesuffix(leaf)
                found = our_name(f"{module}weight")
                if found is None or not found.startswith("blocks."):
                    return None
                return f"{found.removesuffix('weight')}{ours}"
    return None


def patterns_of(names: Iterable[str], cfg: ModelConfig) -> tuple[str, ...]:
    """`lora.targets` that match exactly these layers: one pattern where every block has the same
    ones, else each by its name."""
    wanted = set(names)
    kinds = sorted({name.split(".", 2)[2] for name in wanted})
    everywhere = {f"blocks.{i}.{kind}" for i in range(cfg.num_layers) for kind in kinds}
    if everywhere != wanted:
        return tuple(re.escape(name) for name in linear_shapes(cfg) if name in wanted)
    choices = "|".join(re.escape(kind) for kind in kinds)
    return (rf"blocks\.\d+\.({choices})",)


def _modules(cfg: ModelConfig, lora: LoraConfig) -> list[str]:
    """PEFT's target_modules: the projections' names where every block has the same ones."""
    names = [hf_name(f"{n}.weight").removesuffix(".weight") for n in target_shapes(cfg, lora)]
    kinds = sorted({name.rsplit(".", 1)[1] for name in names})
    return kinds if len(names) == cfg.num_layers * len(kinds) else names


def _stored(folder: str | Path) -> dict[str, str]:
    """Our name -> the stored one."""
    if not (Path(folder) / WEIGHTS).is_file():
        pickled = (Path(folder) / "adapter_model.bin").is_file()
        why = " (pickled weights can run code when opened: save it anew)" if pickled else ""
        raise CheckpointError(f"{folder} holds no {WEIGHTS}{why}")
    found: dict[str, str] = {}
    with _opened(folder) as handle:
        for stored in handle.keys():  # noqa: SIM118 (safe_open is no mapping)
            name = our_adapter_name(stored)
            if name is None:
                raise ConfigError(
                    f"{Path(folder) / WEIGHTS} holds {stored}, which is no adapter of a linear "
                    "layer in a block"
                )
            found[name] = stored
    return found


def _opened(folder: str | Path) -> Any:
    path = Path(folder) / WEIGHTS
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or incomplete: {error}") from error
