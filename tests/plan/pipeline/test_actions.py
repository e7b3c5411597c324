"""Our lists of actions are those that torch's schedules carry out."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from stepwell.parallel.pipeline import SCHEDULES as TORCH_SCHEDULES
from stepwell.parallel.schedules import next_micro_batches, stages_of_rank
from stepwell.plan.pipeline.actions import SCHEDULES, Action, schedule_actions, times_back
from stepwell.sections.layout import LayoutConfig
from stepwell.types import ConfigError

SEVERAL = [("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("zbv", 2), ("dualpipev", 2)]


@contextmanager
def fake_ranks(rank: int, world: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def stage(cls: type[PipelineStage], index: int, number: int) -> PipelineStage:
    x = torch.zeros(1, 1, requires_grad=True)
    return cls(
        torch.nn.Linear(1, 1), index, number, torch.device("cpu"), input_args=(x,), output_args=(x,)
    )


def layout_of(schedule: str, p: int, v: int) -> LayoutConfig:
    return LayoutConfig(pp=p, pp_schedule=schedule, pp_stages_per_rank=v)  # type: ignore[arg-type]


def planned(schedule: str, p: int, m: int, v: int) -> list[list[str]]:
    """What torch's runtime will do, without communication, as it prints it."""
    with fake_ranks(0, p):
        stages = [
            stage(PipelineStage, index, p * v)
            for index in stages_of_rank(0, layout_of(schedule, p, v))
        ]
        plan = TORCH_SCHEDULES[schedule](stages, m, loss_fn=max).pipeline_order
    return [
        [str(part) for action in plan[rank] if action for part in action.sub_actions or [action]]
        for rank in range(p)
    ]


@pytest.mark.parametrize(("schedule", "v"), SEVERAL)
def test_with_several_stages_a_rank_they_are_torchs_plan(schedule, v):
    for p, wanted in product((2, 3, 4, 7), (1, 2, 3, 4, 6, 7, 8, 9, 14, 17)):
        m = next_micro_batches(wanted, layout_of(schedule, p, v))
        ours = [[str(a) for a in row] for row in schedule_actions(schedule, p, m, v)]
        assert ours == planned(schedule, p, m, v), (schedule, p, m, v)


class Recording(PipelineStage):
    """Does nothing but write down what it is told to."""

    done: list[str]

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        self.done.append(f"{self.stage_index}F{fwd_chunk_id}")
        return torch.zeros(1)

    def backward_one_chunk(self, bwd_chunk_id, *args, **kwargs):
        self.done.append(f"{self.stage_index}B{bwd_chunk_id}")

    def get_fwd_send_ops(self, fwd_chunk_id):
        return []

    def get_fwd_recv_ops(self, fwd_chunk_id):
        return []

    def get_bwd_send_ops(self, bwd_chunk_id):
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id):
        return []


def carried_out(schedule: str, p: int, m: int, rank: int) -> list[str]:
    """What torch tells one rank's stage to do."""
    with fake_ranks(rank, p):
        one = stage(Recording, rank, p)
        assert isinstance(one, Recording)
        one.done = []
        plan = TORCH_SCHEDULES[schedule](one, m, loss_fn=lambda x, y: x)
        plan._initialize_stage = lambda *args: None  # which would ask the other ranks
        plan.step(*[torch.zeros(m, 1)] * (rank == 0), target=torch.zeros(m), return_outputs=False)
    return one.done


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_with_one_stage_a_rank_they_are_what_torch_carries_out(schedule):
    for p, m in [(2, 2), (2, 5), (3, 4), (4, 4), (4, 9)]:
        ours = [[str(a) for a in row] for row in schedule_actions(schedule, p, m)]
        assert ours == [carried_out(schedule, p, m, rank) for rank in range(p)], (p, m)


def test_gpipe_also_with_few_micro_batches():
    assert schedule_actions("gpipe", 2, 1)[1] == [Action("F", 1, 0), Action("B", 1, 0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 2, 4), "unknown schedule '1f2b' .did you mean '1f1b'.*known are gpipe"),
        (("1f1b", 4, 3), "3 micro-batches: '1f1b' on 4 ranks needs at least 4; the nearest is 4"),
        (("dualpipev", 2, 3, 2), "needs at least 4; the nearest is 4"),
        (("interleaved-1f1b", 4, 9, 2), "needs rounds of equal length; the nearest is 10"),
        (("1f1b", 4, 8, 2), "2 stages a rank: '1f1b' has 1"),
        (("zbv", 4, 8), "1 stages a rank: 'zbv' has 2"),
        (("interleaved-1f1b", 4, 8, 0), "0 stages a rank: .* at least 1"),
        (("gpipe", 0, 1), "0 ranks and 1 micro-batches"),
    ],
)
def test_numbers_that_a_schedule_cannot_have(arguments, message):
    with pytest.raises(ConfigError, match=message):
        schedule_actions(*arguments)


def test_numbers_that_it_just_can_have():
    for arguments in [("1f1b", 4, 4), ("dualpipev", 2, 4, 2), ("interleaved-1f1b", 4, 10, 2)]:
        assert len(schedule_actions(*arguments)) == arguments[1]
    assert set(SCHEDULES) == set(TORCH_SCHEDULES)


def test_how_often_a_backward_pass_follows_a_forward_pass():
    """Once in gpipe; in 1f1b each time once the ranks behind are filled."""
    for p, m in product((2, 4), (4, 9)):
        for rank in range(p):
            assert times_back("gpipe", p, m, 1, rank) == (1,)
            assert times_back("1f1b", p, m, 1, rank) == (1 + max(0, m - (p - rank)),)
    # 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    assert times_back("interleaved-1f1b", 2, 4, 2, 0) == (1, 2)
