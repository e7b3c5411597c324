import json
import math

import numpy as np
import pytest

from stepwell.eval.grade import Prompt, Verdict
from stepwell.posttrain.overoptimisation.detector import (
    Reading,
    Shift,
    Watch,
    agreement,
    is_sign,
    read,
    repeated_share,
    shift,
)
from stepwell.posttrain.rollout import Group, Rollouts
from stepwell.types import Completion


def readings(num: int, seed: int = 0, single: bool = False, **slopes: float) -> list[Reading]:
    """Noisy rollouts whose numbers rise by `slopes` in each. single: of one model."""
    rng = np.random.default_rng(seed)
    start = {"reward": 1.0, "length": 20.0, "repetition": 0.05, "kl": 0.0}
    start |= {"disagreement": 0.3, "agreement": 0.8}
    noise = {"reward": 0.05, "length": 1.0, "repetition": 0.01, "kl": 0.1}
    noise |= {"disagreement": 0.02, "agreement": 0.05}
    if single:
        del start["disagreement"], start["agreement"]
    return [
        Reading(**{k: v + slopes.get(k, 0.0) * i + rng.normal(0, noise[k])
                   for k, v in start.items()})
        for i in range(num)
    ]  # fmt: skip


def alarm_at(found: list[Reading], window: int = 5):
    watch = Watch(window)
    alarms = [(i, alarm) for i, reading in enumerate(found) if (alarm := watch.see(i, reading))]
    assert len(alarms) <= 1  # it says so once
    return alarms[0] if alarms else None


def test_silent_while_only_the_reward_rises():
    """Over forty runs of noise; nor when one weak sign is there alone."""
    for seed in range(40):
        assert alarm_at(readings(40, seed, reward=0.1)) is None
    assert alarm_at(readings(40, single=True, reward=0.1, kl=1.0)) is None
    assert alarm_at(readings(40, reward=0.1, agreement=0.005)) is None
    assert alarm_at(readings(40, single=True, reward=0.1, length=1.0)) is None
    assert alarm_at(readings(40, single=True, reward=0.1, repetition=0.02)) is None


def test_models_that_disagree_are_enough():
    found = alarm_at(readings(40, reward=0.1, disagreement=0.02))
    assert found is not None
    step, alarm = found
    assert set(alarm.signs) == {"disagreement"}
    # 1.5 times 0.3 is gained after 7.5 rollouts, seen in the mean of a window of 5.
    assert 9 <= step <= 16
    assert alarm.step == step
    # The same where the reward gains more than ten times as much: it is worth it.
    assert alarm_at(readings(40, reward=0.5, disagreement=0.02)) is None


@pytest.mark.parametrize(
    "slopes",
    [
        {"kl": 1.0, "length": 1.0},
        {"kl": 1.0, "length": -0.4},
        {"kl": 1.0, "repetition": 0.02},
        {"length": 1.0, "repetition": 0.02},
    ],
)
def test_two_weak_signs_are_enough_for_one_model(slopes):
    assert alarm_at(readings(40, reward=0.1, **slopes)) is None  # the models agree as before
    waver = readings(40, reward=0.1, agreement=-0.006, **slopes)
    assert alarm_at(waver) is not None
    assert alarm_at(readings(40, reward=0.1, agreement=-0.002, **slopes)) is None
    found = alarm_at(readings(40, single=True, reward=0.1, **slopes))
    assert found is not None
    assert set(found[1].signs) == set(slopes)
    for name in slopes:
        word = {"kl": "divergence", "length": "tokens", "repetition": "repeats one"}[name]
        assert word in found[1].text()
    for way_out in ("kl_budget", "aggregate = 'min'", "overopt stop", "low and high", "repetition"):
        assert way_out in found[1].text()


def test_models_that_rank_otherwise_are_enough():
    found = alarm_at(readings(40, reward=0.1, agreement=-0.02))
    assert found is not None
    assert set(found[1].signs) == {"agreement"}
    assert 11 <= found[0] <= 22
    assert "correlate" in found[1].text()
    assert alarm_at(readings(40, reward=0.1, agreement=-0.004)) is None


def test_no_alarm_where_the_reward_does_not_rise():
    assert alarm_at(readings(40, disagreement=0.05, kl=1.0, length=1.0)) is None
    assert alarm_at(readings(40, reward=-0.1, disagreement=0.05)) is None


@pytest.mark.parametrize(
    ("name", "before", "below", "above"),
    [
        ("disagreement", 0.5, 0.74, 0.75),
        ("length", 20.0, 29.9, 30.0),
        ("length", 30.0, 20.1, 20.0),
        ("repetition", 0.1, 0.199, 0.2001),
        ("kl", 1.0, 5.9, 6.0),
        ("agreement", 0.9, 0.66, 0.64),
    ],
)
def test_both_sides_of_a_limit(name, before, below, above):
    t = math.copysign(3.1, above - before)
    assert not is_sign(name, Shift(before, below, t))
    assert is_sign(name, Shift(before, above, t))
    assert not is_sign(name, Shift(before, above, math.copysign(3.0, t)))  # not clear enough


