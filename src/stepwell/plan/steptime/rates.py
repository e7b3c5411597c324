"""What a device gives of its peaks, and how long a pass takes at that. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.plan.job import Job
from stepwell.plan.steptime.coefficients import (
    OLDER_IS_NATIVE,
    POWER_LIMITED,
    Coefficients,
    fastest_matmul,
    generation,
    peak,
)
from stepwell.plan.steptime.work import Pass, Product

# Bytes moved to bring a value to low precision once, in both orders, by recipe: fused into what
# computes it except where scales need passes of their own (by rows, two in either order).
CAST_FACTOR = {"tensorwise": 1.5, "rowwise": 10.0, "mxfp8": 1.5, "nvfp4": 1.5, "none": 1.0}
# Length of the summed dimension at which a product has half its rate: its start and its end.
SHORT_PRODUCT = 64.0
# Pauses between kernels on the device.
KERNEL_GAP_S = 2e-6


@dataclass(frozen=True)
class Rates:
    """FLOP/s and bytes/s that a device gives; the seconds of a kernel's launch. sixteen: of
    products of the run's own precision, where that is not low; half: of 16 bits in any run."""

    sixteen: float
    half: float
    low: float
    flash: float
    memory: float
    unfused: float
    launch_s: float
    cast_factor: float

    def product_s(self, p: Product) -> float:
        rate = (self.low if p.low else self.sixteen) * p.fill
        rate *= p.summed / (p.summed + SHORT_PRODUCT)
        return max(p.flops / rate, p.num_bytes / self.memory)


def rates_of(job: Job, c: Coefficients) -> Rates:
    device, layout = job.cluster.accelerator, job.layout
    sustained = c.sustained if device.name in POWER_LIMITED else 1.0
    sixteen = half = fastest_matmul(device, 16) * c.matmul_16 * sustained
    if layout.precision == "fp32":
        sixteen = peak(device, 32) * c.matmul_16
    low = sixteen
    if layout.precision == "fp8":
        bits, share = (4, c.matmul_4) if layout.recipe == "nvfp4" else (8, c.matmul_8)
        low = fastest_matmul(device, bits) * share * sustained
    flash = c.attention
    if layout.attention_kernel != "native" and generation(device) not in OLDER_IS_NATIVE:
        flash *= c.attention_older
    if layout.attention_kernel == "triton":
        flash *= c.attention_triton
    return Rates(
        sixteen,
        half,
        low,
        flash * fastest_matmul(device, 16),
        device.bandwidth_bytes_per_s * c.memory,
        1.0 if layout.compiled else c.eager,
        c.launch_s,
        CAST_FACTOR.get(layout.recipe, 1.0),
    )


@dataclass
class Seconds:
    """Of a pass, or a sum of passes. gaps: between kernels. waiting: for the host."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    casts: float = 0.0
    gaps: float = 0.0
    waiting: float = 0.0

    @property
    def host(self) -> float:
        return self.gaps + self.waiting

    @property
    def total(self) -> float:
        return self.products + self.attention + self.memory + self.casts + self.host

    def add(self, other: Seconds, times: float = 1.0) -> None:
        self.products += times * other.products
        self.attention += times * other.attention
        self.memory += times * other.memory
        self.casts += times * other.casts
        self.gaps += times * other.gaps
        self.waiting += times * other.waiting


def pass_seconds(one: Pass, rates: Rates) -> Seconds:
    """The host launches kernels ahead; where it takes longer than they do, they wait for it."""
    products = sum(rates.product_s(p) for p in one.products)
    attention = sum(rates.product_s(p) for p in one.scores) + one.flash_flops / rates.flash
    memory = (one.moved_bytes + one.fusible_bytes * rates.unfused) / rates.memory
    casts = sum(p.cast_bytes for p in one.products) * rates.cast_factor / rates.memory
    gaps = one.num_kernels * KERNEL_GAP_S
    busy = products + attention + memory + casts + gaps
    waiting = max(0.0, one.num_kernels * rates.launch_s - busy)
    return Seconds(products, attention, memory, casts, gaps, waiting)
