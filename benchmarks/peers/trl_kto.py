"""TRL: KTOTrainer with a frozen reference, 8 rows a step."""

from __future__ import annotations

from contextlib import suppress

from datasets import Dataset
from trl import KTOConfig, KTOTrainer

from benchmarks import workload as w
from benchmarks.peers.qwen3 import build_model, load_tokenizer
from benchmarks.peers.trl_preference import counting, settings
from benchmarks.protocol import Clock, Finished

args = w.arguments()
clock = Clock()
Counting, steps = counting(KTOTrainer, clock, "rows")
trainer = Counting(
    model=build_model(),
    ref_model=build_model(),
    args=KTOConfig(**settings(args)),
    train_dataset=Dataset.from_list(w.labelled_rows()),
    processing_class=load_tokenizer(),
    callbacks=[steps],
)
with suppress(Finished):
    trainer.train()
