"""Random bits that are a function of what they are for: of a token's key and of a column's.

N tokens, D columns. Nothing is drawn in order, so no layout, split or restart changes a bit.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

ODD = tuple(
    int.from_bytes(hashlib.sha256(f"stepwell dropout {i}".encode()).digest()[:8], "little") | 1
    for i in range(4)
)


def column_keys(name: str, num_columns: int, start: int = 0) -> Tensor:
    """int32: a key of each column of what has this name, from `start` on."""
    index = torch.arange(start, start + num_columns, dtype=torch.int64)
    return low_half(mixed(index * signed(ODD[3]) + signed(hashed(name))))


def random_bits(keys_N: Tensor, columns_D: Tensor) -> Tensor:
    """int32 (N, D), uniform. keys_N: int64; columns_D: int32, by `column_keys`."""
    return _finish(low_half(keys_N)[:, None] ^ columns_D[None, :])


def hashed(text: str) -> int:
    """64 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def mixed(x: Tensor) -> Tensor:
    """SplitMix64's output function, on int64."""
    x = (x ^ _shifted(x, 30, 64)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27, 64)) * signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31, 64)


def _finish(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser, on int32."""
    x = (x ^ _shifted(x, 16, 32)) * signed(0x85EBCA6B, 32)
    x = (x ^ _shifted(x, 13, 32)) * signed(0xC2B2AE35, 32)
    return x ^ _shifted(x, 16, 32)


def low_half(x: Tensor) -> Tensor:
    """The lower half of int64 as int32."""
    half = x & 0xFFFFFFFF
    return torch.where(half >= 1 << 31, half - (1 << 32), half).to(torch.int32)


def _shifted(x: Tensor, count: int, bits: int) -> Tensor:
    return (x >> count) & ((1 << (bits - count)) - 1)


def signed(x: int, bits: int = 64) -> int:
    """The same bits as a signed number."""
    return x - (1 << bits) if x >= 1 << (bits - 1) else x
