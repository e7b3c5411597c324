import numpy as np
import pytest

from stepwell.mix.design import dirichlet_design, maximin_design, proportions
from stepwell.types import ConfigError


def test_proportions_known_answers():
    assert proportions([1, 3]).tolist() == [0.25, 0.75]
    assert proportions([1, 4], power=0.5) == pytest.approx([1 / 3, 2 / 3])
    assert proportions([1, 1000], power=0).tolist() == [0.5, 0.5]
    with pytest.raises(ConfigError, match="positive"):
        proportions([1, 0])


@pytest.mark.parametrize("kind", ["dirichlet", "maximin"])
def test_designs_are_seeded_sum_to_one_and_grow_at_the_end(kind):
    base = np.array([0.6, 0.3, 0.1])

    def design(num_runs, seed=0):
        if kind == "dirichlet":
            return dirichlet_design(base, num_runs, seed)
        return maximin_design(base, num_runs, seed)

    small, large = design(8), design(20)
    assert large.shape == (20, 3)
    assert large.sum(1) == pytest.approx(np.ones(20))
    assert (large >= 0).all()
    assert np.array_equal(large[:8], small)
    assert not np.array_equal(design(8, seed=1), small)
    assert ((large == 0) | (large >= 1e-3)).all()


def test_dirichlet_is_centred_on_its_base_and_its_strength_concentrates():
    base = np.array([0.6, 0.3, 0.1])
    rows = dirichlet_design(base, 4000, min_weight=0)
    assert rows.mean(0) == pytest.approx(base, abs=0.03)  # a corner is in it once
    tight = dirichlet_design(base, 200, strengths=(1000, 1000), min_weight=0)
    loose = dirichlet_design(base, 200, strengths=(0.1, 0.1), min_weight=0)
    assert tight.std(0).max() < 0.03 < loose.std(0).min()


def test_maximin_takes_the_corners_first_and_spreads_more_than_dirichlet():
    first = np.array([0.4, 0.3, 0.3])
    rows = maximin_design(first, 12, least=0)
    assert {tuple(row) for row in rows[:3]} == {(1, 0, 0), (0, 1, 0), (0, 0, 1)}
    inside = maximin_design(first, 12, least=0.3)
    assert inside.min() == pytest.approx(0.1)
    assert inside[:3].max(1) == pytest.approx([0.8] * 3)

    def closest(points):
        apart = np.linalg.norm(points[:, None] - points[None], axis=2)
        return apart[~np.eye(len(points), dtype=bool)].min()

    every = np.vstack([first, rows])
    assert closest(every) > 2 * closest(dirichlet_design(first, 13))


def test_no_mixture_is_run_twice():
    """From low concentrations one domain alone comes again and again."""
    rows = dirichlet_design(np.array([0.7, 0.3]), 60, strengths=(0.01, 0.05))
    assert len(np.unique(rows.round(6), axis=0)) == 60
    assert (rows[:20] == dirichlet_design(np.array([0.7, 0.3]), 20, strengths=(0.01, 0.05))).all()
