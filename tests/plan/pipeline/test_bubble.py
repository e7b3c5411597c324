"""The simulator against closed forms, against exhaustive search, and by hand."""

from itertools import pairwise, product

import pytest

from stepwell.parallel.schedules import bubble_fraction
from stepwell.plan.footprint.pieces import moments_of_stages
from stepwell.plan.pipeline.actions import Action, Actions, schedule_actions
from stepwell.plan.pipeline.bubble import (
    Costs,
    bubble_share,
    even_costs,
    simulate,
    simulate_schedule,
)
from stepwell.types import ConfigError

KINDS = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved-1f1b", 1),
    ("interleaved-1f1b", 2),
    ("interleaved-1f1b", 3),
    ("zbv", 2),
    ("dualpipev", 2),
]


def legal(max_p: int = 4, max_m: int = 8) -> list[tuple[str, int, int, int]]:
    """(schedule, p, m, v)"""
    found = []
    for (schedule, v), p, m in product(KINDS, range(1, max_p + 1), range(1, max_m + 1)):
        try:
            schedule_actions(schedule, p, m, v)
        except ConfigError:
            continue
        found.append((schedule, p, m, v))
    return found


LEGAL = legal()


def test_closed_forms_are_what_the_simulation_finds():
    assert len(LEGAL) > 120
    for case in LEGAL:
        timeline = simulate_schedule(*case)
        assert timeline.bubble_share == pytest.approx(bubble_share(*case), abs=1e-12), case
        assert max(timeline.idle_s) == min(timeline.idle_s), case


def test_known_bubbles():
    assert bubble_share("1f1b", 4, 8) == 3 / 8
    assert bubble_share("gpipe", 4, 8) == 3 / 8
    assert bubble_share("interleaved-1f1b", 4, 8, 2) == 3 / 16
    assert bubble_share("zbv", 4, 8, 2) == 3 / 48
    assert bubble_share("dualpipev", 4, 8, 2) == 6 / 48
    assert bubble_share("1f1b", 1, 8) == bubble_share("zbv", 1, 8, 2) == 0


@pytest.mark.parametrize("backward", [(0.5, 0.5), (1, 1), (1.5, 2.5)])
def test_the_ratio_of_backward_to_forward_does_not_matter_without_halves(backward):
    for schedule, p, m, v in [("1f1b", 4, 6, 1), ("gpipe", 3, 5, 1), ("interleaved-1f1b", 4, 8, 3)]:
        found = simulate_schedule(schedule, p, m, v, even_costs(p * v, 1, *backward)).bubble_share
        assert found == pytest.approx((p - 1) / (v * m))
        assert bubble_share(schedule, p, m, v, 1, *backward) == pytest.approx(found)


@pytest.mark.parametrize("more", [{"recompute_s": 0.5}, {"send_s": 0.25}, {"weight_s": 0.5}])
def test_the_bubble_with_any_costs_is_the_simulations(more):
    for case in [("1f1b", 4, 6), ("gpipe", 3, 5), ("interleaved-1f1b", 4, 8, 2), ("zbv", 4, 9, 2)]:
        costs = even_costs(case[1] * (case[3] if len(case) > 3 else 1), **more)
        found = simulate_schedule(*case, costs=costs).bubble_share
        assert bubble_share(*case, **more) == pytest.approx(found, abs=1e-12), case
    with pytest.raises(ConfigError, match="nan must be seconds"):
        bubble_share("1f1b", 2, 4, **dict.fromkeys(more, float("nan")))


def test_costs_of_other_stages_than_the_schedules_are_refused():
    assert simulate_schedule("zbv", 2, 4, 2, even_costs(4)).num_stages == 4
    for num_stages in (3, 5):
        with pytest.raises(ConfigError, match=f"of {num_stages} stages, and 2 ranks of 2 have 4"):
            simulate_schedule("zbv", 2, 4, 2, even_costs(num_stages))


def test_zero_bubble_is_not_so_with_unequal_halves():
    uneven = bubble_share("zbv", 4, 16, 2, 1, 1.3, 0.7)
    assert uneven == pytest.approx(1.3 * bubble_share("zbv", 4, 16, 2))
    assert bubble_share("zbv", 4, 16, 2, 1, 0.7, 1.3) > bubble_share("zbv", 4, 16, 2)
    costs = even_costs(8, 1, 1.3, 0.7)
    assert uneven == simulate_schedule("zbv", 4, 16, 2, costs).bubble_share


