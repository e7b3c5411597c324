"""Weights, gradients, masters and moments of a rank, and what is gathered of them, by program. No
torch.

stepwell, fsdp: float32 (or pure bf16) parameters that FSDP2 divides, gathered in the compute dtype.
megatron: weights in the compute dtype and a buffer of gradients on every rank; data ranks divide
masters and moments (its distributed optimiser, ZeRO-1), and with ZeRO 2 and 3 the others too.
"""

from __future__ import annotations

from typing import NamedTuple

from stepwell.plan.activations import compute_bytes
from stepwell.plan.job import Arrangement, Dims
from stepwell.plan.pieces import Elements, Pieces, elements_of

BLOCK_OF_8_BITS = 256  # moments that share a scale


class State(NamedTuple):
    """Bytes on the GPU. gradients: of the whole step; always: whether they are there all the time;
    block_gradient: a block's part of them. Elements: elements, of a tensor rank; shard, what data
    ranks leave of them; block_whole, root_whole: trained, undivided; block_gathered, root_gathered:
    as FSDP2 hands them out; embedding, head. host: bytes in the host's memory."""

    parameters: float
    masters: float
    moments: float
    gradients: float
    gradient_bytes: int
    always: bool
    block_gradient: float
    elements: float
    shard: float
    block_whole: float
    root_whole: float
    block_gathered: float
    root_gathered: float
    embedding: float
    head: float
    host: float


def master_bytes(layout: Arrangement) -> int:
    return 2 if layout.state_precision == "bf16" else 4


def state_of(dims: Dims, layout: Arrangement, pieces: Pieces) -> State:
    elements = elements_of(dims, layout)
    dense, experts, root = _split(dims, pieces, elements)
    n, n_experts = _num_shards(layout)
    shard, share = dense / n + experts / n_experts, layout.trained_share
    p, moments = master_bytes(layout), _moment_bytes(layout) * shard * share
    block = elements.sparse + elements.experts if pieces.sparse else elements.dense
    if layout.program == "megatron":
        bytes_ = _megatron(layout, dense + experts, shard, moments)
    else:
        bytes_ = _fsdp(layout, shard, moments)
    parameters, masters, moments, gradients, size, host = bytes_
    of_block = elements.sparse / n + elements.experts / n_experts
    return State(
        parameters=parameters,
        masters=masters,
        moments=moments,
        gradients=gradients,
        gradient_bytes=size,
        always=layout.program == "megatron",
        block_gradient=p * share * (of_block if pieces.sparse else elements.dense / n),
        elements=dense + experts,
        shard=shard,
        block_whole=block * share,
        root_whole=root * share,
        block_gathered=block,
        root_gathered=root,
        embedding=elements.embedding if pieces.first else 0.0,
        head=elements.head if pieces.last else 0.0,
        host=host,
    )


def _num_shards(layout: Arrangement) -> tuple[float, float]:
    """Among how many data ranks a parameter is divided; and an expert."""
    if not layout.zero:
        return 1, 1
    num = layout.dp_shard * layout.cp
    return num, max(1.0, num * layout.tp / layout.ep)


def _split(dims: Dims, pieces: Pieces, elements: Elements) -> tuple[float, float, float]:
    """Elements of a tensor rank: without experts, of experts, and of the first, the ends."""
    root = elements.embedding if pieces.first else 0.0
    if pieces.last:
        shared = dims.tied and pieces.first
        root += elements.ends + (0.0 if shared else elements.head)
    blocks = pieces.dense * elements.dense + pieces.sparse * elements.sparse
    return blocks + root, pieces.sparse * elements.experts, root


def _moment_bytes(layout: Arrangement) -> float:
    """Of the optimiser's state for a parameter."""
    size = 2 if (layout.moment_precision or layout.state_precision) == "bf16" else 4
    if layout.optimizer == "adamw8bit":
        return 2 * (1 + 4 / BLOCK_OF_8_BITS)
    return size if layout.optimizer == "muon" else 2 * size


_Bytes = tuple[float, float, float, float, int, float]


def _fsdp(layout: Arrangement, shard: float, moments: float) -> _Bytes:
    """Parameters (frozen ones in the compute dtype), no masters beside them, moments, gradients,
    bytes of one gradient, bytes on the host."""
    p, a, share = master_bytes(layout), compute_bytes(layout), layout.trained_share
    parameters = shard * (p * share + a * (1 - share))
    gradients, host = p * shard * share, 0.0
    if layout.offload_parameters:
        host, parameters, moments = parameters + gradients + moments, 0.0, 0.0
    elif layout.offload_optimizer:  # master, moments, and a pinned buffer
        host, moments = 2 * p * shard * share + moments, 0.0
    return parameters, 0.0, moments, gradients, p, host


def _megatron(layout: Arrangement, whole: float, shard: float, moments: float) -> _Bytes:
    a, share = compute_bytes(layout), layout.trained_share
    g = 2 if layout.gradient_precision == "bf16" else 4
    masters = master_bytes(layout) * shard * share if a < 4 else 0.0
    host = 0.0
    if layout.offload_optimizer:
        host, masters, moments = masters + moments, 0.0, 0.0
    parameters = a * (shard if layout.zero == 3 else whole)
    gradients = g * share * (shard if layout.zero >= 2 else whole)
    return parameters, masters, moments, gradients, g, host
