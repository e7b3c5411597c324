import copy

from stepwell.labs import precision


def test_the_claim_holds_and_the_check_can_fail():
    numbers = precision.measure(small=True)
    assert precision.check(numbers) == []
    runs = numbers["runs"]
    assert runs["bf16"]["shadow"] == 0
    assert 0.01 < runs["rowwise"]["shadow"] < 0.2
    assert {"tensorwise", "delayed", "rowwise"} <= runs.keys()  # which the claim names
    assert runs["unscaled"]["final"] > 1.0 > runs["bf16"]["final"]
    assert numbers["bad_batch"]["none"]["losses"][10:] == [None] * 10
    assert len(precision.plot(numbers).axes) == 2
    for change in (
        lambda n: n["runs"]["unscaled"].update(final=0.1),
        lambda n: n["runs"]["delayed"].update(final=1.5),
        lambda n: n["runs"]["delayed"].update(shadow=0.9),
        lambda n: n["runs"]["tensorwise"].update(final=n["runs"]["bf16"]["final"] - 0.3),
        lambda n: n["runs"].pop("tensorwise"),
        lambda n: n["bad_batch"].update(none=n["bad_batch"]["skip"]),
        lambda n: n["bad_batch"]["skip"].update(skipped=[]),
    ):
        off = copy.deepcopy(numbers)
        change(off)
        assert precision.check(off)
