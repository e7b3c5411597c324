"""Which part of the model's state a rank holds, exactly. No torch.

Tensor ranks divide a parameter by the table of axes; FSDP2 then divides the first dim of what is
left among n ranks into pieces of ceil(rows / n), and allocates that much on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from stepwell.config import Run
from stepwell.models.axes import axes_of, divided_dim
from stepwell.models.flops import parameter_shapes
from stepwell.parallel.lever_rules import QUANTISED_BLOCK, is_quantised
from stepwell.parallel.rules import AxisSizes
from stepwell.parallel.schedules import num_stages, split_blocks, stages_of_rank
from stepwell.sections.model import ModelConfig


class Part(NamedTuple):
    """A pipeline stage: its blocks, and which ends of the model it has."""

    blocks: range
    first: bool
    last: bool


class Held(NamedTuple):
    """Elements of some parameters on one rank: whole (of a tensor rank), the matrices among them,
    sharded, and the bytes of their optimiser state."""

    whole: int = 0
    matrices: int = 0
    shard: int = 0
    optimizer_bytes: int = 0

    def plus(self, other: Held, times: int = 1) -> Held:
        return Held(*(a + times * b for a, b in zip(self, other, strict=True)))


def parts_of_rank(run: Run, pp_rank: int) -> list[Part]:
    blocks, last = split_blocks(run.model.num_layers, run.layout), num_stages(run.layout) - 1
    stages = stages_of_rank(pp_rank, run.layout)
    return [Part(blocks[s], s == 0, s == last) for s in stages]


def num_shards(run: Run, sizes: AxisSizes) -> int:
    """Among how many ranks FSDP2 divides."""
    return sizes.dp_shard * sizes.cp if run.layout.zero else 1


def held_by_block(run: Run, sizes: AxisSizes) -> Held:
    first = _first_block(run.model)  # pyright: ignore[reportArgumentType] (frozen: hashable)
    return held(run, sizes, first)


@lru_cache(maxsize=16)
def _first_block(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes = parameter_shapes(model)
    return {name: shape for name, shape in shapes.items() if name.startswith("blocks.0.")}


def held_by_root(run: Run, sizes: AxisSizes, parts: Iterable[Part]) -> Held:
    """What a rank's stages hold besides blocks. A tied embedding has a copy, without optimiser
    state, on a last stage that is not the first."""
    shapes, total = parameter_shapes(run.model), Held()
    for _, first, last in parts:
        names = ["embed.weight"] if first else []
        if last:
            names += [n for n in ("head.weight", "norm.weight", "score.weight") if n in shapes]
        total = total.plus(held(run, sizes, {name: shapes[name] for name in names}))
        if last and not first and run.model.shares_embedding:
            copy = held(run, sizes, {"embed.weight": shapes["embed.weight"]})
            total = total.plus(copy._replace(optimizer_bytes=0))
    return total


def held(run: Run, sizes: AxisSizes, shapes: Mapping[str, tuple[int, ...]]) -> Held:
    total = Held()
    for name, shape in shapes.items():
        local = list(shape)
        dim = divided_dim(axes_of(name), run.model, sizes.tp)
        if dim is not None:
            local[dim] //= sizes.tp
        rows = -(-local[0] // num_shards(run, sizes))
        shard = rows * prod(local[1:])
        total = total.plus(
            Held(
                whole=prod(local),
                matrices=prod(local) if len(shape) == 2 else 0,
                shard=shard,
                optimizer_bytes=_moments(run, name, shape, shard, local[-1]),
            )
        )
    return total


def _moments(run: Run, name: str, shape: tuple[int, ...], shard: int, columns: int) -> int:
    """Bytes of the moments of a shard (without the counters of steps)."""
    size = {"fp32": 4, "fp64": 8}[run.precision.param]
    kind, matrix = run.optim.kind, len(shape) == 2
    if kind == "muon" and matrix and name.startswith("blocks."):
        return size * shard
    if kind == "adamw8bit" and is_quantised(shape, columns):
        return 2 * (shard + size * shard // QUANTISED_BLOCK)
    return 2 * size * shard