COSTS = [  # by stage: forward, inputs, weights, again; and sending
    lambda n: even_costs(n),
    lambda n: even_costs(n, 1, 1.25, 0.75, 1, 0.125),
    lambda n: Costs(
        tuple(1 + 0.25 * s for s in range(n)), (2,) * n, (0.5,) * n, (0, *(1,) * (n - 1)), 3
    ),
]


@pytest.mark.parametrize("of", COSTS)
def test_every_dependency_is_respected_and_nothing_waits_without_reason(of):
    for case in LEGAL:
        _, p, m, v = case
        S, costs = p * v, of(p * v)
        timeline = simulate_schedule(*case, costs=costs)
        start = {event.action: event.start_s for event in timeline.events}
        end = {event.action.key: event.end_s for event in timeline.events}
        sent = dict(end)
        for rank in range(p):
            for event, after in pairwise(timeline.of_rank(rank)):
                if event.action.with_next:
                    sent[event.action.key] = after.end_s
        rank_of = {event.action.stage: event.rank for event in timeline.events}
        assert sum(a.kind == "F" for a in start) == S * m, case
        needs: dict[Action, list[float]] = {action: [0] for action in start}

        def need(
            action,
            stage,
            *kinds,
            needs=needs,
            rank_of=rank_of,
            end=end,
            sent=sent,
            send=costs.send_s,
        ) -> None:
            """One of them is there, and ends in time."""
            there = [(k, stage, action.micro_batch) for k in kinds]
            (other,) = [a for a in there if a in end]
            away = rank_of[stage] != rank_of[action.stage]
            needs[action].append(sent[other] + send if away else end[other])

        for action in start:
            if action.kind == "F" and action.stage:
                need(action, action.stage - 1, "F")
            if action.kind in "BI":
                need(action, action.stage, "F")
                if action.stage < S - 1:
                    need(action, action.stage + 1, "B", "I")
            if action.kind == "W":
                need(action, action.stage, "I")
        for rank in range(p):
            row = timeline.of_rank(rank)
            for before, event in zip([None, *row], row, strict=False):
                assert event.end_s - event.start_s == pytest.approx(costs.of(event.action))
                earliest = [*needs[event.action], before.end_s if before else 0]
                assert event.start_s == pytest.approx(max(earliest)), (case, event)


def test_the_critical_path_is_the_step():
    for case in LEGAL:
        costs = even_costs(case[1] * case[3], 1, 1.25, 0.75, send_s=0.5)
        timeline = simulate_schedule(*case, costs=costs)
        path = timeline.critical_path()
        assert path[0].start_s == 0
        assert path[-1].end_s == timeline.total_s
        for before, event in pairwise(path):
            sent = 0.5 if before.rank != event.rank else 0
            assert event.start_s == pytest.approx(before.end_s + sent), case


def test_a_longer_action_on_the_critical_path_lengthens_the_step():
    actions = schedule_actions("1f1b", 3, 4)
    costs = even_costs(3)
    timeline = simulate(actions, costs)
    for stage in {event.action.stage for event in timeline.critical_path()}:
        slower = Costs(
            tuple(1.5 if s == stage else 1 for s in range(3)), costs.input_s, costs.weight_s
        )
        assert simulate(actions, slower).total_s > timeline.total_s


# --- exhaustive search -----------------------------------------------------------------------


def fastest_with_halves(p: int, m: int, v: int, v_shaped: bool) -> int:
    """The least number of time units in which any order of F, I and W of one unit each can be done:
    all that can happen in a unit, unit after unit. Micro-batches of a stage are alike, so in
    order."""
    S = p * v
    place = [(2 * p - 1 - s if s >= p else s) if v_shaped else s % p for s in range(S)]
    stages = [[s for s in range(S) if place[s] == rank] for rank in range(p)]
    states, units = {((0, 0, 0),) * S}, 0
    end = ((m, m, m),) * S
    while end not in states:
        states = {after for state in states for after in _after_a_unit(state, stages, m)}
        units += 1
    return units


def _after_a_unit(state, stages, m):
    S = len(state)
    choices = []
    for mine in stages:
        options = []
        for s in mine:
            f, i, w = state[s]
            if f < m and (s == 0 or state[s - 1][0] > f):
                options.append((s, 0))
            if i < f and (s == S - 1 or state[s + 1][1] > i):
                options.append((s, 1))
            if w < i:
                options.append((s, 2))
        choices.append(options or [None])  # waiting where one can work never helps
    for chosen in product(*choices):
        after = [list(counts) for counts in state]
        for option in chosen:
            if option is not None:
                after[option[0]][option[1]] += 1
        yield tuple(tuple(counts) for counts in after)


