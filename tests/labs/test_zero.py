import copy

from stepwell.labs import zero
from stepwell.plan.memory.ledger import zero_bytes_per_parameter


def test_the_claim_holds_and_the_check_can_fail():
    numbers = zero.measure(small=True)
    assert zero.check(numbers) == []
    stages = numbers["ranks"]["2"]
    for stage in (0, 1, 3):
        wanted = zero_bytes_per_parameter(stage, 2)
        assert abs(stages[str(stage)]["bytes_per_parameter"] - wanted) < 0.01
    assert stages["2"]["parts"]["gradient shards"] == 2.0
    assert stages["1"]["parts"]["whole gradients"] == 2.0
    assert stages["3"]["wire"] == 3.0
    off = copy.deepcopy(numbers)
    off["ranks"]["2"]["1"]["bytes_per_parameter"] += 1
    assert len(zero.check(off)) == 1
    assert len(zero.plot(numbers).axes) == 2
