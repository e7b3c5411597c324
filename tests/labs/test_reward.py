import copy

from stepwell.labs import reward


def test_the_claim_holds_and_the_check_can_fail():
    numbers = reward.measure(small=True)
    assert reward.check(numbers) == []
    (seed,) = numbers["seeds"]
    proxy, best = seed["rl"]["proxy"], seed["best_of_n"]
    assert proxy["alarm"] >= 2 * reward.WINDOW
    assert {"agreement", "spread"} & set(proxy["signs"])
    assert best["n"][0] == 1
    assert abs(best["gold_sds"][0]) < 1e-9
    assert len(reward.plot(numbers).axes) == 3
    for change in (
        lambda s: s["rl"]["proxy"].update(alarm=None),
        lambda s: s["rl"]["proxy"].update(alarm=30, fall=30),
        lambda s: s["rl"]["proxy"].update(left=0.4),
        lambda s: s["rl"]["proxy"].update(gold=sorted(proxy["gold"])),
        lambda s: s["rl"]["proxy"].update(proxy=sorted(proxy["proxy"], reverse=True)),
        lambda s: s["rl"]["proxy"].update(disagreement=sorted(proxy["disagreement"])),
        lambda s: s["rl"]["gold"].update(alarm=20),
        lambda s: s["rl"]["gold"].update(gold=[0.0]),
        lambda s: s["best_of_n"]["fit"].update(beta_low=0.0),
    ):
        off = copy.deepcopy(numbers)
        change(off["seeds"][0])
        assert reward.check(off)
