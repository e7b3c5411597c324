import copy

import pytest

from stepwell.labs import mixture


@pytest.mark.slow
def test_the_claim_holds_and_the_check_can_fail():
    numbers = mixture.measure(small=True)
    assert mixture.check(numbers) == []
    weighs_and_predicts(numbers)
    natural, proposed = (numbers["mixes"][name]["weights"] for name in ("natural", "proposed"))
    assert natural["web"] > 0.6 > proposed["web"]
    for change in (
        lambda n: n["proposal"].update(spearman=0.79),
        lambda n: n["mixes"]["natural"]["by_seed"].__setitem__(1, 0.0),
        lambda n: n["mixes"]["reversed"]["by_seed"].__setitem__(0, 0.0),
        lambda n: n["mixes"]["natural"]["measured"].update(target=0.0),
        lambda n: n["mixes"]["reversed"]["predicted"].update(target=99.0),
    ):
        off = copy.deepcopy(numbers)
        change(off)
        assert mixture.check(off)


def test_what_is_measured(monkeypatch):
    """Also in runs too short for the claim, which the check then says."""
    short = copy.deepcopy(mixture.SMALL)
    for model in ("proxy", "larger"):
        short[model]["train.steps"] = short[model]["train.steps"] // 8
    monkeypatch.setattr(mixture, "SMALL", short)
    numbers = mixture.measure(small=True)
    weighs_and_predicts(numbers)
    numbers["proposal"]["spearman"] = 0.79
    assert any("0.79" in line for line in mixture.check(numbers))


def weighs_and_predicts(numbers):
    assert numbers["larger"]["parameters"] > 3 * numbers["proxy"]["parameters"]
    assert numbers["larger"]["tokens"] > 2 * numbers["proxy"]["tokens"]
    assert len(numbers["proxies"]["target"]) == mixture.SMALL["num_runs"]
    mixes = numbers["mixes"]
    assert all(abs(sum(row["weights"].values()) - 1) < 1e-6 for row in mixes.values())
    assert len(mixture.plot(numbers).axes) == 2
