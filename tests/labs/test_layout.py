import copy

from stepwell.labs import layout


def test_the_claim_holds_and_the_check_can_fail():
    numbers = layout.measure(small=True)
    assert layout.check(numbers) == []
    assert 395e9 < numbers["parameters"] < 405e9
    assert {row["axis"] for row in numbers["axes"]} >= {"zero", "tp", "pp", "cp", "recompute"}
    off = copy.deepcopy(numbers)
    off["axes"][0] |= {"fits": True, "broken": "", "step_s": 0.5 * numbers["best"]["time/step_s"]}
    off["best"]["runnable"] = False
    assert len(layout.check(off)) == 2
    off["best"]["memory/peak_bytes"] = numbers["gpu_bytes"] + 1
    assert len(layout.check(off)) == 3
    assert len(layout.plot(numbers).axes) == 2
