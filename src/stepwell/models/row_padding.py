"""Few shapes of products in 16 bits on a CPU.

oneDNN, which multiplies bf16 and fp16 there, builds code and keeps memory for every shape that it
meets, and gives little of it back: about 0.6 MiB a product (measured with torch 2.13). Where the
number of rows would differ from batch to batch, rows of zeros make it a multiple.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

HALVES = (torch.bfloat16, torch.float16)


def missing_rows(num_rows: int, dtype: torch.dtype, device: torch.device, multiple: int) -> int:
    """How many rows of zeros make `num_rows` a multiple; 0 where shapes cost nothing."""
    return -num_rows % multiple if device.type == "cpu" and dtype in HALVES else 0


def with_zeros(x: Tensor, num_rows: int) -> Tensor:
    """x with so many further rows of zeros along its first dim."""
    return F.pad(x, (*(0, 0) * (x.dim() - 1), 0, num_rows)) if num_rows else x
