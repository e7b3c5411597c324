"""The decoder: Llama, Qwen2, Qwen3 (dense) and Mistral as settings of one module.

B rows, T tokens a row, N = B*T, D d_model, V vocabulary, C labels of a score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from stepwell.models.activations import Keep, Segment
from stepwell.models.attention import Attention
from stepwell.models.axes import axes_of
from stepwell.models.collectives import all_gather, gather_same
from stepwell.models.layers import (
    EVERY,
    Context,
    ContextRanks,
    Firsts,
    Linear,
    RMSNorm,
    SharedPrompts,
    SwiGLU,
    embed,
    local,
    rope_angles,
    rope_frequencies,
    take_rows,
    upcast,
)
from stepwell.models.logits import token_stats
from stepwell.models.neftune import Noise, noisy
from stepwell.models.recompute import checkpointed
from stepwell.models.row_padding import with_zeros
from stepwell.sections.model import ModelConfig


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
    scores_BTC: Tensor | None = None


@dataclass(frozen=True)
class ForwardOptions:
    """needs: fields of TokenOutputs without their suffix, e.g. {"logprobs", "entropy"}.
    in_halves: the backward pass computes the gradients of inputs and of weights apart.
    tp: the ranks of the tensor axis, if there is one; between the sublayers each then has N / tp
    tokens, in order (sequence parallelism, 2205.05198), and all have the whole outputs.
    cp: the ranks that each have some tokens of the rows, if there are several; inputs and outputs
    are then this rank's tokens, and cu_seqlens the borders in the full rows.
    keys_N: what the dropout of adapters knows this rank's tokens by (before tp divides them); None:
    nothing is dropped. noise: of the same tokens' embeddings. shared: beginnings that several
    documents have in common (cu_seqlens are then the borders of whole documents); never with cp.
    firsts: what attention can leave out."""

    needs: frozenset[str] = frozenset({"logprobs"})
    dtype: torch.dtype = torch.float32
    chunk_tokens: int = 1024
    keep_logits: bool = False
    temperature: float = 1.0
    compiled: bool = False
    in_halves: bool = False
    tp: dist.ProcessGroup | None = None
    cp: ContextRanks | None = None
    keys_N: Tensor | None = None
    noise: Noise | None = None
    shared: SharedPrompts | None = None
    firsts: Firsts = EVERY
    scaled: bool = False

    @property
    def narrows(self) -> bool:
        """Whether the last block computes what follows its attention for active tokens alone:
        unless tensor ranks divide the tokens, all are asked for, 8-bit scales are taken over all of
        them (scaled), or code is compiled for blocks that are alike."""
        wants_all = self.scaled or bool(self.needs & {"hidden", "logits"})
        return self.tp is None and not wants_all and not self.compiled


@dataclass(frozen=True)
class Piece:
    """Part of a decoder: blocks start..stop-1; the first has the embedding, the last the head."""

    start: int
    stop: int
    first: bool = True
    last: bool = True


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attn_norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.attn = Attention(cfg)
        self.mlp_norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.mlp = SwiGLU(cfg.d_model, cfg.d_ff)

    def forward(
        self,
        x_ND: Tensor,
        context: Context,
        keep: Keep = "all",
        active_M: Tensor | None = None,
    ) -> Tensor:
        """active_M: the tokens whose output is wanted, which then are all that is returned."""
        return checkpointed(self._run, keep, x_ND, context, active_M)

    def _run(self, x_ND: Tensor, context: Context, active_M: Tensor | None) -> Tensor:
        mixed_ND = self.attn(self.attn_norm(x_ND, context.tp), context, active_M)
        if active_M is not None:
            missing, keys_N = len(mixed_ND) - len(active_M), context.keys_N
            x_ND = with_zeros(take_rows(x_ND, active_M), missing)
            keys_N = None if keys_N is None else with_zeros(keys_N[active_M], missing)
            context = context._replace(keys_N=keys_N)
        x_ND = x_ND + mixed_ND
        x_ND = x_ND + self.mlp(self.mlp_norm(x_ND, context.tp), context)
        return x_ND if active_M is None else x_ND[: len(active_M)]


class Decoder(nn.Module):
    """A decoder-only transformer, or a piece of one. Everything per token is computed inside
    `forward`, so that a wrapper which gathers the root's parameters (FSDP2) also serves the chunked
    head. Parameters have the same names in a piece as in the whole.

    segments: which blocks keep what for the backward pass."""

    def __init__(self, cfg: ModelConfig, piece: Piece | None = None):
        super().__init__()
        self.cfg, self.piece = cfg, piece or Piece(0, cfg.num_layers)
        piece = self.piece
        self.embed = self.norm = self.head = self.score = None
        if piece.first or (piece.last and cfg.shares_embedding):
            self.embed = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.blocks = nn.ModuleDict({str(i): Block(cfg) for i in range(piece.start, piece.stop)})
        self.segments = tuple(Segment(i, i + 1, "all") for i in range(piece.start, piece.stop))
        if piece.last:
            self.norm = RMSNorm(cfg.d_model, cfg.norm_eps)
            if cfg.has_lm_head and not cfg.tied:
                self.head = Linear(cfg.d_model, cfg.vocab_size, bias=False)
            if cfg.has_score:
                self.score = Linear(cfg.d_model, cfg.num_labels, bias=False)

    @property
    def head_weight(self) -> Tensor:
        owner = self.embed if self.head is None else self.head
        assert owner is not None, "only the last piece has a head"
        return local(owner.weight)

    def forward(
        self,
        inputs: Tensor,
        positions_BT: Tensor,
        cu_seqlens: Tensor,
        targets_BT: Tensor | None = None,
        active_M: Tensor | None = None,
        options: ForwardOptions = ForwardOptions(),
    ) -> TokenOutputs | Tensor:
        """inputs: tokens_BT for the first piece, x_ND for the others. Returns x_ND but for the last
        piece.

        active_M: int64 indices into the N tokens whose output distribution is wanted; the
        others are never computed and read as zero (None: all N).

        Raises ValueError if a need is unknown, is of a head that the model has not, or if targets
        are missing for log-probabilities.
        """
        unknown = options.needs - {f.rsplit("_", 1)[0] for f in TokenOutputs._fields}
        if unknown:
            raise ValueError(f"unknown needs {sorted(unknown)}; known: {TokenOutputs._fields}")
        x_ND = self._embed(inputs, options) if self.piece.first else inputs
        frequencies = rope_frequencies(self.cfg, positions_BT.device)
        cos, sin = rope_angles(positions_BT.flatten(), frequencies)
        tokens = options.cp, options.keys_N, options.shared, options.firsts
        context = Context(cos, sin, cu_seqlens, options.tp, *tokens)
        narrows = options.narrows and self.piece.last and len(self.segments) > 0
        for segment in self.segments:
            last = narrows and segment.stop == self.piece.stop
            x_ND = self._segment(segment, x_ND, context, active_M if last else None)
        if not self.piece.last:
            return x_ND
        assert self.norm is not None
        x_ND = self.norm(x_ND, options.tp)
        shape = positions_BT.shape
        return self._outputs(x_ND, shape, targets_BT, active_M, options, narrows)

    def _segment(
        self, segment: Segment, x_ND: Tensor, context: Context, active_M: Tensor | None
    ) -> Tensor:
        start, stop, keep = segment
        if stop == start + 1:
            return self.blocks[str(start)](x_ND, context, keep, active_M)

        def chain(x_ND: Tensor) -> Tensor:
            for i in range(start, stop):
                wanted = active_M if i == stop - 1 else None
                x_ND = self.blocks[str(i)](x_ND, context, "all", wanted)
            return x_ND

        return checkpointed(chain, keep, x_ND)

    def _embed(self, tokens_BT: Tensor, options: ForwardOptions) -> Tensor:
        assert self.embed is not None
        weight_VD = local(self.embed.weight)
        x_ND = embed(tokens_BT.flatten(), weight_VD, options.dtype, options.tp)
        if options.noise is None:
            return x_ND
        start = 0 if options.tp is None else options.tp.rank() * x_ND.shape[0]
        return noisy(x_ND, options.noise.rows(start, start + x_ND.shape[0]))

    def _outputs(
        self,
        x_ND: Tensor,
        shape: torch.Size,
        targets_BT: Tensor | None,
        active_M: Tensor | None,
        options: ForwardOptions,
        narrowed: bool,
    ) -> TokenOutputs:
        """shape: (B, T). narrowed: x_ND has active tokens alone."""
        narrow_M = None if narrowed else active_M
        outputs: dict[str, Tensor | None] = {}
        lacking = options.needs & ({"scores"} if not self.cfg.has_score else set())
        if not self.cfg.has_lm_head:
            lacking = options.needs & {"logprobs", "lse", "entropy", "mean_logit", "logits"}
        if lacking:
            raise ValueError(f"a model with model.head={self.cfg.head!r} has no {sorted(lacking)}")
        if "scores" in options.needs:
            hidden_MD = gather_same(x_ND, options.tp)
            if narrow_M is not None:
                hidden_MD = take_rows(hidden_MD, narrow_M)
            outputs["scores_BTC"] = self._scores(hidden_MD, shape, active_M)
        if options.needs & {"logprobs", "lse", "entropy", "mean_logit"}:
            if targets_BT is None:
                raise ValueError("log-probabilities need targets_BT")
            hidden_MD, targets_M = all_gather(x_ND, options.tp), targets_BT.flatten()
            if narrow_M is not None:
                hidden_MD = take_rows(hidden_MD, narrow_M)
            if active_M is not None:
                targets_M = targets_M[active_M]
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
                in_halves=options.in_halves,
                tp=options.tp,
            )
            for name, value in stats._asdict().items():
                if name in options.needs:
                    if active_M is not None:
                        value = value.new_zeros(shape.numel()).index_put((active_M,), value)
                    outputs[f"{name}_BT"] = value.reshape(shape).clone()  # FSDP2 warns of views
        if "hidden" in options.needs:
            outputs["hidden_BTD"] = gather_same(x_ND, options.tp).unflatten(0, shape)
        if "logits" in options.needs:
            hidden_ND = all_gather(x_ND, options.tp)
            logits_NV = F.linear(hidden_ND, self.head_weight.to(x_ND.dtype))
            logits_NV = gather_same(logits_NV.t(), options.tp).t()
            wide = torch.promote_types(x_ND.dtype, torch.float32)
            outputs["logits_BTV"] = logits_NV.to(wide).unflatten(0, shape)
        return TokenOutputs(**outputs)

    def _scores(
        self,
        hidden_MD: Tensor,
        shape: torch.Size,
        active_M: Tensor | None,
    ) -> Tensor:
        """(B, T, C) in at least float32, of active tokens' hidden states; zero for the others."""
        assert self.score is not None
        wide = upcast(hidden_MD)
        scores_MC = F.linear(wide, local(self.score.weight).to(wide.dtype))
        if active_M is not None:
            zeros_NC = scores_MC.new_zeros(shape.numel(), scores_MC.shape[1])
            scores_MC = zeros_NC.index_put((active_M,), scores_MC)
        return scores_MC.unflatten(0, shape).clone()
