"""What the machine can do and how much memory is in use. Importing this imports no torch.

Peak rates are dense (no sparsity) with fp32 accumulation: the vendors' figures as collected in
Stas Bekman's "Machine Learning Engineering" (compute/accelerator) unless the row says otherwise.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stepwell.files import write_text
from stepwell.types import ConfigError, nearest

if TYPE_CHECKING:
    from torch import Tensor

GIB = 2**30
DeviceKind = Literal["cpu", "cuda"]
TERA = 1e12


@dataclass(frozen=True)
class Accelerator:
    """Peaks of one device in FLOP/s (None: the device has no such unit), memory as the driver
    reports it where known (else the nominal size in GiB), memory bandwidth in bytes/s."""

    name: str
    bf16_flops_per_s: float | None
    fp16_flops_per_s: float | None
    fp8_flops_per_s: float | None
    fp32_flops_per_s: float | None
    memory_bytes: int
    bandwidth_bytes_per_s: float
    source: str

    def peak_flops_per_s(self, dtype: str) -> float:
        """dtype: bf16, fp16, fp8 or fp32. Raises ConfigError when the device lacks it."""
        known = {
            "bf16": self.bf16_flops_per_s,
            "fp16": self.fp16_flops_per_s,
            "fp8": self.fp8_flops_per_s,
            "fp32": self.fp32_flops_per_s,
        }
        peak = known.get(dtype)
        if peak is None:
            has = ", ".join(name for name, rate in known.items() if rate is not None)
            raise ConfigError(f"{self.name} has no peak for {dtype!r}; it has {has}")
        return peak


_GUIDE = "ml-engineering, compute/accelerator"
_SHEET = "vendor's datasheet"
_TITAN = "torchtitan, tools/utils.py"
_TITAN_H100 = "torchtitan, benchmarks of 2024-12: an H100 of 500 W"

# name, bf16, fp16, fp8, fp32 TFLOP/s, memory GiB, bandwidth TB/s, source
_ROWS: tuple[tuple[str, Any, Any, Any, Any, float, float, str], ...] = (
    ("v100-16g", None, 125, None, 15.7, 16, 0.9, _SHEET),
    ("v100-32g", None, 125, None, 15.7, 32, 0.9, _SHEET),
    ("a100-40g", 312, 312, None, 19.5, 40, 1.555, _GUIDE),
    ("a100-80g", 312, 312, None, 19.5, 80, 2.039, _GUIDE),
    ("a100-80g-pcie", 312, 312, None, 19.5, 80, 1.94, _GUIDE),
    ("a800", 312, 312, None, 19.5, 80, 2.039, _SHEET),
    ("h100-sxm", 989.4, 989.4, 1978.9, 67, 79.1, 3.35, _GUIDE),
    ("h100-96g-hbm2e-500w", 989, 989, 1979, 67, 96, 2.4, _TITAN_H100),
    ("h100-nvl", 835, 835, 1671, 60, 94, 3.9, _TITAN),
    ("h100-pcie", 756, 756, 1513, 51, 80, 2.0, _GUIDE),
    ("h800", 989.4, 989.4, 1978.9, 67, 80, 3.35, _SHEET),
    ("h20", 148, 148, 296, 44, 96, 4.0, _TITAN),
    ("h200", 989.4, 989.4, 1978.9, 67, 141, 4.8, _GUIDE),
    ("gh200", 989.4, 989.4, 1978.9, 67, 96, 4.0, _GUIDE),
    ("b200", 2250, 2250, 4500, 80, 180, 8.0, _GUIDE),
    ("gb200", 2500, 2500, 5000, 80, 184.3, 8.0, _GUIDE),
    ("b300", 2250, 2250, 4500, 80, 288, 8.0, _GUIDE),
    ("gb300", 2500, 2500, 5000, 80, 288, 8.0, _GUIDE),
    ("mi250x", 383, 383, None, 47.9, 128, 3.28, _GUIDE),
    ("mi300x", 1307.4, 1307.4, 2614.9, 163.4, 192, 5.3, _GUIDE),
    ("mi325x", 1307.4, 1307.4, 2614.9, 163.4, 256, 6.0, _GUIDE),
    ("mi350x", 2300, 2300, 4600, 144.2, 288, 8.0, _SHEET),
    ("mi355x", 2500, 2500, 5000, 157.3, 288, 8.0, _GUIDE),
    ("l40s", 362, 362, 733, 91.6, 48, 0.864, _GUIDE),
    ("l4", 121, 121, 242, 30.3, 24, 0.3, _SHEET),
    ("a10", 125, 125, None, 31.2, 24, 0.6, _SHEET),
    ("rtx-a6000", 154.8, 154.8, None, 38.7, 48, 0.768, _TITAN),
    ("rtx3090", 71, 71, None, 35.6, 24, 0.936, _SHEET),
    ("rtx4090", 165.2, 165.2, 330.3, 82.6, 24, 1.008, _SHEET),
    ("rtx5090", 209.5, 209.5, 419, 104.8, 32, 1.792, _SHEET),
)


def _row(name, bf16, fp16, fp8, fp32, memory_gib, tb_per_s, source) -> Accelerator:
    bf16, fp16, fp8, fp32 = (rate and rate * TERA for rate in (bf16, fp16, fp8, fp32))
    memory_bytes = round(memory_gib * GIB)
    return Accelerator(name, bf16, fp16, fp8, fp32, memory_bytes, tb_per_s * TERA, source)


ACCELERATORS: dict[str, Accelerator] = {row[0]: _row(*row) for row in _ROWS}

# What drivers call them, most specific first.
_DRIVER_NAMES: tuple[tuple[str, str], ...] = (
    (r"\bGB300\b", "gb300"),
    (r"\bGB200\b", "gb200"),
    (r"\bGH200\b", "gh200"),
    (r"\bB300\b", "b300"),
    (r"\bB200\b", "b200"),
    (r"\bH200\b(?!.*NVL)", "h200"),
    (r"\bH100\b.*\bNVL\b", "h100-nvl"),
    (r"\bH100\b.*\bPCIe\b", "h100-pcie"),
    (r"\bH100\b.*\b80GB\b", "h100-sxm"),
    (r"\bH800\b(?!.*PCIe)", "h800"),
    (r"\bH20\b", "h20"),
    (r"\bA100\b.*80GB.*PCIe|\bA100-PCIE-80GB", "a100-80g-pcie"),
    (r"\bA100\b.*80GB", "a100-80g"),
    (r"\bA100\b.*40GB", "a100-40g"),
    (r"\bA800\b.*80GB", "a800"),
    (r"\bV100\b.*32GB", "v100-32g"),
    (r"\bV100\b.*16GB", "v100-16g"),
    (r"\bMI250X\b", "mi250x"),
    (r"\bMI300X\b", "mi300x"),
    (r"\bMI325X\b", "mi325x"),
    (r"\bMI350X\b", "mi350x"),
    (r"\bMI355X\b", "mi355x"),
    (r"\bL40S\b", "l40s"),
    (r"\bL4\b", "l4"),
    (r"\bA10\b", "a10"),
    (r"\bRTX A6000\b", "rtx-a6000"),
    (r"\bRTX 3090$", "rtx3090"),
    (r"\bRTX 4090$", "rtx4090"),
    (r"\bRTX 5090$", "rtx5090"),
)


def accelerator(name: str) -> Accelerator:
    """The row called `name`, e.g. "h100-sxm". Raises ConfigError naming the nearest."""
    if name not in ACCELERATORS:
        raise ConfigError(
            f"unknown accelerator {name!r}{nearest(name, ACCELERATORS)}; "
            f"known are {', '.join(ACCELERATORS)}"
        )
    return ACCELERATORS[name]


def match_accelerator(driver_name: str) -> Accelerator | None:
    """The row for a name as the driver gives it ("NVIDIA H100 80GB HBM3"), or None."""
    for pattern, name in _DRIVER_NAMES:
        if re.search(pattern, driver_name.strip()):
            return ACCELERATORS[name]
    return None


# --- this machine ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """kind: "cuda" or "cpu". num_threads: torch's intra-op threads (CPU). memory_bytes: what one
    process may use at most (the cgroup's limit counts)."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    num_threads: int
    accelerator: Accelerator | None = None

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / GIB:.1f} GiB"
        threads = f", {self.num_threads} threads" if self.kind == "cpu" else ""
        return f"{self.name}{threads}, {memory}"


