"""What published programs do to memory that tables of runs have no column for. No torch.

Facts of the programs, each with where it is written; `habits` applies them to a run by the name of
its source and by its notes. An unknown source gets nothing beyond its program's habits.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from stepwell.hardware import GIB
from stepwell.plan.job import Arrangement, Dims

# What Megatron calls the parts of a block that "selective" may compute again.
MODULES = "core_attn|layernorm|mlp|moe_act|moe|shared_experts|mla_up_proj"
DEEPSPEED_BUCKET = 500_000_000  # elements; DeepSpeed's zero_optimization.reduce_bucket_size


def habits(
    layout: Arrangement, dims: Dims, source: str, notes: str, recompute_known: bool = True
) -> Arrangement:
    """`layout` with what is known of the program behind `source`."""
    known: dict[str, Any] = {}
    for name, facts in SOURCES.items():
        if source.startswith(name):
            known = facts(layout, dims, notes)
    modules = re.search(rf"recompute(?:_modules=\[| )((?:{MODULES})(?:\+(?:{MODULES}))*)", notes)
    if modules and layout.recompute == "selective":
        known["recompute_modules"] = tuple(modules.group(1).split("+"))
    if not recompute_known:
        known.setdefault("recompute", _usual_recompute(layout))
    if re.search("force-balanced|fake balanced", notes):
        known["imbalance"] = 1.0
    return replace(layout, **known)


def _usual_recompute(layout: Arrangement) -> str:
    """What a source that prints nothing most likely did: torchtitan's recipes ship with selective
    checkpointing by operator, Megatron's with flash attention and nothing."""
    return "selective" if layout.program == "fsdp" else layout.recompute


def _deepspeed(layout: Arrangement, dims: Dims, notes: str) -> dict[str, Any]:
    """Megatron-DeepSpeed on V100s: gradients stay in fp16; the step copies a rank's part of them,
    and widens it (zero/stage_1_and_2.py, `single_grad_partition`). Its ZeRO-3 scripts
    (bigscience, experiments/gpt2-meg-ds-zero) sum d_model^2 gradients at a time, and keep what is
    checkpointed on the host (PA_CPU=true) in the runs that say nothing else, too; those that
    offload have the optimiser there (meg_ds_zero_gpt2_perf_n16_offload.slurm)."""
    facts: dict[str, Any] = {"gradient_precision": "bf16"}
    if "Megatron-LM" in notes:
        return facts
    facts |= {"step_bytes": 6, "bucket_elements": DEEPSPEED_BUCKET}
    facts["partitioned_activations"] = "partitioned activations" in notes
    if facts["partitioned_activations"]:
        facts["bucket_elements"] = dims.d_model**2
        facts["offload_activations"] = "checkpoint-in-cpu N" not in notes
        facts["offload_optimizer"] = "params offloaded" in notes
    if "8-bit optimizer" in notes:
        facts["optimizer"] = "adamw8bit"
    return facts


def _megatron_papers(layout: Arrangement, dims: Dims, notes: str) -> dict[str, Any]:
    """Beside Megatron they ran ZeRO-3 (DeepSpeed)."""
    return _deepspeed(layout, dims, notes) if layout.zero == 3 else {}


def _llm_foundry(layout: Arrangement, dims: Dims, notes: str) -> dict[str, Any]:
    """Its loss is a fused kernel: logits and their gradient in the compute dtype."""
    return {"compiled_loss": True}


def _internevo(layout: Arrangement, dims: Dims, notes: str) -> dict[str, Any]:
    """Gradients in bf16, copied and widened for the step (hybrid_zero_optim.py); torch's AdamW with
    the root of the second moment and the denominator, float32 each. Weights are handed out by a
    broadcast from each rank (`broadcast_params`)."""
    return {
        "gradient_precision": "bf16",
        "shards_broadcast": True,
        "step_bytes": 12 if layout.program == "fsdp" else 14,
        "compiled": False,
        "compiled_loss": False,
    }


def _torchtitan(layout: Arrangement, dims: Dims, notes: str) -> dict[str, Any]:
    """Until 2025-03 the loss was not compiled with the blocks."""
    return {"compiled_loss": "2.4TB/s" not in notes and "2025-03" not in notes}


def _torchtune(layout: Arrangement, dims: Dims, notes: str) -> dict[str, Any]:
    """Its table of memory savings, each row with all those before."""
    steps = (
        "packed",
        "+compile",
        "+chunked",
        "+activation ckpt",
        "+optimizer step",
        "+activation offload",
        "+8-bit",
    )
    done = max((place for place, step in enumerate(steps) if step in notes), default=0)
    return {
        "program": "fsdp",
        "state_precision": "bf16",
        "gradient_precision": "bf16",
        "compiled": done >= 1,
        "compiled_loss": False,
        "loss_chunk_tokens": layout.tokens_of_rank // 8 if done >= 2 else None,
        "release_gradients": done >= 4,
        "offload_activations": done >= 5,
        "optimizer": "adamw8bit" if done >= 6 else "adamw",
    }


def _automodel(layout: Arrangement, dims: Dims, notes: str) -> dict[str, Any]:
    """Its recipes (examples/llm_finetune/*_peft_benchmark.yaml): tensor ranks sum whole rows
    (sequence_parallel: false); adapters are trained on Transformers' modules (force_hf), and models
    of 32B and more recompute their blocks (activation_checkpointing: true)."""
    facts: dict[str, Any] = {"sequence_parallel": False}
    if layout.trained_share < 1:
        facts["compiled"] = False
        facts["recompute"] = "full" if dims.parameters() > 20e9 else "none"
    return facts


def _nvidia(layout: Arrangement, dims: Dims, notes: str) -> dict[str, Any]:
    """Performance recipes sum gradients in bf16 (grad_reduce_in_fp32=False); those of models with
    latent attention keep moments in bf16 (use_precision_aware_optimizer). The scripts that measure
    force balanced experts (moe_router_force_load_balancing); Moonlight is not among them, and its
    recipe (recipes/moonlight) does not."""
    facts: dict[str, Any] = {"gradient_precision": "bf16"}
    if "natural routing" not in notes and not dims.name.startswith("moonlight"):
        facts["imbalance"] = 1.0
    if "MLA" in notes or "deepseek" in dims.name or "moonlight" in dims.name:
        facts["moment_precision"] = "bf16"
    return facts


def memory_unit(source: str) -> float:
    """Bytes of what a source prints as a "GB" of memory. Most tools count in units of 1,024 (where
    InternEvo prints "GB", weights of 40.2e9 bytes are 39); Megatron-Bridge divides by 1e9
    (training/utils/train_utils.py, `report_memory`)."""
    return 1e9 if source.startswith("megatron-bridge") else GIB


SOURCES = {
    "bigscience": _deepspeed,
    "llm-foundry": _llm_foundry,
    "megatron-papers": _megatron_papers,
    "internevo": _internevo,
    "torchtitan": _torchtitan,
    "torchtune": _torchtune,
    "nemo-automodel": _automodel,
    "megatron-bridge": _nvidia,
    "dgxc": _nvidia,
    "nemo-docs": _nvidia,
    "mlperf": _nvidia,
}
