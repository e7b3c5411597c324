"""Held-out loss during training: a fixed set of rows, scored without touching the training state.

B rows, T tokens a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from stepwell.data.batch import Batch, concat
from stepwell.data.loader import State, packed_stream, packing_report, pretrain_stream, rank_rows
from stepwell.data.store import TokenStore
from stepwell.parallel.mesh import Mesh, all_reduce_sum
from stepwell.train.engine import Engine
from stepwell.types import DataError

# Not the run's: runs of other seeds are then compared on the same rows.
SEED = 0


def heldout_windows(
    stores: Sequence[tuple[TokenStore, float]], seq_len: int, num_rows: int, document_mask: bool
) -> Batch:
    """Up to num_rows different windows of the stores, dealt by weight as in pretraining."""
    stream = pretrain_stream(stores, seq_len, num_rows, seed=SEED, document_mask=document_mask)
    return without_repeats(next(stream)[0])


def heldout_conversations(store: TokenStore, seq_len: int, num_rows: int, pad_id: int) -> Batch:
    """Up to num_rows rows of packed conversations, loss on the answers."""
    num_rows = min(num_rows, packing_report(store, seq_len)["rows"])
    stream: Iterator[tuple[Batch, State]] = packed_stream(
        store, seq_len, num_rows, seed=SEED, pad_id=pad_id
    )
    return next(stream)[0]


def without_repeats(batch: Batch) -> Batch:
    """Each row once: a store that is smaller than its share has begun anew."""
    first = {sample: row for row, sample in reversed(list(enumerate(batch.sample_ids)))}
    return concat([batch.rows(row, row + 1) for row in sorted(first.values())])


def rank_share(batch: Batch, mesh: Mesh) -> Batch:
    """The rows of the global batch that this rank scores."""
    share = rank_rows(batch.num_rows, mesh.data_rank, mesh.data_world)
    return batch.rows(share.start, share.stop)


def heldout_loss(engine: Engine, batch: Batch) -> dict[str, float]:
    """Mean cross-entropy of all held-out tokens: `eval/loss` in nats, `eval/bits_per_token`.

    batch: every row, the same on all ranks; each scores its share. Raises DataError when no token
    of it has a weight.
    """
    mine = rank_share(batch, engine.mesh)
    weights_BT = mine.weights_BT.double()
    logprobs_BT = engine.logprobs(mine).double()
    nll = -torch.where(weights_BT != 0, logprobs_BT, 0) * weights_BT
    total, count = all_reduce_sum(torch.stack([nll.sum(), weights_BT.sum()]), engine.mesh).tolist()
    if count == 0:
        raise DataError(f"none of the {batch.num_rows} held-out rows has a token with loss")
    loss = total / count
    return {"eval/loss": loss, "eval/bits_per_token": loss / math.log(2)}
