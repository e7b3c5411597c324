"""The decoder as plain matrices with a key/value cache: what sampling runs on.

B slots, R rows in use (R <= B), T prompt tokens, D d_model, H heads, K key/value heads, E head_dim,
G = H/K query heads that share a key/value head, V vocabulary, L layers, S cache length.

At a few rows a step costs as much in launching operators as in arithmetic, so q, k and v are one
matrix, gate and up are one matrix, and q and k are rotated together as complex numbers. For the
last, the rows of wq and wk are reordered so that the pair (i, i + E/2) lies side by side; scores
don't change when q and k are permuted alike. Roundings fall where `transformer.Decoder` has them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stepwell.models.attention import attend
from stepwell.models.flops import parameter_shapes
from stepwell.models.layers import rms_norm, rope_angles, rope_frequencies, upcast
from stepwell.models.row_padding import missing_rows, with_zeros
from stepwell.sections.model import ModelConfig
from stepwell.types import CheckpointError, ConfigError, nearest

PROMPT_MULTIPLE = 16  # of the rows of a prompt, in 16 bits on a CPU (`row_padding`)
BUCKET = 32  # attended cache lengths are multiples of this: few shapes, whole vectors


def pack_matrix(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix as `linear` likes it best. For bfloat16 on CPU that is oneDNN's blocked layout (an
    opaque tensor): the same products and sums a third faster at few rows."""
    if _in_blocks(weight, dtype):
        return torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous())
    return weight.to(dtype, copy=True)


def _in_blocks(weight: Tensor, dtype: torch.dtype) -> bool:
    return weight.device.type == "cpu" and dtype == torch.bfloat16 and _BLOCKED_BF16


