"""What waits between the halves of backward passes."""

import pytest

from stepwell.plan.footprint.zero_bubble import states_of


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize("p", [2, 4, 5])
def test_a_full_pipeline_repeats_itself(schedule, p):
    for rank in range(p):
        few, many = (states_of(schedule, p, rank, m) for m in (4 * p + 1, 4 * p + 2))
        assert few == many == states_of(schedule, p, rank, 7 * p)
        assert few[0].summed == (False, False)
        assert not few[0].halved


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_the_micro_batch_of_a_pass_is_where_the_pass_says(schedule):
    for rank in range(4):
        for state in states_of(schedule, 4, rank, 8):
            assert state.held[state.place + 2 * state.halved] > 0
            assert not (state.halved and rank == 0 and state.place == 0)  # whole in one
