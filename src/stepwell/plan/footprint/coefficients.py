"""What a GPU's memory holds beside a program's tensors: few numbers, fitted to published runs. No
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.hardware import GIB


@dataclass(frozen=True)
class MemoryCoefficients:
    """context_bytes: of the driver and the libraries, a process. group_bytes: a communicator's
    buffers, for each group that a rank is in. fragmentation: of the blocks that the allocator has
    from a step's other moments, the part that its worst moment cannot use. margin: the part of the
    usable memory that `fits` leaves free."""

    context_bytes: float
    group_bytes: float
    fragmentation: float
    margin: float


# context_bytes: measured by BigScience (experiments/tr3m-1B3.md), 1113 MiB on both V100s. The next
# two: `plan/calibration/memory.fit` on its published_runs.csv (docs/memory.md). margin: ours.
SHIPPED = MemoryCoefficients(
    context_bytes=1113 * 2**20, group_bytes=0.53 * GIB, fragmentation=0.68, margin=0.01
)
