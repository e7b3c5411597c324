"""What a machine gives of its peaks: the few numbers that the step time was fitted with. No torch.

Each is physical and the same for every model, program and source. `docs/planner-calibration.md`
says how each was found and how well the whole predicts runs that the fit has not seen.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from stepwell.hardware import TERA, Accelerator

# Fastest dense product measured, TFLOP/s in 16 and 8 bits: Stas Bekman, "Machine Learning
# Engineering", compute/accelerator (MAMF finder). Two are not measured but follow from a sibling by
# the square root of the power limits: h100-96g-hbm2e-500w (500 W, h100-sxm's are 700 W) and gb300
# (1400 W, gb200's are 1200 W).
# V100: 83 on the PCIe card of 112.7 (1803.04014), by the peaks.
MEASURED_MATMUL: dict[str, tuple[float, float | None]] = {
    "v100-16g": (92.1, None),
    "v100-32g": (92.1, None),
    "a100-40g": (271.2, None),
    "a100-80g": (271.2, None),
    "a100-80g-pcie": (252.9, None),
    "a800": (271.2, None),
    "h100-sxm": (794.5, 1402.6),
    "h100-96g-hbm2e-500w": (671.5, 1185.4),
    "h200": (794.5, 1453.4),
    "gh200": (828.6, 1535.0),
    "b200": (1745.0, 3432.5),
    "gb200": (1822.0, 3615.6),
    "b300": (1769.0, 3353.3),
    "gb300": (1968.0, 3905.3),
    "mi300x": (668.4, None),
    "mi325x": (784.9, None),
    "mi355x": (1565.0, None),
}
# That rate as a share of the peak where nobody has measured it: the mean of those above.
UNMEASURED = 0.75
# Devices that the seconds of such a measurement don't heat to where a step runs.
POWER_LIMITED = ("b200", "gb200", "b300")
# 4-bit rate over the 8-bit one (vendor's datasheets; 3 on Blackwell Ultra).
FOUR_BITS = {"b300": 3.0, "gb300": 3.0}


@dataclass(frozen=True)
class Coefficients:
    """matmul_*: share of the device's fastest measured product that the products of a block reach,
    in 16, 8 and 4 bits. sustained: of that product, what POWER_LIMITED devices keep up over a step.
    attention: of attention that keeps its scores on the chip, as a share of the fastest 16-bit
    product, by kernels written for the device's generation; what is left of that with kernels of an
    older one (attention_older) and with Triton's (attention_triton).
    memory:
    share of the memory's bandwidth that operations reach which only move bytes. eager: bytes moved
    where these operations are not fused, over bytes where they are. scaleup, network: share of a
    link's rate that collectives reach. hop_s: time of a message from one machine to the next.
    launch_s: of the host, for a kernel. contention: of communication that is hidden, the share of
    its own time, and of the time its bytes would take over the scale-up links, by which it slows
    what hides it. straggling: share by which a step grows with each doubling of the
    GPUs."""

    matmul_16: float
    matmul_8: float
    matmul_4: float
    sustained: float
    attention: float
    attention_older: float
    attention_triton: float
    memory: float
    eager: float
    scaleup: float
    network: float
    hop_s: float
    launch_s: float
    contention: float
    straggling: float

    def as_dict(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def changed(self, **values: float) -> Coefficients:
        return replace(self, **values)

    def slower_products(self, factor: float) -> Coefficients:
        """Products at `factor` times the rate, in every precision."""
        keys = ("matmul_16", "matmul_8", "matmul_4")
        return self.changed(**{key: factor * getattr(self, key) for key in keys})


SHIPPED = Coefficients(
    matmul_16=0.899,
    matmul_8=0.947,
    matmul_4=0.714,
    sustained=0.855,
    attention=0.556,
    attention_older=0.533,
    attention_triton=0.735,
    memory=0.809,
    eager=2.32,
    scaleup=0.691,
    network=0.673,
    hop_s=2.9e-05,
    launch_s=2.73e-05,
    contention=0.415,
    straggling=0.00402,
)

# Streaming multiprocessors, or compute units: a product's tiles run on them in waves.
PROCESSORS = {
    "volta": 80,
    "ampere": 108,
    "ada": 128,
    "hopper": 132,
    "blackwell": 148,
    "cdna": 256,
}
# FlashAttention-2 was written for Ampere, and Ada's units are the same: no newer kernel is faster
# on these (2307.08691; 2407.08608 is for Hopper's).
OLDER_IS_NATIVE = ("volta", "ampere", "ada")


def generation(device: Accelerator) -> str:
    """Of NVIDIA's data-centre parts, and the nearest of them for consumer parts; AMD's are cdna."""
    name = device.name
    if name.startswith("mi"):
        return "cdna"
    for prefixes, found in (
        (("v100",), "volta"),
        (("a100", "a800", "a10", "rtx-a", "rtx3"), "ampere"),
        (("l4", "rtx4"), "ada"),
        (("b200", "gb200", "b300", "gb300", "rtx5"), "blackwell"),
    ):
        if name.startswith(prefixes):
            return found
    return "hopper"


def fastest_matmul(device: Accelerator, bits: int) -> float:
    """FLOP/s of the fastest product in that many bits: measured if anybody has."""
    if bits == 4:
        return FOUR_BITS.get(device.name, 2.0) * fastest_matmul(device, 8)
    sixteen, eight = MEASURED_MATMUL.get(device.name, (None, None))
    measured = {16: sixteen, 8: eight}.get(bits)
    if measured is not None:
        return measured * TERA
    return UNMEASURED * peak(device, bits)


def peak(device: Accelerator, bits: int) -> float:
    """FLOP/s by the datasheet, in 32, 16, 8 or 4 bits."""
    if bits == 16:
        return device.bf16_flops_per_s or device.peak_flops_per_s("fp16")
    if bits == 32:
        return device.peak_flops_per_s("fp32")
    return device.peak_flops_per_s("fp8") * (FOUR_BITS.get(device.name, 2.0) if bits == 4 else 1)
