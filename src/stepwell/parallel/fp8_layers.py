"""Which linear layers compute in 8 bits, and which runs that cannot be. No torch.

The embedding and the head are outside the blocks, norms are no matrices: neither is ever asked.
"""

from __future__ import annotations

import math
from collections import Counter
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING

from stepwell.config import Run
from stepwell.models.flops import parameter_shapes
from stepwell.parallel.remedies import Complaint, Way, multiples, only, values_of
from stepwell.sections.model import ModelConfig
from stepwell.types import nearest

if TYPE_CHECKING:
    from stepwell.parallel.rules import AxisSizes

# The scaled kernel reads 16 bytes at a time. The emulation would do without, but a recipe that
# works here must work there.
MULTIPLE = 16
# A router decides by small differences, and costs nothing.
ALWAYS_KEPT = ("*router*",)

# Which of the model's sizes the rows and the columns of a weight are.
_ROWS_COLUMNS = {
    "wq": ("heads", "d_model"),
    "wk": ("kv_heads", "d_model"),
    "wv": ("kv_heads", "d_model"),
    "wo": ("d_model", "heads"),
    "w_gate": ("d_ff", "d_model"),
    "w_up": ("d_ff", "d_model"),
    "w_down": ("d_model", "d_ff"),
}


def block_linears(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Global name (without `.weight`) -> (out, in) of every matrix in the blocks."""
    return dict(_block_linears(model))  # pyright: ignore[reportArgumentType] (frozen: hashable)


@lru_cache(maxsize=16)
def _block_linears(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        name.removesuffix(".weight"): shape
        for name, shape in parameter_shapes(model).items()
        if name.startswith("blocks.") and len(shape) == 2
    }


def fp8_linears(run: Run, tp: int = 1) -> list[str]:
    """Global names of the layers that compute in 8 bits, in the model's order; the same on every
    rank. tp: ranks of the tensor axis, whose parts of a weight `min_dim` measures."""
    fp8 = run.precision.fp8
    if fp8.recipe == "none":
        return []
    rules = (fp8.keep, fp8.min_dim, tp)
    return list(_large_linears(run.model, *rules))  # pyright: ignore[reportArgumentType] (frozen)


@lru_cache(maxsize=64)
def _large_linears(
    model: ModelConfig, keep: tuple[str, ...], min_dim: int, tp: int
) -> tuple[str, ...]:
    """Of at least min_dim rows and columns on a tensor rank, but for the patterns in keep."""
    return tuple(
        name
        for name, shape in block_linears(model).items()
        if not any(fnmatchcase(name, pattern) for pattern in (*ALWAYS_KEPT, *keep))
        and min(local_shape(model, name, shape, tp)) >= min_dim
    )


def usual_kinds(run: Run, tp: int = 1) -> frozenset[str]:
    """The projections (`wq`) that compute in 8 bits in most blocks."""
    kinds = Counter(name.rsplit(".", 1)[-1] for name in fp8_linears(run, tp))
    return frozenset(kind for kind, n in kinds.items() if 2 * n > run.model.num_layers)


def saved_in_8_bits(run: Run, tp: int = 1) -> frozenset[str]:
    """Those of them that also save their input in 8 bits."""
    fp8 = run.precision.fp8
    saves = fp8.recipe in ("tensorwise", "delayed") and not fp8.wgrad_high_precision
    return usual_kinds(run, tp) if saves else frozenset()


def local_shape(
    model: ModelConfig, name: str, shape: tuple[int, ...], tp: int = 1
) -> tuple[int, ...]:
    """(out, in) of a tensor rank's part of a layer's weight."""
    axes = _ROWS_COLUMNS.get(name.rsplit(".", 1)[-1])
    return shape if axes is None else tuple(_local_size(model, axis, tp) for axis in axes)


def _local_size(model: ModelConfig, axis: str, tp: int) -> int:
    return {
        "d_model": model.d_model,
        "d_ff": model.d_ff // tp,
        "heads": model.num_heads // tp * model.head_dim,
        "kv_heads": max(1, model.num_kv_heads // tp) * model.head_dim,
    }[axis]


# --- rules: what is wrong with a run, or None ------------------------------------------------


def odd_shapes(run: Run, sizes: AxisSizes) -> list[Complaint]:
    """Every size that is no multiple of 16, once."""
    found: list[Complaint] = []
    odd: dict[str, list[str]] = {a: [] for a in ("d_model", "d_ff", "heads", "kv_heads")}
    for name in fp8_linears(run, sizes.tp):
        kind = name.rsplit(".", 1)[-1]
        for axis in _ROWS_COLUMNS.get(kind, ()):
            if _local_size(run.model, axis, sizes.tp) % MULTIPLE:
                odd[axis].append(name)
    for axis, names in odd.items():
        if names:
            kinds = sorted({f"*.{name.rsplit('.', 1)[-1]}" for name in names})
            said = (
                f"precision.fp8.recipe={run.precision.fp8.recipe!r} needs multiples of {MULTIPLE} "
                f"on both sides of {names[0]}: {_size_of(run.model, axis, sizes.tp)}"
            )
            keep = ({"precision.fp8.keep": [*run.precision.fp8.keep, *kinds]},)
            ways = _better(run.model, axis, sizes.tp), keep
            found.append(Complaint(said, ways, axis))
    return found


def _size_of(model: ModelConfig, axis: str, tp: int) -> str:
    """How a tensor rank's size comes from keys of the model."""
    per_rank = f" / layout.tp={tp}" if tp > 1 and axis != "d_model" else ""
    size = _local_size(model, axis, tp)
    if axis in ("d_model", "d_ff"):
        return f"model.{axis}={getattr(model, axis)}{per_rank}" + (f" = {size}" if per_rank else "")
    key = {"heads": "num_heads", "kv_heads": "num_kv_heads"}[axis]
    return f"model.{key}={getattr(model, key)}{per_rank} x model.head_dim={model.head_dim} = {size}"


def _better(model: ModelConfig, axis: str, tp: int) -> Way:
    if axis in ("d_model", "d_ff"):
        unit = MULTIPLE * (tp if axis == "d_ff" else 1)
        return values_of(f"model.{axis}", multiples(unit, getattr(model, axis)))
    heads = _local_size(model, axis, tp) // model.head_dim
    # RoPE rotates pairs, so head_dim is even as well.
    unit = math.lcm(2, MULTIPLE // math.gcd(MULTIPLE, heads))
    return values_of("model.head_dim", multiples(unit, model.head_dim))


def idle_settings(run: Run, sizes: AxisSizes) -> list[Complaint]:
    """Patterns that keep nothing, and recipes that reach nothing."""
    fp8, known = run.precision.fp8, list(block_linears(run.model))
    none = only(precision__fp8__recipe="none", precision__fp8__shadow_every=0)
    if fp8.recipe == "none":
        if not fp8.shadow_every:
            return []
        said = (
            f"precision.fp8.shadow_every={fp8.shadow_every} compares 8 bits with "
            f"{run.precision.compute}, but precision.fp8.recipe='none'"
        )
        off = only(precision__fp8__shadow_every=0)
        return [Complaint(said, (off, only(precision__fp8__recipe="tensorwise")), "shadow")]
    found = []
    for pattern in fp8.keep:
        if not any(fnmatchcase(name, pattern) for name in known):
            said = (
                f"precision.fp8.keep has {pattern!r}, which is no linear layer of the model"
                f"{nearest(pattern, known)}; the layers are {known[0]} to {known[-1]}"
            )
            found.append(Complaint(said, about=pattern))
    if not fp8_linears(run, sizes.tp):
        shapes = [
            local_shape(run.model, n, s, sizes.tp) for n, s in block_linears(run.model).items()
        ]
        said = (
            f"precision.fp8.recipe={fp8.recipe!r} reaches no layer: precision.fp8.keep="
            f"{list(fp8.keep)} and min_dim={fp8.min_dim} keep them all"
        )
        smaller = sorted({min(shape) for shape in shapes if min(shape) < fp8.min_dim}, reverse=True)
        ways = values_of("precision.fp8.min_dim", smaller), only(precision__fp8__keep=[]), none
        found.append(Complaint(said, ways, "no layer"))
    return found


def mixed_with_fp16(run: Run, sizes: AxisSizes) -> list[Complaint]:
    fp8 = run.precision.fp8
    if fp8.recipe == "none" or run.precision.compute != "fp16":
        return []
    said = (
        f"precision.fp8.recipe={fp8.recipe!r} works beside precision.compute='bf16' (every card "
        "with 8 bits has it), not 'fp16'"
    )
    none = {"precision.fp8.recipe": "none"}
    if fp8.shadow_every:
        none |= {"precision.fp8.shadow_every": 0}
    return [Complaint(said, (only(precision__compute="bf16"), (none,)))]


def needs_whole_gradients(run: Run, sizes: AxisSizes) -> list[Complaint]:
    if not run.optim.release_gradients:
        return []
    found, released = [], only(optim__release_gradients=False)
    if run.precision.fp8.shadow_every:
        said = (
            f"precision.fp8.shadow_every={run.precision.fp8.shadow_every} compares a step's "
            "gradients, which optim.release_gradients frees as they come"
        )
        ways = only(precision__fp8__shadow_every=0), released
        found.append(Complaint(said, ways, "shadow"))
    if run.precision.compute == "fp16":
        said = (
            "precision.compute='fp16' skips a step when any gradient overflows, which "
            "optim.release_gradients finds out too late"
        )
        found.append(Complaint(said, (only(precision__compute="bf16"), released), "fp16"))
    return found
