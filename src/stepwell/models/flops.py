"""The one FLOP counter: parameters by group and FLOPs per token. No torch.

A multiply-add is two FLOPs. Only matrix products count: norms, biases, RoPE and softmax are left
out (under 0.1 % of a model of any size worth measuring), as in PaLM, 2204.02311, appendix B.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, get_args

from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError, nearest

Attention = Literal["causal_half", "full"]

CONVENTIONS = {
    "causal_half": "6N + 6*L*d*s FLOPs per trained token (causal attention: half the score matrix)",
    "full": "6N + 12*L*d*s FLOPs per trained token (attention counted in full)",
}
TERMS = "N: matrix parameters without the input embedding, with the head; d = heads*head_dim"


def parameter_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Global name -> shape of every parameter, in the model's order; a tied head is absent."""
    return dict(_parameter_shapes(cfg))  # pyright: ignore[reportArgumentType] (frozen: hashable)


@lru_cache(maxsize=16)
def _parameter_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    D, F = cfg.d_model, cfg.d_ff
    q_rows, kv_rows = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (cfg.vocab_size, D)}
    for i in range(cfg.num_layers):
        block = f"blocks.{i}."
        shapes[block + "attn_norm.weight"] = (D,)
        for name, rows in (("wq", q_rows), ("wk", kv_rows), ("wv", kv_rows)):
            shapes[f"{block}attn.{name}.weight"] = (rows, D)
            if cfg.qkv_bias:
                shapes[f"{block}attn.{name}.bias"] = (rows,)
        shapes[block + "attn.wo.weight"] = (D, q_rows)
        if cfg.qk_norm:
            shapes[block + "attn.q_norm.weight"] = (cfg.head_dim,)
            shapes[block + "attn.k_norm.weight"] = (cfg.head_dim,)
        shapes[block + "mlp_norm.weight"] = (D,)
        shapes[block + "mlp.w_gate.weight"] = (F, D)
        shapes[block + "mlp.w_up.weight"] = (F, D)
        shapes[block + "mlp.w_down.weight"] = (D, F)
    shapes["norm.weight"] = (D,)
    if cfg.has_lm_head and not cfg.tied:
        shapes["head.weight"] = (cfg.vocab_size, D)
    if cfg.has_score:
        shapes["score.weight"] = (cfg.num_labels, D)
    return shapes


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by group. head is 0 when tied: the embedding's parameters are counted once. tied:
    the embedding is also multiplied with, as the head."""

    embedding: int
    attention: int
    mlp: int
    norms_and_biases: int
    head: int
    tied: bool

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.norms_and_biases + self.head

    @property
    def matmul(self) -> int:
        """N of 6N: what a token is multiplied by. The head's product is done, tied or not; the
        input embedding is a look-up."""
        return self.attention + self.mlp + self.head + (self.embedding if self.tied else 0)


def count_parameters(cfg: ModelConfig) -> ParameterCounts:
    sums = {"embedding": 0, "attention": 0, "mlp": 0, "norms_and_biases": 0, "head": 0}
    for name, shape in parameter_shapes(cfg).items():
        sums[_group(name, shape)] += prod(shape)
    return ParameterCounts(**sums, tied=cfg.shares_embedding)


def _group(name: str, shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return "norms_and_biases"
    if name == "embed.weight":
        return "embedding"
    if name in ("head.weight", "score.weight"):
        return "head"
    return "attention" if ".attn." in name else "mlp"


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token at a sequence length. The backward pass costs twice the forward.

    blocks: the blocks' matrices; attention: scores and weighted values of all layers;
    head: the output projection. All are forward only.
    """

    blocks: int
    attention: float
    head: int
    convention: str

    @property
    def forward(self) -> float:
        return self.blocks + self.attention + self.head

    @property
    def training(self) -> float:
        """Forward and backward, without recomputation."""
        return 3 * self.forward

    def recomputed(self, blocks: float = 0.0, attention: float = 0.0, head: float = 0.0) -> float:
        """Extra forward FLOPs per trained token when these fractions are computed twice: activation
        checkpointing of every block is `blocks=1, attention=1`; a chunked loss that drops its
        logits is `head=1`."""
        return blocks * self.blocks + attention * self.attention + head * self.head


def flops_per_token(
    cfg: ModelConfig, seq_len: float, attention: Attention = "causal_half"
) -> TokenFlops:
    """FLOPs per token of a sequence of `seq_len` tokens.

    With packed documents under a document mask, pass `attended_seq_len(document lengths)`: whole
    rows would credit the model with attention that it never does. A sliding window bounds the keys
    that a token sees. Attention is 2 products of H*E per visible key, whatever d_model is.

    Raises ConfigError for an unknown convention or a length that is not positive.
    """
    if attention not in get_args(Attention):
        raise ConfigError(
            f"attention={attention!r} is not a FLOP convention: one of "
            f"{', '.join(get_args(Attention))}{nearest(str(attention), get_args(Attention))}"
        )
    if seq_len <= 0:
        raise ConfigError(f"seq_len={seq_len} must be positive; the nearest legal value is 1")
    window = min(cfg.sliding_window or seq_len, seq_len)
    # Causal: key counts rise to `window`, then stay; s/2 without a window, as 6*L*d*s has it.
    keys = window if attention == "full" else window - window * window / (2 * seq_len)
    counts = count_parameters(cfg)
    return TokenFlops(
        blocks=2 * (counts.attention + counts.mlp),
        attention=cfg.num_layers * 4 * cfg.num_heads * cfg.head_dim * keys,
        head=2 * (counts.head + (counts.embedding if counts.tied else 0)),
        convention=f"{CONVENTIONS[attention]}; {TERMS}",
    )


def attended_seq_len(document_lengths: Iterable[int]) -> float:
    """Mean over tokens of the length of the token's own document: sum(l^2) / sum(l)."""
    lengths = [n for n in document_lengths if n > 0]
    if not lengths:
        raise ConfigError("no document has a token: a sequence length needs at least one")
    return sum(n * n for n in lengths) / sum(lengths)