_BLOCKED_BF16 = (
    torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for a matrix of `pack_matrix`."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


@dataclass(frozen=True)
class LayerWeights:
    """Matrices are in compute dtype, norms in at least float32 (as the master weights are)."""

    attn_norm_D: Tensor
    qkv: Tensor  # ((H + 2K) E, D)
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # (H + K, E)
    wo: Tensor  # (D, H E)
    mlp_norm_D: Tensor
    gate_up: Tensor  # (2F, D)
    w_down: Tensor  # (D, F)


@dataclass(frozen=True)
class DecodeWeights:
    cfg: ModelConfig
    embed_VD: Tensor
    head_VD: Tensor
    norm_D: Tensor
    layers: tuple[LayerWeights, ...]

    @classmethod
    def pack(
        cls,
        cfg: ModelConfig,
        state: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
    ) -> DecodeWeights:
        """From a decoder's full parameters by name (of `transformer.AXES`), copied to `dtype`. One
        block is held at a time, if each block's come together.

        Raises CheckpointError for missing, surplus or misshapen parameters, ConfigError for a model
        that gives scores only.
        """
        if not cfg.has_lm_head:
            raise ConfigError(
                f"model.head={cfg.head!r} gives scores, no next tokens, so there is nothing to "
                "sample; take a language model (model.head='lm')"
            )
        return cls(cfg, **_packed(cfg, state, dtype))

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_VD.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_VD.device

    def rope(self, length: int) -> Tensor:
        """cos + i sin of positions 0..length-1, complex (length, 1, E/2)."""
        positions = torch.arange(length, device=self.device)
        cos, sin = rope_angles(positions, rope_frequencies(self.cfg, self.device))
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return torch.complex(cos.to(wide), sin.to(wide))


@dataclass(frozen=True)
class KVCache:
    """Slots of equal length. A slot is filled from position 0, whatever the others hold."""

    kv: Tensor  # (L, B, S, 2, K, E)

    @classmethod
    def empty(cls, weights: DecodeWeights, num_slots: int, length: int) -> KVCache:
        cfg = weights.cfg
        shape = (cfg.num_layers, num_slots, length, 2, cfg.num_kv_heads, cfg.head_dim)
        return cls(torch.zeros(shape, dtype=weights.dtype, device=weights.device))

    @property
    def num_slots(self) -> int:
        return self.kv.shape[1]

    @property
    def length(self) -> int:
        return self.kv.shape[2]

    def put(self, slot: int, kv_LT: Tensor) -> None:
        """Fills a slot with a prefix of shape (L, T, 2, K, E)."""
        self.kv[:, slot, : kv_LT.shape[1]] = kv_LT


def bucketed(length: int) -> int:
    """The next multiple of BUCKET."""
    return -(-length // BUCKET) * BUCKET


def prefill(weights: DecodeWeights, rope: Tensor, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of one prompt, (L, T, 2, K, E), and the logits after it, (V,).

    rope: `weights.rope(length)` with length >= T.
    """
    cfg, num_tokens = weights.cfg, tokens_T.shape[0]
    missing = missing_rows(num_tokens, weights.dtype, weights.device, PROMPT_MULTIPLE)
    # No token sees what comes after it.
    tokens_T = with_zeros(tokens_T, min(missing, rope.shape[0] - num_tokens))
    T = tokens_T.shape[0]
    borders = torch.tensor([0, T], dtype=torch.int32, device=tokens_T.device)
    shape = (cfg.num_layers, T, 2, cfg.num_kv_heads, cfg.head_dim)
    kv_LT = torch.empty(shape, dtype=weights.dtype, device=weights.device)
    x_TD = F.embedding(tokens_T, weights.embed_VD)
    for layer, kv_T in zip(weights.layers, kv_LT, strict=True):
        q_THE, fresh = _project(cfg, layer, x_TD, rope[:T])
        kv_T.copy_(fresh.unflatten(1, shape[2:]))
        out_THE = attend(q_THE, kv_T[:, 0], kv_T[:, 1], borders, cfg.sliding_window)
        x_TD = _finish(cfg, layer, x_TD, out_THE.flatten(1))
    return kv_LT[:, :num_tokens], _head(weights, x_TD[num_tokens - 1 : num_tokens])[0]


def decode_step(
    weights: DecodeWeights,
    rope: Tensor,
    cache: KVCache,
    tokens_R: Tensor,
    positions_R: Tensor,
    length: int,
) -> Tensor:
    """Feeds one token to each of the first R slots; writes the cache, returns logits (R, V).

    positions_R: int64, where each token goes in its slot; all are < length.
    length: how much of the cache is attended to (a multiple of BUCKET). Entries beyond a row's
    position have weight 0 exactly, so the length changes no row's result.
    """
    cfg, R = weights.cfg, tokens_R.shape[0]
    G, K, E = cfg.num_heads // cfg.num_kv_heads, cfg.num_kv_heads, cfg.head_dim
    rope_R = rope[positions_R]
    mask = _mask(positions_R, length, cfg.sliding_window, weights.dtype)
    places_R = torch.arange(R, device=tokens_R.device) * cache.length + positions_R
    x_RD = F.embedding(tokens_R, weights.embed_VD)
    for layer, kv in zip(weights.layers, cache.kv, strict=True):
        q_RHE, fresh = _project(cfg, layer, x_RD, rope_R)
        kv.view(-1, 2 * K * E).index_copy_(0, places_R, fresh)
        k_RKSE = kv[:R, :length, 0].transpose(1, 2)
        v_RKSE = kv[:R, :length, 1].transpose(1, 2)
        out = F.scaled_dot_product_attention(q_RHE.view(R, K, G, E), k_RKSE, v_RKSE, attn_mask=mask)
        x_RD = _finish(cfg, layer, x_RD, out.reshape(R, -1))
    return _head(weights, x_RD)


def _project(
    cfg: ModelConfig, layer: LayerWeights, x_ND: Tensor, rope: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotated q (N, H, E), and rotated k beside v (N, 2 K E)."""
    num_rotated, E = cfg.num_heads + cfg.num_kv_heads, cfg.head_dim
    hidden_ND = rms_norm(x_ND, layer.attn_norm_D, cfg.norm_eps)
    out = linear(hidden_ND, layer.qkv, layer.qkv_bias)
    qk = out[:, : num_rotated * E].unflatten(1, (num_rotated, E))
    pairs = qk if layer.qk_norm is None else rms_norm(qk, layer.qk_norm, cfg.norm_eps)
    turned = torch.view_as_complex(upcast(pairs).unflatten(2, (E // 2, 2))) * rope
    qk.copy_(torch.view_as_real(turned).flatten(2))
    return qk[:, : cfg.num_heads], out[:, cfg.num_heads * E :]


def _finish(cfg: ModelConfig, layer: LayerWeights, x_ND: Tensor, attended: Tensor) -> Tensor:
    """The rest of a block after attention."""
    x_ND = x_ND + linear(attended, layer.wo)
    hidden_ND = rms_norm(x_ND, layer.mlp_norm_D, cfg.norm_eps)
    gate, up = linear(hidden_ND, layer.gate_up).chunk(2, dim=1)
    return x_ND + linear(F.silu(gate) * up, layer.w_down)


def _head(weights: DecodeWeights, x_ND: Tensor) -> Tensor:
    return linear(rms_norm(x_ND, weights.norm_D, weights.cfg.norm_eps), weights.head_VD)


def _mask(positions_R: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where a row may look, -inf elsewhere, (R, 1, 1, length)."""
    index = torch.arange(length, device=positions_R.device)
    here = positions_R[:, None]
    hidden = index > here
    if window is not None:
        hidden |= index <= here - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None, None]


def _pair_order(cfg: ModelConfig) -> Tensor:
    """Which row of a head goes where: 0, E/2, 1, E/2 + 1, ..."""
    return torch.arange(cfg.head_dim).view(2, -1).t().flatten()


def _packed(
    cfg: ModelConfig, pairs: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> dict[str, Any]:
    """The fields of DecodeWeights but cfg. A block is packed and let go when all of it is here."""
    shapes, order = parameter_shapes(cfg), _pair_order(cfg)
    missing, left = set(shapes), Counter(_block(name) for name in shapes)
    blocks: dict[int, dict[str, Tensor]] = defaultdict(dict)
    layers: dict[int, LayerWeights] = {}
    fields: dict[str, Any] = {}
    for name, tensor in pairs:
        _check(name, tensor, shapes)
        missing.remove(name)
        block = _block(name)
        left[block] -= 1
        with torch.inference_mode():
            # Norms are rounded nowhere: they are few, and the decoder multiplies in float32.
            if name == "embed.weight":
                fields["embed_VD"] = tensor.detach().to(dtype, copy=True)
            elif name == "norm.weight":
                fields["norm_D"] = upcast(tensor.detach()).clone()
            elif name == "head.weight":
                fields["head_VD"] = pack_matrix(tensor.detach(), dtype)
            elif block >= 0:
                blocks[block][name] = tensor
                if left[block] == 0:
                    layers[block] = _pack_layer(cfg, blocks.pop(block), block, order, dtype)
    if missing:
        first = next(name for name in shapes if name in missing)
        raise CheckpointError(f"parameter {first!r} is missing")
    if cfg.tied:
        embed_VD = fields["embed_VD"]
        with torch.inference_mode():
            in_blocks = _in_blocks(embed_VD, dtype)
            fields["head_VD"] = pack_matrix(embed_VD, dtype) if in_blocks else embed_VD
    return {**fields, "layers": tuple(layers[i] for i in range(cfg.num_layers))}


def _block(name: str) -> int:
    """-1: what is around the blocks."""
    return int(name.split(".")[1]) if name.startswith("blocks.") else -1


def _pack_layer(
    cfg: ModelConfig,
    state: Mapping[str, Tensor],
    block: int,
    order: Tensor,
    dtype: torch.dtype,
) -> LayerWeights:
    def get(name: str) -> Tensor:
        return state[f"blocks.{block}.{name}"].detach()

    def paired(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, cfg.head_dim))[:, order.to(x.device)].flatten(0, 1)

    def fused(kind: str) -> Tensor:
        q, k, v = (get(f"attn.{w}.{kind}").to(dtype) for w in ("wq", "wk", "wv"))
        return torch.cat([paired(q), paired(k), v])

    gate_up = torch.cat([get(f"mlp.{w}.weight").to(dtype) for w in ("w_gate", "w_up")])

    qk_norm = None
    if cfg.qk_norm:
        q, k = (upcast(paired(get(f"attn.{n}.weight"))) for n in ("q_norm", "k_norm"))
        qk_norm = torch.cat([q.expand(cfg.num_heads, -1), k.expand(cfg.num_kv_heads, -1)])
    return LayerWeights(
        attn_norm_D=upcast(get("attn_norm.weight")).clone(),
        qkv=pack_matrix(fused("weight"), dtype),
        qkv_bias=fused("bias") if cfg.qkv_bias else None,
        qk_norm=qk_norm,
        wo=pack_matrix(get("attn.wo.weight"), dtype),
        mlp_norm_D=upcast(get("mlp_norm.weight")).clone(),
        gate_up=pack_matrix(gate_up, dtype),
        w_down=pack_matrix(get("mlp.w_down.weight"), dtype),
    )


def _check(name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if name not in shapes:
        raise CheckpointError(f"parameter {name!r} is not part of the model{nearest(name, shapes)}")
    if tuple(tensor.shape) != shapes[name]:
        raise CheckpointError(
            f"parameter {name!r} has shape {tuple(tensor.shape)}, but the configuration says "
            f"{shapes[name]}"
        )


def check_prompt(cfg: ModelConfig, prompt_ids: tuple[int, ...]) -> None:
    """Raises ConfigError for a prompt that can't be continued."""
    if not prompt_ids:
        raise ConfigError("the prompt is empty; give it at least one token (e.g. eos)")
    if len(prompt_ids) >= cfg.max_seq_len:
        raise ConfigError(
            f"a prompt of {len(prompt_ids)} tokens leaves no room in model.max_seq_len="
            f"{cfg.max_seq_len}; the longest that can be continued has {cfg.max_seq_len - 1}"
        )
    low, high = min(prompt_ids), max(prompt_ids)
    if low < 0 or high >= cfg.vocab_size:
        bad = low if low < 0 else high
        raise ConfigError(
            f"the prompt holds id {bad}, but the vocabulary has ids 0 to {cfg.vocab_size - 1}"
        )
