"""The global batch behind a rank's rows: how they are split into micro-batches, and what the ranks
have seen together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch, concat, padding
from stepwell.models.activations import KEEP_LOGITS_BYTES
from stepwell.parallel.context import local_tokens
from stepwell.parallel.fsdp import DTYPES
from stepwell.parallel.mesh import Mesh, all_reduce_max, all_reduce_sum
from stepwell.parallel.pipeline import Pipeline
from stepwell.types import TrainingError


@dataclass(frozen=True)
class Stats:
    """What one forward-backward pass saw, over the whole global batch.

    loss: the minimised value. metrics: means over their own counts. num_tokens: tokens that were
    processed (padding not counted); num_loss_tokens: those with a weight; num_twice_tokens: those
    whose logits are computed again in the backward pass.
    """

    loss: float
    metrics: dict[str, float]
    num_tokens: int
    num_loss_tokens: int
    num_twice_tokens: int = 0


@dataclass
class Tally:
    """Sums over the micro-batches of a pass on this rank. metrics: name -> (sum, count)."""

    value: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)

    def add(self, value: Tensor, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self.value.add_(value.detach())
        for name, (part, count) in metrics.items():
            pair = torch.stack([part.detach().double(), count.detach().double()])
            self.metrics[name] = self.metrics[name] + pair if name in self.metrics else pair


def split_rows(batch: Batch, run: Run, mesh: Mesh, pipeline: Pipeline | None) -> list[Batch]:
    """This rank's rows in micro-batches; as many on every rank, so that collectives match.

    A pipeline's are of one shape, and as many as its schedule can run. Raises TrainingError if no
    rank has a row.
    """
    size, length = run.train.micro_batch_rows, batch.tokens_BT.shape[1]
    if pipeline is not None:
        size = max(1, min(size, batch.num_rows))
    pieces = [batch.rows(i, i + size) for i in range(0, batch.num_rows, size)]
    wanted = int(all_reduce_max(torch.tensor(len(pieces)), mesh))
    if wanted == 0:
        raise TrainingError("the batch has no rows on any rank")
    if pipeline is not None:
        wanted = pipeline.micro_batches(wanted)
        if pieces and (missing := size - pieces[-1].num_rows):
            pieces[-1] = concat([pieces[-1], padding(missing, length, batch.extra)])
    while len(pieces) < wanted:
        pieces.append(padding(size if pipeline else 1, length, batch.extra))
    return pieces


def global_counts(counts: Mapping[str, float], mesh: Mesh) -> dict[str, float]:
    """The sums over all rows of what each rank counts on its rows."""
    names = sorted(counts)
    local = torch.tensor([counts[name] for name in names], dtype=torch.float64)
    return dict(zip(names, all_reduce_sum(local * mesh.counts_rows, mesh).tolist(), strict=True))


def keeps_logits(run: Run, mesh: Mesh, num_loss_tokens: int) -> bool:
    """Whether a micro-batch with this many loss tokens holds its logits until the backward."""
    wanted, itemsize = run.loss.keep_logits, DTYPES[run.precision.compute].itemsize
    if not run.model.has_lm_head:
        return True
    num_bytes = num_loss_tokens * run.model.vocab_size // mesh.sizes.tp * itemsize
    return num_bytes <= KEEP_LOGITS_BYTES if wanted == "auto" else wanted == "always"


def global_stats(
    tally: Tally,
    batch: Batch,
    micro_batches: Sequence[Batch],
    run: Run,
    mesh: Mesh,
    pipeline: Pipeline | None,
) -> Stats:
    """The tallies of all ranks together, the same on every rank."""
    metrics, names = tally.metrics, sorted(tally.metrics)
    if pipeline is not None:  # the loss was computed at its end only
        names = pipeline.object_from_last(names)
        nothing = torch.zeros(2, dtype=torch.float64)
        metrics = {name: metrics.get(name, nothing) for name in names}
    active = [int((local_tokens(micro, mesh).weights_BT != 0).sum()) for micro in micro_batches]
    twice = sum(count for count in active if not keeps_logits(run, mesh, count))
    seen = (local_tokens(batch, mesh).docs_BT >= 0).sum().item()
    counts = torch.tensor([seen, sum(active), twice], dtype=torch.float64) * mesh.counts_tokens
    # Tensor ranks have computed the same loss.
    found = torch.cat([tally.value.cpu().reshape(1), *(metrics[name].cpu() for name in names)])
    found *= mesh.place.tp == 0
    loss, *totals = all_reduce_sum(torch.cat([found[:1], counts, found[1:]]), mesh).tolist()
    sums = zip(names, totals[3::2], totals[4::2], strict=True)
    means = {name: total / count if count else 0.0 for name, total, count in sums}
    return Stats(loss, means, *(int(count) for count in totals[:3]))