def test_the_growth_of_disagreement_is_held_against_the_reward():
    assert is_sign("disagreement", Shift(0.5, 1.0, 9.0), reward_gain=5.0)
    assert not is_sign("disagreement", Shift(0.5, 1.0, 9.0), reward_gain=5.1)


def test_shift_is_welchs():
    from scipy.stats import ttest_ind

    rng = np.random.default_rng(3)
    x, y = rng.normal(0, 1, 6), rng.normal(1, 2, 9)
    found = shift(x.tolist(), y.tolist())
    (statistic, _) = ttest_ind(y, x, equal_var=False)
    assert found.t == pytest.approx(statistic)
    assert (found.before, found.now) == (pytest.approx(x.mean()), pytest.approx(y.mean()))
    assert shift([1, 1, 1], [2, 2, 2]).t == math.inf
    assert shift([0, 0, 0], [0, 0, 0]).t == 0
    assert shift([1, 1, 1], [1, 1, 1]).t == 0


def test_its_state_survives_json():
    found = readings(30, reward=0.1, disagreement=0.02)
    whole, first = Watch(5), Watch(5)
    alarms = [whole.see(i, reading) for i, reading in enumerate(found)]
    again = [first.see(i, reading) for i, reading in enumerate(found[:7])]
    second = Watch(5)
    second.load(json.loads(json.dumps(first.state())))
    again += [second.see(i, reading) for i, reading in enumerate(found[7:], 7)]
    assert again == alarms
    assert second.metrics() == whole.metrics()
    assert second.alarmed


def test_what_is_shown():
    watch = Watch(3)
    for i in range(5):
        watch.see(i, Reading(0.0, 10.0 + i, 0.1 * i))
        assert watch.metrics() == {}
    watch.see(5, Reading(0.0, 15.0, 0.5))
    shown = watch.metrics()
    assert shown["overopt/length"] == pytest.approx(14 / 11)
    assert shown["overopt/repetition"] == pytest.approx(0.4 - 0.1)
    assert shown["overopt/signs"] == 1
    assert not {"overopt/kl", "overopt/disagreement"} & shown.keys()
    assert watch.see(6, Reading(math.nan, 1.0, 1.0)) is None
    assert watch.metrics() == shown


def test_a_rollout_is_read():
    def answer(ids, reward, spread=None, mine=None):
        done = Completion(0, (1,), ids, (0.0,) * len(ids), "", "stop", from_policy=mine)
        return done, Verdict(reward, disagreement=spread)

    pairs = [
        answer((5, 6, 7, 5, 6, 7), 1.0, 0.2),  # half of it is repeated
        answer((5, 9, 9, 6), 2.0, 0.4, (True, False, False, True)),
        answer((5,) * 50, None, 9.0),
    ]
    completions, verdicts = zip(*pairs, strict=True)
    rollouts = Rollouts((Group(Prompt("", (1,)), completions, verdicts),))
    found = read(rollouts, kl=3.0)
    assert found is not None
    assert found == pytest.approx((*Reading(1.5, 4.0, 0.25, 3.0, 0.3)[:5], None))
    unknown = Rollouts((Group(Prompt("", (1,)), completions[2:], verdicts[2:]),))
    assert read(unknown) is None
    assert repeated_share([]) == repeated_share([1, 2]) == 0
    assert repeated_share([1] * 12) == pytest.approx(11 / 12)
    assert repeated_share([1, *range(2, 17), 1]) == pytest.approx(1 / 17)  # 16 before
    assert repeated_share([1, *range(2, 18), 1]) == 0  # 17 before
    # Twice as long, not twice as repetitive.
    rng = np.random.default_rng(0)
    shares = [repeated_share(rng.integers(0, 50, n).tolist()) for n in (400, 800)]
    assert shares[0] == pytest.approx(shares[1], abs=0.05)


def test_agreement_knows_no_units():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 50))
    one = np.stack([x, 5 * x - 3, 0.1 * x], axis=1)
    assert agreement(one.tolist()) == pytest.approx(1)
    assert abs(agreement(np.stack([x, y], axis=1).tolist()) or 1) < 0.3
    assert agreement(np.stack([x, -x], axis=1).tolist()) == pytest.approx(-1)
    assert agreement([(1.0,), (2.0,), (3.0,)]) is None
    assert agreement([(1.0, 2.0), (1.0, 3.0), (1.0, 4.0)]) is None
    assert agreement([(1.0, 2.0), (2.0, 3.0)]) is None
    assert agreement([(1.0, 2.0), (1.0,), ()]) is None
