"""The logical axes of every parameter, once: sharding and the planner read this table. No torch."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache

from stepwell.sections.model import ModelConfig

AXES: dict[str, tuple[str, ...]] = {
    "embed.weight": ("vocab", "embed"),
    "blocks.*.attn_norm.weight": ("embed",),
    "blocks.*.attn.wq.weight": ("heads", "embed"),
    "blocks.*.attn.wk.weight": ("kv_heads", "embed"),
    "blocks.*.attn.wv.weight": ("kv_heads", "embed"),
    "blocks.*.attn.wq.bias": ("heads",),
    "blocks.*.attn.wk.bias": ("kv_heads",),
    "blocks.*.attn.wv.bias": ("kv_heads",),
    "blocks.*.attn.wo.weight": ("embed", "heads"),
    "blocks.*.attn.q_norm.weight": ("head_dim",),
    "blocks.*.attn.k_norm.weight": ("head_dim",),
    "blocks.*.mlp_norm.weight": ("embed",),
    "blocks.*.mlp.w_gate.weight": ("ffn", "embed"),
    "blocks.*.mlp.w_up.weight": ("ffn", "embed"),
    "blocks.*.mlp.w_down.weight": ("embed", "ffn"),
    "norm.weight": ("embed",),
    "head.weight": ("vocab", "embed"),
    "score.weight": ("labels", "embed"),
}

# Of each matrix in the blocks, its adapter (models.lora_shapes). No axis divides a rank.
AXES |= {
    f"{pattern.removesuffix('.weight')}.{leaf}": axes
    for pattern, (rows, *columns) in list(AXES.items())
    if pattern.startswith("blocks.") and columns
    for leaf, axes in (
        ("lora_magnitude", (rows,)),
        ("lora_a.weight", ("rank", *columns)),
        ("lora_b.weight", (rows, "rank")),
    )
}

# What tensor ranks divide; a parameter has at most one of them.
DIVIDED = frozenset({"heads", "kv_heads", "ffn", "vocab"})


@lru_cache(maxsize=1 << 16)
def axes_of(name: str) -> tuple[str, ...]:
    """The logical axes of a parameter. Raises KeyError for a name without a row in AXES."""
    for pattern, axes in AXES.items():
        if fnmatchcase(name, pattern):
            return axes
    raise KeyError(f"parameter {name!r} has no row in models.axes.AXES")


def divided_dim(axes: tuple[str, ...], cfg: ModelConfig, tp: int) -> int | None:
    """The dim of a parameter with these axes that `tp` tensor ranks divide evenly; None if each
    holds the whole: fewer key/value heads than ranks stay whole."""
    for dim, axis in enumerate(axes):
        if axis in DIVIDED and (axis != "kv_heads" or cfg.num_kv_heads % tp == 0):
            return dim
    return None
