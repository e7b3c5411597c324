"""What a GPU's memory holds beside a program's tensors: few numbers, fitted to published runs. No
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.hardware import GIB


@dataclass(frozen=True)
class MemoryCoefficients:
    """context_bytes: the driver's and the libraries' own, per process. group_bytes: a
    communicator's buffers, per group of ranks. fragmentation: the part of what is allocated that
    the allocator reserves beyond it. margin: the part of the usable memory that `fits` leaves
    free."""

    context_bytes: float = 0.9 * GIB
    group_bytes: float = 0.25 * GIB
    fragmentation: float = 0.06
    margin: float = 0.02


SHIPPED = MemoryCoefficients()
