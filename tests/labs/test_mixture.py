import copy

from stepwell.labs import mixture


def test_the_claim_holds_and_the_check_can_fail():
    numbers = mixture.measure(small=True)
    assert mixture.check(numbers) == []
    assert numbers["larger"]["parameters"] > 3 * numbers["proxy"]["parameters"]
    assert numbers["larger"]["tokens"] > 2 * numbers["proxy"]["tokens"]
    assert len(numbers["proxies"]["target"]) == mixture.SMALL["num_runs"]
    mixes = numbers["mixes"]
    assert mixes["natural"]["weights"]["web"] > 0.6 > mixes["proposed"]["weights"]["web"]
    assert all(abs(sum(row["weights"].values()) - 1) < 1e-6 for row in mixes.values())
    assert len(mixture.plot(numbers).axes) == 2
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
