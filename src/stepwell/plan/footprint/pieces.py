"""Which blocks and ends of a model a pipeline rank has, in any program, how many of its
micro-batches wait at most, and how many parameters that is. No torch."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from stepwell.parallel.remat import chosen_blocks
from stepwell.parallel.schedules import ZERO_BUBBLE, split_blocks
from stepwell.plan.job import Arrangement, Dims
from stepwell.sections.layout import LayoutConfig


class Pieces(NamedTuple):
    """stages: (blocks with an ordinary MLP, blocks of experts) of each stage of the rank, in the
    model's order; dense, sparse: how many of all. first, last: whether it has the embedding, the
    head."""

    stages: tuple[tuple[range, range], ...]
    first: bool
    last: bool
    dense: int
    sparse: int

    @property
    def num_blocks(self) -> int:
        return self.dense + self.sparse


class Elements(NamedTuple):
    """Parameters of a tensor rank, before data ranks divide them: of a block with an ordinary MLP;
    of a block of experts, without them; its experts on an expert rank; the ends."""

    dense: float
    sparse: float
    experts: float
    embedding: float
    head: float
    ends: float


def blocks_of_stages(num_layers: int, layout: Arrangement) -> tuple[range, ...]:
    """The blocks of each stage. Ours count the embedding and the head as a block each; what is left
    over goes to the first stages. Others' are even; where they cannot be but would be with the ends
    counted so, these are counted too, as Megatron's account-for-embedding and -loss do."""
    ours = layout.program == "stepwell"
    return _blocks_of_stages(
        num_layers, ours, layout.pp, layout.stages_per_rank, layout.stage_blocks
    )


@lru_cache(maxsize=1024)
def _blocks_of_stages(
    num_layers: int, ours: bool, p: int, v: int, counts: tuple[int, ...] | None
) -> tuple[range, ...]:
    each, over = divmod(num_layers, p * v)
    if ours or (over and counts is None and (num_layers + 2) % (p * v) == 0):
        layout = LayoutConfig.model_construct(pp=p, pp_stages_per_rank=v, pp_layers=counts)
        return tuple(split_blocks(num_layers, layout))
    counts = counts or tuple(each + (s < over) for s in range(p * v))
    return tuple(range(end - n, end) for end, n in zip(accumulate(counts), counts, strict=True))


def stages_of(layout: Arrangement, pp_rank: int) -> list[int]:
    """The stages of a pipeline rank: every pp-th, or there and back for V-shaped schedules (as
    parallel.schedules.rank_of_stage)."""
    p, back = layout.pp, layout.schedule in ZERO_BUBBLE
    places = range(layout.stages_per_rank)
    return [p * v + (p - 1 - pp_rank if back and v % 2 else pp_rank) for v in places]


def pieces_of_rank(dims: Dims, layout: Arrangement, pp_rank: int) -> Pieces:
    blocks = blocks_of_stages(dims.num_layers, layout)
    stages = stages_of(layout, pp_rank)
    ordinary = dims.num_layers - dims.num_expert_layers
    split = []
    for mine in (blocks[stage] for stage in stages):
        border = min(max(ordinary, mine.start), mine.stop)
        split.append((range(mine.start, border), range(border, mine.stop)))
    dense, sparse = (sum(map(len, kind)) for kind in zip(*split, strict=True))
    return Pieces(tuple(split), stages[0] == 0, len(blocks) - 1 in stages, dense, sparse)


def ranks_to_try(dims: Dims, layout: Arrangement) -> tuple[int, ...]:
    """The pipeline ranks that may need the most: the ends, and of the others the first, which has
    as many blocks as any and waits for the most; where some blocks are computed again, the first of
    those with as many; all of them where somebody has split otherwise, or blocks differ."""
    p, unlike = layout.pp, dims.experts is not None and dims.experts.num_dense_layers > 0
    if p <= 3 or unlike or layout.stage_blocks is not None:
        return tuple(range(p))
    if layout.recompute == "every":
        shares = recomputed_of_ranks(dims, layout)
        firsts = {share: rank for rank, share in reversed([*enumerate(shares)]) if 0 < rank < p - 1}
        return tuple(sorted({0, 1, p - 1, *firsts.values()}))
    return (0, 1, p - 1)