def detect() -> Device:
    """The device that training uses here: the current CUDA device, else the CPU."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name = properties.name
        return Device("cuda", name, properties.total_memory, 1, match_accelerator(name))
    return Device("cpu", cpu_name(), cpu_memory_bytes(), torch.get_num_threads())


def device_kind() -> DeviceKind:
    """Of `detect`, without importing torch: what its build and the driver say."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    if hidden or metadata.version("torch").endswith("+cpu"):
        return "cpu"
    return "cuda" if _num_nvidia_devices() else "cpu"


def _num_nvidia_devices() -> int:
    """By NVIDIA's management library, which makes no context; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if driver.nvmlInit_v2() or driver.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    driver.nvmlShutdown()
    return count.value


def peak_flops_per_s(device: Device, dtype: str) -> tuple[float, str]:
    """The denominator of MFU for one device, and where it comes from (to be shown beside it).

    fp64 is measured: tables of accelerators have no figure for it."""
    if device.accelerator is not None and dtype != "fp64":
        row = device.accelerator
        return row.peak_flops_per_s(dtype), f"{row.name} dense {dtype}, {row.source}"
    peak = measured_peak_flops(dtype, device=device.kind)
    where = f"{device.num_threads} threads" if device.kind == "cpu" else device.name
    return peak, f"fastest measured {dtype} matmul on {where}"


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def cpu_memory_bytes() -> int:
    """Physical memory, or the cgroup's limit when that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = Path(path).read_text().strip() if Path(path).exists() else "max"
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def available_memory_bytes() -> int:
    """What processes may still allocate: the system's estimate (with caches that it would give up),
    or what the cgroup's limit leaves when that is less."""
    info = Path("/proc/meminfo")
    text = info.read_text() if info.exists() else ""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    available = int(found.group(1)) * 1024 if found else cpu_memory_bytes() - rss_bytes()
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        if Path(limit).exists() and Path(limit).read_text().strip().isdigit():
            free = int(Path(limit).read_text()) - int(Path(usage).read_text())
            available = min(available, max(free, 0))
    return available


