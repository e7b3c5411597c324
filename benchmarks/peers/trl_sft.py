"""TRL: SFTTrainer on chat rows, loss on the answers. --packing 1: its best-fit packing."""

from __future__ import annotations

from contextlib import suppress

from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks import workload as w
from benchmarks.peers.qwen3 import build_model, load_tokenizer
from benchmarks.protocol import Clock, Finished

args = w.arguments(packing=0)
clock = Clock()
config = SFTConfig(
    output_dir=str(w.SCRATCH / "trl"),
    per_device_train_batch_size=w.ROWS // 2 if args.packing else w.ROWS,
    max_steps=10**6,
    learning_rate=w.LR,
    adam_beta2=w.BETA2,
    weight_decay=w.WEIGHT_DECAY,
    max_grad_norm=w.CLIP_NORM,
    lr_scheduler_type="constant",
    max_length=w.SEQ_LEN,
    packing=bool(args.packing),
    assistant_only_loss=True,
    bf16=args.dtype == "bf16",
    torch_compile=bool(args.compile),
    use_cpu=True,
    gradient_checkpointing=False,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    disable_tqdm=True,
)


class Counting(SFTTrainer):
    """Keeps the loss and the number of real tokens of the step for the clock."""

    def training_step(self, model, inputs, *rest, **named):
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        self.slots = ids.numel()
        self.tokens = ids.numel() if mask is None else int(mask.sum())
        loss = super().training_step(model, inputs, *rest, **named)
        self.last_loss = loss.item()
        return loss


class Steps(TrainerCallback):
    def on_step_begin(self, *rest, **named):
        clock.begin()

    def on_step_end(self, *rest, **named):
        clock.end(loss=trainer.last_loss, tokens=trainer.tokens, slots=trainer.slots)


trainer = Counting(
    model=build_model(),
    args=config,
    train_dataset=Dataset.from_list(w.json_rows("chat")),
    processing_class=load_tokenizer(),
    callbacks=[Steps()],
)
with suppress(Finished):
    trainer.train()
