import pytest
import torch

from stepwell.diagnose.waterfall import Kernel, profiled_kernels, waterfall
from stepwell.plan.measured.parts import category


def test_waterfall_adds_up_and_counts_overlap_once():
    kernels = [
        Kernel("gemm", 0.0, 4.0),
        Kernel("flash", 4.0, 5.0),
        Kernel("nccl all_gather", 3.0, 6.0),  # one second is exposed
        Kernel("elementwise", 6.0, 7.5),
        Kernel("fused adam", 7.5, 8.0),
    ]
    found = waterfall(kernels, 10.0, model_flops=30, recomputed_flops=10, peak_flops_per_s=10)
    assert found.mfu == pytest.approx(0.3)
    assert found.recomputed_s == pytest.approx(1.0)
    assert found.below_peak_s == pytest.approx(1.0)
    assert found.collectives_s == pytest.approx(1.0)
    assert found.memory_bound_s == pytest.approx(1.5)
    assert found.optimizer_s == pytest.approx(0.5)
    assert found.idle_s == pytest.approx(2.0)
    lines = found.lines()
    assert lines[0] == "100.0 %  peak"
    assert lines[-1].startswith(" 30.0 %")


def test_kernels_longer_than_the_step_are_refused():
    with pytest.raises(ValueError, match=r"2\.0000 s of a step of 1\.0000 s"):
        waterfall([Kernel("gemm", 0, 2)], 1.0, 1, 0, 1)


def test_a_profile_of_this_machine():
    x = torch.randn(256, 256)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            (x @ x).relu()
    kernels = profiled_kernels(profiler, "cpu")
    assert {category(k.name) for k in kernels} == {"products", "memory-bound"}
    assert all(k.end_s >= k.start_s for k in kernels)
