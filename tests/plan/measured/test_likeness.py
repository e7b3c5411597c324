from dataclasses import replace

import pytest

from stepwell.plan.comms.collectives import collectives
from stepwell.plan.measured.likeness import check_ranks, doubts_of, sent_like
from stepwell.plan.measured.trace import Message, Piece, Trace
from stepwell.types import ConfigError
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


def trace(world, *group_sizes):
    """Group size 0: gloo's messages do not say."""
    sent = [Piece("send", 0, 1, Message("", None, size, "", ())) for size in group_sizes]
    return Trace((), (Piece("gemm", 0, 1), *sent), (), True, "", world, None)


@pytest.mark.parametrize(
    ("found", "legal", "illegal", "said"),
    [
        (trace(8, 4), [8], [1, 4, 16], "of 8 ranks, and"),
        (trace(1), [1], [2], "of one rank, and 2 are planned; give --gpus 1"),
        (trace(None), [1], [2, 64], "of one rank, for it sends nothing, and"),
        (trace(None, 4, 2), [4, 8], [1, 3], "of 4 ranks or more"),
        (trace(None, 0), [2, 3], [1], "of 2 ranks or more, and 1 is planned; give --gpus 2"),
    ],
)
def test_a_trace_of_another_number_of_ranks_is_refused(found, legal, illegal, said):
    for world in legal:
        check_ranks(found, world)
    for world in illegal:
        with pytest.raises(ConfigError, match=said):
            check_ranks(found, world)


@pytest.mark.parametrize(("share", "said"), [(0.011, 1), (0.009, 0)])
def test_messages_that_are_not_planned_are_told_unless_they_are_next_to_nothing(share, said):
    sent = {"data": (2.0**30, 2.0**30), "world": (share * 2**30, 0.0)}
    found = list(doubts_of(trace(64), sent, JOB))
    assert len(found) == said
    assert all("messages of world are in the trace" in doubt for doubt in found)
