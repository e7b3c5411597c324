"""litgpt: its GPT under Lightning Fabric, with the calls of its own pretraining loop."""

from __future__ import annotations

import lightning
import torch
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy

from benchmarks import workload as w
from benchmarks.peers.loop import build_adamw
from benchmarks.protocol import Clock, Finished

args = w.arguments()
clock = Clock()
fabric = lightning.Fabric(
    accelerator="cpu", devices=1, precision="bf16-mixed" if args.dtype == "bf16" else "32-true"
)
fabric.seed_everything(0)
model = GPT(
    Config(
        name="bench",
        block_size=2048,
        vocab_size=w.VOCAB,
        padded_vocab_size=w.VOCAB,
        n_layer=w.LAYERS,
        n_head=w.HEADS,
        n_embd=w.D_MODEL,
        head_size=w.HEAD_DIM,
        n_query_groups=w.KV_HEADS,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-6,
        norm_qk=True,
        mlp_class_name="LLaMAMLP",
        intermediate_size=w.D_FF,
        rope_base=10000,
    )
)
model.apply(model._init_weights)
model.max_seq_length = w.SEQ_LEN
if args.compile:
    model = torch.compile(model)
model = fabric.setup(model)
optimizer = fabric.setup_optimizers(build_adamw(model))
rows = w.token_rows()
try:
    while True:
        clock.begin()
        window = next(rows)
        loss = chunked_cross_entropy(
            model(window[:, :-1].contiguous()), window[:, 1:].contiguous(), chunk_size=0
        )
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=w.CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        clock.end(loss=loss.item(), tokens=w.ROWS * w.SEQ_LEN)
except Finished:
    pass
