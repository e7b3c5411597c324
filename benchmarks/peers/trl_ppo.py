"""TRL 1.12.0, the last with PPO: whole steps of PPOTrainer. 32 prompts of 32 tokens, 64 new tokens
each; policy, value, reference and reward model, one epoch in one minibatch."""

from __future__ import annotations

import sys
from contextlib import suppress

from benchmarks import workload as w

sys.path.insert(0, str(w.CACHE / "envs" / "trl-1.12.0"))

import torch
from datasets import Dataset
from transformers import Qwen3ForSequenceClassification, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.peers.qwen3 import build_model, load_tokenizer
from benchmarks.protocol import Clock, Finished

ANSWERS, NEW_TOKENS = 32, 64

args = w.arguments()
clock = Clock()


def with_score(seed: int) -> Qwen3ForSequenceClassification:
    config = build_model(seed).config
    config.num_labels = 1
    return Qwen3ForSequenceClassification(config)


class Steps(TrainerCallback):
    """PPOTrainer has a loop of its own, of which only the ends of steps are told."""

    def on_train_begin(self, *rest, **named):
        clock.begin()

    def on_step_end(self, *rest, **named):
        clock.end(tokens=ANSWERS * NEW_TOKENS)
        clock.begin()


tokenizer = load_tokenizer()
tokenizer.padding_side = "left"
prompts = Dataset.from_list([{"input_ids": row["ids"]} for row in w.json_rows("prompts")])
torch.manual_seed(0)
trainer = PPOTrainer(
    args=PPOConfig(
        output_dir=str(w.SCRATCH / "trl-ppo"),
        per_device_train_batch_size=ANSWERS,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=ANSWERS * 10_000,
        response_length=NEW_TOKENS,
        learning_rate=1e-5,
        local_rollout_forward_batch_size=ANSWERS,
        num_sample_generations=0,
        bf16=args.dtype == "bf16",
        torch_compile=bool(args.compile),
        use_cpu=True,
        activation_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
    processing_class=tokenizer,
    model=build_model(),
    ref_model=build_model(),
    reward_model=with_score(1),
    value_model=with_score(2),
    train_dataset=prompts,
    eval_dataset=prompts.select(range(8)),
    callbacks=[Steps()],
)
with suppress(Finished):
    trainer.train()
