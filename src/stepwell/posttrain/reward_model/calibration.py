"""Whether a reward model's chances are true: does what it calls 80 % win in 80 % of the cases?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import root_scalar
from scipy.special import expit

from stepwell.types import ConfigError, DataError

Values = Sequence[float] | np.ndarray
# Temperatures outside these say that the scores carry hardly any order, or hardly any doubt.
COLDEST, HOTTEST = 1e-3, 1e3


class Bin(NamedTuple):
    """Chances in (low, high] (the first bin: from low on), their mean, and the share that came
    true; both are NaN in an empty bin."""

    low: float
    high: float
    count: int
    chance: float
    frequency: float


def reliability_table(chances: Values, outcomes: Values, num_bins: int = 10) -> list[Bin]:
    """Bins of equal width over [0, 1] (DeGroot and Fienberg 1983). outcomes: 1 what came true, else
    0. Raises DataError for unequal lengths and for chances outside [0, 1], ConfigError for no bin.
    """
    chance, outcome = np.asarray(chances, float), np.asarray(outcomes, float)
    if chance.shape != outcome.shape:
        raise DataError(f"{len(chance)} chances and {len(outcome)} outcomes are not of the same")
    if len(chance) and not ((chance >= 0) & (chance <= 1)).all():
        raise DataError("chances lie in [0, 1]; scores become chances by a sigmoid")
    if num_bins < 1:
        raise ConfigError(f"num_bins={num_bins} must be at least 1; 10 are usual")
    edges = np.linspace(0, 1, num_bins + 1)
    place = np.clip(np.searchsorted(edges, chance, side="left") - 1, 0, num_bins - 1)
    found = []
    for i in range(num_bins):
        here = place == i
        means = (chance[here].mean(), outcome[here].mean()) if here.any() else (np.nan, np.nan)
        found.append(Bin(float(edges[i]), float(edges[i + 1]), int(here.sum()), *map(float, means)))
    return found


def calibration_error(table: Sequence[Bin]) -> float:
    """Expected calibration error: |frequency - chance| of the bins, weighted by their counts
    (1706.04599, equation 3). NaN for an empty table."""
    total = sum(row.count for row in table)
    if total == 0:
        return float("nan")
    return sum(row.count * abs(row.frequency - row.chance) for row in table if row.count) / total


def pair_chances(margins: Values, temperature: float = 1.0) -> np.ndarray:
    """sigmoid(margin / temperature): the chance that the answer with the higher score is the better
    one, by the Bradley-Terry model."""
    if temperature <= 0:
        raise ConfigError(f"temperature={temperature:g} must be above 0; 1 changes nothing")
    return expit(np.asarray(margins, float) / temperature)


def fit_temperature(margins: Values) -> float:
    """The temperature under which held-out pairs are most likely (1706.04599, section 4.2): the
    minimum of mean log(1 + exp(-margin / T)). margins: chosen less rejected.

    The loss is convex in 1/T, so its slope's zero is the only minimum. Raises DataError where there
    is none: no pair ranked wrongly (any colder T is better), or a mean margin of 0 or less (any
    hotter T is better).
    """
    margin = np.asarray(margins, float)
    if not len(margin) or not np.isfinite(margin).all():
        raise DataError(f"a temperature needs finite margins of at least one pair, not {margins!r}")

    def slope(sharpness: float) -> float:
        return float(-(margin * expit(-sharpness * margin)).mean())

    if slope(1 / HOTTEST) >= 0:
        raise DataError(
            f"the mean margin of the {len(margin)} held-out pairs is {margin.mean():g}: the scores "
            "do not tell the chosen answers, and no temperature makes them true"
        )
    if slope(1 / COLDEST) <= 0:
        raise DataError(
            f"hardly any of the {len(margin)} held-out pairs is ranked wrongly, so that any lower "
            "temperature fits better; calibrate on more, or harder, pairs"
        )
    bracket = (1 / HOTTEST, 1 / COLDEST)
    return 1 / root_scalar(slope, bracket=bracket, xtol=1e-12).root
