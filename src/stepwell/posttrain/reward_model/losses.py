"""What reward models are trained with: losses of scores, and the same as `Loss` of a batch.

A score is read where the batch has a weight: at the last token of an answer or of a step, once a
document (process: once a step). M places, in the order of the rows; P = M / 2 pairs, whose answers
are neighbours, the chosen one first; C labels. B rows, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from stepwell.data.batch import Batch
from stepwell.models.transformer import TokenOutputs
from stepwell.sections.methods import RewardModel
from stepwell.train.losses import Loss, LossSums

NEEDS = frozenset({"scores"})
# Per-token streams of a batch, read at the places: of a pair the margin, else what is to be found.
MARGIN, LABEL = "margin", "label"


# --- of scores -----------------------------------------------------------------------------------


def bradley_terry_nll(
    chosen_P: Tensor, rejected_P: Tensor, margins_P: Tensor | float = 0.0
) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) (P,): the chance that the chosen answer wins is
    sigmoid of the difference (Bradley and Terry 1952; 2203.02155, equation 1), which has to exceed
    the margin (Llama 2, 2307.09288, equation 2). Only differences count, so scores are known up to
    a constant."""
    return -F.logsigmoid(chosen_P - rejected_P - margins_P)


def pair_square(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """(chosen + rejected)^2 (P,): holds the free constant near zero (2312.09244)."""
    return (chosen_P + rejected_P).square()


def binary_nll(scores_M: Tensor, labels_M: Tensor) -> Tensor:
    """-(p log sigmoid(s) + (1 - p) log sigmoid(-s)) (M,) of labels p between 0 and 1."""
    return -(labels_M * F.logsigmoid(scores_M) + (1 - labels_M) * F.logsigmoid(-scores_M))


def class_nll(scores_MC: Tensor, labels_M: Tensor) -> Tensor:
    """-log softmax(scores)[label] (M,); labels int64."""
    return -scores_MC.log_softmax(-1).gather(-1, labels_M[:, None])[:, 0]


def step_nll(scores_MC: Tensor, labels_M: Tensor) -> Tensor:
    """Cross-entropy (M,) of labels p, the chance that a step is right: with one label a score the
    sigmoid's, with two the softmax's over (wrong, right), as token classifiers have it."""
    if scores_MC.shape[-1] == 1:
        return binary_nll(scores_MC[:, 0], labels_M)
    logprobs_MC = scores_MC.log_softmax(-1)
    return -(labels_M * logprobs_MC[:, 1] + (1 - labels_M) * logprobs_MC[:, 0])


def step_chance(scores_MC: Tensor) -> Tensor:
    """The chance (M,) that a step is right."""
    if scores_MC.shape[-1] == 1:
        return scores_MC[:, 0].sigmoid()
    return scores_MC.softmax(-1)[:, 1]


# --- of a batch ----------------------------------------------------------------------------------


def reward_loss(method: RewardModel, num_labels: int) -> Loss:
    """The loss of the method's objective. Means over pairs, rows or steps are minimised."""
    if method.objective == "bradley-terry":
        return bradley_terry(method.centre_coef)
    if method.objective == "regression":
        return regression()
    if method.objective == "classification":
        return classification(num_labels)
    return process()


def at_places(stream_BT: Tensor, batch: Batch) -> Tensor:
    """The entries (M, ...) of a stream (B, T, ...) where the batch has a weight."""
    return stream_BT.flatten(0, 1)[batch.weights_BT.flatten() != 0]


def _scores(outputs: TokenOutputs, batch: Batch) -> Tensor:
    assert outputs.scores_BTC is not None
    return at_places(outputs.scores_BTC, batch)


def num_places(batch: Batch) -> float:
    return float((batch.weights_BT != 0).sum())


def bradley_terry(centre_coef: float = 0.0) -> Loss:
    """`bradley_terry_nll` with the batch's `margin`, and centre_coef times `pair_square`.

    Metrics: `loss`, and with centring `nll`, what it is without; `accuracy` (a tie is half right),
    `margin` (chosen less rejected), and the mean scores of both.
    """

    def fn(outputs: TokenOutputs, batch: Batch) -> LossSums:
        chosen_P, rejected_P = _scores(outputs, batch)[:, 0].unflatten(0, (-1, 2)).unbind(1)
        margins_P = at_places(batch.extra[MARGIN], batch)[::2]
        nll_P = bradley_terry_nll(chosen_P, rejected_P, margins_P)
        objective_P = nll_P
        if centre_coef:
            objective_P = nll_P + centre_coef * pair_square(chosen_P, rejected_P)
        with torch.no_grad():
            won_P = ((chosen_P - rejected_P).sign() + 1) / 2
            metrics = _means(
                loss=objective_P,
                **({"nll": nll_P} if centre_coef else {}),
                accuracy=won_P,
                margin=chosen_P - rejected_P,
                score_chosen=chosen_P,
                score_rejected=rejected_P,
            )
        return LossSums({"pairs": objective_P.sum()}, metrics)

    return Loss(NEEDS, lambda batch: {"pairs": num_places(batch) / 2}, fn, whole_rows=True)


def regression() -> Loss:
    """(score - label)^2. Metrics: `loss`, `error` (absolute), `score`."""

    def fn(outputs: TokenOutputs, batch: Batch) -> LossSums:
        scores_M = _scores(outputs, batch)[:, 0]
        difference_M = scores_M - at_places(batch.extra[LABEL], batch).to(scores_M.dtype)
        squares_M = difference_M.square()
        metrics = _means(loss=squares_M, error=difference_M.abs(), score=scores_M)
        return LossSums({"rows": squares_M.sum()}, metrics)

    return Loss(NEEDS, lambda batch: {"rows": num_places(batch)}, fn)


def classification(num_labels: int) -> Loss:
    """`class_nll`; with one label `binary_nll` of 0 and 1. Metrics: `loss`, `accuracy`."""

    def fn(outputs: TokenOutputs, batch: Batch) -> LossSums:
        scores_MC = _scores(outputs, batch)
        labels_M = at_places(batch.extra[LABEL], batch).to(scores_MC.dtype)
        if num_labels == 1:
            nll_M, found_M = binary_nll(scores_MC[:, 0], labels_M), scores_MC[:, 0] > 0
        else:
            nll_M, found_M = class_nll(scores_MC, labels_M.long()), scores_MC.argmax(-1)
        metrics = _means(loss=nll_M, accuracy=found_M == labels_M)
        return LossSums({"rows": nll_M.sum()}, metrics)

    return Loss(NEEDS, lambda batch: {"rows": num_places(batch)}, fn)


def process() -> Loss:
    """`step_nll` of every labelled step. Metrics: `loss`, `accuracy` (label and chance on the same
    side of one half), `step_chance` (mean)."""

    def fn(outputs: TokenOutputs, batch: Batch) -> LossSums:
        scores_MC = _scores(outputs, batch)
        labels_M = at_places(batch.extra[LABEL], batch).to(scores_MC.dtype)
        nll_M = step_nll(scores_MC, labels_M)
        with torch.no_grad():
            chance_M = step_chance(scores_MC)
            right_M = (chance_M > 0.5) == (labels_M > 0.5)
            metrics = _means(loss=nll_M, accuracy=right_M, step_chance=chance_M)
        return LossSums({"steps": nll_M.sum()}, metrics)

    return Loss(NEEDS, lambda batch: {"steps": num_places(batch)}, fn)


def _means(**values: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    return {
        name: (value.detach().double().sum(), value.new_tensor(value.numel(), dtype=torch.float64))
        for name, value in values.items()
    }
