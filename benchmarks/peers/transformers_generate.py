"""Transformers: generate() for 16 prompts at once. --compile 1: static cache, compiled forward."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from benchmarks import workload as w
from benchmarks.peers.qwen3 import build_model
from benchmarks.protocol import Clock, Finished

args = w.arguments(temperature=0.0)
clock = Clock()
model = build_model().eval()
if args.dtype == "bf16":
    model = model.to(torch.bfloat16)
ids = torch.tensor([row["ids"] for row in w.json_rows("prompts")[: w.PROMPTS]])
sampled = args.temperature > 0
config = GenerationConfig(
    max_new_tokens=w.NEW_TOKENS,
    min_new_tokens=w.NEW_TOKENS,
    do_sample=sampled,
    temperature=args.temperature if sampled else None,
    top_k=0 if sampled else None,
    pad_token_id=w.PAD_ID,
    eos_token_id=None,
    cache_implementation="static" if args.compile else None,
)
if args.compile:
    model.forward = torch.compile(model.forward)
try:
    while True:
        clock.begin()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert out.numel() - ids.numel() == w.PROMPTS * w.NEW_TOKENS
        clock.end(tokens=out.numel() - ids.numel())
except Finished:
    pass
