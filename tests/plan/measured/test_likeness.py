from dataclasses import replace

import pytest

from stepwell.plan.comms.collectives import collectives
from stepwell.plan.measured.likeness import sent_like
from tests.plan.measured.test_compare import JOB, LAYOUT


def data_bytes(job):
    return sum(s.wire_bytes * s.calls for s in collectives(job) if s.axis != "world")


@pytest.mark.parametrize(
    "was",
    [
        {"reduce_every_micro_batch": False},
        {"reshard": "never"},
        {"reshard": "never", "reduce_every_micro_batch": False},
    ],
)
def test_data_ranks_are_arranged_as_the_trace_sends(was):
    planned = replace(JOB, layout=replace(LAYOUT, micro_batch_rows=1, global_batch_rows=512))
    run = replace(planned, layout=replace(planned.layout, **was))
    assert data_bytes(run) != pytest.approx(data_bytes(planned), rel=0.2)
    found = sent_like(data_bytes(run), planned)
    assert data_bytes(found) == pytest.approx(data_bytes(run), rel=0.05)
    assert found.layout == run.layout


def test_a_layout_that_sends_as_much_stays_and_so_does_one_that_nothing_explains():
    assert sent_like(1.15 * data_bytes(JOB), JOB) is JOB
    assert sent_like(17 * data_bytes(JOB), JOB) is JOB
    assert sent_like(0.0, JOB) is JOB
