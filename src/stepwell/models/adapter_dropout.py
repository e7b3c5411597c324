"""Dropout of adapters that no layout changes: whether an element is dropped is a function of the
seed, the step, the layer, the in-feature and the token.

A token is known by what its document says and by its place in it: packing, ranks and micro-batches
change neither. Two equal documents of a step share their mask. N tokens, D in-features.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_ODD = tuple(
    int.from_bytes(hashlib.sha256(f"stepwell dropout {i}".encode()).digest()[:8], "little") | 1
    for i in range(4)
)


def token_keys(
    tokens_N: Tensor, positions_N: Tensor, borders: Tensor, seed: int, step: int
) -> Tensor:
    """int64 (N,): a key of each token, for one step of a run. borders: of the documents, (documents
    + 1), as `Batch.cu_seqlens`."""
    places_N = positions_N * _signed(_ODD[1])
    own_N = _mix(tokens_N * _signed(_ODD[0]) + _mix(places_N))
    lengths = borders.long().diff()
    number_N = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    sums = torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, number_N, own_N)
    document_N = _mix(sums + _signed(_hash(f"{seed}\0{step}")))[number_N]
    return _mix(document_N ^ _mix(positions_N * _signed(_ODD[2])))


def column_keys(name: str, num_columns: int, start: int = 0) -> Tensor:
    """int32: a key of each in-feature of the layer with this global name, from `start` on."""
    index = torch.arange(start, start + num_columns, dtype=torch.int64)
    return _low(_mix(index * _signed(_ODD[3]) + _signed(_hash(name))))


def drop(x_ND: Tensor, keys_N: Tensor, columns_D: Tensor, rate: float) -> Tensor:
    """x with the share `rate` of its elements at zero and the others over 1 - rate; which, is a
    function of the keys alone."""
    bits_ND = _finish(_low(keys_N)[:, None] ^ columns_D[None, :])
    kept_ND = bits_ND >= round(rate * 2**32) - 2**31
    return torch.where(kept_ND, x_ND / (1 - rate), 0)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's output function, on int64."""
    x = (x ^ _shifted(x, 30, 64)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27, 64)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31, 64)


def _finish(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser, on int32."""
    x = (x ^ _shifted(x, 16, 32)) * _signed(0x85EBCA6B, 32)
    x = (x ^ _shifted(x, 13, 32)) * _signed(0xC2B2AE35, 32)
    return x ^ _shifted(x, 16, 32)


def _low(x: Tensor) -> Tensor:
    """The lower half of int64 as int32."""
    half = x & 0xFFFFFFFF
    return torch.where(half >= 1 << 31, half - (1 << 32), half).to(torch.int32)


def _shifted(x: Tensor, count: int, bits: int) -> Tensor:
    return (x >> count) & ((1 << (bits - count)) - 1)


def _signed(x: int, bits: int = 64) -> int:
    return x - (1 << bits) if x >= 1 << (bits - 1) else x
