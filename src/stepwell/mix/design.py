"""Which mixtures the proxy runs of a sweep are trained on. D domains, R runs.

A design grows at its end: the first R mixtures of a larger one are those of the smaller one, so a
sweep may be extended.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepwell.types import ConfigError

# RegMix (2407.01492, appendix): the prior's exponent, and the range of concentrations.
POWER = 0.5
STRENGTHS = (0.1, 5.0)
MIN_WEIGHT = 1e-3
POOL, LEAST = 4096, 0.2
MOST_DRAWS = 1000


def proportions(sizes: Sequence[float] | np.ndarray, power: float = 1.0) -> np.ndarray:
    """Shares proportional to size**power: 1 the natural mixture, 0 the uniform one.

    Raises ConfigError for a size that is not positive.
    """
    sizes_D = np.asarray(sizes, np.float64)
    if not len(sizes_D) or not (sizes_D > 0).all():
        raise ConfigError(f"sizes of domains must be positive numbers, not {list(sizes)}")
    raised_D = np.exp(power * (np.log(sizes_D) - np.log(sizes_D.max())))
    return raised_D / raised_D.sum()


def dirichlet_design(
    base: Sequence[float] | np.ndarray,
    num_runs: int,
    seed: int = 0,
    strengths: tuple[float, float] = STRENGTHS,
    min_weight: float = MIN_WEIGHT,
) -> np.ndarray:
    """(R, D): each mixture from Dirichlet(strength * base), its strength drawn log-uniformly
    (RegMix, 2407.01492): from nearly one domain alone to close to the base.

    Weights below min_weight become 0; a mixture that is there already is drawn again.
    """
    base_D = np.asarray(base, np.float64) / np.sum(base)
    low, high = np.log(strengths)
    rows = []
    known: set[bytes] = set()
    for number in range(num_runs):
        generator = np.random.default_rng([seed, number])
        for _ in range(MOST_DRAWS):
            strength = np.exp(generator.uniform(low, high))
            row_D = _without_crumbs(generator.dirichlet(strength * base_D), min_weight)
            if (row_D.round(6) + 0.0).tobytes() not in known:
                break
        known.add((row_D.round(6) + 0.0).tobytes())
        rows.append(row_D)
    return np.array(rows).reshape(num_runs, len(base_D))


def maximin_design(
    first: np.ndarray, num_runs: int, seed: int = 0, least: float = LEAST
) -> np.ndarray:
    """(R, D): spread over the mixtures that give every domain at least `least` of an even share
    (near 0 losses rise in a way that no exponential follows). Each is the one of a large pool,
    corners included, that lies farthest from those before it (maximin distance: Johnson, Moore and
    Ylvisaker, 1990). Best for few domains.

    first: mixtures (any number, D) that are run anyway; the design keeps away from them too.
    """
    first = np.atleast_2d(np.asarray(first, np.float64))
    num_domains = first.shape[1]
    generator = np.random.default_rng([seed, num_domains])
    pool = np.vstack([np.eye(num_domains), generator.dirichlet(np.ones(num_domains), POOL)])
    pool = least / num_domains + (1 - least) * pool
    nearest = np.linalg.norm(pool[:, None] - first[None], axis=2).min(1)
    rows = []
    for _ in range(num_runs):
        best = int(nearest.argmax())
        rows.append(pool[best])
        nearest = np.minimum(nearest, np.linalg.norm(pool - pool[best], axis=1))
    return np.array(rows).reshape(num_runs, num_domains)


def _without_crumbs(weights_D: np.ndarray, min_weight: float) -> np.ndarray:
    kept = np.where(weights_D >= min_weight, weights_D, 0.0)
    return kept / kept.sum()
