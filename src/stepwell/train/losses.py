"""Losses as sums with named denominators.

A loss sees per-token quantities and returns one *sum* for each stream of weights. The engine
divides by denominators that were counted over the whole global batch before the forward pass, so
no split of a batch (micro-batches, ranks) changes a gradient. B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stepwell.data.batch import Batch
from stepwell.models.transformer import TokenOutputs
from stepwell.sections.optim import LossConfig


class LossSums(NamedTuple):
    """sums: one differentiable scalar for each stream. metrics: name -> (sum, count)."""

    sums: dict[str, Tensor]
    metrics: dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Loss:
    """needs: what `fn` reads of TokenOutputs. denominators: counted from this rank's batch.
    whole_rows: `fn` relates the tokens of a document, so it is given whole rows also where context
    ranks divide them."""

    needs: frozenset[str]
    denominators: Callable[[Batch], dict[str, float]]
    fn: Callable[[TokenOutputs, Batch], LossSums]
    whole_rows: bool = False


def select(values: Tensor, weights: Tensor) -> Tensor:
    """values * weights where a weight is set, zero elsewhere: NaN under a mask stays out."""
    return torch.where(weights != 0, values, 0) * weights


def masked_sum(values: Tensor, weights: Tensor) -> Tensor:
    return select(values, weights).sum()


def document_index(batch: Batch) -> tuple[Tensor, int]:
    """(B, T): the document of each token, counted over the rows in order, padding as the number of
    documents; and that number."""
    docs_BT = batch.docs_BT.long()
    counts_B = docs_BT.amax(1) + 1 if docs_BT.shape[1] else docs_BT.new_zeros(docs_BT.shape[0])
    first_B = counts_B.cumsum(0) - counts_B
    num_docs = int(counts_B.sum())
    return torch.where(docs_BT >= 0, docs_BT + first_B[:, None], num_docs), num_docs


def document_sums(values_BT: Tensor, batch: Batch, weights_BT: Tensor | None = None) -> Tensor:
    """(documents,): the sum of each document's values, in the order of `document_index`; weighted
    as in `select` if there are weights. A row's last token belongs to its document as a target."""
    if weights_BT is not None:
        values_BT = select(values_BT, weights_BT)
    index_BT, num_docs = document_index(batch)
    sums = values_BT.new_zeros(num_docs + 1)
    return sums.index_add(0, index_BT.flatten(), values_BT.flatten())[:num_docs]


def per_document(stream_BT: Tensor, batch: Batch) -> Tensor:
    """(documents,): what a stream says that is the same for all tokens of a document."""
    index_BT, num_docs = document_index(batch)
    found = stream_BT.new_zeros(num_docs + 1)
    return found.scatter(0, index_BT.flatten(), stream_BT.flatten())[:num_docs]


def document_counts(batch: Batch) -> Tensor:
    """(documents,) float32: how many tokens of each document have a weight."""
    return document_sums((batch.weights_BT != 0).float(), batch)


def token_count(batch: Batch) -> dict[str, float]:
    """The denominator of a token-weighted mean: the sum of the weights."""
    return {"tokens": batch.weights_BT.double().sum().item()}


def cross_entropy(config: LossConfig) -> Loss:
    """Next-token cross-entropy with label smoothing e and z-loss w.

    (1 - e) * -log p(target) + e * mean over V of -log p + w * (log Z)^2; the mean over the
    weighted tokens is minimised. Metrics: `loss` is the plain cross-entropy in nats.
    """
    smooth, z_weight = config.label_smoothing, config.z_loss
    needs = {"logprobs"}
    if smooth:
        needs |= {"lse", "mean_logit"}
    if z_weight:
        needs |= {"lse"}

    def fn(outputs: TokenOutputs, batch: Batch) -> LossSums:
        assert outputs.logprobs_BT is not None
        weights_BT = batch.weights_BT
        nll_BT = -outputs.logprobs_BT
        count = weights_BT.sum()
        objective_BT = nll_BT
        metrics = {"loss": (masked_sum(nll_BT.detach(), weights_BT), count)}
        if smooth and outputs.lse_BT is not None and outputs.mean_logit_BT is not None:
            mean_nll_BT = outputs.lse_BT - outputs.mean_logit_BT
            objective_BT = (1 - smooth) * nll_BT + smooth * mean_nll_BT
        if z_weight and outputs.lse_BT is not None:
            z_BT = z_weight * outputs.lse_BT.square()
            objective_BT = objective_BT + z_BT
            metrics["z_loss"] = (masked_sum(z_BT.detach(), weights_BT), count)
        return LossSums({"tokens": masked_sum(objective_BT, weights_BT)}, metrics)

    return Loss(frozenset(needs), token_count, fn)
