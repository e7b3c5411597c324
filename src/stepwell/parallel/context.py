"""Context parallelism: the ranks of one data share divide its rows' tokens among them.

B rows, T tokens a row, R ranks. Every rank gets the same full rows and takes its zig-zag share of
each (`models.zigzag`); positions, weights and further streams go with their tokens, so rotary
angles and losses need to know nothing of it.
"""

from __future__ import annotations

from torch import Tensor

from stepwell.config import LayoutConfig
from stepwell.data.batch import Batch
from stepwell.models.collectives import gathered
from stepwell.models.context_attention import dealt, in_order
from stepwell.models.layers import ContextRanks
from stepwell.models.zigzag import chunks, visible_pairs
from stepwell.parallel.mesh import Mesh
from stepwell.types import ConfigError


def local_tokens(batch: Batch, mesh: Mesh) -> Batch:
    """This rank's tokens (B, T/R) of full rows; the same batch without context parallelism. Its
    documents' borders are no longer in it: take `cu_seqlens` of the full rows.

    Raises ConfigError if T does not divide by 2R.
    """
    if mesh.sizes.cp == 1:
        return batch
    check_length(batch.tokens_BT.shape[1], mesh.sizes.cp)
    return batch.streams(lambda x_BT: take(x_BT, mesh.place.cp, mesh.sizes.cp))


def check_length(length: int, num_ranks: int) -> None:
    parts = 2 * num_ranks
    if length % parts:
        raise ConfigError(
            f"rows of {length} tokens do not divide into 2 x layout.cp={num_ranks} chunks; the "
            f"nearest length that does is {max(1, round(length / parts)) * parts}"
        )


def take(x_BT: Tensor, rank: int, num_ranks: int) -> Tensor:
    """(B, T) -> (B, T/R): the tokens of one rank."""
    num_rows = x_BT.shape[0]
    return dealt(x_BT.flatten(), num_rows, num_ranks)[rank].unflatten(0, (num_rows, -1))


def gather_tokens(x_Bn: Tensor, mesh: Mesh) -> Tensor:
    """(B, T/R) of each rank -> (B, T) in order on all of them."""
    if mesh.cp_group is None:
        return x_Bn
    all_ranks = gathered(x_Bn.flatten().to(mesh.device), mesh.cp_group)
    tokens = in_order(all_ranks.unflatten(0, (mesh.sizes.cp, -1)), x_Bn.shape[0])
    return tokens.unflatten(0, (x_Bn.shape[0], -1)).to(x_Bn.device)


def context_ranks(batch: Batch, mesh: Mesh, layout: LayoutConfig) -> ContextRanks | None:
    """What attention must know of the full rows; None without context parallelism."""
    if mesh.cp_group is None:
        return None
    borders = batch.cu_seqlens()
    return ContextRanks(mesh.cp_group, layout.cp_method, batch.num_rows, borders)


def pairs_of_ranks(batch: Batch, num_ranks: int, window: int | None = None) -> list[int]:
    """(query, key) pairs that each rank's attention computes in one head of one layer: how evenly
    the work is divided."""
    borders = batch.cu_seqlens().tolist()
    parts = [chunks(rank, num_ranks) for rank in range(num_ranks)]
    return visible_pairs(borders, batch.num_rows, parts, window or 0)
