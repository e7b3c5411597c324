"""Weights, gradients, masters and moments of a rank, and what is gathered of them, by program. No
torch.

stepwell, fsdp: float32 (or pure bf16) parameters that FSDP2 divides, gathered in the compute dtype.
megatron: weights in the compute dtype and a buffer of gradients on every rank; data ranks divide
masters and moments (its distributed optimiser, ZeRO-1), and with ZeRO 2 and 3 the others too.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from stepwell.plan.footprint.activations import compute_bytes, master_bytes
from stepwell.plan.footprint.pieces import Elements, Pieces, elements_of, target_sizes
from stepwell.plan.job import Arrangement, Dims

BLOCK_OF_8_BITS = 256  # moments that share a scale
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # 4 bits with double-quantised scales (2305.14314)


class State(NamedTuple):
    """Bytes on the GPU. gradients: of the whole step; always: whether they are there all the time;
    block_gradient, root_gradient: a block's part of them, and that of the ends. Elements: elements,
    of a tensor rank; shard, what is trained of what data ranks leave; block_whole, root_whole:
    trained, undivided; block_gathered, root_gathered: as FSDP2 hands them out; embedding, head.
    host: bytes that live in the host's memory; staged: that a checkpoint copies there."""

    parameters: float
    masters: float
    moments: float
    gradients: float
    gradient_bytes: int
    always: bool
    block_gradient: float
    root_gradient: float
    elements: float
    shard: float
    block_whole: float
    root_whole: float
    block_gathered: float
    root_gathered: float
    embedding: float
    head: float
    host: float
    staged: float


def state_of(dims: Dims, layout: Arrangement, pieces: Pieces) -> State:
    elements = elements_of(dims, layout)
    of_block, blocks, experts = _blocks(pieces, elements)
    root = _root(dims, pieces, elements)
    n, n_experts = _num_shards(layout)
    num, share = pieces.num_blocks, layout.trained_share
    shard = (blocks + root) / n + experts / n_experts
    gathered, frozen_apart = of_block, 0.0
    block_trained, block_shard = of_block * share, shard_of(pieces, elements, n, n_experts) * share
    root_trained, root_shard = root * share, root * share / n
    if layout.adapters is not None:
        block_trained, block_shard, in_4_bits = adapted(dims, layout, n)
        root_trained = root_shard = 0.0
        gathered += block_trained - in_4_bits
        frozen_apart = num * (in_4_bits * NF4_BYTES - compute_bytes(layout) * in_4_bits / n)
    trained = _Trained(num * block_shard, root_shard)
    if layout.program == "megatron":
        held = _megatron(layout, blocks + root + experts, shard, trained)
    else:
        held = _fsdp(layout, shard, trained, frozen_apart)
    return State(
        parameters=held.parameters,
        masters=held.masters,
        moments=held.moments,
        gradients=held.gradients,
        gradient_bytes=held.gradient_bytes,
        always=layout.program == "megatron",
        block_gradient=master_bytes(layout) * block_shard,
        root_gradient=master_bytes(layout) * root_shard,
        elements=blocks + root + experts,
        shard=trained.blocks + trained.root,
        block_whole=block_trained,
        root_whole=root_trained,
        block_gathered=gathered,
        root_gathered=root,
        embedding=elements.embedding if pieces.first else 0.0,
        head=elements.head if pieces.last else 0.0,
        host=held.host,
        staged=held.staged,
    )


class _Trained(NamedTuple):
    """Elements of a rank's part that are trained."""

    blocks: float
    root: float


def _num_shards(layout: Arrangement) -> tuple[float, float]:
    """Among how many data ranks a parameter is divided; and an expert."""
    if not layout.zero:
        return 1, 1
    num = layout.dp_shard * layout.cp
    return num, max(1.0, num * layout.tp / layout.ep)


