"""Weights, gradients, masters and moments of a rank, and what is gathered of them, by program. No
torch.

stepwell, fsdp: float32 (or pure bf16) parameters that FSDP2 divides, gathered in the compute dtype.
megatron: weights in the compute dtype and a buffer of gradients on every rank; data ranks divide
masters and moments (its distributed optimiser, ZeRO-1), and with ZeRO 2 and 3 the others too.
"""

from __future__ import annotations

from typing import NamedTuple

from stepwell.plan.job import Arrangement, Dims
from stepwell.plan.pieces import Elements, Pieces, elements_of

BLOCK_OF_8_BITS = 256  # moments that share a scale


class State(NamedTuple):
    """Bytes on the GPU. gradients: of the whole step; block_gradients: of one block, among them;
    always: whether they are there all the time. whole_gradients: where they wait undivided.
    gathered, block_whole, block_gathered: elements."""

    parameters: float
    masters: float
    moments: float
    gradients: float
    always: bool
    block_gradient: float
    block_whole: float
    block_gathered: float
    root_gathered: float
    embedding: float
    head: float
    host: float


def state_of(dims: Dims, layout: Arrangement, pieces: Pieces) -> State:
    elements = elements_of(dims, layout)
    if layout.program == "megatron":
        return _megatron(dims, layout, pieces, elements)
    return _fsdp(dims, layout, pieces, elements)


def shards(layout: Arrangement) -> tuple[int, float]:
    """Data ranks that divide a parameter; and an expert."""
    if not layout.zero:
        return 1, 1
    num = layout.dp_shard * layout.cp
    return num, max(1.0, num * layout.tp / layout.ep)


def _split(dims: Dims, pieces: Pieces, elements: Elements) -> tuple[float, float]:
    """Elements of a tensor rank: what all data ranks divide, and experts."""
    dense = pieces.dense * elements.dense + pieces.sparse * elements.sparse
    if pieces.first:
        dense += elements.embedding
    if pieces.last:
        copied = dims.tied and pieces.first
        dense += elements.ends + (0 if copied else elements.head)
    return dense, pieces.sparse * elements.experts


def _moments(layout: Arrangement) -> float:
    """Bytes of the optimiser's state for a parameter."""
    size = 2 if layout.state_precision == "bf16" else 4
    if layout.optimizer == "adamw8bit":
        return 2 * (1 + 4 / BLOCK_OF_8_BITS)
    return size if layout.optimizer == "muon" else 2 * size


def _fsdp(dims: Dims, layout: Arrangement, pieces: Pieces, elements: Elements) -> State:
    p = 2 if layout.state_precision == "bf16" else 4
    a = 4 if layout.precision == "fp32" else 2
    n, n_experts = shards(layout)
    dense, experts = _split(dims, pieces, elements)
    shard = dense / n + experts / n_experts
    share = layout.trained_share
    parameters = shard * (p * share + a * (1 - share))
    moments = _moments(layout) * shard * share
    host = 0.0
    if layout.offload_parameters:
        host, parameters, moments = parameters + (p * share * shard) + moments, 0.0, 0.0
    elif layout.offload_optimizer:
        host, moments = 2 * p * shard * share + moments, 0.0
    block = elements.sparse + elements.experts if pieces.sparse else elements.dense
    of_block = (
        elements.sparse / n + elements.experts / n_experts if pieces.sparse else elements.dense / n
    )
    root = dense - pieces.dense * elements.dense - pieces.sparse * elements.sparse
    return State(
        parameters=parameters,
        masters=0.0,
        moments=moments,
        gradients=p * shard * share,
        always=False,
        block_gradient=p * of_block * share,
        block_whole=block * share,
        block_gathered=block,
        root_gathered=root,
        embedding=elements.embedding if pieces.first else 0.0,
        head=elements.head if pieces.last else 0.0,
        host=host,
    )


def _megatron(dims: Dims, layout: Arrangement, pieces: Pieces, elements: Elements) -> State:
    a = 4 if layout.precision == "fp32" else 2
    g = 2 if layout.gradient_precision == "bf16" else 4
    n, n_experts = shards(layout)
    dense, experts = _split(dims, pieces, elements)
    whole, shard = dense + experts, dense / n + experts / n_experts
    share = layout.trained_share
    size = 2 if layout.state_precision == "bf16" else 4
    masters = size * shard * share if a < 4 else 0.0
    moments = _moments(layout) * shard * share
    host = 0.0
    if layout.offload_optimizer:
        host, masters, moments = masters + moments, 0.0, 0.0
    block = elements.sparse + elements.experts if pieces.sparse else elements.dense
    return State(
        parameters=a * (shard if layout.zero == 3 else whole),
        masters=masters,
        moments=moments,
        gradients=g * (shard if layout.zero >= 2 else whole) * share,
        always=True,
        block_gradient=0.0,
        block_whole=block * share,
        block_gathered=block,
        root_gathered=0.0,
        embedding=elements.embedding if pieces.first else 0.0,
        head=elements.head if pieces.last else 0.0,
        host=host,
    )
