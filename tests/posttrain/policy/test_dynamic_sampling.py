import pytest

from stepwell.eval.grade import Prompt, Verdict
from stepwell.posttrain.policy.dynamic_sampling import draw_alive
from stepwell.posttrain.rollout import Group
from stepwell.types import Completion


def group(number: int, *rewards: float | None) -> Group:
    completion = Completion(0, (1,), (2,), (-1.0,), "", "stop")
    prompt = Prompt(str(number), (1,))
    return Group(prompt, (completion,) * len(rewards), tuple(Verdict(r) for r in rewards))


class Source:
    """Groups in order: those whose number is in `dead` have equal rewards."""

    def __init__(self, dead):
        self.dead, self.next, self.calls = dead, 0, []

    def __call__(self, count, refill):
        self.calls.append((count, refill))
        numbers = range(self.next, self.next + count)
        self.next += count
        return [group(n, 1, 1) if n in self.dead else group(n, 1, 0) for n in numbers]


def names(groups):
    return [int(g.prompt.text) for g in groups]


def test_dead_groups_are_replaced_until_there_are_enough():
    source = Source(dead={0, 2, 4})
    drawn = draw_alive(source, wanted=4, max_refills=3)
    assert names(drawn.kept) == [1, 3, 5, 6]
    assert names(drawn.thrown) == [0, 2, 4]
    assert source.calls == [(4, 0), (2, 1), (1, 2)]
    assert (drawn.refills, drawn.num_refilled) == (2, 3)
    assert len(drawn.groups) == source.next == 7


def test_nothing_is_drawn_again_when_all_live():
    source = Source(dead=set())
    drawn = draw_alive(source, wanted=3, max_refills=3)
    assert (names(drawn.kept), drawn.thrown, drawn.refills) == ([0, 1, 2], (), 0)
    assert source.calls == [(3, 0)]


@pytest.mark.parametrize("max_refills", [1, 2])
def test_refills_are_bounded_and_what_is_alive_is_kept(max_refills):
    """One group of four lives; the refills find none. With one more refill there is another."""
    source = Source(dead=set(range(1, 7)))
    drawn = draw_alive(source, wanted=4, max_refills=max_refills)
    assert names(drawn.kept) == ([0] if max_refills == 1 else [0, 7, 8, 9])
    assert drawn.refills == max_refills
    assert len(drawn.groups) == source.next


def test_where_all_are_dead_the_first_rollout_is_kept():
    source = Source(dead=set(range(99)))
    drawn = draw_alive(source, wanted=2, max_refills=2)
    assert names(drawn.kept) == [0, 1]
    assert names(drawn.thrown) == [2, 3, 4, 5]
