from dataclasses import replace

from stepwell.plan.calibration.habits import DEEPSPEED_BUCKET, habits, memory_unit
from stepwell.plan.job import Arrangement, Dims

DIMS = Dims("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256)
MEGATRON = Arrangement(
    4096, 1, 64, dp_shard=8, zero=1, program="megatron", gradient_precision="fp32"
)
FSDP = Arrangement(4096, 2, 64, dp_shard=8, zero=3, program="fsdp")


def test_unknown_sources_have_their_programs_habits():
    assert habits(MEGATRON, DIMS, "somebody", "") == MEGATRON
    assert habits(FSDP, DIMS, "somebody", "", recompute_known=True) == FSDP


def test_automodels_adapters_are_trained_as_its_recipes_say():
    asked = replace(FSDP, tp=2, trained_share=0.005)
    small = habits(asked, DIMS, "nemo-automodel", "", recompute_known=False)
    large = habits(asked, replace(DIMS, num_layers=160), "nemo-automodel", "", False)
    assert (small.recompute, large.recompute) == ("none", "full")
    assert (small.sequence_parallel, small.compiled) == (False, False)
    whole = habits(FSDP, DIMS, "nemo-automodel", "", recompute_known=False)
    assert (whole.recompute, whole.compiled) == ("selective", True)


def test_benchmarks_force_their_routers():
    assert habits(MEGATRON, DIMS, "megatron-bridge", "").imbalance == 1
    assert habits(MEGATRON, DIMS, "megatron-bridge", "natural routing").imbalance > 1
    assert habits(FSDP, DIMS, "x", "fake balanced gate").imbalance == 1 < FSDP.imbalance
    moonlight = replace(DIMS, name="moonlight-16b-a3b")
    assert habits(MEGATRON, moonlight, "megatron-bridge-skills", "").imbalance > 1


def test_units_in_which_sources_print_memory():
    assert memory_unit("megatron-bridge-skills") == 1e9
    assert memory_unit("internevo") == memory_unit("") == 2**30


def test_unknown_recomputation_is_the_likeliest_of_the_program():
    assert habits(FSDP, DIMS, "somebody", "", recompute_known=False).recompute == "selective"
    assert habits(MEGATRON, DIMS, "somebody", "", recompute_known=False).recompute == "none"


def test_modules_that_are_computed_again_are_read_from_notes():
    layout = replace(MEGATRON, recompute="selective")
    assert habits(
        layout, DIMS, "x", "recompute_modules=[layernorm+moe_act]; y"
    ).recompute_modules == (
        "layernorm",
        "moe_act",
    )
    assert habits(layout, DIMS, "x", "SFT; recompute mlp").recompute_modules == ("mlp",)
    assert habits(layout, DIMS, "x", "attention core recompute + more").recompute_modules == ()
    assert habits(MEGATRON, DIMS, "x", "recompute mlp").recompute_modules == ()


def test_deepspeed_on_v100s():
    found = habits(MEGATRON, DIMS, "bigscience", "Megatron-DeepSpeed; 8-bit optimizer")
    assert found.gradient_precision == "bf16"  # 2 bytes
    assert (found.step_bytes, found.bucket_elements) == (6, DEEPSPEED_BUCKET)
    assert found.optimizer == "adamw8bit"
    assert not found.offload_activations
    notes = "ZeRO-3 (partitioned activations); activation checkpoints / params offloaded to CPU"
    found = habits(FSDP, DIMS, "bigscience", notes)
    assert found.partitioned_activations
    assert (found.offload_activations, found.offload_optimizer) == (True, True)
    assert found.bucket_elements == DIMS.d_model**2
    plain = habits(FSDP, DIMS, "bigscience", "ZeRO-3 (partitioned activations)")
    assert (plain.offload_activations, plain.offload_optimizer) == (True, False)
    not_there = habits(FSDP, DIMS, "bigscience", "partitioned activations; checkpoint-in-cpu N")
    assert not not_there.offload_activations


def test_a_table_of_savings_is_cumulative():
    """Each row of torchtune's has the savings of those above it."""
    names = ["packed dataset", "+compile", "+chunked cross-entropy", "+activation ckpt"]
    names += ["+optimizer step fused in backward", "+activation offload", "+8-bit AdamW"]
    found = [habits(MEGATRON, DIMS, "torchtune", f"cumulative list: {name}") for name in names]
    assert all(f.program == "fsdp" and f.state_precision == "bf16" for f in found)
    assert [f.compiled for f in found] == [False] + [True] * 6
    assert [f.loss_chunk_tokens for f in found] == [None] * 2 + [512] * 5
    assert [f.release_gradients for f in found] == [False] * 4 + [True] * 3
    assert [f.offload_activations for f in found] == [False] * 5 + [True] * 2
    assert [f.optimizer for f in found] == ["adamw"] * 6 + ["adamw8bit"]


def test_habits_of_other_sources():
    assert habits(FSDP, DIMS, "internevo", "").step_bytes == 12
    assert habits(MEGATRON, DIMS, "internevo", "").step_bytes == 14
    assert not habits(FSDP, DIMS, "torchtitan", "HBM2e 2.4TB/s at 500 W").compiled_loss
    assert habits(FSDP, DIMS, "torchtitan", "compile").compiled_loss
    latent = replace(DIMS, name="deepseek-v3")
    found = habits(MEGATRON, latent, "megatron-bridge-skills", "force-balanced")
    assert (found.gradient_precision, found.moment_precision, found.imbalance) == (
        "bf16",
        "bf16",
        1.0,
    )
    assert habits(MEGATRON, DIMS, "megatron-bridge", "").moment_precision is None
    assert habits(FSDP, DIMS, "megatron-papers", "").bucket_elements == DEEPSPEED_BUCKET
    assert habits(MEGATRON, DIMS, "megatron-papers", "").bucket_elements == 0
    assert habits(replace(FSDP, compiled_loss=False), DIMS, "llm-foundry", "").compiled_loss
