"""What a rank's share of a job's weights is, for what has to be gathered and reduced. No torch.

n ranks shard a unit (a block, or what a stage has besides blocks) by the first dim of each
parameter, in pieces of ceil(rows / n); t tensor ranks have divided it before.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import NamedTuple

from stepwell.parallel.schedules import ZERO_BUBBLE
from stepwell.plan.footprint.pieces import blocks_of_stages, stages_of
from stepwell.plan.job import Adapters, Arrangement, Dims
from stepwell.plan.memory.shards import Part


class Weight(NamedTuple):
    """shape: of the whole. divided: the dim that tensor ranks divide, None: each has the whole.
    partial: of those that are whole, whether ranks use it in ways of their own, so that its
    gradients have to be summed over them."""

    shape: tuple[int, ...]
    divided: int | None = None
    trained: bool = True
    partial: bool = False

    def local(self, t: int) -> tuple[int, ...]:
        if self.divided is None:
            return self.shape
        dims = list(self.shape)
        dims[self.divided] = -(-dims[self.divided] // t)
        return tuple(dims)

    def padded(self, t: int, n: int) -> int:
        """Elements of n equal pieces."""
        rows, *rest = self.local(t)
        return n * -(-rows // n) * prod(rest)


def gathered(weights: Iterable[Weight], t: int, n: int) -> int:
    """Elements that are handed out."""
    return sum(weight.padded(t, n) for weight in weights)


def reduced(weights: Iterable[Weight], t: int, n: int) -> int:
    """Elements of the gradients."""
    return sum(weight.padded(t, n) for weight in weights if weight.trained)


def parts_of(layout: Arrangement, num_layers: int, pp_rank: int) -> list[Part]:
    """The stages of a pipeline rank."""
    blocks = blocks_of_stages(num_layers, layout)
    last = len(blocks) - 1
    return [Part(blocks[s], s == 0, s == last) for s in stages_of(layout, pp_rank)]


def rank_of_stage(layout: Arrangement, stage: int) -> int:
    """As parallel.schedules.rank_of_stage."""
    turn, place = divmod(stage, layout.pp)
    back = layout.schedule in ZERO_BUBBLE and turn % 2
    return layout.pp - 1 - place if back else place


def block_weights(dims: Dims, layout: Arrangement, experts: bool = False) -> tuple[Weight, ...]:
    """Of one block, without routed experts; experts: of a layer that has them."""
    return _block_weights(dims, layout.tp, layout.adapters, experts)


@lru_cache(maxsize=256)
def _block_weights(
    dims: Dims, t: int, adapters: Adapters | None, experts: bool
) -> tuple[Weight, ...]:
    D, q, kv = dims.d_model, dims.q_width, dims.kv_width
    whole = dims.num_kv_heads % t != 0
    matrices = {
        "wq": Weight((q, D), 0),
        "wk": Weight((kv, D), None if whole else 0, partial=whole),
        "wv": Weight((kv, D), None if whole else 0, partial=whole),
        "wo": Weight((D, q), 1),
    }
    if not experts:
        matrices |= _mlp(dims, dims.d_ff, "")
    elif dims.experts:
        for i in range(dims.experts.num_shared):
            matrices |= _mlp(dims, dims.experts.d_ff, f"shared {i} ")
        matrices["router"] = Weight((dims.experts.num_experts, D), partial=True)
    vectors = [Weight((D,), partial=True)] * 2
    vectors += _biases(dims, whole)
    if adapters is None:
        return (*matrices.values(), *vectors)
    return (*_adapted(matrices, adapters), *(w._replace(trained=False) for w in vectors))


def expert_elements(dims: Dims) -> int:
    """Of all routed experts of a layer."""
    if dims.experts is None:
        return 0
    return dims.experts.num_experts * dims.mlp_parameters(dims.experts.d_ff)


def root_weights(dims: Dims, layout: Arrangement, part: Part) -> list[Weight]:
    """Of a stage, besides blocks."""
    words, found = Weight((dims.vocab_size, dims.d_model), 0), []
    if part.first or (part.last and dims.tied):
        found.append(words)
    if part.first and dims.learned_positions:
        found.append(Weight((dims.learned_positions, dims.d_model), partial=True))
    if part.last:
        found.append(Weight((dims.d_model,), partial=True))
        found += [] if dims.tied else [words]
    trained = layout.adapters is None
    return [weight._replace(trained=trained) for weight in found]


def _mlp(dims: Dims, d_ff: int, prefix: str) -> dict[str, Weight]:
    up, down = Weight((d_ff, dims.d_model), 0), Weight((dims.d_model, d_ff), 1)
    names = ("w_gate", "w_up") if dims.mlp == "swiglu" else ("w_up",)
    return {prefix + name: up for name in names} | {f"{prefix}w_down": down}


def _biases(dims: Dims, whole: bool) -> list[Weight]:
    """Norms of heads, and biases: those of Qwen2's projections, or a lump of others'."""
    found, rest = [], dims.biases
    if dims.qk_norm:
        found += [Weight((dims.head_dim,), partial=True)] * 2
        rest -= 2 * dims.head_dim
    if rest == dims.q_width + 2 * dims.kv_width:
        found.append(Weight((dims.q_width,), 0))
        found += [Weight((dims.kv_width,), None if whole else 0, partial=whole)] * 2
    elif rest > 0:
        found.append(Weight((rest,), partial=True))
    return found


def _adapted(matrices: dict[str, Weight], adapters: Adapters) -> list[Weight]:
    """Frozen matrices (of those in 4 bits nothing is handed out) and their adapters. Tensor ranks
    divide the side of an adapter that they divide the matrix along."""
    found = []
    for name, weight in matrices.items():
        adapted = name in adapters.targets
        if not (adapted and adapters.quantized):
            found.append(weight._replace(trained=False, partial=False))
        if adapted:
            rows, columns = weight.shape
            of_rows, of_columns = weight.divided == 0, weight.divided == 1
            if adapters.dora:
                found.append(Weight((rows,), 0 if of_rows else None, partial=not of_rows))
            found.append(
                Weight((adapters.rank, columns), 1 if of_columns else None, partial=not of_columns)
            )
            found.append(Weight((rows, adapters.rank), 0 if of_rows else None, partial=not of_rows))
    return found
