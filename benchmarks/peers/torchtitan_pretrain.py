"""torchtitan: its Qwen3Model in a plain loop. Its own trainer does not start without CUDA."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

from benchmarks import workload as w
from benchmarks.peers.loop import train
from benchmarks.protocol import Clock

MATRIX = {"weight": partial(nn.init.normal_, std=0.02)}
ONES = {"weight": nn.init.ones_}


def norm(size: int):
    return RMSNorm.Config(normalized_shape=size, eps=1e-6, param_init=ONES)


def block():
    attention = make_gqa_config(
        dim=w.D_MODEL,
        n_heads=w.HEADS,
        n_kv_heads=w.KV_HEADS,
        head_dim=w.HEAD_DIM,
        wqkv_param_init=MATRIX,
        wo_param_init=MATRIX,
        inner_attention=ScaledDotProductAttention.Config(),
        fuse_qkv=True,
        rope=CosSinRoPE.Config(dim=w.HEAD_DIM, max_seq_len=2048, theta=10000.0),
        qk_norm=norm(w.HEAD_DIM),
    )
    ffn = make_ffn_config(
        dim=w.D_MODEL, hidden_dim=w.D_FF, w1_param_init=MATRIX, w2w3_param_init=MATRIX
    )
    return Qwen3TransformerBlock.Config(
        attention_norm=norm(w.D_MODEL),
        ffn_norm=norm(w.D_MODEL),
        attention=attention,
        feed_forward=ffn,
    )


args = w.arguments()
clock = Clock()
torch.manual_seed(0)
model = Qwen3Model.Config(
    dim=w.D_MODEL,
    vocab_size=w.VOCAB,
    norm=norm(w.D_MODEL),
    tok_embeddings=Embedding.Config(
        num_embeddings=w.VOCAB, embedding_dim=w.D_MODEL, param_init=MATRIX
    ),
    lm_head=Linear.Config(in_features=w.D_MODEL, out_features=w.VOCAB, param_init=MATRIX),
    layers=[block() for _ in range(w.LAYERS)],
).build()
model.init_states()
run = torch.compile(model) if args.compile else model
train(
    clock,
    model,
    args.dtype,
    lambda x, y: nn.functional.cross_entropy(run(x).flatten(0, 1).float(), y.flatten()),
)
