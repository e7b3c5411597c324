"""TRL: whole steps of GRPOTrainer with native sampling. 4 prompts of 32 tokens, 8 answers each of
64 new tokens, a trivial reward. --batching 1: Transformers' continuous batching."""

from __future__ import annotations

from contextlib import suppress

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks import workload as w
from benchmarks.peers.qwen3 import build_model, load_tokenizer
from benchmarks.protocol import Clock, Finished

PROMPTS, GROUP, NEW_TOKENS = 4, 8, 64

args = w.arguments(batching=0)
clock = Clock()
tokenizer = load_tokenizer()


def distinct_words(completions, **columns):
    return [float(len(set(text.split()))) for text in completions]


class Steps(TrainerCallback):
    def on_step_begin(self, *rest, **named):
        clock.begin()

    def on_step_end(self, *rest, **named):
        clock.end(tokens=PROMPTS * GROUP * NEW_TOKENS)


trainer = GRPOTrainer(
    model=build_model(),
    args=GRPOConfig(
        output_dir=str(w.SCRATCH / "trl-grpo"),
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
        use_transformers_continuous_batching=bool(args.batching),
        transformers_continuous_batching_config=(
            {"num_blocks": 128, "max_batch_tokens": 1024} if args.batching else None
        ),
        beta=0.0,
        temperature=1.0,
        max_steps=10**6,
        learning_rate=1e-5,
        adam_beta2=w.BETA2,
        weight_decay=w.WEIGHT_DECAY,
        max_grad_norm=w.CLIP_NORM,
        lr_scheduler_type="constant",
        bf16=args.dtype == "bf16",
        torch_compile=bool(args.compile),
        use_cpu=True,
        activation_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
    reward_funcs=distinct_words,
    train_dataset=Dataset.from_list(
        [{"prompt": tokenizer.decode(row["ids"])} for row in w.json_rows("prompts")]
    ),
    processing_class=tokenizer,
    callbacks=[Steps()],
)
with suppress(Finished):
    trainer.train()
