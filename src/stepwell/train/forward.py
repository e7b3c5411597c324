"""A micro-batch through a piece of the model: what of it is this rank's, and with which options.

B rows, T tokens a row, N tokens of the micro-batch on this rank, D d_model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.models.layers import EVERY
from stepwell.models.neftune import Noise
from stepwell.models.transformer import Decoder, ForwardOptions
from stepwell.parallel.context import context_ranks, local_tokens
from stepwell.parallel.fsdp import DTYPES
from stepwell.parallel.mesh import Mesh
from stepwell.parallel.schedules import ZERO_BUBBLE
from stepwell.parallel.shared_prompts import first_queries, shared_prompts
from stepwell.train.global_batch import keeps_logits


def forward(
    piece: Decoder,
    inputs: Tensor | None,
    micro: Batch,
    run: Run,
    mesh: Mesh,
    needs: frozenset[str],
    temperature: float,
    keys_N: Tensor | None = None,
    noise: Noise | None = None,
) -> Any:
    """What a piece makes of the tokens, or of the x_ND that it is given: x_ND, or TokenOutputs from
    the last one. keys_N: what the adapters' dropout knows the tokens by."""
    cp, device = context_ranks(micro, mesh, run.layout), mesh.device
    cu_seqlens, shared = shared_prompts(micro, micro.cu_seqlens(), run, device)
    micro = local_tokens(micro, mesh)
    num_tokens = micro.tokens_BT.numel()
    active = micro.weights_BT.flatten().nonzero().flatten()
    firsts = EVERY
    if cp is None and device.type == "cpu":  # elsewhere no kernel leaves anything out
        firsts = first_queries(cu_seqlens, micro.docs_BT >= 0, active, shared)
    options = ForwardOptions(
        needs=needs,
        dtype=DTYPES[run.precision.compute],
        chunk_tokens=run.loss.chunk_tokens,
        keep_logits=keeps_logits(run, mesh, active.numel()),
        temperature=temperature,
        compiled=run.layout.compile,
        scaled=run.precision.fp8.recipe != "none",
        in_halves=run.layout.pp_schedule in ZERO_BUBBLE,
        tp=mesh.tp_group,
        cp=cp,
        keys_N=keys_N,
        noise=noise,
        shared=shared,
        firsts=firsts,
    )
    if run.layout.compile:  # the number of documents changes from batch to batch
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
    return piece(
        micro.tokens_BT.to(device) if inputs is None else inputs,
        micro.positions_BT.to(device),
        cu_seqlens.to(device),
        micro.targets_BT.to(device),
        None if active.numel() == num_tokens else active.to(device),
        options,
    )


def tokens_between_blocks(micro: Batch, mesh: Mesh) -> int:
    """N: the tokens of a micro-batch that this rank has between two blocks."""
    return micro.tokens_BT.numel() // (mesh.sizes.cp * mesh.sizes.tp)
