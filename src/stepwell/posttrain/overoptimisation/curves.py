"""How far a proxy reward can be optimised before the gold reward that it stands for falls (Gao,
Schulman, Hilton 2022, 2210.10760).

With d = sqrt(KL(policy || first policy)), and the gold reward measured from that of the first
policy: best-of-n has gold d (alpha - beta d), reinforcement learning d (alpha - beta ln d).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from scipy.stats import t as student

from stepwell.types import ConfigError, DataError, nearest

Numbers = Sequence[float] | np.ndarray
Form = Literal["best-of-n", "rl"]
# Two are as many as there are coefficients; below this an interval says nothing.
LEAST_POINTS = 5


class Fit(NamedTuple):
    """alpha: how fast gold rises at first; beta: what bends it down. low, high: their intervals.
    residual_sd: of the points about the curve. num_points: what it was fitted to."""

    form: Form
    alpha: float
    beta: float
    alpha_low: float
    alpha_high: float
    beta_low: float
    beta_high: float
    residual_sd: float
    num_points: int

    @property
    def turns(self) -> bool:
        """Whether beta's whole interval is above 0: the points show that gold bends down."""
        return self.beta_low > 0

    @property
    def peak(self) -> float | None:
        """The distance at which gold is highest, which may lie beyond the points; None where the
        curve never falls."""
        return peak(self.form, self.alpha, self.beta) if self.beta > 0 < self.alpha else None


def gold(form: Form, distance: float, alpha: float, beta: float) -> float:
    """Gold reward above the first policy's at d = sqrt(KL in nats) >= 0.

    Raises ConfigError for another form, DataError for a negative distance.
    """
    rise, bend = _terms(form, np.array([distance]))
    return float(alpha * rise[0] - beta * bend[0])


def peak(form: Form, alpha: float, beta: float) -> float:
    """Where gold is highest: best-of-n alpha / (2 beta), RL exp(alpha / beta - 1).

    Raises DataError unless beta is above 0 (and, for best-of-n, alpha at least 0): the curve has no
    highest point.
    """
    _check_form(form)
    if not beta > 0 or (form == "best-of-n" and alpha < 0):
        raise DataError(
            f"with alpha={alpha:g} and beta={beta:g} gold has no highest point at a distance: "
            "beta must be above 0, and alpha not below 0"
        )
    return alpha / (2 * beta) if form == "best-of-n" else math.exp(alpha / beta - 1)


def fit(form: Form, distances: Numbers, golds: Numbers, level: float = 0.95) -> Fit:
    """Least squares for alpha and beta, with Student's intervals at `level`.

    distances: sqrt(KL), all above 0. golds: above the first policy's. The intervals take the points
    for independent with one variance; points out of one set of samples are not, and there a
    bootstrap over prompts is the honest interval.

    Raises DataError for fewer than 5 points, fewer than 3 distances, and for values that are not
    finite or not above 0; ConfigError for another form or a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ConfigError(f"level={level:g} must lie between 0 and 1; 0.95 is usual")
    d, y = (np.asarray(values, np.float64) for values in (distances, golds))
    if d.shape != y.shape or d.ndim != 1:
        raise DataError(f"{d.size} distances but {y.size} gold rewards; give one for each")
    if len(d) < LEAST_POINTS:
        raise DataError(
            f"{len(d)} points are too few for two coefficients with intervals; give at least "
            f"{LEAST_POINTS}"
        )
    if not (np.isfinite(d).all() and np.isfinite(y).all() and (d > 0).all()):
        at = int(np.flatnonzero(~(np.isfinite(d) & np.isfinite(y) & (d > 0)))[0])
        raise DataError(
            f"point {at} has distance {d[at]:g} and gold {y[at]:g}; both must be finite, and the "
            "distance above 0 (the first policy itself, at 0, is no point)"
        )
    if len(np.unique(d)) < 3:
        raise DataError(
            f"the points lie at {len(np.unique(d))} distances; alpha and beta need at least 3"
        )
    rise, bend = _terms(form, d)
    x = np.stack([rise, -bend], axis=1)
    coefs, *_ = np.linalg.lstsq(x, y, rcond=None)
    freedom = len(d) - 2
    variance = float(np.square(y - x @ coefs).sum()) / freedom
    errors = np.sqrt(variance * np.diag(np.linalg.inv(x.T @ x)))
    reach = float(student.ppf(0.5 + level / 2, freedom)) * errors
    (alpha, beta), low, high = coefs.tolist(), coefs - reach, coefs + reach
    intervals = (float(low[0]), float(high[0]), float(low[1]), float(high[1]))
    return Fit(form, alpha, beta, *intervals, math.sqrt(variance), len(d))


def first_fall(golds: Numbers, share: float = 0.05) -> int | None:
    """The first point after which gold is, and stays, more than `share` of the way from its highest
    value back to its first one: there it has turned over. None where it has not, or has never
    risen. Raises ConfigError for a share outside [0, 1)."""
    if not 0 <= share < 1:
        raise ConfigError(f"share={share:g} must be at least 0 and below 1")
    values = np.asarray(golds, np.float64)
    if not len(values):
        return None
    top = int(values.argmax())
    floor = values[top] - share * (values[top] - values[0])
    stands = np.flatnonzero(values >= floor)
    after = int(stands[-1]) + 1
    return after if values[top] > values[0] and after < len(values) else None


def _terms(form: Form, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What alpha and -beta are multiplied by; d ln d is 0 at 0."""
    _check_form(form)
    if (d < 0).any():
        raise DataError(f"a distance of {d.min():g} is below 0, the nearest legal value")
    if form == "best-of-n":
        return d, d * d
    return d, np.where(d > 0, d * np.log(np.where(d > 0, d, 1.0)), 0.0)


def _check_form(form: str) -> None:
    if form not in get_args(Form):
        legal = get_args(Form)
        raise ConfigError(
            f"{form!r} is no form of over-optimisation: one of {', '.join(legal)}"
            f"{nearest(form, legal)}"
        )