def _blocks(pieces: Pieces, elements: Elements) -> tuple[float, float, float]:
    """Elements of one block on a tensor rank, of all without experts, and of their experts."""
    one = elements.sparse + elements.experts if pieces.sparse else elements.dense
    blocks = pieces.dense * elements.dense + pieces.sparse * elements.sparse
    return one, blocks, pieces.sparse * elements.experts


def shard_of(pieces: Pieces, elements: Elements, n: float, n_experts: float) -> float:
    """Elements of a block that data ranks leave to one of them."""
    if pieces.sparse:
        return elements.sparse / n + elements.experts / n_experts
    return elements.dense / n


def _root(dims: Dims, pieces: Pieces, elements: Elements) -> float:
    """Elements of a tensor rank besides blocks."""
    root = elements.embedding if pieces.first else 0.0
    if pieces.last:
        shared = dims.tied and pieces.first
        root += elements.ends + (0.0 if shared else elements.head)
    return root


def _moments(layout: Arrangement, trained: _Trained) -> float:
    """Bytes of the optimiser's state; muon keeps one moment of blocks."""
    size = 2 if (layout.moment_precision or layout.state_precision) == "bf16" else 4
    if layout.optimizer == "muon":
        return size * (trained.blocks + 2 * trained.root)
    each = 2 * (1 + 4 / BLOCK_OF_8_BITS) if layout.optimizer == "adamw8bit" else 2 * size
    return each * (trained.blocks + trained.root)


class _Held(NamedTuple):
    """Bytes."""

    parameters: float
    masters: float
    moments: float
    gradients: float
    gradient_bytes: int
    host: float
    staged: float = 0.0


def _stages(layout: Arrangement) -> bool:
    """Whether a checkpoint is copied to the host first; of other programs it is not known."""
    return layout.program == "stepwell" and layout.stages_checkpoint


def _fsdp(layout: Arrangement, shard: float, trained: _Trained, frozen_apart: float) -> _Held:
    """frozen_apart: bytes that a base in 4 bits has more than if it were divided in 16."""
    p, a, num = master_bytes(layout), compute_bytes(layout), trained.blocks + trained.root
    adapters = num if layout.adapters else 0.0  # beside the model's own
    parameters = p * num + a * (shard + adapters - num) + frozen_apart
    moments, gradients, host = _moments(layout, trained), p * num, 0.0
    staged = p * num + moments if _stages(layout) else 0.0
    if layout.offload_parameters:
        host, parameters, moments = parameters + gradients + moments, 0.0, 0.0
    elif layout.offload_optimizer:  # master, moments, and a pinned buffer
        host, moments = 2 * p * num + moments, 0.0
    return _Held(parameters, 0.0, moments, gradients, p, host, staged)


def _megatron(layout: Arrangement, whole: float, shard: float, trained: _Trained) -> _Held:
    a, num = compute_bytes(layout), trained.blocks + trained.root
    g = 2 if layout.gradient_precision == "bf16" else 4
    masters = master_bytes(layout) * num if a < 4 else 0.0
    moments, host = _moments(layout, trained), 0.0
    if layout.offload_optimizer:
        host, masters, moments = masters + moments, 0.0, 0.0
    parameters = a * (shard if layout.zero == 3 else whole)
    gradients = g * num * (1 if layout.zero >= 2 else whole / shard)
    return _Held(parameters, masters, moments, gradients, g, host)


def adapted(dims: Dims, layout: Arrangement, n: float) -> tuple[float, float, float]:
    """Elements of a block's adapters on a tensor rank, what n data ranks leave of them (rows of
    each matrix, rounded up), and elements of the block that are in 4 bits, whole on every rank."""
    adapters = layout.adapters
    assert adapters
    whole = part = four = 0.0
    for rows, columns in target_sizes(dims, layout):
        whole += adapters.rank * (rows + columns) + (rows if adapters.dora else 0)
        part += ceil(adapters.rank / n) * columns + ceil(rows / n) * adapters.rank
        part += ceil(rows / n) if adapters.dora else 0
        four += rows * columns if adapters.quantized else 0
    return whole, part, four
