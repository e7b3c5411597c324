"""TRL: DPOTrainer with a frozen reference, 8 pairs a step. --precomputed 1: the reference has been
scored before."""

from __future__ import annotations

from contextlib import suppress

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from benchmarks import workload as w
from benchmarks.peers.qwen3 import build_model, load_tokenizer
from benchmarks.peers.trl_preference import counting, settings
from benchmarks.protocol import Clock, Finished

args = w.arguments(precomputed=0)
clock = Clock()
Counting, steps = counting(DPOTrainer, clock, "pairs")
trainer = Counting(
    model=build_model(),
    ref_model=None if args.precomputed else build_model(),
    args=DPOConfig(**settings(args), precompute_ref_log_probs=bool(args.precomputed)),
    train_dataset=Dataset.from_list(w.json_rows("pairs")[: w.PREFERENCE_PAIRS]),
    processing_class=load_tokenizer(),
    callbacks=[steps],
)
with suppress(Finished):
    trainer.train()
