import copy

from stepwell.labs import offload


def test_the_claim_holds_and_the_check_can_fail():
    numbers = offload.measure(small=True)
    assert offload.check(numbers) == []
    assert numbers["bytes"]["optimizer"] == {"device": 8.0, "host": 16.0}
    assert numbers["norms"]["8-bit"] != numbers["norms"]["none"]
    assert all(rate > 0 for key, rate in numbers["here"].items() if key.endswith("_per_s"))
    pcie4 = numbers["links"]["PCIe 4 x16"]
    assert abs(pcie4["seconds"]["8B"] - 32 / 31.5) < 1e-9
    assert abs(pcie4["tokens_as_long"]["8B"] - 0.4 * 312e12 * 4 / (6 * 31.5e9)) < 1e-6
    for change in (
        lambda n: n["bytes"]["none"].update(device=14.0),
        lambda n: n["norms"]["optimizer"].reverse(),
        lambda n: n["links"]["PCIe 4 x16"]["tokens_as_long"].update({"8B": 1.0}),
    ):
        off = copy.deepcopy(numbers)
        change(off)
        assert len(offload.check(off)) == 1
    assert len(offload.plot(numbers).axes) == 2
