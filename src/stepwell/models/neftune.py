"""Noise on the embeddings while training (NEFTune, 2310.05914), the same on any layout.

N tokens, D d_model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stepwell.models.counter_bits import ODD, column_keys, hashed, mixed, random_bits, signed

_CHUNK_TOKENS = 1024


class Noise(NamedTuple):
    """keys_N: int64, what the noise knows each token by; bounds_N: float32, how large it may be."""

    keys_N: Tensor
    bounds_N: Tensor

    def rows(self, start: int, stop: int) -> Noise:
        """Of these tokens."""
        return Noise(self.keys_N[start:stop], self.bounds_N[start:stop])


def place_keys(sample_ids: Sequence[int], length: int, seed: int, step: int) -> Tensor:
    """int64 (B, T): a key of each place of these rows, for one step of a run."""
    run = signed(hashed(f"neftune\0{seed}\0{step}"))
    rows_B1 = mixed(torch.tensor(sample_ids, dtype=torch.int64)[:, None] * signed(ODD[0]) + run)
    return mixed(rows_B1 ^ mixed(torch.arange(length)[None, :] * signed(ODD[1])))


def noise_bounds(cu_seqlens: Tensor, alpha: float, d_model: int) -> Tensor:
    """float32 (N,): alpha / sqrt(L D) for the tokens of a document of length L (section 2.1)."""
    lengths = cu_seqlens.long().diff()
    bounds = alpha / (lengths * d_model).double().sqrt()
    return torch.repeat_interleave(bounds.float(), lengths)


def noisy(x_ND: Tensor, noise: Noise) -> Tensor:
    """x with uniform noise from -bound to bound on each element; x's gradient passes unchanged."""
    columns_D = column_keys("embed.noise", x_ND.shape[1]).to(x_ND.device)
    noise_ND = torch.empty_like(x_ND, requires_grad=False)
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    for start in range(0, x_ND.shape[0], _CHUNK_TOKENS):
        part = slice(start, start + _CHUNK_TOKENS)
        uniform = random_bits(noise.keys_N[part], columns_D).to(wide) / 2**31
        noise_ND[part] = (uniform * noise.bounds_N[part, None]).to(x_ND.dtype)
    return x_ND + noise_ND