def software_versions() -> dict[str, str]:
    """Versions of what the numbers of a run depend on."""
    from importlib import metadata

    found = {"python": platform.python_version(), "system": platform.platform(terse=True)}
    for package in ("stepwell", "torch", "numpy", "tokenizers", "safetensors"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


# --- peak FLOP/s by measurement --------------------------------------------------------------


def cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "stepwell"


def measured_peak_flops(dtype: str, device: str = "cpu", refresh: bool = False) -> float:
    """FLOP/s of the fastest square matmul `x @ w.T` on the threads in use; takes about a second.

    Kept in the user's cache under the device's name, the threads and torch's version; `refresh`
    measures again. On a busy machine the figure is low, and an MFU over it high.
    Raises ConfigError for a dtype other than bf16, fp16, fp32 and fp64.
    """
    import torch

    dtypes = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp64": torch.float64,
    }
    if dtype not in dtypes:
        raise ConfigError(f"cannot measure {dtype!r} matmuls; choose {', '.join(dtypes)}")
    name = cpu_name() if device == "cpu" else torch.cuda.get_device_name()
    threads = torch.get_num_threads() if device == "cpu" else 1
    key = f"{name}|{threads} threads|torch {torch.__version__}|{dtype}"
    path = cache_dir() / "peak_flops.json"
    known = _read_cache(path)
    if refresh or key not in known:
        known[key] = _fastest_matmul(dtypes[dtype], device)
        _write_cache(path, known)
    return known[key]


def _fastest_matmul(dtype, device: str, budget_s: float = 0.35) -> float:
    import torch

    best = 0.0
    for size in (512, 1024, 2048) if device == "cpu" else (4096, 8192):
        x = torch.randn(size, size, device=device).to(dtype)
        w = torch.randn(size, size, device=device).to(dtype)
        end = time.perf_counter() + budget_s
        while time.perf_counter() < end:
            start = time.perf_counter()
            torch.mm(x, w.T)
            if device != "cpu":
                torch.cuda.synchronize()
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def _read_cache(path: Path) -> dict[str, float]:
    """Empty when there is none or when it is damaged: it is measured again then."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, float) and v > 0}


def _write_cache(path: Path, known: dict[str, float]) -> bool:
    """False when the cache cannot be written (a read-only home); the figure holds all the same."""
    try:
        write_text(path, json.dumps(known, indent=1))
    except OSError:
        return False
    return True


# --- memory in use ---------------------------------------------------------------------------


def rss_bytes() -> int:
    """Resident memory of this process."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_rss_bytes()


def peak_rss_bytes() -> int:
    """The most resident memory since the start, or since `reset_peak_rss` succeeded."""
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        if found:
            return int(found.group(1)) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def reset_peak_rss() -> bool:
    """Starts the peak again from now; False where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def measure_peak_allocated(fn: Callable[[], Any]) -> int:
    """Bytes of tensor memory that `fn()` needed at its worst, above what was live before it.

    CUDA: torch's allocator statistics. CPU: the allocations that torch's profiler sees, eager or
    compiled; memory that torch does not allocate (oneDNN's scratch space) is not among them. What
    gloo's threads free goes unseen, so among CPU ranks the figure can only be too high.
    """
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports every profile on stderr otherwise
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        fn()
    return _highest_sum(_allocations(profiler))


def _allocations(profiler) -> list[int]:
    """Bytes of each allocation (negative: freed), in order of time."""
    events = profiler.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return [num_bytes for _, num_bytes in sorted(changes, key=lambda change: change[0])]


def _highest_sum(changes: Iterable[int]) -> int:
    live = highest = 0
    for change in changes:
        live += change
        highest = max(highest, live)
    return highest


def live_tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each storage once; DTensors count locally."""
    storages = {}
    for tensor in tensors:
        local: Any = tensor
        if hasattr(local, "to_local"):
            local = local.to_local()
        storage = local.untyped_storage()
        storages[local.device, storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())
