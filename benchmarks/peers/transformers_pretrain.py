"""Transformers: Qwen3ForCausalLM in a plain loop."""

from __future__ import annotations

import torch

from benchmarks import workload as w
from benchmarks.peers.loop import train
from benchmarks.peers.qwen3 import build_model
from benchmarks.protocol import Clock

args = w.arguments()
clock = Clock()
model = build_model()
run = torch.compile(model) if args.compile else model
train(clock, model, args.dtype, lambda x, y: run(input_ids=x, labels=y, shift_labels=y).loss)