def interleavings(rank: int, m: int) -> list[list[Action]]:
    """All orders of m forward and backward passes of one stage."""
    found: list[list[Action]] = [[]]
    for _ in range(2 * m):
        longer = []
        for row in found:
            f = sum(a.kind == "F" for a in row)
            b = len(row) - f
            longer += [[*row, Action("F", rank, f)]] if f < m else []
            longer += [[*row, Action("B", rank, b)]] if b < f else []
        found = longer
    return found


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 3), (2, 4), (3, 3)])
def test_no_order_with_whole_backward_passes_beats_1f1b(p, m):
    """Exhaustively, with even stages; nor does one beat gpipe, which only holds more."""
    every: list[Actions] = [
        list(rows) for rows in product(*(interleavings(r, m) for r in range(p)))
    ]
    times = []
    for actions in every:
        try:
            times.append(simulate(actions, even_costs(p)).total_s)
        except ConfigError:  # a deadlock: not an order that can be
            continue
    assert min(times) == simulate_schedule("1f1b", p, m).total_s
    assert min(times) == simulate_schedule("gpipe", p, m).total_s
    assert max(times) > min(times)


@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 2, 1), (2, 4, 1), (3, 3, 1), (2, 2, 2), (2, 3, 2), (2, 4, 2)]
)
def test_no_schedule_beats_the_fastest_order(p, m, v):
    looped, v_shaped = (fastest_with_halves(p, m, v, shape) for shape in (False, True))
    for schedule, stages in KINDS:
        if stages == v and (schedule, p, m, v) in LEGAL:
            best = v_shaped if schedule in ("zbv", "dualpipev") else looped
            assert simulate_schedule(schedule, p, m, v).total_s >= best, schedule
    if v == 2 and m >= 2 * p - 1:
        assert simulate_schedule("zbv", p, m, 2).total_s == v_shaped  # and zbv is the fastest


# --- what is held ----------------------------------------------------------------------------


def test_micro_batches_in_flight():
    """1F1B: p - s in stage s (2006.09503); GPipe: all."""
    assert simulate_schedule("1f1b", 4, 8).peak_in_flight == [4, 3, 2, 1]
    assert simulate_schedule("1f1b", 4, 4).peak_in_flight == [4, 3, 2, 1]
    assert simulate_schedule("gpipe", 4, 8).peak_in_flight == [8] * 4
    assert simulate_schedule("interleaved-1f1b", 4, 16, 2).peak_in_flight_of_ranks == [11, 9, 7, 5]
    assert simulate_schedule("zbv", 4, 16, 2).peak_in_flight_of_ranks == [8] * 4
    assert simulate_schedule("dualpipev", 4, 16, 2).peak_in_flight_of_ranks == [9] * 4


def test_the_ledger_holds_as_many():
    """Also where rounds of an interleaved schedule are longer than p. (For zero bubble also
    those between the halves of their backward pass.)"""
    for schedule, p, m, v in LEGAL:
        if p == 1 or (schedule, v) == ("interleaved-1f1b", 1):
            continue
        found = simulate_schedule(schedule, p, m, v).peak_in_flight_of_ranks
        ledger = [
            max(
                sum(moment.held) + sum(moment.halves)
                for moment in moments_of_stages(schedule, p, v, rank, m)
            )
            for rank in range(p)
        ]
        assert found == ledger, (schedule, p, m, v)


# --- uneven stages, recomputation, messages --------------------------------------------------


def test_uneven_stages_by_hand():
    """Two stages, forward 1 and 2, backward 2 and 4, two micro-batches: F0 0-1, F1 1-2; behind, F0
    1-3, B0 3-7, F1 7-9, B1 9-13; in front, B0 7-9, B1 13-15."""
    costs = Costs((1, 2), (1, 2), (1, 2))
    timeline = simulate_schedule("1f1b", 2, 2, costs=costs)
    ends = {str(event.action): event.end_s for event in timeline.events}
    assert ends == {
        "0F0": 1, "0F1": 2, "1F0": 3, "1B0": 7, "1F1": 9, "1B1": 13, "0B0": 9, "0B1": 15
    }  # fmt: skip
    assert timeline.total_s == 15
    assert timeline.busy_s == [6, 12]
    assert timeline.idle_s == [9, 3]
    assert timeline.bubble_share == 12 / 18


