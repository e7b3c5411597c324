import copy

import pytest

from stepwell.labs import remat


@pytest.fixture(scope="module")
def numbers():
    return remat.measure(small=True)


def test_the_claim_holds(numbers):
    assert remat.check(numbers) == []
    assert remat.plot(numbers).axes[0].get_xlabel() == "blocks"


def test_the_check_can_fail(numbers):
    # Were sqrt no better than none, or selective to compute products again, it would be said.
    worse = copy.deepcopy(numbers)
    worse["modes"]["sqrt"] = worse["modes"]["none"]
    worse["modes"]["selective"]["16"]["extra_flops"] = 0.1
    found = "\n".join(remat.check(worse))
    for part in ("sqrt grows", "sqrt costs 0.0% more", "selective does 10.0%"):
        assert part in found
