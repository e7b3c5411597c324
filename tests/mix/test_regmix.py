"""RegMix's published proxy runs (512 models of 1M parameters) against its 64 runs of 1B parameters,
on mixtures that no proxy had: the rank correlations that it reports, found again."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from stepwell.mix.fit import fit, measure

HERE = Path(__file__).parent
needs_trees = pytest.mark.skipif(
    importlib.util.find_spec("lightgbm") is None, reason="the extra `trees`"
)


def runs(name):
    table = np.loadtxt(HERE / f"regmix_{name}.csv", delimiter=",", skiprows=2)
    weights, losses = table[:, :-1], table[:, -1:]
    assert np.abs(weights.sum(1) - 1000).max() <= 6  # the published ones are rounded
    return weights / weights.sum(1, keepdims=True), losses


def rank_correlation(law, num_runs):
    mixtures, losses = runs("1m")
    unseen, measured = runs("1b")
    assert (len(mixtures), len(unseen)) == (512, 64)
    found = fit(law, mixtures[:num_runs], losses[:num_runs])
    return measure(found.predict(unseen), measured).spearman_O[0]


def test_log_linear_ranks_1b_models_at_least_as_well_as_published():
    assert rank_correlation("log-linear", 512) >= 0.952


@needs_trees
def test_trees_rank_1b_models_as_published():
    assert rank_correlation("trees", 512) >= 0.96


@needs_trees
def test_with_128_runs_the_log_linear_law_is_the_better_one():
    log_linear, trees = rank_correlation("log-linear", 128), rank_correlation("trees", 128)
    assert log_linear > 0.96  # .960
    assert log_linear > trees + 0.05  # .906
