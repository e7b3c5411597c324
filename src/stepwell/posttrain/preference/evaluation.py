"""What a policy prefers on pairs that it was not trained on.

P held-out pairs, R labelled rows, D documents.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stepwell.data.batch import Batch
from stepwell.data.loader import rank_rows
from stepwell.eval.score import bootstrap_interval
from stepwell.parallel.mesh import all_gather_objects
from stepwell.posttrain.preference.losses import (
    KL,
    LABEL,
    ROUNDING,
    PairLogps,
    kto,
    pair_losses,
    pair_metrics,
    rewards_of,
    wins,
)
from stepwell.posttrain.preference.reference import Reference, with_reference
from stepwell.posttrain.preference.rows import Rows
from stepwell.posttrain.preference.scored_references import document_totals
from stepwell.sections.methods import DPO
from stepwell.sections.preference import PreferenceLoss
from stepwell.train.engine import Engine
from stepwell.train.losses import document_counts, per_document

COLUMNS: tuple[str, ...] = ("number", "logps", "reference", "lengths", "label", "kl")


def heldout_metrics(
    engine: Engine, rows: Rows, reference: Reference, pad_id: int
) -> dict[str, float]:
    """`eval/...`: the loss and what it is logged with, over the held-out rows, and the bootstrap
    interval of the accuracy (95 %). The reference is that of training. Every rank calls it."""
    method, mesh, numbers = engine.run.method, engine.mesh, rows.heldout
    assert isinstance(method, DPO)
    share = rank_rows(len(numbers), mesh.data_rank, mesh.data_world)
    batch = rows.batch(numbers[share.start : share.stop], engine.run, pad_id)
    # kto's KL term needs every rank, also one without rows.
    batch = with_reference(batch, numbers, rows, reference, engine, pad_id)
    mine = documents_of(engine.logprobs, reference, batch)
    parts = all_gather_objects(mine if mesh.counts_rows else mine[:0], mesh)
    found = torch.cat(parts)
    found = found[found[:, 0].argsort(stable=True)]
    columns: dict[str, Tensor] = dict(zip(COLUMNS, found.unbind(1), strict=True))
    config = method.loss
    eps = ROUNDING[engine.run.precision.compute]
    metrics = of_labelled(config, columns) if rows.labelled else of_pairs(config, columns, eps)
    return {f"eval/{name}": value for name, value in metrics.items()}


def documents_of(score: Callable[[Batch], Tensor], reference: Reference, batch: Batch) -> Tensor:
    """float64 (D, columns)."""
    nothing = torch.zeros(document_counts(batch).shape, dtype=torch.float64)
    extra = {
        name: per_document(batch.extra[name], batch).double() if name in batch.extra else nothing
        for name in ("index", LABEL, KL)
    }
    sums = nothing if reference.sums is None else reference.sums(batch).double()
    columns = [
        extra["index"],
        document_totals(score(batch), batch),
        sums,
        document_counts(batch).double(),
        extra[LABEL],
        extra[KL],
    ]
    return torch.stack(columns, 1)


def of_pairs(
    config: PreferenceLoss, columns: dict[str, Tensor], eps: float = 0.0
) -> dict[str, float]:
    logps, theirs, lengths = (
        PairLogps(columns[name][0::2], columns[name][1::2])
        for name in ("logps", "reference", "lengths")
    )
    reference = theirs if config.needs_reference else None
    losses = pair_losses(config, logps, reference, lengths, eps)
    sums = pair_metrics(config, logps, reference, lengths, losses)
    found = {name: (total / count).item() for name, (total, count) in sums.items()}
    chosen, rejected = (
        rewards_of(config, mine, his, n)
        for mine, his, n in zip(logps, theirs, lengths, strict=True)
    )
    return found | _interval(wins(chosen, rejected))


def of_labelled(config: PreferenceLoss, columns: dict[str, Tensor]) -> dict[str, float]:
    """accuracy: the share of answers whose log-ratio is on the right side of the KL term."""
    ratios, good = columns["logps"] - columns["reference"], columns["label"] != 0
    weights = config.desirable_weight, config.undesirable_weight
    losses = kto(ratios, good, columns["kl"], config.beta, *weights)
    nothing, gap = torch.zeros_like(ratios), ratios - columns["kl"]
    right = wins(torch.where(good, gap, -gap), nothing)
    found = {"loss": losses.mean().item(), "kl": columns["kl"].mean().item()}
    for name, mask in (("chosen", good), ("rejected", ~good)):
        if mask.any():
            found[f"rewards/{name}"] = config.beta * ratios[mask].mean().item()
            found[f"logps/{name}"] = columns["logps"][mask].mean().item()
    return found | {"rewards/accuracy": right.mean().item()} | _interval(right)


def _interval(right: Tensor) -> dict[str, float]:
    low, high = bootstrap_interval(right.tolist())
    return {"rewards/accuracy_low": low, "rewards/accuracy_high": high}
