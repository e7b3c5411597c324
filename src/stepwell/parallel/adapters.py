"""Low-rank adapters on the layout at hand: which modules get them, what is frozen, how tensor ranks
share them, and what the whole model's state is.

FSDP2 takes frozen and trained parameters into one unit: it gathers both and reduces the gradients
of the trained ones. A base in 4 bits is no parameter; every rank of the data axes has the whole of
its stage's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.models.adapter_dropout import token_keys
from stepwell.models.axes import axes_of, divided_dim
from stepwell.models.counter_bits import column_keys
from stepwell.models.lora import Divided, LoraLinear, merged_weight
from stepwell.models.lora_shapes import (
    MAGNITUDE,
    A,
    B,
    is_adapter,
    is_trained,
    layer_of,
    scaling,
    target_shapes,
)
from stepwell.models.quantize import dequantise_nf4, quantise_nf4
from stepwell.models.transformer import Decoder
from stepwell.parallel.context import local_tokens
from stepwell.parallel.fsdp import DTYPES
from stepwell.parallel.init import Rule, init_parameter
from stepwell.parallel.mesh import Mesh
from stepwell.sections.model import LoraConfig
from stepwell.types import CheckpointError

KEYS = "dropout_keys"


def add_adapters(decoder: Decoder, run: Run) -> Decoder:
    """Gives the run's target layers of a decoder (or a piece of one) on the meta device their
    adapters, in place, and freezes the rest; returns it.

    Frozen matrices are in compute precision from here on; vectors stay as they are, for they are
    few, and multiplied in float32.
    """
    lora = run.lora
    if lora.rank == 0:
        return decoder
    targets = target_shapes(run.model, lora)
    for name in targets:
        owner, _, leaf = name.rpartition(".")
        if owner.split(".")[1] not in decoder.blocks:  # another stage's
            continue
        parent = decoder.get_submodule(owner)
        base = getattr(parent, leaf)
        layer = LoraLinear(base, lora.rank, scaling(lora), lora.dropout, lora.dora)
        layer.to(DTYPES[run.precision.param])
        if lora.quantize == "nf4":
            layer.weight = None  # pyright: ignore[reportAttributeAccessIssue]
        setattr(parent, leaf, layer)
    for name, parameter in decoder.named_parameters():
        if not is_trained(name, lora):
            parameter.requires_grad_(False)
            if parameter.dim() == 2:
                parameter.data = parameter.data.to(DTYPES[run.precision.compute])
    return decoder


def lay_out_adapters(decoder: nn.Module, mesh: Mesh, run: Run) -> None:
    """After tensor parallelism: which factor is shared, and the keys that dropout needs."""
    for name, layer in adapted(decoder):
        tp, start, columns = mesh.sizes.tp, 0, layer.in_features
        dim = divided_dim(axes_of(f"{name}.weight"), run.model, tp)
        if mesh.tp_group is not None:
            by = {0: "rows", 1: "columns", None: "whole"}[dim]
            layer.divided = Divided(mesh.tp_group, by)
            if by == "columns":
                columns //= tp
                start = mesh.place.tp * columns
        layer.column_keys = column_keys(name, columns, start).to(mesh.device)


def all_shapes(run: Run) -> dict[str, torch.Size]:
    """Name -> shape of base and adapters, in the model's order, an adapter after its layer."""
    plain = run.model_copy(update={"lora": run.lora.model_copy(update={"quantize": "none"})})
    with torch.device("meta"):
        decoder = add_adapters(Decoder(run.model), plain)
    return {name: parameter.shape for name, parameter in decoder.named_parameters()}


