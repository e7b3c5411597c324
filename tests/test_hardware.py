import json
import subprocess
import sys

import pytest
import torch

from stepwell import hardware
from stepwell.hardware import (
    ACCELERATORS,
    GIB,
    Device,
    accelerator,
    detect,
    live_tensor_bytes,
    match_accelerator,
    measure_peak_allocated,
    measured_peak_flops,
    peak_flops_per_s,
)
from stepwell.types import ConfigError

MIB = 2**20


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "stepwell" / "peak_flops.json"


def floats(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB // 4)


def test_importing_it_imports_no_torch():
    code = "import sys, stepwell.hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_table_holds_published_figures():
    h100 = accelerator("h100-sxm")
    assert h100.peak_flops_per_s("bf16") == pytest.approx(989.4e12)
    assert h100.peak_flops_per_s("fp8") == pytest.approx(1978.9e12)
    assert h100.bandwidth_bytes_per_s == pytest.approx(3.35e12)
    assert accelerator("a100-80g").peak_flops_per_s("bf16") == 312e12
    for row in ACCELERATORS.values():
        assert 15 * GIB < row.memory_bytes < 300 * GIB
        assert row.source
        if row.fp8_flops_per_s and row.bf16_flops_per_s:
            assert 1.9 < row.fp8_flops_per_s / row.bf16_flops_per_s < 2.1


def test_a_missing_dtype_and_an_unknown_name_are_refused():
    with pytest.raises(ConfigError, match="v100-16g has no peak for 'bf16'; it has fp16, fp32"):
        accelerator("v100-16g").peak_flops_per_s("bf16")
    with pytest.raises(ConfigError, match="did you mean 'h100-sxm'"):
        accelerator("h100-smx")


@pytest.mark.parametrize(
    ("driver_name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
        ("Something Else", None),
    ],
)
def test_driver_names(driver_name, expected):
    found = match_accelerator(driver_name)
    assert (found.name if found else None) == expected


def test_detect_describes_this_machine():
    device = detect()
    assert device.memory_bytes > GIB // 2
    assert device.name in str(device)
    if not torch.cuda.is_available():
        assert device.kind == "cpu"
        assert device.num_threads == torch.get_num_threads()
        assert device.accelerator is None
    assert hardware.software_versions()["torch"] == torch.__version__


def test_the_kind_of_device_is_known_without_torch(monkeypatch):
    assert hardware.device_kind() == detect().kind
    monkeypatch.setattr(hardware.metadata, "version", lambda name: "2.11.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    has = hardware._num_nvidia_devices()
    assert hardware.device_kind() == ("cuda" if has else "cpu")
    monkeypatch.setattr(hardware, "_num_nvidia_devices", lambda: 2)
    assert hardware.device_kind() == "cuda"
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert hardware.device_kind() == "cpu"


def test_fp64_is_measured_on_any_device(cache):
    peak, source = peak_flops_per_s(Device("cpu", "x", 1, 1, accelerator("h100-sxm")), "fp64")
    assert peak > 1e6
    assert source.startswith("fastest measured fp64 matmul")


def test_measured_peak_is_cached_by_machine_threads_and_torch(cache):
    peak = measured_peak_flops("fp32")
    assert 1e8 < peak < 1e15
    (key,) = json.loads(cache.read_text())
    assert key == (
        f"{hardware.cpu_name()}|{torch.get_num_threads()} threads|torch {torch.__version__}|fp32"
    )
    cache.write_text(json.dumps({key: 123.0}))
    assert measured_peak_flops("fp32") == 123.0
    assert measured_peak_flops("fp32", refresh=True) > 1e8
    with pytest.raises(ConfigError, match="'fp8'"):
        measured_peak_flops("fp8")


def test_a_damaged_cache_is_measured_again(cache):
    cache.parent.mkdir()
    for content in ("{broken", "[]", '{"x": "y"}', '{"x": -1.0}'):
        cache.write_text(content)
        assert hardware._read_cache(cache) == {}
    assert measured_peak_flops("fp32") > 1e8
    assert len(json.loads(cache.read_text())) == 1


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert measured_peak_flops("fp32") > 1e8


def test_rss_follows_touched_memory_and_the_peak_can_be_reset():
    before = hardware.rss_bytes()
    block = bytearray(b"x") * (200 * MIB)
    during = hardware.rss_bytes()
    assert 190 * MIB < during - before < 260 * MIB
    peak = hardware.peak_rss_bytes()
    assert peak >= during
    del block
    if not hardware.reset_peak_rss():
        pytest.skip("this system does not let a process reset its peak")
    assert hardware.peak_rss_bytes() < peak - 150 * MIB


def test_peak_allocated_of_a_known_pattern():
    held = floats(32)

    def pattern():
        first = floats(8)
        second = floats(16)
        del first
        third = floats(4)
        assert second.numel() + third.numel() > 0
        del second, third
        floats(12)

    assert measure_peak_allocated(pattern) == 24 * MIB
    assert measure_peak_allocated(pattern) == 24 * MIB  # nothing is left over from the first
    assert measure_peak_allocated(lambda: None) == 0
    assert held.numel() * 4 == 32 * MIB


def test_measuring_prints_nothing():
    code = (
        "import torch; from stepwell.hardware import measure_peak_allocated as m\n"
        "print(m(lambda: torch.empty(1000)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("4000\n", "")


def test_what_lives_before_is_not_counted_even_when_freed_inside():
    held = [floats(64)]

    def swap():
        held.clear()
        held.append(floats(16))

    assert measure_peak_allocated(swap) <= 16 * MIB


def test_peak_allocated_sees_the_backward_thread_and_compiled_code():
    w = torch.randn(512, 512, requires_grad=True)
    x = torch.randn(2048, 512)

    def loss(x):
        return ((x @ w).sin() * 2).square().sum()

    def step():
        w.grad = None
        loss(x).backward()

    # four activations of 4 MiB are held forward (the product, sin, doubled, square's input is the
    # doubled one); backward adds at most two gradients of 4 MiB and w's of 1 MiB
    eager = measure_peak_allocated(step)
    assert 12 * MIB <= eager <= 22 * MIB

    compiled_loss = torch.compile(loss)

    def compiled():
        w.grad = None
        compiled_loss(x).backward()

    compiled()
    fused = measure_peak_allocated(compiled)
    assert 4 * MIB <= fused < eager


def test_live_tensor_bytes_counts_a_storage_once():
    base = floats(8)
    other = torch.empty(MIB, dtype=torch.bfloat16)
    assert live_tensor_bytes([base, base[:10], base.view(2, -1), other]) == 10 * MIB
    assert live_tensor_bytes([base[:10]]) == 8 * MIB
    assert live_tensor_bytes([]) == 0


def test_available_memory_is_part_of_what_there_is():
    assert 2**20 < hardware.available_memory_bytes() < hardware.cpu_memory_bytes()
