"""Context parallelism: the ranks of one data share divide its rows' tokens among them.

B rows, T tokens a row, R ranks, k chunks a rank. Every rank gets the same full rows and takes its
share of each, which only their documents decide (`models.shares`); positions, weights and further
streams go with their tokens, so rotary angles and losses need to know nothing of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepwell.data.batch import Batch
from stepwell.models.collectives import gather_same, gathered
from stepwell.models.context_attention import dealt, in_order
from stepwell.models.layers import ContextRanks
from stepwell.models.shares import Shares, deal
from stepwell.models.transformer import TokenOutputs
from stepwell.parallel.mesh import Mesh
from stepwell.sections.layout import LayoutConfig
from stepwell.types import ConfigError


def local_tokens(batch: Batch, mesh: Mesh) -> Batch:
    """This rank's tokens (B, T/R) of full rows; the same batch without context parallelism. Its
    documents' borders are no longer in it: take `cu_seqlens` of the full rows.

    Raises ConfigError if T does not divide by 2R.
    """
    if mesh.sizes.cp == 1 or not batch.num_rows:
        return batch
    chunks_BRk = chunks(batch, mesh.sizes.cp)

    def take(x_BT: Tensor) -> Tensor:
        mine = dealt(x_BT.flatten(), chunks_BRk)[mesh.place.cp]
        return mine.unflatten(0, (batch.num_rows, -1))

    return batch.streams(take)


def gather_tokens(x_Bn: Tensor, batch: Batch, mesh: Mesh) -> Tensor:
    """(B, T/R, ...) of each rank -> (B, T, ...) in order on all of them; batch: the full rows."""
    if mesh.cp_group is None:
        return x_Bn
    ranks = gathered(x_Bn.flatten(0, 1).to(mesh.device), mesh.cp_group)
    tokens = in_order(ranks.unflatten(0, (mesh.sizes.cp, -1)), chunks(batch, mesh.sizes.cp))
    return tokens.unflatten(0, (x_Bn.shape[0], -1)).to(x_Bn.device)


def gather_outputs(outputs: TokenOutputs, batch: Batch, mesh: Mesh) -> TokenOutputs:
    """Each rank's outputs for its tokens -> those of the whole rows on all ranks, which must then
    use them in the same way; batch: the full rows."""
    if mesh.cp_group is None:
        return outputs

    def whole(x_Bn: Tensor) -> Tensor:
        ranks = gather_same(x_Bn.flatten(0, 1), mesh.cp_group)
        tokens = in_order(ranks.unflatten(0, (mesh.sizes.cp, -1)), chunks(batch, mesh.sizes.cp))
        return tokens.unflatten(0, (x_Bn.shape[0], -1))

    return TokenOutputs(*(None if x is None else whole(x) for x in outputs))


def context_ranks(batch: Batch, mesh: Mesh, layout: LayoutConfig) -> ContextRanks | None:
    """What attention must know of the full rows; None without context parallelism."""
    if mesh.cp_group is None:
        return None
    chunks_BRk = chunks(batch, mesh.sizes.cp)
    return ContextRanks(mesh.cp_group, layout.cp_method, batch.cu_seqlens(), chunks_BRk)


def chunks(batch: Batch, num_ranks: int) -> Tensor:
    """(B, R, k): the chunks of each full row that each rank has."""
    B, T = batch.tokens_BT.shape
    parts = 2 * num_ranks
    if T % parts:
        raise ConfigError(
            f"rows of {T} tokens do not divide into 2 x layout.cp={num_ranks} chunks; the nearest "
            f"length that does is {max(1, round(T / parts)) * parts}"
        )
    return torch.tensor(deal(batch.cu_seqlens().tolist(), B, num_ranks))


def pairs_of_ranks(batch: Batch, num_ranks: int, window: int | None = None) -> list[int]:
    """(query, key) pairs that each rank's attention computes in one head of one layer: how evenly
    the work is divided."""
    borders = batch.cu_seqlens().tolist()
    return Shares(borders, chunks(batch, num_ranks).tolist(), window or 0).visible_pairs()