def adapted(decoder: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """(global name, layer) of those with an adapter."""
    return ((n, m) for n, m in decoder.named_modules() if isinstance(m, LoraLinear))


def adapter_rule(name: str, shape: torch.Size) -> Rule:
    """As PEFT starts them: A by Kaiming's uniform rule with a = sqrt(5) (1502.01852), whose bound
    is 1 / sqrt(in-features), and B zero, so that the first step begins at the base."""
    if name.endswith(A):
        return "uniform", shape[1] ** -0.5
    return "zeros" if name.endswith(B) else "ones"


def init_adapters(pieces: Iterable[nn.Module], seed: int) -> None:
    """Draws the adapters; magnitudes, which depend on the base, by `reset_magnitudes`."""
    for piece in pieces:
        for name, parameter in piece.named_parameters():
            if is_adapter(name):
                init_parameter(parameter, seed, name, adapter_rule(name, parameter.shape))


@torch.no_grad()
def reset_magnitudes(pieces: Iterable[nn.Module]) -> None:
    """Brings the magnitudes (DoRA) to the lengths of the base's rows, so that the adapted layer
    begins as its base. Every rank must call it."""
    for piece in pieces:
        for _, layer in adapted(piece):
            if layer.lora_magnitude is not None:
                weight_MD = _whole(_base_weight(layer))
                wide = torch.promote_types(weight_MD.dtype, torch.float32)
                copy_full(layer.lora_magnitude, weight_MD.to(wide).norm(dim=1))


def copy_full(parameter: Tensor, value: Tensor) -> None:
    """Writes a full tensor into a parameter, or this rank's shard of it."""
    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        value = distribute_tensor(value, mesh, placements, src_data_rank=None)
    parameter.copy_(value)


def set_quantised(layer: LoraLinear, name: str, weight_MD: Tensor, run: Run, mesh: Mesh) -> None:
    """Takes a full weight up in 4 bits. Raises CheckpointError if it is not finite."""
    if not weight_MD.isfinite().all():
        raise CheckpointError(f"{name} holds values that are not finite, which have no 4-bit form")
    weight_MD = weight_MD.to(mesh.device)
    layer.quantised = quantise_nf4(weight_MD, run.lora.double_quantize)


# --- the whole state -----------------------------------------------------------------------------


def named_tensors(piece: nn.Module) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Every parameter, and in their places the restored weights of layers in 4 bits: name -> how to
    get it."""
    for prefix, module in piece.named_modules():
        if isinstance(module, LoraLinear) and module.quantised is not None:
            yield f"{prefix}.weight", partial(_base_weight, module)
        for leaf, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.{leaf}" if prefix else leaf, partial(_itself, parameter)


def full_tensors(piece: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`named_tensors` as full tensors, one at a time."""
    return ((name, _whole(tensor())) for name, tensor in named_tensors(piece))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def merged(pairs: Iterable[tuple[str, Tensor]], lora: LoraConfig) -> Iterator[tuple[str, Tensor]]:
    """Full tensors of base and adapters, an adapter beside its layer -> those of the plain model
    that computes the same."""
    held: dict[str, Tensor] = {}
    layer = None
    for name, tensor in pairs:
        if layer_of(name) != layer:
            yield from _merged_layer(held, layer, lora)
            held, layer = {}, layer_of(name)
        held[name] = tensor
    yield from _merged_layer(held, layer, lora)


def _merged_layer(
    held: dict[str, Tensor], layer: str | None, lora: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    a_rD, b_Mr = held.get(f"{layer}.{A}"), held.get(f"{layer}.{B}")
    for name, tensor in held.items():
        if is_adapter(name):
            continue
        if a_rD is not None and b_Mr is not None and name.endswith(".weight"):
            magnitude_M = held.get(f"{layer}.{MAGNITUDE}")
            tensor = merged_weight(tensor, a_rD, b_Mr, scaling(lora), magnitude_M)
        yield name, tensor


def quantised_bytes(pieces: Iterable[nn.Module]) -> tuple[int, int]:
    """(bytes, elements) that this rank holds of the weights of layers in 4 bits."""
    layers = [layer.quantised for piece in pieces for _, layer in adapted(piece)]
    found = [q for q in layers if q is not None]
    return sum(q.num_bytes for q in found), sum(q.shape[0] * q.shape[1] for q in found)


def _base_weight(layer: LoraLinear) -> Tensor:
    if layer.quantised is None:
        return layer.weight
    dtype = torch.float64 if layer.lora_a.weight.dtype == torch.float64 else torch.float32
    return dequantise_nf4(layer.quantised, dtype)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


# --- dropout -------------------------------------------------------------------------------------


def local_dropout_keys(batch: Batch, run: Run, step: int, mesh: Mesh) -> Tensor | None:
    """int64 (N,): what a step's dropout knows this rank's tokens of full rows by; None without
    dropout."""
    if not run.lora.rank or not run.lora.dropout:
        return None
    tokens_N, places_N = batch.tokens_BT.cpu().flatten(), batch.positions_BT.cpu().flatten()
    keys_N = token_keys(tokens_N, places_N, batch.cu_seqlens(), run.train.seed, step)
    keys_BT = keys_N.view_as(batch.tokens_BT)
    mine = local_tokens(replace(batch, extra={KEYS: keys_BT}), mesh)
    return mine.extra[KEYS].flatten().to(mesh.device)
