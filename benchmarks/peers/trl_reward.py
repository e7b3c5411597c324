"""TRL: RewardTrainer on pairs, a sequence classifier with one label."""

from __future__ import annotations

from contextlib import suppress

import torch
from datasets import Dataset
from transformers import Qwen3ForSequenceClassification, TrainerCallback
from trl import RewardConfig, RewardTrainer

from benchmarks import workload as w
from benchmarks.peers.qwen3 import build_config, load_tokenizer
from benchmarks.protocol import Clock, Finished

args = w.arguments()
clock = Clock()
torch.manual_seed(0)
model = Qwen3ForSequenceClassification(build_config(num_labels=1))
config = RewardConfig(
    output_dir=str(w.SCRATCH / "trl"),
    per_device_train_batch_size=w.PAIRS,
    max_steps=10**6,
    learning_rate=w.LR,
    adam_beta2=w.BETA2,
    weight_decay=w.WEIGHT_DECAY,
    max_grad_norm=w.CLIP_NORM,
    lr_scheduler_type="constant",
    max_length=w.SEQ_LEN,
    bf16=args.dtype == "bf16",
    torch_compile=bool(args.compile),
    use_cpu=True,
    gradient_checkpointing=False,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    disable_tqdm=True,
)


class Counting(RewardTrainer):
    """Keeps the loss and the number of real tokens of the step for the clock."""

    def training_step(self, model, inputs, *rest, **named):
        self.slots = inputs["input_ids"].numel()
        self.tokens = int(inputs["attention_mask"].sum())
        loss = super().training_step(model, inputs, *rest, **named)
        self.last_loss = loss.item()
        return loss


class Steps(TrainerCallback):
    def on_step_begin(self, *rest, **named):
        clock.begin()

    def on_step_end(self, *rest, **named):
        clock.end(loss=trainer.last_loss, tokens=trainer.tokens, pairs=w.PAIRS, slots=trainer.slots)


trainer = Counting(
    model=model,
    args=config,
    train_dataset=Dataset.from_list(w.json_rows("pairs")),
    processing_class=load_tokenizer(),
    callbacks=[Steps()],
)
with suppress(Finished):
    trainer.train()
