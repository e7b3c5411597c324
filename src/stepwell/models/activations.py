"""What blocks keep for the backward pass, in closed form. No torch.

N tokens of a micro-batch on a rank, D d_model, H heads, K key/value heads, E head_dim, F d_ff.
`a` is the size of the compute dtype, `w` of the wide one (at least float32) that norms are computed
in. tp: ranks that divide heads and F, and between the products the tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from stepwell.sections.model import ModelConfig

# all: everything that autograd saves. products: matrix products and attention; what is cheap is
# computed again. input: nothing but the input.
Keep = Literal["all", "products", "input"]
# Up to this, a micro-batch's logits wait for the backward pass (loss.keep_logits = "auto").
KEEP_LOGITS_BYTES = 256 * 2**20


class Segment(NamedTuple):
    """Blocks start..stop-1, which are computed again together; several only with keep "input"."""

    start: int
    stop: int
    keep: Keep


class BlockBytes(NamedTuple):
    """What one block holds until its backward pass, for each `Keep`; unneeded: the part of
    `products` that its backward pass does not use."""

    all: int
    products: int
    input: int
    unneeded: int = 0


def block_bytes(
    cfg: ModelConfig,
    num_tokens: int,
    a: int = 2,
    w: int = 4,
    compiled: bool = False,
    tp: int = 1,
    eight: Collection[str] = (),
) -> BlockBytes:
    """eight: the projections (`wq`) that save their input in 8 bits."""
    saved = saved_per_layer(cfg, num_tokens, a, w, compiled, tp)
    return BlockBytes(
        all=saved + _more_in_8_bits(cfg, num_tokens, a, tp, eight),
        products=_kept_products(cfg, num_tokens, a, w, tp),
        input=a * num_tokens * cfg.d_model // tp,
        unneeded=_written(cfg, num_tokens, a, tp),
    )


def saved_per_layer(
    cfg: ModelConfig,
    num_tokens: int,
    a: int = 2,
    w: int = 4,
    compiled: bool = False,
    tp: int = 1,
) -> int:
    """Bytes that one block keeps for its backward pass, besides its weights.

    Norms: the input and 1/rms. Projections: their input, which tensor ranks have gathered.
    Attention: q, k, v, the output (which is also wo's input) and the log-sum-exp. SwiGLU: gate,
    silu(gate), up and their product; compiled, silu(gate) is computed again.
    """
    N, D, F = num_tokens, cfg.d_model, cfg.d_ff // tp
    heads, kv_heads = local_heads(cfg, tp)
    query, keyvalue = N * heads * cfg.head_dim, N * kv_heads * cfg.head_dim
    attention = a * (2 * query + 2 * keyvalue) + w * N * heads
    norms = 2 * _saved_by_norm(N * D, N, a, w) // tp + 2 * a * N * D
    qk_norms = _saved_by_norm(query + keyvalue, N * (heads + kv_heads), a, w) if cfg.qk_norm else 0
    return norms + attention + qk_norms + (3 if compiled else 4) * a * N * F


def _more_in_8_bits(
    cfg: ModelConfig, num_tokens: int, a: int, tp: int, eight: Collection[str]
) -> int:
    """What `eight` changes: each has a copy of its own, of a byte an element. The input itself goes
    where all that share it have one; the output of attention stays, for attention needs it."""
    N, D, F = num_tokens, cfg.d_model, cfg.d_ff // tp
    query = local_heads(cfg, tp)[0] * cfg.head_dim
    shared = [(("wq", "wk", "wv"), D, a), (("wo",), query, 0)]
    shared += [(("w_gate", "w_up"), D, a), (("w_down",), F, a)]
    more = 0
    for names, width, size in shared:
        copies = sum(name in eight for name in names)
        more += N * width * (copies - (size if copies == len(names) else 0))
    return more


def _kept_products(cfg: ModelConfig, num_tokens: int, a: int, w: int, tp: int) -> int:
    """The input; q, k, v, the output of attention and the log-sum-exp; gate and up; what wo and
    w_down write."""
    N, D, F = num_tokens, cfg.d_model, cfg.d_ff // tp
    heads, kv_heads = local_heads(cfg, tp)
    query, keyvalue = N * heads * cfg.head_dim, N * kv_heads * cfg.head_dim
    attention = a * (2 * query + 2 * keyvalue) + w * N * heads
    return attention + a * (N * D // tp + 2 * N * F) + 2 * _written(cfg, N, a, tp)


def _written(cfg: ModelConfig, num_tokens: int, a: int, tp: int) -> int:
    """A product that is added to the residual stream; with tensor ranks, before and after their
    sum."""
    whole = a * num_tokens * cfg.d_model
    return whole if tp == 1 else whole + whole // tp


def local_heads(cfg: ModelConfig, tp: int) -> tuple[int, int]:
    """Query and key/value heads of a tensor rank, which has one at least."""
    return cfg.num_heads // tp, max(1, cfg.num_kv_heads // tp)


def root_bytes(cfg: ModelConfig, num_tokens: int, a: int, w: int, tp: int = 1) -> int:
    """Saved around the blocks: by the last norm, the hidden states (gathered for the head), cos and
    sin."""
    N, D = num_tokens, cfg.d_model
    return _saved_by_norm(N * D, N, a, w) // tp + a * N * D + 4 * N * cfg.head_dim


def _saved_by_norm(num_elements: int, num_rows: int, a: int, w: int) -> int:
    return a * num_elements + w * num_rows


def held(segments: Sequence[Segment], block: BlockBytes) -> int:
    """Bytes that wait for the backward pass when the forward pass through `segments` is over."""
    return sum(
        block.input if keep == "input" else (stop - start) * getattr(block, keep)
        for start, stop, keep in segments
    )


def seen_outside(segments: Sequence[Segment], block: BlockBytes) -> int:
    """The part of `held` that hooks around the forward pass see, and can offload: of a block that
    keeps its products only the input, for the products are kept inside."""
    inside = sum(block.products - block.input for x in segments if x.keep == "products")
    return held(segments, block) - inside


def at_block(segments: Sequence[Segment], block: BlockBytes, number: int) -> int:
    """Bytes held when the backward pass of block `number` begins: those before it still wait, and
    what its segment did not keep has been computed again."""
    for i, (start, stop, keep) in enumerate(segments):
        if start <= number < stop:
            own = (number - start + 1) * block.all
            return held(segments[:i], block) + own + (block.unneeded if keep == "products" else 0)
    raise ValueError(f"block {number} is in none of {segments}")


def peak(segments: Sequence[Segment], block: BlockBytes, root: int = 0) -> int:
    """The most that is held at once: at the end of the forward pass (with `root`), or where a
    segment has just been computed again."""
    before, ends = 0, []
    for segment in segments:
        ends.append(before + at_block((segment,), block, segment.stop - 1))
        before += held((segment,), block)
    return max([before + root, *ends])
