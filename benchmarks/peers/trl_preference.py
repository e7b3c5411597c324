"""What TRL's preference trainers are given."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from benchmarks import workload as w
from benchmarks.protocol import Clock


def settings(args: Any) -> dict[str, Any]:
    return {
        "output_dir": str(w.SCRATCH / "trl"),
        "per_device_train_batch_size": w.PAIRS,
        "max_steps": 10**6,
        "learning_rate": w.PREFERENCE_LR,
        "adam_beta2": w.BETA2,
        "weight_decay": w.WEIGHT_DECAY,
        "max_grad_norm": w.CLIP_NORM,
        "lr_scheduler_type": "constant",
        "max_length": w.SEQ_LEN,
        "beta": 0.1,
        "bf16": args.dtype == "bf16",
        "torch_compile": bool(args.compile),
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def counting(trainer_class: type, clock: Clock, unit: str) -> tuple[type, TrainerCallback]:
    """The trainer, and the callback that tells the clock of each step."""
    seen: dict[str, float] = {}

    class Counting(trainer_class):
        def training_step(self, model, inputs, *rest, **named):
            masks = [v for k, v in inputs.items() if k.endswith("attention_mask")]
            seen["tokens"] = sum(int(mask.sum()) for mask in masks)
            seen["slots"] = sum(mask.numel() for mask in masks)
            loss = super().training_step(model, inputs, *rest, **named)
            seen["loss"] = loss.item()
            return loss

    class Steps(TrainerCallback):
        def on_step_begin(self, *rest, **named):
            clock.begin()

        def on_step_end(self, *rest, **named):
            clock.end(**seen, **{unit: w.PAIRS})

    return Counting, Steps()
