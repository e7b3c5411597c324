import itertools
import math

import numpy as np
import pytest

from stepwell.eval.grade import Prompt, Verdict
from stepwell.generate import Sampling
from stepwell.labs.symbols import tokenizer_of
from stepwell.posttrain.best_of_n import (
    best_of,
    best_of_n,
    expected_max_normal,
    kl_bound,
    kl_of_levels,
    pick,
    pick_chances,
)
from stepwell.train.engine import Engine
from stepwell.types import ConfigError, DataError
from tests.oracle import base_run


def test_known_answers():
    assert kl_bound(1) == 0
    assert {n: round(kl_bound(n), 3) for n in (4, 16, 64)} == {4: 0.636, 16: 1.835, 64: 3.175}
    known = {4: 1.0294, 16: 1.7660, 64: 2.3437}
    assert {n: round(expected_max_normal(n), 4) for n in known} == known
    assert expected_max_normal(1) == pytest.approx(0, abs=1e-9)
    assert round(kl_of_levels([0.5, 0.5], 16), 5) == 0.69296
    # pass@k
    right = [1.0] * 3 + [0.0] * 7
    assert best_of(right, 1) == pytest.approx(0.3)
    assert best_of(right, 5) == pytest.approx(0.916667, abs=1e-6)


def test_the_bound_is_met_where_no_two_answers_score_the_same():
    """With ever finer levels the KL rises to the bound, and never above."""
    for n in (2, 8):
        found = [kl_of_levels([1 / m] * m, n) for m in (2, 10, 100, 20_000)]
        assert found == sorted(found)
        assert found[-1] < kl_bound(n)
        assert found[-1] == pytest.approx(kl_bound(n), abs=1e-3)
    assert kl_of_levels([0.2, 0.8], 1) == 0


def test_the_estimate_is_the_mean_over_all_subsets():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=7), rng.normal(size=7)
    for n in range(1, 8):
        subsets = list(itertools.combinations(range(7), n))
        best = [max(chosen, key=lambda i: rewards[i]) for chosen in subsets]
        assert best_of(rewards, n, values) == pytest.approx(np.mean(values[best]))
        assert best_of(rewards, n) == pytest.approx(np.mean(rewards[best]))
        assert pick_chances(7, n).sum() == pytest.approx(1)


def test_ties_are_picked_among_at_random():
    rewards, values = [1.0, 1.0, 0.0], [4.0, 2.0, 9.0]
    assert best_of(rewards, 3, values) == 3
    assert best_of(rewards, 1, values) == 5


def test_a_large_set_and_its_expectation():
    rng = np.random.default_rng(1)
    found = [best_of(rng.normal(size=4096), n) for n in (4, 64)]
    assert found == pytest.approx([expected_max_normal(n) for n in (4, 64)], abs=0.06)
    assert math.isfinite(best_of(rng.normal(size=4096), 4096))


def test_refusals():
    with pytest.raises(ConfigError, match="nearest legal value is 3"):
        best_of([1.0, 2.0, 3.0], 4)
    assert best_of([1.0, 2.0, 3.0], 3) == 3
    for call in (lambda: kl_bound(0), lambda: best_of([1.0], 0), lambda: expected_max_normal(0)):
        with pytest.raises(ConfigError, match="nearest legal value is 1"):
            call()
    with pytest.raises(DataError, match="not finite"):
        best_of([1.0, math.nan], 1)
    with pytest.raises(DataError, match="one for each"):
        best_of([1.0, 2.0], 1, [1.0])
    with pytest.raises(DataError, match="add up to 1"):
        kl_of_levels([0.5, 0.6], 2)


class Evens:
    """Rewards the share of even ids; of answers that begin with id 0 it knows nothing."""

    def score(self, prompts, completions):
        return [
            Verdict(
                None
                if c.token_ids[0] == 0
                else sum(i % 2 == 0 for i in c.token_ids) / len(c.token_ids)
            )
            for c in completions
        ]


def test_the_best_is_picked_and_repeats_itself():
    engine, tokenizer = Engine(base_run()), tokenizer_of("abc")
    prompts = [Prompt("a", (1, 2)), Prompt("b", (3,))]
    sampling = Sampling(max_new_tokens=6)
    found = best_of_n(engine, prompts, 8, sampling, Evens(), tokenizer, seed=4)
    for picked in found:
        known = [r for r in picked.group.rewards if r is not None]
        assert picked.best is not None
        assert picked.group.rewards[picked.best] == max(known)
        assert len(picked.group.completions) == 8
    again = best_of_n(engine, prompts, 8, sampling, Evens(), tokenizer, seed=4)
    assert again == found
    assert best_of_n(engine, prompts, 8, sampling, Evens(), tokenizer, seed=5) != found
    more = best_of_n(engine, prompts, 9, sampling, Evens(), tokenizer, seed=4)
    for one, other in zip(found, more, strict=True):
        ids = [[c.token_ids for c in picked.group.completions] for picked in (one, other)]
        assert ids[1][:8] == ids[0]
    assert pick([None, 0.5, 1.0, 1.0, None]) == 2
    assert pick([None, None]) is None
