"""What a mixture's held-out losses will be: laws fitted to proxy runs, and how far to trust them.

D domains, O outcomes (held-out losses), R runs. Mixtures are rows that sum to 1.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stepwell.types import ConfigError, DataError

Law = Literal["log-linear", "trees"]
# Where the search for a floor begins, as a share of the lowest loss seen.
FLOORS = (0.0, 0.5, 0.8, 0.95, 0.99)
RIDGE_PER_RUN = 1e-6
NUM_FOLDS, MAX_STEPS = 10, 60
# RegMix's settings (2407.01492); trees that cannot be grown from so few runs are grown smaller.
TREES: dict[str, Any] = {
    "objective": "regression",
    "learning_rate": 0.01,
    "verbosity": -1,
    "num_threads": 1,
    "deterministic": True,
    "force_row_wise": True,
}
NUM_TREES, MIN_LEAF_RUNS = 1000, 20


@dataclass(frozen=True)
class LogLinear:
    """L_o(r) = c_o + exp(sum_j t_oj r_j): the mixing law of 2403.16952 (eq. 6), whose factor k_o
    is exp of a constant added to every t_oj, since a mixture sums to 1."""

    floors_O: np.ndarray
    slopes_OD: np.ndarray

    def predict(self, mixtures_RD: np.ndarray) -> np.ndarray:
        """Losses (R, O)."""
        return self.floors_O + np.exp(np.atleast_2d(mixtures_RD) @ self.slopes_OD.T)

    def gradients(self, mixture_D: np.ndarray) -> np.ndarray:
        """d loss / d weight (O, D)."""
        return np.exp(self.slopes_OD @ mixture_D)[:, None] * self.slopes_OD


@dataclass(frozen=True)
class Trees:
    """Gradient-boosted trees, one ensemble an outcome (RegMix, 2407.01492)."""

    models: tuple[Any, ...]

    def predict(self, mixtures_RD: np.ndarray) -> np.ndarray:
        """Losses (R, O)."""
        mixtures_RD = np.atleast_2d(mixtures_RD)
        return np.stack([model.predict(mixtures_RD) for model in self.models], axis=1)


@dataclass(frozen=True)
class Quality:
    """Of predictions for runs that were left out of the fit. spearman_O: rank correlation with what
    was measured; rmse_O: in nats; predicted_RO: the predictions."""

    spearman_O: np.ndarray
    rmse_O: np.ndarray
    predicted_RO: np.ndarray


def fit(law: Law, mixtures_RD: np.ndarray, losses_RO: np.ndarray, seed: int = 0):
    """The law that fits best: LogLinear or Trees.

    Raises DataError for too few runs, ConfigError for trees without lightgbm.
    """
    check_runs(mixtures_RD, losses_RO)
    if law == "trees":
        return fit_trees(mixtures_RD, losses_RO, seed)
    return fit_log_linear(mixtures_RD, losses_RO)


def fewest_mixtures(num_domains: int) -> int:
    """Different mixtures that a law needs, and its cross-validation, which leaves a fold of them
    out."""
    fewest = num_domains + 2
    while fewest - -(-fewest // min(NUM_FOLDS, fewest)) < num_domains + 2:
        fewest += 1
    return fewest


def check_runs(mixtures_RD: np.ndarray, losses_RO: np.ndarray) -> None:
    """Raises DataError for numbers that no law can be fitted to."""
    num_runs, num_domains = mixtures_RD.shape
    if losses_RO.shape[0] != num_runs:
        raise DataError(f"{num_runs} mixtures but losses of {losses_RO.shape[0]} runs")
    if not (np.isfinite(mixtures_RD).all() and np.isfinite(losses_RO).all()):
        bad = np.flatnonzero(~np.isfinite(losses_RO).all(1))
        raise DataError(f"the losses of runs {bad.tolist()} are not finite; leave these runs out")
    if np.abs(mixtures_RD.sum(1) - 1).max(initial=0) > 0.01:
        worst = mixtures_RD[np.abs(mixtures_RD.sum(1) - 1).argmax()]
        raise DataError(f"a mixture must sum to 1, not {worst.sum():.3f}: {worst.tolist()}")
    distinct = len(np.unique(mixtures_RD.round(6), axis=0))
    if distinct < num_domains + 2:
        raise DataError(
            f"{distinct} different mixtures of {num_domains} domains cannot fit a law of "
            f"{num_domains + 1} numbers an outcome; the fewest is {num_domains + 2}: raise --runs"
        )


def fit_log_linear(
    mixtures_RD: np.ndarray, losses_RO: np.ndarray, start: LogLinear | None = None
) -> LogLinear:
    """Least squares, each outcome by itself, from several floors (or from `start` alone).

    A ridge of RIDGE_PER_RUN on how far the slopes are from their mean settles what the runs leave
    open (a domain that is 0 in all of them).
    """
    rows = []
    for o in range(losses_RO.shape[1]):
        begin = None if start is None else (start.floors_O[o], start.slopes_OD[o])
        rows.append(_fit_outcome(mixtures_RD, losses_RO[:, o], begin))
    return LogLinear(np.array([floor for floor, _ in rows]), np.stack([t for _, t in rows]))


def _fit_outcome(
    mixtures_RD: np.ndarray, losses_R: np.ndarray, start: tuple[float, np.ndarray] | None
) -> tuple[float, np.ndarray]:
    from scipy.optimize import least_squares

    num_runs, num_domains = mixtures_RD.shape
    ridge = np.sqrt(RIDGE_PER_RUN * num_runs)
    centre_DD = np.eye(num_domains) - 1 / num_domains
    highest = losses_R.min() - 1e-6

    def residuals(theta: np.ndarray) -> np.ndarray:
        misfit_R = theta[0] + np.exp(mixtures_RD @ theta[1:]) - losses_R
        return np.concatenate([misfit_R, ridge * centre_DD @ theta[1:]])

    def jacobian(theta: np.ndarray) -> np.ndarray:
        slope_RD = np.exp(mixtures_RD @ theta[1:])[:, None] * mixtures_RD
        top = np.hstack([np.ones((num_runs, 1)), slope_RD])
        return np.vstack([top, np.hstack([np.zeros((num_domains, 1)), ridge * centre_DD])])

    begins = []
    if start is not None:
        begins.append(np.concatenate([[min(start[0], highest - 1e-6)], start[1]]))
    else:
        for share in FLOORS:
            floor = share * highest
            logs_R = np.log(losses_R - floor)
            penalty = np.sqrt(1e-3) * centre_DD
            slopes = np.linalg.lstsq(
                np.vstack([mixtures_RD, penalty]),
                np.concatenate([logs_R, np.zeros(num_domains)]),
                rcond=None,
            )[0]
            begins.append(np.concatenate([[floor], slopes]))
    bounds = (
        np.concatenate([[-1e-9], np.full(num_domains, -np.inf)]),
        np.concatenate([[highest], np.full(num_domains, np.inf)]),
    )
    settings: dict[str, Any] = {"jac": jacobian, "bounds": bounds, "x_scale": "jac"}
    found = [least_squares(residuals, begin, max_nfev=MAX_STEPS, **settings) for begin in begins]
    best = min(found, key=lambda result: result.cost).x
    return float(best[0]), best[1:]


def fit_trees(mixtures_RD: np.ndarray, losses_RO: np.ndarray, seed: int = 0) -> Trees:
    """One ensemble an outcome. Raises ConfigError without lightgbm."""
    check_trees()
    import lightgbm

    least = max(1, min(MIN_LEAF_RUNS, len(mixtures_RD) // 6))
    settings = TREES | {"seed": seed, "min_data_in_leaf": least}
    models = []
    for losses_R in losses_RO.T:
        rows = lightgbm.Dataset(mixtures_RD, losses_R, params=settings)
        models.append(lightgbm.train(settings, rows, NUM_TREES))
    return Trees(tuple(models))


def check_trees() -> None:
    if importlib.util.find_spec("lightgbm") is None:
        raise ConfigError(
            "--law trees needs lightgbm, which is not installed: pip install 'stepwell[trees]', "
            "or take --law log-linear"
        )


def cross_validate(
    law: Law, mixtures_RD: np.ndarray, losses_RO: np.ndarray, seed: int = 0
) -> Quality:
    """Predictions for each run from a law fitted without it (in NUM_FOLDS folds; copies of one
    mixture share a fold, or the law would have seen what it is asked)."""
    predicted_RO = np.empty_like(losses_RO)
    for left_out in _folds(mixtures_RD, seed):
        rest = np.setdiff1d(np.arange(len(mixtures_RD)), left_out)
        found = fit(law, mixtures_RD[rest], losses_RO[rest], seed)
        predicted_RO[left_out] = found.predict(mixtures_RD[left_out])
    return measure(predicted_RO, losses_RO)


def measure(predicted_RO: np.ndarray, losses_RO: np.ndarray) -> Quality:
    from scipy.stats import rankdata

    spearman = [
        float(np.corrcoef(rankdata(predicted_RO[:, o]), rankdata(losses_RO[:, o]))[0, 1])
        for o in range(losses_RO.shape[1])
    ]
    rmse_O = np.sqrt(((predicted_RO - losses_RO) ** 2).mean(0))
    return Quality(np.array(spearman), rmse_O, predicted_RO)


def _folds(mixtures_RD: np.ndarray, seed: int) -> list[np.ndarray]:
    _, group_R = np.unique(mixtures_RD.round(6), axis=0, return_inverse=True)
    group_R = group_R.ravel()
    order = np.random.default_rng(seed).permutation(group_R.max() + 1)
    num_folds = min(NUM_FOLDS, len(order))
    return [np.flatnonzero(np.isin(group_R, order[k::num_folds])) for k in range(num_folds)]


def bootstrap(
    law: Law,
    mixtures_RD: np.ndarray,
    losses_RO: np.ndarray,
    quality: Quality,
    num_draws: int,
    seed: int = 0,
) -> Iterator[LogLinear | Trees]:
    """Laws fitted to losses as they might have been: the fitted ones plus errors drawn from those
    of the cross-validation, a run's outcomes together (the residual bootstrap of a fixed design;
    Davison and Hinkley, 1997, section 6.2)."""
    best = fit(law, mixtures_RD, losses_RO, seed)
    fitted_RO = best.predict(mixtures_RD)
    errors_RO = losses_RO - quality.predicted_RO
    errors_RO = errors_RO - errors_RO.mean(0)
    generator = np.random.default_rng(seed)
    for draw in range(num_draws):
        drawn_RO = fitted_RO + errors_RO[generator.integers(len(errors_RO), size=len(errors_RO))]
        if isinstance(best, LogLinear):
            yield fit_log_linear(mixtures_RD, drawn_RO, best)
        else:
            yield fit_trees(mixtures_RD, drawn_RO, seed + draw)
