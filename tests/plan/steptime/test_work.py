"""What a step asks for: FLOPs against the closed form, tiles, recomputation, experts."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepwell.models.flops import flops_per_token as flops_of_model
from stepwell.models.quantize import dequantise_nf4, quantise_nf4
from stepwell.plan.footprint.pieces import blocks_of_stages
from stepwell.plan.job import Adapters, dims_of
from stepwell.plan.steptime.step import flops_per_token
from stepwell.plan.steptime.work import (
    KERNELS_NF4,
    LOGIT_BYTES,
    LOGIT_BYTES_UNFUSED,
    NF4_MOVED_BYTES,
    SCORE_BYTES_FORWARD,
    blocks_of_ranks,
    fill,
    work_of,
)
from stepwell.presets import preset
from tests.plan.jobs import LLAMA_8B, LLAMA_70B, MIXTURE, changed, job

PROCESSORS = 132


def product_flops(asked) -> float:
    """Of the products of a micro-batch, forward and backward."""
    work = work_of(asked)
    pieces = [(piece, number) for piece, number, _, _ in work.blocks] + [(work.head, 1)]
    passes = [(p, n) for piece, n in pieces for p in (piece.forward, piece.backward)]
    return sum(n * product.flops for p, n in passes for product in p.products)


@pytest.mark.parametrize("dims", [LLAMA_8B, LLAMA_70B])
@pytest.mark.parametrize("tp", [1, 4])
def test_products_are_six_flops_for_a_weight_and_token(dims, tp):
    asked = job(dims, tp=tp, dp_shard=8, program="fsdp")
    matrices, _ = flops_per_token(dims, 8192)
    assert product_flops(asked) == pytest.approx(3 * matrices * 8192 / tp, rel=1e-9)


def test_experts_compute_what_their_tokens_ask_for():
    asked = job(MIXTURE, ep=8, imbalance=1.0, program="fsdp")
    matrices, _ = flops_per_token(MIXTURE, 8192)
    assert product_flops(asked) == pytest.approx(3 * matrices * 8192, rel=1e-6)


def test_the_rank_with_the_most_tokens_sets_the_pace_of_experts_that_ranks_divide():
    even, uneven = (product_flops(job(MIXTURE, ep=8, imbalance=x)) for x in (1.0, 1.3))
    routed = 3 * 2 * 8192 * 32 * 2 * MIXTURE.mlp_parameters(4096)
    assert uneven - even == pytest.approx(0.3 * routed, rel=1e-3)
    whole = [product_flops(job(MIXTURE, ep=1, imbalance=x)) for x in (1.0, 1.3)]
    assert whole[0] == whole[1]


def test_frozen_weights_have_no_gradient_of_their_own():
    matrices, _ = flops_per_token(LLAMA_8B, 8192)
    asked = product_flops(job(trained_share=0.01, program="fsdp"))
    assert asked == pytest.approx(2 * matrices * 8192, rel=1e-9)


def test_logits_that_are_too_many_to_keep_are_computed_twice():
    """By ours; 2 bytes each against 256 MiB."""
    few, many = (replace(LLAMA_8B, vocab_size=256 * 2**20 // 2 // 8192 + more) for more in (0, 1))
    for dims, times in ((few, 3), (many, 4)):
        products = work_of(job(dims)).head
        flops = sum(p.flops for p in products.forward.products + products.backward.products)
        assert flops == times * 2 * 8192 * dims.embedding_parameters
    assert len(work_of(job(many, program="fsdp")).head.backward.products) == 2


def test_a_loss_that_is_not_fused_moves_every_logit_more_often():
    logits = 8192 * LLAMA_8B.vocab_size
    for asked, fused in (
        (job(program="fsdp"), True),
        (job(program="fsdp", compiled_loss=False), False),
        (job(program="fsdp", compiled_loss=False, loss_chunk_tokens=1024), True),
        (job(compiled=False), False),
        (job(), True),
    ):
        head = work_of(asked).head
        moved = head.forward.moved_bytes + head.backward.moved_bytes
        assert moved == logits * (LOGIT_BYTES if fused else LOGIT_BYTES_UNFUSED)


def test_attention_that_writes_its_scores_computes_all_of_them():
    on_chip, written = work_of(job()), work_of(job(flash=False))
    scores = sum(p.flops for p in written.blocks[0][0].forward.scores)
    assert scores == pytest.approx(4 * 8192 * 8192 * 4096)
    assert not on_chip.blocks[0][0].forward.scores
    assert scores / 2.2 < on_chip.blocks[0][0].forward.flash_flops < scores / 1.8


@pytest.mark.parametrize(("window", "keys"), [(1024, 960), (8192, 4096), (None, 4096)])
def test_a_window_bounds_what_attention_computes(window, keys):
    """Counted one token at a time, and as a run counts its own."""
    width = window or 8192
    seen = sum(min(place + 1, width) for place in range(8192)) / 8192
    assert keys == seen - width / 8192 / 2  # a token's own key counts by half
    dims, model = replace(LLAMA_8B, window=window), preset("mistral-7b")
    assert dims.mean_keys(8192) == keys
    on_chip = work_of(job(dims, cp=4)).blocks[0][0].forward.flash_flops
    all_of_them = work_of(job(cp=4)).blocks[0][0].forward.flash_flops
    assert on_chip / all_of_them == pytest.approx(keys / 4096)
    model = model.model_copy(update={"sliding_window": window})
    own = flops_of_model(model, 8192)
    assert flops_per_token(dims_of(model), 8192) == (own.blocks + own.head, own.attention)
    assert replace(dims, num_window_layers=16).mean_keys(8192) == (keys + 4096) / 2


def test_32_bits_are_twice_as_many_bytes_and_have_no_flash_kernel():
    half, full = (work_of(job(precision=bits)) for bits in ("bf16", "fp32"))
    narrow, wide = half.blocks[0][0].backward, full.blocks[0][0].backward
    assert [p.num_bytes for p in wide.products] == [2 * p.num_bytes for p in narrow.products]
    assert wide.fusible_bytes == 2 * narrow.fusible_bytes
    assert full.embedding.moved_bytes == 2 * half.embedding.moved_bytes
    assert full.head.forward.moved_bytes == 2 * half.head.forward.moved_bytes


@pytest.mark.parametrize(("program", "pairs"), [("fsdp", 2 * 8192**2), ("stepwell", 16384**2)])
def test_attention_in_32_bits_computes_all_pairs(program, pairs):
    """Ours of all rows together, under one mask; written where heads share their keys."""
    moved = []
    for dims in (LLAMA_8B, replace(LLAMA_8B, num_kv_heads=32)):
        asked = job(dims, precision="fp32", micro_batch_rows=2, program=program)
        forward = work_of(asked).blocks[0][0].forward
        assert forward.flash_flops == 0.0
        assert sum(p.flops for p in forward.scores) == 4 * pairs * 4096
        moved.append(forward.moved_bytes)
    assert moved == [2 * SCORE_BYTES_FORWARD * pairs * 32, 0.0]


@pytest.mark.parametrize(
    ("mode", "program", "share"),
    [
        ("none", "stepwell", 0.0),
        ("sqrt", "stepwell", 1.0),
        ("full", "megatron", 1.0),
        ("every", "megatron", 0.5),
        ("selective", "megatron", 0.0),
    ],
)
def test_recomputation_repeats_its_share_of_the_forward_products(mode, program, share):
    piece = work_of(job(recompute=mode, program=program)).blocks[0][0]
    again = sum(p.flops for p in piece.again.products) if piece.again else 0.0
    assert again == pytest.approx(share * sum(p.flops for p in piece.forward.products))


@pytest.mark.parametrize(("mode", "share"), [("full", 1.0), ("every", 0.5)])
def test_recomputation_stops_before_a_blocks_last_product(mode, share):
    """Nothing of the block needs it; programs whose attention writes its scores are older."""
    piece = work_of(job(recompute=mode, program="fsdp")).blocks[0][0]
    assert piece.again is not None
    found = [p.flops for p in piece.again.products]
    assert found == [share * p.flops for p in piece.forward.products[:-1]]
    older = work_of(job(recompute="full", program="fsdp", flash=False)).blocks[0][0]
    assert older.again is not None
    assert len(older.again.products) == len(older.forward.products)


def test_fsdp_programs_keep_every_second_product():
    piece = work_of(job(recompute="selective", program="fsdp")).blocks[0][0]
    assert piece.again is not None
    assert [p.flops for p in piece.again.products] == [
        p.flops for p in piece.forward.products[1::2]
    ]
    assert piece.again.flash_flops == 0


def test_whole_waves_of_tiles_fill_the_processors():
    assert fill(256 * PROCESSORS, 128, PROCESSORS) == pytest.approx(1)
    # One tile more is one wave more, of one tile.
    assert fill(256 * (PROCESSORS + 1), 128, PROCESSORS) < 0.8
    assert fill(16, 16, PROCESSORS) < 0.01


def test_a_pipeline_whose_blocks_do_not_divide_spares_its_ends():
    """The split is the program's: ours counts the ends as a block each, Megatron's where that makes
    it even."""
    megatron = job(pp=16, dp_shard=1, program="megatron").layout
    assert blocks_of_ranks(126, megatron) == (8, 7)
    assert blocks_of_ranks(126, job(pp=16, dp_shard=1).layout) == (8, 7)
    assert blocks_of_ranks(80, replace(megatron, pp=8)) == (10, 10)
    assert blocks_of_ranks(81, replace(megatron, pp=8)) == (11, 10)
    assert blocks_of_ranks(80, job(pp=8, dp_shard=1).layout) == (11, 9)
    interleaved = replace(
        megatron, pp=16, stages_per_rank=2, schedule="interleaved-1f1b"
    )  # DeepSeek-V3's: 1, 2, 2, ... 2, 0
    assert blocks_of_ranks(61, interleaved) == (4, 2)
    counts = [len(blocks) for blocks in blocks_of_stages(61, interleaved)]
    assert counts == [1, *[2] * 30, 0]
    v_shaped = replace(megatron, pp=2, stages_per_rank=2, schedule="zbv", stage_blocks=(1, 3, 3, 9))
    assert blocks_of_ranks(16, v_shaped) == (6, 10)
    assert blocks_of_ranks(80, job().layout) == (80, 80)
    split = changed(job(pp=2, dp_shard=4), stage_blocks=(18, 14)).layout
    assert blocks_of_ranks(32, split) == (18, 14)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_matrix_in_4_bits_is_restored_each_time_it_is_used(recompute):
    """Forward, backward, and where the block is computed again; products are the same."""
    in_16, in_4 = (
        work_of(job(adapters=Adapters(16, ("wq", "w_down"), quantized=four), recompute=recompute))
        for four in (False, True)
    )
    elements = LLAMA_8B.d_model * (LLAMA_8B.q_width + LLAMA_8B.d_ff)
    (one, *_), (other, *_) = in_16.blocks[0], in_4.blocks[0]
    again = recompute != "none"
    for name in ("forward", "backward", "again")[: 2 + again]:
        before, after = getattr(one, name), getattr(other, name)
        assert after.moved_bytes - before.moved_bytes == NF4_MOVED_BYTES * elements
        assert after.num_kernels > before.num_kernels
        assert after.products == before.products
    assert again or other.again is None


def test_restoring_moves_what_its_tensors_are_read_and_written_for():
    """Of models/quantize: each operator's inputs and outputs, but the table of levels, which stays
    on the chip."""
    weight = quantise_nf4(torch.randn(256, 1024))
    dequantise_nf4(weight, torch.bfloat16)  # the first one makes the table of levels
    moved = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            if not func.is_view:
                table = func.overloadpacket is torch.ops.aten.embedding
                read = [x for x in args[1 if table else 0 :] if isinstance(x, torch.Tensor)]
                moved.append(out.nbytes + sum(x.nbytes for x in read))
            return out

    with Counting():
        dequantise_nf4(weight, torch.bfloat16)
    assert sum(moved) / (256 * 1024) == pytest.approx(NF4_MOVED_BYTES, rel=0.03)
    assert len(moved) == pytest.approx(KERNELS_NF4, abs=1)


def test_adapters_train_no_base():
    """Whatever their rank: its weights have no gradients; adapters' products come on top."""
    tokens = job().layout.tokens_of_rank
    asked = work_of(job(adapters=Adapters(4096, ("wq",))))
    piece = asked.blocks[0][0]
    base = 2 * tokens * (LLAMA_8B.attention_parameters + LLAMA_8B.mlp_parameters(LLAMA_8B.d_ff))
    own = 2 * tokens * 4096 * (LLAMA_8B.d_model + LLAMA_8B.q_width)
    assert sum(p.flops for p in piece.forward.products) == pytest.approx(base + own)
    assert sum(p.flops for p in piece.backward.products) == pytest.approx(base + 2 * own)
