"""The decoder: Llama, Qwen2, Qwen3 (dense) and Mistral as settings of one module.

B rows, T tokens a row, N = B*T, D d_model, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stepwell.config import ModelConfig
from stepwell.models.attention import Attention
from stepwell.models.layers import Linear, RMSNorm, SwiGLU, rope_angles, rope_frequencies
from stepwell.models.logits import token_stats

# The logical axes of every parameter, once: sharding and the planner read this table.
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
}


def axes_of(name: str) -> tuple[str, ...]:
    """The logical axes of a parameter. Raises KeyError for a name without a row in AXES."""
    for pattern, axes in AXES.items():
        if fnmatchcase(name, pattern):
            return axes
    raise KeyError(f"parameter {name!r} has no row in models.transformer.AXES")


def init_rule(cfg: ModelConfig, name: str) -> tuple[str, float]:
    """("ones" | "zeros" | "normal", standard deviation). Matrices that write to the residual
    stream start smaller by sqrt(2 L) (GPT-2)."""
    if name.endswith(".bias"):
        return "zeros", 0.0
    if len(axes_of(name)) == 1:
        return "ones", 0.0
    writes_residual = name.endswith(("attn.wo.weight", "mlp.w_down.weight"))
    return "normal", cfg.init_std / math.sqrt(2 * cfg.num_layers if writes_residual else 1)


class TokenOutputs(NamedTuple):
    """What a loss may ask for, one value a token, in float32 (float64 under fp64 compute).

    A tuple, so that FSDP2 finds the tensors in it. Entries that were not asked for are None.
    """

    logprobs_BT: Tensor | None = None
    lse_BT: Tensor | None = None
    entropy_BT: Tensor | None = None
    mean_logit_BT: Tensor | None = None
    hidden_BTD: Tensor | None = None
    logits_BTV: Tensor | None = None


@dataclass(frozen=True)
class ForwardOptions:
    """needs: fields of TokenOutputs without their suffix, e.g. {"logprobs", "entropy"}."""

    needs: frozenset[str] = frozenset({"logprobs"})
    dtype: torch.dtype = torch.float32
    chunk_tokens: int = 1024
    keep_logits: bool = False
    temperature: float = 1.0
    compiled: bool = False


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attn_norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.attn = Attention(cfg)
        self.mlp_norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.mlp = SwiGLU(cfg.d_model, cfg.d_ff)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), cos, sin, cu_seqlens)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Decoder(nn.Module):
    """A decoder-only transformer. Everything per token is computed inside `forward`, so that a
    wrapper which gathers the root's parameters (FSDP2) also serves the chunked head."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.num_layers))
        self.norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.head = None if cfg.tied else Linear(cfg.d_model, cfg.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        cu_seqlens: Tensor,
        targets_BT: Tensor | None = None,
        active_M: Tensor | None = None,
        options: ForwardOptions = ForwardOptions(),
    ) -> TokenOutputs:
        """active_M: int64 indices into the N tokens whose output distribution is wanted; the
        others are never computed and read as zero (None: all N).

        Raises ValueError if a need is unknown or targets are missing for log-probabilities.
        """
        unknown = options.needs - {f.rsplit("_", 1)[0] for f in TokenOutputs._fields}
        if unknown:
            raise ValueError(f"unknown needs {sorted(unknown)}; known: {TokenOutputs._fields}")
        B, T = tokens_BT.shape
        x_BTD = F.embedding(tokens_BT, self.embed.weight).to(options.dtype)
        frequencies = rope_frequencies(self.cfg, tokens_BT.device)
        cos, sin = rope_angles(positions_BT.flatten(), frequencies)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos, sin, cu_seqlens)
        x_BTD = self.norm(x_BTD)
        outputs: dict[str, Tensor | None] = {}
        if options.needs & {"logprobs", "lse", "entropy", "mean_logit"}:
            if targets_BT is None:
                raise ValueError("log-probabilities need targets_BT")
            hidden_MD, targets_M = x_BTD.flatten(0, 1), targets_BT.flatten()
            if active_M is not None:
                hidden_MD, targets_M = hidden_MD[active_M], targets_M[active_M]
            stats = token_stats(
                hidden_MD,
                self.head_weight,
                targets_M,
                chunk_tokens=options.chunk_tokens,
                keep_logits=options.keep_logits,
                inverse_temperature=1.0 / options.temperature,
                with_entropy="entropy" in options.needs,
                with_mean="mean_logit" in options.needs,
                compiled=options.compiled,
            )
            for name, value in stats._asdict().items():
                if name in options.needs:
                    if active_M is not None:
                        value = value.new_zeros(B * T).index_put((active_M,), value)
                    outputs[f"{name}_BT"] = value.reshape(B, T).clone()  # FSDP2 warns of views
        if "hidden" in options.needs:
            outputs["hidden_BTD"] = x_BTD
        if "logits" in options.needs:
            logits_BTV = F.linear(x_BTD, self.head_weight.to(x_BTD.dtype))
            outputs["logits_BTV"] = logits_BTV.to(torch.promote_types(x_BTD.dtype, torch.float32))
        return TokenOutputs(**outputs)
