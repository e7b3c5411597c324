import math

import numpy as np
import pytest

from stepwell.mix import propose as mix
from stepwell.mix.design import dirichlet_design, maximin_design, proportions
from stepwell.mix.fit import LogLinear, Trees
from stepwell.types import ConfigError, DataError

NAMES = ("web", "code", "books")
TOKENS = (8_000_000, 1_500_000, 500_000)
# Each domain is helped by itself alone, by the same law: the best mixture is the even one.
EVEN = LogLinear(np.full(3, 2.0), -1.0 * np.eye(3))
TARGETS = dict.fromkeys(NAMES, 1.0)


def runs(law=EVEN, num_runs=20, noise=0.0):
    mixtures = maximin_design(np.array([0.8, 0.15, 0.05]), num_runs)
    errors = noise * np.random.default_rng(0).normal(size=(num_runs, 3))
    return mixtures, law.predict(mixtures) + errors


def proposed(**more):
    values = {
        "names": NAMES,
        "unique_tokens": TOKENS,
        "mixtures_RD": runs()[0],
        "losses_RO": runs(noise=0.002)[1],
        "targets": TARGETS,
        "total_tokens": 1_000_000,
        "num_draws": 30,
        **more,
    }
    return mix.propose(**values)


def test_a_known_optimum_is_found_and_taken():
    found = proposed()
    assert [d.proposed for d in found.domains] == pytest.approx([1 / 3] * 3, abs=0.03)
    assert found.decision == "proposed"
    assert found.weights == {d.name: d.proposed for d in found.domains}
    truth = EVEN.predict(np.array([[0.8, 0.15, 0.05], [1 / 3] * 3])).mean(1)
    assert found.gain == pytest.approx(truth[0] - truth[1], abs=0.01)
    assert found.gain_low < found.gain < found.gain_high
    assert [(d.share_up, d.share_down) for d in found.domains] == [(0, 1), (1, 0), (1, 0)]
    assert all(d.low <= d.proposed + 0.02 <= d.high + 0.04 for d in found.domains)
    assert found.spearman > 0.95
    # More of what there is too much of harms, more of the others helps.
    assert found.domains[0].effect > 0 > found.domains[2].effect


def test_caps_on_repetition_bind_and_give_to_the_others():
    found = proposed(total_tokens=10_000_000, max_epochs=[4.0, 4.0, 4.0])
    books = found.domains[2]
    assert books.cap == pytest.approx(0.2)
    assert books.proposed == pytest.approx(0.2, abs=1e-6)
    assert books.epochs == pytest.approx(4.0, abs=1e-4)
    assert found.domains[0].proposed == pytest.approx(0.4, abs=0.03)
    free = proposed(total_tokens=10_000_000, max_epochs=[4.0, 4.0, 40.0])
    assert free.domains[2].proposed > 0.3
    assert free.domains[2].epochs > 4


def test_a_cap_on_the_largest_domain_holds_for_the_natural_mixture_too():
    # Read once, the 10 million tokens just suffice; one more and no mixture is left.
    found = proposed(total_tokens=10_000_000, max_epochs=[1.0, 1.0, 1.0])
    assert [d.natural for d in found.domains] == pytest.approx([0.8, 0.15, 0.05])
    assert [d.proposed for d in found.domains] == pytest.approx([0.8, 0.15, 0.05], abs=1e-6)
    assert found.decision == "natural"
    with pytest.raises(DataError, match="the most is 10,000,000"):
        proposed(total_tokens=10_000_001, max_epochs=[1.0, 1.0, 1.0])


def test_the_natural_mixture_stays_where_the_gain_is_noise():
    flat = LogLinear(np.full(3, 2.0), np.zeros((3, 3)))
    mixtures, losses = runs(flat, noise=0.02)
    found = proposed(mixtures_RD=mixtures, losses_RO=losses)
    assert found.decision == "natural"
    assert found.weights == {d.name: d.natural for d in found.domains}


@pytest.mark.parametrize(
    ("gain", "gain_low", "noise", "spearman", "decision", "why"),
    [
        (0.05, 0.01, 0.02, 0.9, "proposed", "above the noise"),
        (0.05, 0.0, 0.02, 0.9, "natural", "may be none"),
        (0.05, 0.01, 0.036, 0.9, "natural", "inside the noise"),
        (0.05, 0.01, 0.035, 0.9, "proposed", "above the noise"),
        (0.05, 0.01, 0.02, 0.0, "natural", "no better than chance"),
        (0.05, 0.01, 0.02, math.nan, "natural", "no better than chance"),
    ],
)
def test_every_reason_to_stay(gain, gain_low, noise, spearman, decision, why):
    found = mix.decide(gain, gain_low, noise, spearman)
    assert found[0] == decision
    assert why in found[1]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_no_decision_rests_on_numbers_that_are_none(place, number):
    gain, gain_low, noise = (number if i == place else 0.01 for i in range(3))
    with pytest.raises(DataError, match="all must be finite"):
        mix.decide(gain, gain_low, noise, 0.9)


def test_a_chosen_optimum_flatters_itself():
    """Under pure noise the law's own promise is positive, and what is left of it is not."""
    flat = LogLinear(np.full(3, 2.0), np.zeros((3, 3)))
    mixtures, losses = runs(flat, noise=0.02)
    found = proposed(mixtures_RD=mixtures, losses_RO=losses)
    promised = found.natural_loss - found.proposed_loss
    assert promised > 0
    assert found.optimism > 0.5 * promised
    assert found.gain == pytest.approx(promised - found.optimism)
    # A gain that is there is hardly touched.
    found = proposed()
    assert abs(found.optimism) < 0.1 * (found.natural_loss - found.proposed_loss)


