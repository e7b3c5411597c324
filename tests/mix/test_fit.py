import importlib.util

import numpy as np
import pytest

from stepwell.mix import fit
from stepwell.mix.design import dirichlet_design, maximin_design
from stepwell.types import ConfigError, DataError

FLOORS = np.array([1.5, 2.0])
SLOPES = np.array([[-1.0, 0.4, 0.2], [0.5, -0.8, 0.0]])
LAW = fit.LogLinear(FLOORS, SLOPES)
needs_trees = pytest.mark.skipif(
    importlib.util.find_spec("lightgbm") is None, reason="the extra `trees`"
)


def runs(num_runs=24, noise=0.0, seed=0):
    mixtures = maximin_design(np.full(3, 1 / 3), num_runs, seed)
    errors = noise * np.random.default_rng(seed).normal(size=(num_runs, 2))
    return mixtures, LAW.predict(mixtures) + errors


def test_the_law_is_the_published_one():
    # c + k exp(sum t r), with the factor inside the exponent: a mixture sums to 1.
    mixture = np.array([0.2, 0.5, 0.3])
    k, t = np.exp(0.7), SLOPES[0] - 0.7
    assert LAW.predict(mixture)[0, 0] == pytest.approx(1.5 + k * np.exp(t @ mixture))


def test_gradients_are_those_of_the_predictions():
    mixture, step = np.array([0.2, 0.5, 0.3]), 1e-6
    found = [
        (LAW.predict(mixture + step * unit) - LAW.predict(mixture - step * unit))[0] / (2 * step)
        for unit in np.eye(3)
    ]
    assert LAW.gradients(mixture) == pytest.approx(np.stack(found, 1), abs=1e-6)


def test_a_law_without_noise_is_found_again():
    found = fit.fit("log-linear", *runs())
    elsewhere = dirichlet_design(np.full(3, 1 / 3), 200, seed=5)
    assert found.predict(elsewhere) == pytest.approx(LAW.predict(elsewhere), abs=2e-3)


def test_cross_validation_ranks_unseen_runs_and_measures_the_noise():
    quality = fit.cross_validate("log-linear", *runs(40, noise=0.01))
    assert (quality.spearman_O > 0.98).all()
    assert (quality.rmse_O > 0.005).all()
    assert (quality.rmse_O < 0.02).all()
    mixtures, losses = runs(40)
    shuffled = losses[np.random.default_rng(0).permutation(40)]
    assert (np.abs(fit.cross_validate("log-linear", mixtures, shuffled).spearman_O) < 0.6).all()


def test_copies_of_a_mixture_share_a_fold():
    mixtures = np.vstack([np.tile([0.5, 0.25, 0.25], (5, 1)), runs(20)[0]])
    folds = fit._folds(mixtures, 0)
    assert sorted(np.concatenate(folds)) == list(range(25))
    assert [set(range(5)) <= set(fold) for fold in folds].count(True) == 1


def test_bootstrap_spreads_with_the_noise():
    def spread(noise):
        mixtures, losses = runs(24, noise)
        quality = fit.cross_validate("log-linear", mixtures, losses)
        laws = fit.bootstrap("log-linear", mixtures, losses, quality, 30)
        return np.std([law.predict(mixtures[:1])[0] for law in laws], axis=0)

    assert (spread(0.02) > 3 * spread(0.002)).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m, y: (m[:4], y[:4]), "the fewest is 5"),
        (lambda m, y: (m, np.where(y == y.min(), np.nan, y)), "not finite"),
        (lambda m, y: (m * 2, y), "must sum to 1"),
        (lambda m, y: (m, y[:-1]), "24 mixtures but losses of 23"),
    ],
)
def test_unusable_runs_are_refused(change, said):
    with pytest.raises(DataError, match=said):
        fit.fit("log-linear", *change(*runs()))


def test_five_mixtures_of_three_domains_are_enough():
    assert fit.fit_log_linear(*runs(5)).slopes_OD.shape == (2, 3)


def test_trees_say_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"stepwell\[trees\]"):
        fit.fit("trees", *runs())


@needs_trees
def test_trees_learn_what_no_exponential_has():
    mixtures = dirichlet_design(np.full(3, 1 / 3), 200, seed=1)
    losses = np.where(mixtures[:, :1] > 0.5, 2.0, 3.0)
    found = fit.cross_validate("trees", mixtures, losses)
    assert found.rmse_O[0] < 0.15 < fit.cross_validate("log-linear", mixtures, losses).rmse_O[0]
