"""Which linear layers get low-rank adapters, and the parameters that these have. No torch.

M out-features, D in-features, r rank. A layer `blocks.0.attn.wq` gets `lora_a.weight` (r, D),
`lora_b.weight` (M, r) and, with DoRA, `lora_magnitude` (M,).
"""

from __future__ import annotations

import re

from stepwell.models.flops import parameter_shapes
from stepwell.sections.model import LoraConfig, ModelConfig
from stepwell.types import ConfigError, nearest

A, B, MAGNITUDE = "lora_a.weight", "lora_b.weight", "lora_magnitude"
_LEAVES = (A, B, MAGNITUDE)

Shape = tuple[int, ...]


def linear_shapes(cfg: ModelConfig) -> dict[str, Shape]:
    """Global name (without `.weight`) -> (M, D) of every linear layer that can be adapted: the
    matrices in the blocks."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in parameter_shapes(cfg).items()
        if name.startswith("blocks.") and len(shape) == 2
    }


def target_shapes(cfg: ModelConfig, lora: LoraConfig, strict: bool = True) -> dict[str, Shape]:
    """`linear_shapes` of the layers that `lora.targets` match, in the model's order; none without a
    rank. Raises ConfigError for a pattern that matches no layer, if strict."""
    if lora.rank == 0:
        return {}
    known = linear_shapes(cfg)
    for pattern in lora.targets:
        if strict and not any(re.fullmatch(pattern, name) for name in known):
            raise ConfigError(unmatched(pattern, list(known)))
    wanted = [re.compile(pattern) for pattern in lora.targets]
    return {n: shape for n, shape in known.items() if any(w.fullmatch(n) for w in wanted)}


def unmatched(pattern: str, known: list[str]) -> str:
    """What is wrong with a pattern that matches no layer."""
    return (
        f"lora.targets has {pattern!r}, which matches no linear layer of the model"
        f"{nearest(pattern, known)}; the layers are {known[0]} to {known[-1]} (the whole name must "
        "match)"
    )


def adapter_shapes(cfg: ModelConfig, lora: LoraConfig, strict: bool = True) -> dict[str, Shape]:
    """Global name -> shape of every parameter of the adapters, in the model's order."""
    found: dict[str, Shape] = {}
    for name, (rows, columns) in target_shapes(cfg, lora, strict).items():
        if lora.dora:
            found[f"{name}.{MAGNITUDE}"] = (rows,)
        found[f"{name}.{A}"] = (lora.rank, columns)
        found[f"{name}.{B}"] = (rows, lora.rank)
    return found


def is_adapter(name: str) -> bool:
    """Whether a global name is that of an adapter's parameter."""
    return name.endswith(_LEAVES)


def layer_of(name: str) -> str:
    """The linear layer that a parameter belongs to: itself or an adapter's."""
    for leaf in (*_LEAVES, "weight", "bias"):
        if name.endswith(f".{leaf}"):
            return name.removesuffix(f".{leaf}")
    return name


def is_trained(name: str, lora: LoraConfig) -> bool:
    """Whether a run trains this parameter. With adapters: these, and a fresh score head, which the
    base has not."""
    return lora.rank == 0 or is_adapter(name) or name.startswith("score.")


def trained_shapes(cfg: ModelConfig, lora: LoraConfig, strict: bool = True) -> dict[str, Shape]:
    """Global name -> shape of every parameter that a run trains."""
    base = {n: s for n, s in parameter_shapes(cfg).items() if is_trained(n, lora)}
    return adapter_shapes(cfg, lora, strict) | base


def nf4_bytes(num_elements: int, double: bool) -> int:
    """Of a matrix in 4 bits with blocks of 64 (models.quantize)."""
    blocks = -(-num_elements // 64)
    scales = blocks + 4 * -(-blocks // 256) + 4 if double else 4 * blocks
    return -(-num_elements // 2) + scales


def scaling(lora: LoraConfig) -> float:
    """What B A is multiplied by: alpha / r (2106.09685, section 4.1), or alpha / sqrt(r) (rsLoRA,
    2312.03732, theorem 3.2)."""
    return lora.alpha / (lora.rank**0.5 if lora.rslora else lora.rank)
