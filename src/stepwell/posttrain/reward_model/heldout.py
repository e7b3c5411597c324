"""How good a reward model is on rows that it was not trained on: loss, accuracy with its interval,
margins, calibration, and how its scores are distributed.

M places where a score is read, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stepwell.eval.score import bootstrap_interval
from stepwell.parallel.mesh import all_gather_objects
from stepwell.posttrain.reward_model.calibration import (
    calibration_error,
    pair_chances,
    reliability_table,
)
from stepwell.posttrain.reward_model.losses import (
    LABEL,
    MARGIN,
    at_places,
    binary_nll,
    bradley_terry_nll,
    class_nll,
    pair_square,
    step_chance,
    step_nll,
)
from stepwell.posttrain.reward_model.prm import first_error
from stepwell.posttrain.reward_model.rows import Rows, pack
from stepwell.sections.methods import RewardModel
from stepwell.train.engine import Engine

QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}
NUM_RESAMPLES = 2000


class Scored(NamedTuple):
    """Row numbers, scores and what the row says of them (margin or label), in the rows' order."""

    index_M: Tensor
    scores_MC: Tensor
    given_M: Tensor


def score_rows(engine: Engine, rows: Rows, pad_id: int) -> Scored:
    """All ranks' scores of the rows, the same on every rank; each scores its share."""
    run, mesh = engine.run, engine.mesh
    mine = range(mesh.data_rank, len(rows), mesh.data_world)
    batch = pack([rows[i] for i in mine], run, pad_id, list(mine))
    method = run.method
    assert isinstance(method, RewardModel)
    name = MARGIN if method.objective == "bradley-terry" else LABEL
    streams = (batch.extra["index"], engine.scores(batch), batch.extra[name])
    found = tuple(at_places(stream, batch) for stream in streams)
    parts = [p for p in all_gather_objects(found if mesh.counts_rows else None, mesh) if p]
    index_M, scores_MC, given_M = (torch.cat(part) for part in zip(*parts, strict=True))
    order_M = index_M.argsort(stable=True)
    return Scored(index_M[order_M], scores_MC[order_M].double(), given_M[order_M].double())


def evaluate(engine: Engine, rows: Rows, pad_id: int) -> dict[str, float]:
    """`eval/loss` and what else the objective has; intervals are 95 % bootstrap intervals over rows
    (`accuracy_low`, `accuracy_high`)."""
    scored, run = score_rows(engine, rows, pad_id), engine.run
    method = run.method
    assert isinstance(method, RewardModel)
    if method.objective == "bradley-terry":
        found = pair_metrics(scored, method.centre_coef)
    elif method.objective == "regression":
        found = regression_metrics(scored)
    elif method.objective == "classification":
        found = class_metrics(scored)
    else:
        found = step_metrics(scored)
    return {f"eval/{name}": value for name, value in found.items()}


def pair_metrics(scored: Scored, centre_coef: float = 0.0) -> dict[str, float]:
    """nll: the loss without the centring. A tie is half right. calibration_error: of the chance
    sigmoid(difference) that the chosen answer wins, over both orders of each pair (or every outcome
    would be a win)."""
    scores_P2 = scored.scores_MC[:, 0].unflatten(0, (-1, 2))
    chosen_P, rejected_P = scores_P2.unbind(1)
    margin_P = chosen_P - rejected_P
    nll_P = bradley_terry_nll(chosen_P, rejected_P, scored.given_M[::2])
    right = ((margin_P.sign() + 1) / 2).tolist()
    both = torch.cat([margin_P, -margin_P]).tolist()
    wins = [1.0] * len(right) + [0.0] * len(right)
    table = reliability_table(pair_chances(both).tolist(), wins)
    nll = float(nll_P.mean())
    centring = centre_coef * float(pair_square(chosen_P, rejected_P).mean())
    return {
        "loss": nll + centring,
        **({"nll": nll} if centre_coef else {}),
        **_accuracy(right),
        "margin": float(margin_P.mean()),
        "calibration_error": calibration_error(table),
        **distribution(scores_P2.flatten()),
    }


