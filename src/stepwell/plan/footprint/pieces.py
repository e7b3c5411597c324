"""Which blocks and ends of a model a pipeline rank has, in any program, how many of its
micro-batches wait at most, and how many parameters that is. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import ceil
from operator import mul
from typing import Literal, NamedTuple

from stepwell.parallel.remat import chosen_blocks
from stepwell.parallel.schedules import ZERO_BUBBLE, most_in_flight, split_blocks
from stepwell.plan.footprint.zero_bubble import states_of
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
    counted so, these are counted too, as Megatron's account-for-embedding and -loss do. Several
    stages a rank that still cannot be even need a layout there, which spares the ends (of
    DeepSeek-V3's 32 stages, 31 have its 61 blocks and the last has the loss)."""
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
    if counts is None:
        even = tuple(each + (s < over) for s in range(p * v))
        counts = _sparing_ends(num_layers, p * v) if over and v > 1 else even
    return tuple(range(end - n, end) for end, n in zip(accumulate(counts), counts, strict=True))


def _sparing_ends(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """What is missing to even stages, half of it at the last stage, as far as that has blocks."""
    each = ceil(num_layers / num_stages)
    missing = each * num_stages - num_layers
    counts = [each] * num_stages
    for first, last in enumerate(reversed(range(num_stages))):
        for stage, share in ((last, (missing + 1) // 2), (first, missing // 2)):
            taken = min(counts[stage], share)
            counts[stage] -= taken
            missing -= taken
    return tuple(counts)


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


Phase = Literal["backward", "loss", "embedding"]


class Moment(NamedTuple):
    """Before a backward pass of a pipeline rank, of its stage `place`: of each stage the
    micro-batches that wait for theirs (this one, too), and whether it has had one, so that its
    gradients are there. halves: of each stage, the micro-batches between the halves of a backward
    pass; halved: this one is among them, before its weights' gradients."""

    place: int
    held: tuple[float, ...]
    summed: tuple[bool, ...]
    halves: tuple[float, ...] = ()
    halved: bool = False

    def weigh(self, kept: Sequence[float], halves: Sequence[float]) -> float:
        """All that waits, this micro-batch included, from what one does in each stage."""
        return sum(map(mul, self.held, kept)) + sum(map(mul, self.halves, halves))


def moments_of_stages(schedule: str, p: int, v: int, pp_rank: int, m: int) -> tuple[Moment, ...]:
    """The moments which may be the fullest, the first backward pass first.

    1f1b: p - rank (2006.09503). interleaved: its warm-up, (v-1) rounds of p or a little more and
    2 (p - rank - 1), and the one at work (2104.04473); from then on each forward pass takes the
    place of a backward pass, mostly of another stage. Zero bubble: `footprint/zero_bubble`.
    """
    if schedule in ZERO_BUBBLE:
        states = states_of(schedule, p, pp_rank, m)
        return tuple(Moment(x.place, x.held[:2], x.summed, x.held[2:], x.halved) for x in states)
    if v == 1:
        most = most_in_flight(schedule, p, m, 1, pp_rank)
        first = Moment(0, (most,), (False,))
        return (first, Moment(0, (min(m - 1, most),), (True,))) if m > 1 else (first,)
    return _moments_interleaved(p, v, pp_rank, m)


@lru_cache(maxsize=4096)
def _moments_interleaved(p: int, v: int, pp_rank: int, m: int) -> tuple[Moment, ...]:
    """Before and after forward or backward passes come to another stage, and where the first
    backward pass of a stage is done."""
    per_round = m // max(1, m // p)
    most = most_in_flight("interleaved-1f1b", p, m, v, pp_rank)
    borders = range(0, 2 * v * per_round + most, per_round)
    starts = {n for border in borders for n in (border - 1, border, border - most)}
    starts = {n for n in starts if 0 <= n <= v * m - most}
    starts |= {n for border in borders[:v] for n in (border, border + 1) if n < v * m}
    found = {_moment(min(done + most, v * m), done, v, per_round) for done in starts}
    return tuple(sorted(found, key=lambda moment: (sum(moment.summed), -sum(moment.held), moment)))


def _moment(forwards: int, backwards: int, v: int, per_round: int) -> Moment:
    """Once a rank has done so many passes."""
    held = tuple(
        float(_passes(forwards, place, v, per_round) - _passes(backwards, turn, v, per_round))
        for place, turn in zip(range(v), reversed(range(v)), strict=True)
    )
    next_turn = backwards % (v * per_round) // per_round
    summed = tuple(backwards > turn * per_round for turn in reversed(range(v)))
    return Moment(v - 1 - next_turn, held, summed)


def fullest(
    moments: Sequence[Moment],
    kept: Sequence[float],
    halves: Sequence[float],
    restored: Sequence[float],
    gradients: Sequence[float],
) -> dict[Moment, set[Phase]]:
    """Of these moments the fullest, and what to look at there: the last stage's loss, the first
    one's embedding, and the backward pass, once with the gradients of its own stage there and once,
    if it may be more, with them still to come. Of each stage: what it keeps of a micro-batch, and
    between the halves of a backward pass; what its backward pass brings back, its gradients."""
    found: dict[Phase, tuple[float, Moment]] = {}
    new: tuple[float, Moment] | None = None
    nothing = (-1.0, moments[0])
    for moment in moments:
        place, summed = moment.place, moment.summed
        size = moment.weigh(kept, halves) + sum(map(mul, gradients, summed))
        last = place == len(kept) - 1 and not moment.halved
        if last and size > found.get("loss", nothing)[0]:
            found["loss"] = size, moment
        if place == 0 and size > found.get("embedding", nothing)[0]:
            found["embedding"] = size, moment
        size += restored[place]
        if not summed[place]:
            size += gradients[place]  # as if all were there already
            new = (size, moment) if new is None or size > new[0] else new
        elif size > found.get("backward", nothing)[0]:
            found["backward"] = size, moment
    named: dict[Moment, set[Phase]] = {}
    for phase, (_, moment) in found.items():
        named.setdefault(moment, set()).add(phase)
    if new and new[0] > found.get("backward", nothing)[0]:
        named.setdefault(new[1], set()).add("backward")
    return named


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