def test_recomputation_is_part_of_the_backward_pass():
    plain, again = (
        simulate_schedule("1f1b", 3, 6, costs=even_costs(3, recompute_s=r)) for r in (0, 1)
    )
    assert again.total_s == pytest.approx(plain.total_s * 4 / 3)
    assert again.bubble_share == pytest.approx(plain.bubble_share)
    halves = simulate_schedule("zbv", 2, 4, 2, costs=even_costs(4, recompute_s=1))
    for event in halves.events:
        assert event.end_s - event.start_s == {"F": 1, "I": 2, "W": 1}[event.action.kind]


def test_messages_by_hand():
    """1F1B of p ranks, with a message of t on each border: it is on the way there and back while
    the pipeline fills, and again for each round trip that a warm-up of p - s cannot hide."""
    assert simulate_schedule("1f1b", 2, 2, costs=even_costs(2, send_s=0.5)).total_s == (
        1 + 0.5 + 1 + 2 + 1 + 2 + 0.5 + 2
    )
    assert simulate_schedule("gpipe", 3, 4, costs=even_costs(3, send_s=0.5)).total_s == (
        (4 + 3 - 1) * 3 + 4 * 0.5
    )


def test_no_message_between_stages_of_one_rank():
    costs = even_costs(2, send_s=100)
    assert simulate_schedule("zbv", 1, 2, 2, costs=costs).total_s == 12


# --- errors ----------------------------------------------------------------------------------


def test_a_deadlock_names_who_waits_for_what():
    orders = [
        [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)],
        [Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)],
    ]
    with pytest.raises(ConfigError, match="rank 0 at 0B0 for 1B0; rank 1 at 1F1 for 0F1"):
        simulate(orders, even_costs(2))
    orders[0] = [orders[0][i] for i in (0, 2, 1, 3)]
    assert simulate(orders, even_costs(2)).total_s > 0
    with pytest.raises(ConfigError, match="rank 0 at 0B0 for 0F0"):
        simulate([[Action("B", 0, 0), Action("F", 0, 0)]], even_costs(1))


F00, B00 = Action("F", 0, 0), Action("B", 0, 0)


@pytest.mark.parametrize(
    ("actions", "stages", "message"),
    [
        ([[F00, F00]], 1, "0F0 is there twice"),
        ([[F00, B00], [Action("F", 1, 0)]], 2, "micro-batch 0 has F in stage 1; .* F and B, or"),
        ([[F00], [Action("F", 0, 1)]], 1, "stage 0 is on rank 0 and, for 0F1, on rank 1"),
        ([[F00, B00]], 2, "micro-batch 0 has nothing in stage 1"),
        ([[F00, Action("F", 1, 0)]], 1, "1F0 is of no stage; costs are of 1 stages"),
        ([[F00, Action("I", 0, 0)]], 1, "micro-batch 0 has FI in stage 0"),
        ([[F00, B00, Action("W", 0, 0)]], 1, "micro-batch 0 has FBW in stage 0"),
    ],
)
def test_lists_that_are_not_a_step(actions, stages, message):
    with pytest.raises(ConfigError, match=message):
        simulate(actions, even_costs(stages))


def test_forward_passes_alone():
    timeline = simulate([[Action("F", s, i) for i in range(3)] for s in range(2)], even_costs(2))
    assert timeline.total_s == 4
    assert timeline.peak_in_flight == [3, 3]


def test_costs_are_checked():
    with pytest.raises(ConfigError, match=r"costs are of \[1, 2\] stages"):
        Costs((1,), (1, 2), (1,))
    with pytest.raises(ConfigError, match=r"forward_s\[0\]=-1 must be .* nearest legal value is 0"):
        even_costs(2, -1)
    with pytest.raises(ConfigError, match=r"forward_s\[1\]=nan must be"):
        Costs((1, float("nan")), (1, 1), (1, 1))
    with pytest.raises(ConfigError, match="send_s=inf must be"):
        even_costs(2, send_s=float("inf"))
    assert even_costs(2, 0, 0, 0).num_stages == 2


def test_it_agrees_with_the_engines_own_form():
    assert bubble_fraction("zbv", 4, 5) == bubble_share("zbv", 4, 5, 2)
