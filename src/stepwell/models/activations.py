"""What blocks keep for the backward pass, in closed form. No torch.

N tokens of a micro-batch, D d_model, H heads, K key/value heads, E head_dim, F d_ff.
`a` is the size of the compute dtype, `w` of the wide one (at least float32) that norms are computed
in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from stepwell.config import ModelConfig

# all: everything that autograd saves. products: matrix products and attention; what is cheap is
# computed again. input: nothing but the input.
Keep = Literal["all", "products", "input"]


class Segment(NamedTuple):
    """Blocks start..stop-1, which are computed again together; several only with keep "input"."""

    start: int
    stop: int
    keep: Keep


class BlockBytes(NamedTuple):
    """What one block holds until its backward pass, for each `Keep`."""

    all: int
    products: int
    input: int


def block_bytes(
    cfg: ModelConfig, num_tokens: int, a: int = 2, w: int = 4, compiled: bool = False
) -> BlockBytes:
    return BlockBytes(
        all=saved_per_layer(cfg, num_tokens, a, w, compiled),
        products=_kept_products(cfg, num_tokens, a, w),
        input=a * num_tokens * cfg.d_model,
    )


def saved_per_layer(
    cfg: ModelConfig, num_tokens: int, a: int = 2, w: int = 4, compiled: bool = False
) -> int:
    """Bytes that one block keeps for its backward pass, besides its weights.

    Norms: the input and 1/rms. Projections: their input. Attention: q, k, v, the output (which is
    also wo's input) and the log-sum-exp. SwiGLU: gate, silu(gate), up and their product; compiled,
    silu(gate) is computed again.
    """
    N, D, F = num_tokens, cfg.d_model, cfg.d_ff
    query, keyvalue = N * cfg.num_heads * cfg.head_dim, N * cfg.num_kv_heads * cfg.head_dim
    heads = N * (cfg.num_heads + cfg.num_kv_heads)
    attention = a * (2 * query + 2 * keyvalue) + w * N * cfg.num_heads
    norms = 2 * _saved_by_norm(N * D, N, a, w) + 2 * a * N * D
    qk_norms = _saved_by_norm(query + keyvalue, heads, a, w) if cfg.qk_norm else 0
    return norms + attention + qk_norms + (3 if compiled else 4) * a * N * F


def _kept_products(cfg: ModelConfig, num_tokens: int, a: int, w: int) -> int:
    """The input; q, k, v, the outputs of attention and of wo; the log-sum-exp; gate, up and down
    (which is kept without need: an operator cannot tell)."""
    N, D, F = num_tokens, cfg.d_model, cfg.d_ff
    query, keyvalue = N * cfg.num_heads * cfg.head_dim, N * cfg.num_kv_heads * cfg.head_dim
    attention = a * (2 * query + 2 * keyvalue) + w * N * cfg.num_heads
    return attention + a * (3 * N * D + 2 * N * F)


def root_bytes(cfg: ModelConfig, num_tokens: int, a: int, w: int) -> int:
    """Saved around the blocks: by the last norm, the hidden states, cos and sin."""
    N, D = num_tokens, cfg.d_model
    return _saved_by_norm(N * D, N, a, w) + a * N * D + 4 * N * cfg.head_dim


def _saved_by_norm(num_elements: int, num_rows: int, a: int, w: int) -> int:
    return a * num_elements + w * num_rows


def held(segments: Sequence[Segment], block: BlockBytes) -> int:
    """Bytes that wait for the backward pass when the forward pass through `segments` is over."""
    return sum(_held(segment, block) for segment in segments)


def peak(segments: Sequence[Segment], block: BlockBytes, root: int = 0) -> int:
    """The most that is held at once: at the end of the forward pass (with `root`), or when the
    backward pass has just computed a segment again, the ones before it still waiting."""
    highest, before = held(segments, block) + root, 0
    for start, stop, keep in segments:
        own = _held(Segment(start, stop, keep), block)
        whole = (stop - start) * block.all
        # Computed again, a block's input is the one that was kept.
        highest = max(highest, before + whole)
        before += own
    return highest


def _held(segment: Segment, block: BlockBytes) -> int:
    start, stop, keep = segment
    return block.input if keep == "input" else (stop - start) * getattr(block, keep)