def regression_metrics(scored: Scored) -> dict[str, float]:
    """correlation: Pearson's; 0 where scores or labels are all the same."""
    scores_M, labels_M = scored.scores_MC[:, 0], scored.given_M
    difference_M = scores_M - labels_M
    spread = float(scores_M.std(correction=0) * labels_M.std(correction=0))
    together = float(((scores_M - scores_M.mean()) * (labels_M - labels_M.mean())).mean())
    return {
        "loss": float(difference_M.square().mean()),
        "error": float(difference_M.abs().mean()),
        "correlation": together / spread if spread > 0 else 0.0,
        **distribution(scores_M),
    }


def class_metrics(scored: Scored) -> dict[str, float]:
    scores_MC, labels_M = scored.scores_MC, scored.given_M
    if scores_MC.shape[1] == 1:
        nll_M = binary_nll(scores_MC[:, 0], labels_M)
        found_M, score_M = scores_MC[:, 0] > 0, scores_MC[:, 0]
    else:
        nll_M = class_nll(scores_MC, labels_M.long())
        found_M, score_M = scores_MC.argmax(-1), None
        if scores_MC.shape[1] == 2:
            score_M = scores_MC[:, 1] - scores_MC[:, 0]
    right = (found_M == labels_M).double().tolist()
    spread = {} if score_M is None else distribution(score_M)
    return {"loss": float(nll_M.mean()), **_accuracy(right), **spread}


def step_metrics(scored: Scored) -> dict[str, float]:
    """accuracy: of steps, its interval over rows. first_error: the share of rows whose first wrong
    step (or that there is none) is found (2412.06559), among the steps that are labelled."""
    chance_M, labels_M = step_chance(scored.scores_MC), scored.given_M
    right_M = ((chance_M > 0.5) == (labels_M > 0.5)).double()
    counts = torch.unique_consecutive(scored.index_M, return_counts=True)[1].tolist()
    rights = [float(part.sum()) for part in right_M.split(counts)]
    low, high = ratio_interval(rights, counts)
    firsts = [
        first_error(found.tolist()) == first_error(labels.tolist())
        for found, labels in zip(chance_M.split(counts), labels_M.split(counts), strict=True)
    ]
    table = reliability_table(chance_M.tolist(), labels_M.tolist())
    return {
        "loss": float(step_nll(scored.scores_MC, labels_M).mean()),
        "accuracy": float(right_M.mean()),
        "accuracy_low": low,
        "accuracy_high": high,
        "first_error": sum(firsts) / len(firsts),
        "step_chance": float(chance_M.mean()),
        "calibration_error": calibration_error(table),
    }


def ratio_interval(
    sums: Sequence[float], counts: Sequence[int], seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval of sum(sums) / sum(counts), where rows are resampled whole:
    the steps of an answer are not independent."""
    rng = np.random.default_rng(seed)
    places = rng.integers(0, len(sums), (NUM_RESAMPLES, len(sums)))
    ratios = np.asarray(sums)[places].sum(1) / np.asarray(counts)[places].sum(1)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def distribution(scores: Tensor) -> dict[str, float]:
    """Mean, standard deviation and quantiles of scores."""
    spread = float(scores.std(correction=1)) if len(scores) > 1 else 0.0
    quantiles = {f"score_{name}": float(scores.quantile(at)) for name, at in QUANTILES.items()}
    return {"score_mean": float(scores.mean()), "score_sd": spread, **quantiles}


def _accuracy(right: Sequence[float]) -> dict[str, float]:
    low, high = bootstrap_interval(right)
    mean = sum(right) / len(right)
    return {"accuracy": mean, "accuracy_low": low, "accuracy_high": high}