def recomputed_of_ranks(dims: Dims, layout: Arrangement) -> list[int]:
    """Of each pipeline rank, the blocks that recomputation of one block in `recompute_every`
    computes again."""
    stages = blocks_of_stages(dims.num_layers, layout)
    chosen = [len(chosen_blocks(blocks, layout.recompute_every)) for blocks in stages]
    return [sum(chosen[s] for s in stages_of(layout, rank)) for rank in range(layout.pp)]


def held_by_stages(
    schedule: str, p: int, v: int, pp_rank: int, m: int
) -> tuple[tuple[float, ...], ...]:
    """Micro-batches that wait for their backward pass, in each stage of a rank, at the moments
    which may be the fullest.

    1f1b: p - rank (2006.09503). interleaved: its warm-up, (v-1) rounds of p or a little more and
    2 (p - rank - 1), and the one at work (2104.04473); from then on each forward pass takes the
    place of a backward pass, mostly of another stage. Zero bubble: 2 p of both stages together, as
    in 1f1b's first stage, and one that waits for its weights' gradients (2401.10241).
    """
    if schedule == "gpipe":
        return ((m,) * v,)
    if schedule in ZERO_BUBBLE:
        return ((min(v * m, 2 * p + 1) / v,) * v,)
    if v == 1:
        return ((min(m, p - pp_rank),),)
    return _held_interleaved(p, v, pp_rank, m)


@lru_cache(maxsize=4096)
def _held_interleaved(p: int, v: int, pp_rank: int, m: int) -> tuple[tuple[float, ...], ...]:
    """Before a backward pass, where forward or backward passes come to another stage."""
    per_round = m // max(1, m // p)
    most = min(v * m, (v - 1) * per_round + 2 * (p - pp_rank - 1) + 1)
    borders = range(0, 2 * v * per_round + most, per_round)
    starts = {n for border in borders for n in (border, border - most) if 0 <= n <= v * m - most}
    counts = set()
    for done in starts:
        forward = [_passes(done + most, place, v, per_round) for place in range(v)]
        backward = [_passes(done, v - 1 - place, v, per_round) for place in range(v)]
        counts.add(tuple(float(f - b) for f, b in zip(forward, backward, strict=True)))
    return tuple(sorted(counts))


def _passes(number: int, turn: int, v: int, per_round: int) -> int:
    """Of the first `number` passes of a rank, those of the stage whose turn in a round this is."""
    rounds, inside = divmod(number, v * per_round)
    return rounds * per_round + min(max(inside - turn * per_round, 0), per_round)


def elements_of(dims: Dims, layout: Arrangement) -> Elements:
    t, D = layout.tp, dims.d_model
    attention = 2 * D * (dims.q_width / t + key_width(dims, layout))
    vectors = 2 * D + dims.biases
    experts = router = shared = 0.0
    if dims.experts:
        one = dims.mlp_parameters(dims.experts.d_ff)
        experts = dims.experts.num_experts * one / layout.ep
        router = dims.experts.num_experts * D
        shared = dims.experts.num_shared * one / t
    words = dims.embedding_parameters / t
    return Elements(
        dense=attention + vectors + dims.mlp_parameters(dims.d_ff) / t,
        sparse=attention + vectors + router + shared,
        experts=experts,
        embedding=words + dims.learned_positions * D,
        head=words,
        ends=D,
    )


def key_width(dims: Dims, layout: Arrangement) -> int:
    """Rows of a tensor rank's key projection. With fewer heads than ranks, Megatron gives each rank
    one, our engine all (`models/axes`)."""
    if dims.num_kv_heads % layout.tp and layout.program == "stepwell":
        return dims.kv_width
    return max(dims.head_dim, dims.kv_width // layout.tp)


def target_sizes(dims: Dims, layout: Arrangement) -> list[tuple[int, int]]:
    """Rows and columns of the adapted matrices of a block, on a tensor rank."""
    t, D = layout.tp, dims.d_model
    inner, query = dims.d_ff // t, dims.q_width // t
    key = key_width(dims, layout)
    sizes = {"wq": (query, D), "wk": (key, D), "wv": (key, D), "wo": (D, query)}
    sizes |= {"w_gate": (inner, D), "w_up": (inner, D), "w_down": (D, inner)}
    return [sizes[name] for name in layout.adapters.targets] if layout.adapters else []
