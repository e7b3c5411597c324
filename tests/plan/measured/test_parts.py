from dataclasses import replace

import pytest

from stepwell.plan.job import Arrangement
from stepwell.plan.measured.parts import COPIES, axis_of, category, part_of, parts_of, union
from stepwell.plan.measured.trace import Message, Piece, read_trace
from tests.plan.measured import traces
from tests.plan.measured.traces import ADAM, ALL_GATHER, FLASH, GEMM, POINTWISE, REDUCE_SCATTER

FSDP = Arrangement(seq_len=8192, micro_batch_rows=1, global_batch_rows=512, dp_shard=64, zero=3)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopB_TNN", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "products"),
        ("aten::mm", "products"),
        ("aten::addmm", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "products"),
        ("void flash_bwd_kernel<Flash_bwd_kernel_traits>", "attention"),
        ("stepwell::packed_attention", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("ncclDevKernel_AllGather_RING_LL", "collectives"),
        ("void at::native::vectorized_elementwise_kernel<4, mul>", "memory-bound"),
        ("aten::sum", "memory-bound"),
        ("Memcpy DtoD (Device -> Device)", "memory-bound"),
        ("Memcpy PtoP (Device -> Device)", "collectives"),
        ("triton_poi_fused_addmm_mm_relu_0", "memory-bound"),
        ("triton_poi_fused_all_gather_into_tensor_1", "memory-bound"),
        ("triton_tem_fused_mm_2", "products"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x64", "products"),
        ("void gemv2T_kernel_val<int, int, float>", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_fprop_wgmma_f16_knob_3", "attention"),
        ("fsdp::all_gather_copy_in", "memory-bound"),
    ],
)
def test_category(name, wanted):
    assert category(name) == wanted


def test_union():
    assert union([(3, 4), (0, 1), (0.5, 2), (2, 2.5)]) == [(0, 2.5), (3, 4)]


def one_step(at_ms=0.0):
    """100 ms: products 0-20 and 40-60, attention 20-30, a fused kernel 30-36, Adam 80-86, a copy to
    the host 90-92; a gather 10-45 and a scatter 55-75, with a second, shorter one within it."""
    k, m = traces.kernel, traces.message
    data = ("mesh_fsdp", 64, tuple(range(64)))
    pieces = [
        k(GEMM, 0, 20), k(GEMM, 40, 60), k(GEMM, 5, 15, traces.OTHER), k(FLASH, 20, 30),
        k(POINTWISE, 30, 36), k(ADAM, 80, 84), k("void at::native::elementwise", 84, 86),
        traces.event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 90, 92, traces.COMPUTE),
        traces.event("Optimizer.step#AdamW.step", "gpu_user_annotation", 80, 86, traces.COMPUTE),
        m(ALL_GATHER, 10, 45, traces.GATHER, 64_000_000, "BFloat16", *data),
        m(REDUCE_SCATTER, 55, 75, traces.SCATTER, 32_000_000, "Float", *data),
        m(REDUCE_SCATTER, 60, 70, traces.GATHER, 32_000_000, "Float", *data),
    ]  # fmt: skip
    return [piece | {"ts": piece["ts"] + 1e3 * at_ms} for piece in pieces]


