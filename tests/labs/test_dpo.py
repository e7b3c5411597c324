import copy

from stepwell.labs import dpo
from stepwell.labs.seeds import interval


def test_the_claim_holds_and_the_check_can_fail():
    numbers = dpo.measure(small=True)
    assert dpo.check(numbers) == []
    reward = numbers["reward"]
    assert 0.7 < reward["slope"]["mean"] < 1.3
    assert abs(reward["accuracy"]["mean"] - reward["judge_accuracy"]["mean"]) < 0.05
    assert len(dpo.plot(numbers).axes) == 3
    for change, said in (
        (lambda n: n["reward"]["correlation"].update(by_seed=[0.95, 0.8]), "by 0.800 only"),
        (lambda n: set_(n, "near-identical pairs", "chosen", 0.5), "changed by +0.50 nats"),
        (lambda n: set_(n, "mixed pairs", "chosen", 0.4), "changed by +0.40 nats"),
        (lambda n: missed(n, "mixed pairs", -9.1), "mixed pairs: no alarm, though 9.10 nats"),
        (lambda n: set_(n, "mixed pairs", "rejected", 1.0), "the rejected answers rose"),
        (lambda n: set_(n, "unlike pairs", "alarms", 1), "unlike pairs: an alarm"),
        (lambda n: set_(n, "near-identical, DPO-positive", "margin", -0.1), "did not grow"),
        (
            lambda n: set_(
                n,
                "near-identical, SFT mixed in",
                "chosen",
                n["arms"]["near-identical pairs"]["chosen"]["by_seed"][0] / 2,
            ),
            "50% of the loss is left",
        ),
    ):
        off = copy.deepcopy(numbers)
        change(off)
        assert said in "\n".join(dpo.check(off))
    missed(numbers, "mixed pairs", -8.9)
    assert "no alarm" not in "\n".join(dpo.check(numbers))


def missed(numbers, arm, change):
    set_(numbers, arm, "chosen", change)
    set_(numbers, arm, "alarms", 0)


def set_(numbers, arm, name, value):
    numbers["arms"][arm][name]["by_seed"] = [value]


def test_intervals_are_students():
    found = interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2
    assert abs(found["high"] - 2 - 4.302653 / 3**0.5) < 1e-6
    assert interval([4.0]) == {"mean": 4.0, "low": None, "high": None, "by_seed": [4.0]}