def test_copies_that_differ_by_more_than_the_gain_keep_the_natural_mixture():
    mixtures, losses = runs(noise=0.002)
    natural = np.array([[0.8, 0.15, 0.05]] * 2)
    for apart, decision in ((0.002, "proposed"), (1.0, "natural")):
        copies = EVEN.predict(natural) + apart * np.array([[0.5], [-0.5]])
        found = proposed(
            mixtures_RD=np.vstack([natural, mixtures]), losses_RO=np.vstack([copies, losses])
        )
        assert found.seed_noise == pytest.approx(apart / 2**0.5)
        assert found.decision == decision
    assert proposed().seed_noise is None


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"max_epochs": [4.0, math.nan, 4.0]}, "max_epochs=nan must be a positive number"),
        ({"max_epochs": [4.0, -1.0, 4.0]}, "max_epochs=-1 must be a positive number"),
        ({"num_draws": 19}, "the fewest is 20"),
    ],
)
def test_numbers_that_cannot_be(change, wrong):
    with pytest.raises(ConfigError, match=wrong):
        proposed(**change)
    assert proposed(num_draws=20).num_runs == 20


@pytest.mark.parametrize(
    ("max_epochs", "default", "advice", "change"),
    [
        # 8 + 1.5 M tokens at the default, 0.5 M at the recipe's 2 epochs.
        ([None, None, 2.0], 4.0, "raise --max-epochs to 5.16 from 4", {"default_epochs": 5.16}),
        ([None, None, 2.0], 1.0, "raise --max-epochs to 5.16 from 1", {"default_epochs": 5.16}),
        (
            [4.0, 4.0, 4.0],
            9.0,
            "multiply the recipe's max_epochs by 1.25",
            {"max_epochs": [5.0, 5.0, 5.0]},
        ),
    ],
)
def test_the_advice_about_caps_is_the_least_that_helps(max_epochs, default, advice, change):
    values = {
        "total_tokens": 50_000_000,
        "max_epochs": max_epochs,
        "default_epochs": default,
        "num_draws": 20,
    }
    with pytest.raises(DataError, match=f"or {advice}"):
        proposed(**values)
    assert proposed(**{**values, **change}).total_tokens == 50_000_000
    less = {
        key: value - 0.02 if key == "default_epochs" else [v - 0.02 for v in value]
        for key, value in change.items()
    }
    with pytest.raises(DataError, match="cannot be read"):
        proposed(**{**values, **less})


def test_targets_choose_what_is_minimised():
    found = proposed(targets={"web": 0.0, "code": 1.0, "books": 0.0})
    assert found.domains[1].proposed == pytest.approx(1 - 2 * 0.2 / 3)
    with pytest.raises(ConfigError, match="no target has a weight above 0"):
        proposed(targets=dict.fromkeys(NAMES, 0.0))
    with pytest.raises(ConfigError, match="0 or more"):
        proposed(targets={"web": -1.0, "code": 1.0, "books": 0.0})


def test_it_stays_within_the_weights_that_runs_have_seen():
    seen = runs()[0]
    keep = seen[:, 1] < 0.5
    found = proposed(
        mixtures_RD=seen[keep],
        losses_RO=EVEN.predict(seen[keep]),
        targets={"web": 0.0, "code": 1.0, "books": 0.0},
    )
    assert found.domains[1].proposed == pytest.approx(seen[keep][:, 1].max())


def test_within_gives_what_a_cap_takes_to_the_others_by_their_weights():
    low, high = np.zeros(3), np.array([0.2, 1.0, 1.0])
    assert mix.within(np.array([0.6, 0.3, 0.1]), low, high) == pytest.approx([0.2, 0.6, 0.2])
    high = np.array([0.5, 0.3, 0.2])
    assert mix.within(np.array([1.0, 0.0, 0.0]), low, high) == pytest.approx([0.5, 0.3, 0.2])


def test_trees_are_searched_by_random_mixtures():
    class Towards:
        """Lowest at (.2, .5, .3)."""

        def predict(self, mixtures):
            return ((mixtures - np.array([0.2, 0.5, 0.3])) ** 2).sum(1)

    found = mix.optimum(Trees((Towards(),)), np.ones(1), np.zeros(3), np.ones(3), np.full(3, 1 / 3))
    assert found == pytest.approx([0.2, 0.5, 0.3], abs=0.03)


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize("design", ["maximin", "dirichlet"])
def test_of_60_sweeps_of_pure_noise_at_most_3_are_proposed(design):
    tokens = TOKENS if design == "maximin" else tuple(int(t * 1e6) for t in (40, 20, 10, 5, 3, 1))
    natural = proportions(tokens)
    if design == "maximin":
        rest = maximin_design(natural, 15)
    else:
        rest = dirichlet_design(proportions(tokens, 0.5), 30)
    mixtures = np.vstack([natural, natural, rest])
    names = [f"domain{d}" for d in range(len(tokens))]
    decisions = []
    for seed in range(60):
        errors = np.random.default_rng(seed).normal(size=(len(mixtures), len(tokens)))
        found = proposed(
            names=names,
            unique_tokens=tokens,
            mixtures_RD=mixtures,
            losses_RO=2 + 1 + 0.01 * errors,
            targets=dict.fromkeys(names, 1.0),
            total_tokens=10_000,
            num_draws=20,
            seed=seed,
        )
        decisions.append(found.decision)
    assert decisions.count("proposed") <= 3
