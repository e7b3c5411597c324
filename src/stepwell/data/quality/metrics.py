"""How good a classifier is on texts that it hasn't seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def binary_report(scores: np.ndarray, is_positive: np.ndarray, threshold: float) -> dict[str, Any]:
    """Precision, recall and F1 of `score >= threshold`, and the area under the ROC curve; None for
    what is not defined (a share of nothing)."""
    said = scores >= threshold
    hits = int(np.count_nonzero(said & is_positive))
    precision = ratio(hits, int(np.count_nonzero(said)))
    recall = ratio(hits, int(np.count_nonzero(is_positive)))
    f1 = None
    if precision is not None and recall is not None:
        f1 = ratio(2 * precision * recall, precision + recall) or 0.0
    return {
        "threshold": threshold,
        "num": len(scores),
        "num_positive": int(np.count_nonzero(is_positive)),
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "roc_auc": roc_auc(scores, is_positive),
    }


def roc_auc(scores: np.ndarray, is_positive: np.ndarray) -> float | None:
    """The probability that a positive one scores higher than a negative one, ties counting half
    (Mann and Whitney 1947); None without one of each."""
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(sizes) - (sizes - 1) / 2
    positive = int(np.count_nonzero(is_positive))
    negative = len(scores) - positive
    above = float(mean_rank[group][is_positive].sum()) - positive * (positive + 1) / 2
    return ratio(above, positive * negative)


def calibration(scores: np.ndarray, outcomes: np.ndarray, edges: Sequence[float]) -> dict[str, Any]:
    """Mean score beside mean outcome in bins from one edge up to the next (the last includes its
    upper edge), and the expected calibration error: their mean distance, weighted by the number of
    texts (Naeini et al. 2015). Empty bins are left out."""
    number = np.clip(np.searchsorted(edges, scores, side="right") - 1, 0, len(edges) - 2)
    bins, error = [], 0.0
    for i in np.unique(number).tolist():
        mine = number == i
        mean_score, mean_outcome = float(scores[mine].mean()), float(outcomes[mine].mean())
        size = int(np.count_nonzero(mine))
        error += size * abs(mean_score - mean_outcome) / len(scores)
        bins.append(
            {"from": edges[i], "to": edges[i + 1], "num": size, "mean_score": mean_score,
             "mean_outcome": mean_outcome}
        )  # fmt: skip
    return {"error": error, "bins": bins}


def level_report(scores: np.ndarray, levels: np.ndarray, num_levels: int) -> dict[str, Any]:
    """For labels 0, 1, ...: mean absolute error of the score, share of scores that round to the
    label, and confusion[label][rounded score]."""
    rounded = np.clip(np.floor(scores + 0.5), 0, num_levels - 1).astype(int)
    confusion = np.zeros((num_levels, num_levels), int)
    np.add.at(confusion, (levels, rounded), 1)
    return {
        "mean_absolute_error": float(np.abs(scores - levels).mean()),
        "accuracy": float((rounded == levels).mean()),
        "confusion": confusion.tolist(),
    }


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
