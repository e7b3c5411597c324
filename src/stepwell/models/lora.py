"""Low-rank adapters on linear layers: LoRA (2106.09685), rsLoRA (2312.03732), DoRA (2402.09353), on
bases in any precision, also in 4 bits (QLoRA, 2305.14314).

N tokens, D in-features, M out-features, r rank. Under tensor parallelism a layer has a part of its
out- or its in-features; of A and B that one is divided which has this dim, the other is whole on
every rank and its gradient is summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from stepwell.models.adapter_dropout import drop
from stepwell.models.collectives import shared, summed
from stepwell.models.layers import Linear, local, upcast
from stepwell.models.quantize import Nf4, dequantise_nf4, nf4_linear


@dataclass(frozen=True)
class Divided:
    """How tensor ranks divide a layer: "rows" (its out-features), "columns" (its in-features), or
    "whole", of which each rank uses some rows (key/value heads that ranks share)."""

    tp: dist.ProcessGroup
    by: str


class Factor(nn.Module):
    """A or B: a matrix by the name of `weight`."""

    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


class LoraLinear(Linear):
    """A linear layer with an adapter: x W^T + s drop(x) A^T B^T + b. With a magnitude (DoRA), rows
    of W + s B A are brought to its lengths.

    quantised: the frozen weight in 4 bits, in place of `weight`. active: False leaves the base
    alone. column_keys: int32 (D,), what dropout knows each in-feature of this layer by; of a tensor
    rank those that it has. Set where the layer is laid out.
    """

    def __init__(self, base: Linear, rank: int, scaling: float, dropout: float, dora: bool):
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.fp8, self.rows = base.fp8, base.rows
        if dora:
            self.lora_magnitude = nn.Parameter(torch.empty(self.out_features))
        else:
            self.lora_magnitude = None
        self.lora_a = Factor(rank, self.in_features)
        self.lora_b = Factor(self.out_features, rank)
        self.scaling, self.dropout, self.active = scaling, dropout, True
        self.divided: Divided | None = None
        self.quantised: Nf4 | None = None
        self.column_keys: Tensor | None = None

    def forward(self, input: Tensor, keys_N: Tensor | None = None) -> Tensor:
        """keys_N: int64, what dropout knows each token by; None: nothing is dropped."""
        product = self.product(input)
        if not self.active:
            return self.with_bias(product)
        dropped = input
        if keys_N is not None and self.dropout > 0:
            assert self.column_keys is not None
            dropped = drop(input, keys_N, self.column_keys, self.dropout)
        a_rD, b_Mr = self._factors(input.dtype)
        update = F.linear(F.linear(dropped, a_rD), b_Mr) * self.scaling
        if self.lora_magnitude is None:
            return self.with_bias(product + update)
        gain_M = self._gain(a_rD, b_Mr).to(input.dtype)
        if dropped is input:
            return self.with_bias((product + update) * gain_M)
        return self.with_bias(product + (gain_M - 1) * self.product(dropped) + gain_M * update)

    def product(self, input: Tensor) -> Tensor:
        """x W^T of the base."""
        if self.quantised is not None:
            return nf4_linear(input, self.quantised)
        return super().product(input)

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and B as this rank uses them."""
        a_rD, b_Mr = local(self.lora_a.weight), local(self.lora_b.weight)
        if self.divided is not None:
            if self.divided.by == "columns":
                b_Mr = shared(b_Mr, self.divided.tp)
            else:
                a_rD = shared(a_rD, self.divided.tp)
        if self.rows is not None:
            b_Mr = self.rows.of(b_Mr)
        return a_rD.to(dtype), b_Mr.to(dtype)

    def _gain(self, a_rD: Tensor, b_Mr: Tensor) -> Tensor:
        """m / |W + s B A| by rows. The length counts as constant (2402.09353, section 4.3)."""
        assert self.lora_magnitude is not None
        magnitude_M = local(self.lora_magnitude)
        if self.rows is not None:
            magnitude_M = self.rows.of(magnitude_M)
        columns = self.divided is not None and self.divided.by == "columns"
        if columns:
            assert self.divided is not None
            magnitude_M = shared(magnitude_M, self.divided.tp)
        with torch.no_grad():
            weight_MD = self._weight(torch.promote_types(a_rD.dtype, torch.float32))
            square_M = row_squares(weight_MD, a_rD, b_Mr, self.scaling)
            if columns:
                assert self.divided is not None
                square_M = summed(square_M, self.divided.tp)
        return upcast(magnitude_M) / square_M.sqrt()

    def _weight(self, dtype: torch.dtype) -> Tensor:
        """The base's weight as this rank uses it."""
        if self.quantised is not None:
            return dequantise_nf4(self.quantised, dtype)
        weight_MD = local(self.weight)
        if self.rows is not None:
            weight_MD = weight_MD[self.rows.start : self.rows.stop]
        return weight_MD.to(dtype)


# --- arithmetic --------------------------------------------------------------------------------


def row_squares(weight_MD: Tensor, a_rD: Tensor, b_Mr: Tensor, scaling: float) -> Tensor:
    """|W + s B A|^2 by rows (M,), in the dtype of W: |W|^2 + 2 s <W A^T, B> + s^2 <B A A^T, B>,
    whose products are small enough to be kept by activation checkpointing."""
    a_rD, b_Mr = a_rD.to(weight_MD.dtype), b_Mr.to(weight_MD.dtype)
    cross_M = (F.linear(weight_MD, a_rD) * b_Mr).sum(1)
    own_M = (b_Mr @ (a_rD @ a_rD.t()) * b_Mr).sum(1)
    return weight_MD.square().sum(1) + 2 * scaling * cross_M + scaling**2 * own_M


def merged_weight(
    weight_MD: Tensor,
    a_rD: Tensor,
    b_Mr: Tensor,
    scaling: float,
    magnitude_M: Tensor | None = None,
) -> Tensor:
    """The one matrix that computes what base and adapter do, in the widest dtype of the three: W +
    s B A, and with a magnitude its rows at these lengths."""
    dtype = torch.promote_types(torch.promote_types(weight_MD.dtype, a_rD.dtype), torch.float32)
    whole_MD = weight_MD.to(dtype) + scaling * (b_Mr.to(dtype) @ a_rD.to(dtype))
    if magnitude_M is None:
        return whole_MD
    return whole_MD * (magnitude_M.to(dtype) / whole_MD.norm(dim=1)).unsqueeze(1)


# --- adapters off ------------------------------------------------------------------------------


@contextmanager
def without_adapters(pieces: Iterable[nn.Module]) -> Iterator[None]:
    """The base alone for a while: the reference that adapters are trained against."""
    layers = [m for piece in pieces for m in piece.modules() if isinstance(m, LoraLinear)]
    before = [layer.active for layer in layers]
    try:
        for layer in layers:
            layer.active = False
        yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer.active = active
