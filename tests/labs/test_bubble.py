import copy

import pytest

from stepwell.labs import bubble
from stepwell.plan.pipeline.actions import schedule_actions
from stepwell.plan.pipeline.bubble import simulate_schedule


def test_ranks_take_at_least_the_time_that_is_foretold_and_do_the_same():
    """Passes that sleep can only be late, so this holds on a machine as busy as may be."""
    cases = [(case, bubble.case_costs(case, True, 0.004)) for case in bubble.SMALL]
    measured = bubble.measured_timelines(2, cases)
    for (case, costs), timeline in zip(cases, measured, strict=True):
        foretold = simulate_schedule(*case, costs=costs)
        assert foretold.total_s <= timeline.total_s < 1.0
        found = [[event.action for event in timeline.of_rank(rank)] for rank in range(2)]
        assert found == schedule_actions(*case)
        for event in timeline.events:
            assert event.end_s - event.start_s >= costs.of(event.action) - 1e-9
        assert timeline.peak_in_flight == foretold.peak_in_flight


def numbers_as_foretold():
    rows = []
    for case in bubble.CASES:
        costs = bubble.case_costs(case, False, 0.1)
        rows.append(bubble.compare(case, costs, simulate_schedule(*case, costs=costs), False))
    case = bubble.CASES[1]
    costs = bubble.case_costs(case, True, 0.1)
    rows.append(bubble.compare(case, costs, simulate_schedule(*case, costs=costs), True))
    return {"unit_s": 0.1, "cases": rows}


def test_the_check_can_fail():
    numbers = numbers_as_foretold()
    assert bubble.check(numbers) == []
    assert len(bubble.plot(numbers).axes) == 1
    for key, value in (
        ("bubble", 0.5),
        ("step_s", 9.0),
        ("same_order", False),
        ("peak_in_flight", [1, 1]),
    ):
        off = copy.deepcopy(numbers)
        off["cases"][2][key] = value
        (said,) = bubble.check(off)
        assert said.startswith("interleaved-1f1b p=4 m=8 v=2: "), said


@pytest.mark.slow
def test_the_claim_holds():
    assert bubble.check(bubble.measure(small=True)) == []