def test_a_cuda_step_by_hand(tmp_path):
    """Two steps, the second 20 ms longer; between them nothing runs from 92 to 100 ms."""
    events = one_step() + one_step(100)
    # Of the step before the first: it is not whole, and its gather ends within the next.
    events.append(traces.message(
        ALL_GATHER, -10, 5, traces.GATHER, 64_000_000, "BFloat16", "mesh_fsdp", 64
    ))  # fmt: skip
    events += traces.steps([(0, 92), (100, 192)], [(-5, 95), (95, 215)])
    found = read_trace(traces.write(tmp_path / "t.json.gz", traces.trace(events)))
    assert [w.seconds for w in found.steps] == pytest.approx([0.100, 0.120])
    assert (found.device, found.world, found.rank) == ("NVIDIA H100 80GB HBM3", 64, 0)
    measured = parts_of(found, FSDP)
    assert measured.num_steps == 2
    assert measured.parts == pytest.approx({
        "products": 0.040, "attention": 0.010, "memory-bound": 0.006, "optimizer": 0.006,
        COPIES: 0.002,
        "exposed data": 0.004 + 0.015,  # 36-40, 60-75
        "idle": (0.017 + 0.037) / 2,  # 75-80, 86-90, 92-100 or -120
    })  # fmt: skip
    assert sum(measured.parts.values()) == pytest.approx(measured.step_s)
    data = measured.messages["data"]
    assert data.busy_s == pytest.approx(0.055 + 0.0025)  # 0-5 of the first is the one before's
    assert data.exposed_s == pytest.approx(0.019)
    assert data.calls == 3
    assert data.wire_bytes == pytest.approx(3 * 128_000_000 * 63 / 64)
    # The fastest of each size: 35 ms of the gather, 10 of two scatters.
    assert data.link_s == pytest.approx(0.055)
    assert data.bytes_per_s == pytest.approx(data.wire_bytes / 0.055)
    assert measured.longest_gap_s == pytest.approx(0.028)
    assert measured.launches_s == pytest.approx(0, abs=1e-6)
    assert measured.heaviest["products"] == GEMM


def test_short_pauses_are_launches(tmp_path):
    pieces = [traces.kernel(GEMM, 2 * i, 2 * i + 1.5) for i in range(5)]
    events = [*pieces, *traces.steps([(0, 9.5)], [(0, 20)])]
    found = read_trace(traces.write(tmp_path / "t.json", traces.trace(events), packed=False))
    measured = parts_of(found, FSDP)
    assert measured.step_s == pytest.approx(0.020)
    assert measured.launches_s == pytest.approx(4 * 0.0005)
    assert measured.parts["idle"] == pytest.approx(0.0125)


MESH = replace(FSDP, tp=8, cp=2, pp=4, dp_shard=2, dp_replicate=2, ep=1)  # 256 ranks


@pytest.mark.parametrize(
    ("group", "size", "ranks", "wanted"),
    [
        ("mesh_tp", 8, (), "tp"),
        ("mesh_dp_shard_cp", 4, (), "data"),
        ("mesh_fsdp", 4, (), "data"),
        ("mesh_cp", 2, (), "cp"),
        ("mesh_ep", 8, (), "ep"),
        ("TENSOR_MODEL_PARALLEL_GROUP", 8, (), "tp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", 8, (), "data"),
        ("EXPERT_MODEL_PARALLEL_GROUP", 8, (), "ep"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", 4, (), "pp"),
        ("17", 8, (0, 1), "tp"),
        ("17", 2, (0, 8), "cp"),
        ("17", 4, (0, 8), "data"),
        ("17", 2, (0, 32), "data"),
        ("17", 4, (0, 64), "pp"),
        ("17", 3, (0, 5), "other"),
        ("17", 8, (), "other"),  # tensor ranks, or data ranks with their context ranks and replicas
        ("default_pg", 256, (), "world"),
        ("", 0, (), "other"),
    ],
)
def test_the_axis_of_a_group(group, size, ranks, wanted):
    assert axis_of(Message("all-gather", 8, size, group, ranks), MESH) == wanted


def test_without_a_name_only_one_axis_can_be():
    assert axis_of(Message("all-reduce", None, 0, "", ()), FSDP) == "data"
    assert axis_of(Message("send", 8, 2, "", ()), MESH) == "pp"
    assert axis_of(Message("all-gather", 8, 64, "default_pg", ()), FSDP) == "data"


def test_what_an_operator_calls_is_its_own():
    assert part_of(Piece("aten::bmm", 0, 1, None, ("stepwell::packed_attention",))) == "attention"
    assert part_of(Piece("aten::bmm", 0, 1, None, ("aten::linear",))) == "products"
    assert part_of(Piece("aten::mul", 1, 2), [(0.5, 3)]) == "optimizer"
    assert part_of(Piece("aten::mul", 0.4, 2), [(0.5, 3)]) == "memory-bound"
