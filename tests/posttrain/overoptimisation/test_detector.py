import json
import math
from pathlib import Path

import numpy as np
import pytest

from stepwell.eval.grade import Prompt, Verdict
from stepwell.labs.reward import SMOOTH
from stepwell.posttrain.overoptimisation.curves import first_fall
from stepwell.posttrain.overoptimisation.detector import (
    Reading,
    Shift,
    Watch,
    agreement,
    is_sign,
    read,
    repeated_share,
    shift,
    spread,
)
from stepwell.posttrain.rollout import Group, Rollouts
from stepwell.types import Completion


def readings(num: int, seed: int = 0, single: bool = False, **slopes: float) -> list[Reading]:
    """Noisy rollouts whose numbers rise by `slopes` in each. single: of one model."""
    rng = np.random.default_rng(seed)
    start = {"reward": 1.0, "length": 20.0, "repetition": 0.05, "kl": 0.0}
    start |= {"disagreement": 0.3, "agreement": 0.8, "spread": 1.0}
    noise = {"reward": 0.05, "length": 1.0, "repetition": 0.01, "kl": 0.1}
    noise |= {"disagreement": 0.02, "agreement": 0.05, "spread": 0.05}
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
    assert alarm_at(readings(40, reward=0.1, spread=-0.02)) is None
    assert alarm_at(readings(40, single=True, reward=0.1, length=1.0)) is None
    assert alarm_at(readings(40, single=True, reward=0.1, repetition=0.02)) is None
    # Both move where the reward is right, too.
    assert alarm_at(readings(40, single=True, reward=0.1, repetition=0.02, kl=1.0)) is None


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
        {"length": 1.0, "repetition": 0.02},
    ],
)
def test_length_and_a_weak_sign_are_enough_for_one_model(slopes):
    assert alarm_at(readings(40, reward=0.1, **slopes)) is None  # the models agree as before
    assert alarm_at(readings(40, reward=0.1, agreement=-0.008, **slopes)) is None  # nearly
    found = alarm_at(readings(40, single=True, reward=0.1, **slopes))
    assert found is not None
    assert set(found[1].signs) == set(slopes)
    for name in slopes:
        word = {"kl": "divergence", "length": "tokens", "repetition": "repeats one"}[name]
        assert word in found[1].text()
    for way_out in ("kl_budget", "aggregate = 'min'", "overopt stop", "low and high", "repetition"):
        assert way_out in found[1].text()


@pytest.mark.parametrize("slopes", [{"kl": 1.0}, {"length": 1.0}, {"repetition": 0.02}])
def test_a_spread_used_up_and_a_weak_sign_are_enough_for_several_models(slopes):
    for single in (False, True):
        found = alarm_at(readings(40, reward=0.1, single=single, spread=-0.025, **slopes))
        assert found is not None
        step, alarm = found
        assert set(alarm.signs) == {"spread", *slopes}
        # A third of the first window's mean, 0.95, is passed by that of rollouts 26 to 30.
        assert 27 <= step <= 32
        assert "the reward varies by" in alarm.text()
        part = readings(40, reward=0.1, single=single, spread=-0.015, **slopes)
        assert alarm_at(part) is None  # two fifths


def test_models_that_rank_otherwise_are_enough():
    found = alarm_at(readings(40, reward=0.1, agreement=-0.02))
    assert found is not None
    assert set(found[1].signs) == {"agreement"}
    # Half of the first window's mean, 0.38, is passed by that of rollouts 20 to 24.
    assert 21 <= found[0] <= 25
    assert "correlate" in found[1].text()
    assert alarm_at(readings(40, reward=0.1, agreement=-0.008)) is None


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
        ("agreement", 0.9, 0.451, 0.449),
        ("agreement", 0.0, 0.01, -0.01),
        ("spread", 0.9, 0.301, 0.299),
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
    assert found._replace(agreement=0.0) == pytest.approx(
        Reading(1.5, 4.0, 0.25, 3.0, 0.3, 0.0, math.sqrt(0.5))
    )
    assert found.agreement is None
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


def test_agreement_is_spearmans_and_knows_no_units():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 50))
    one = np.stack([x, 5 * x - 3, np.exp(x)], axis=1)
    assert agreement([one.tolist()]) == pytest.approx(1)
    assert agreement([np.stack([x, -x], axis=1).tolist()]) == pytest.approx(-1)
    ties = np.round(np.stack([x, x + y, y], axis=1))
    rho = np.asarray(spearmanr(ties)[0])
    expected = (rho[0, 1] + rho[0, 2] + rho[1, 2]) / 3
    assert agreement([ties.tolist()]) == pytest.approx(expected)
    outlier = np.stack([x, y], axis=1)
    outlier[0] = 1e6
    assert np.corrcoef(outlier.T)[0, 1] > 0.99
    assert abs(agreement([outlier.tolist()]) or 1) < 0.3


def test_agreement_is_about_a_prompts_answers():
    """Models that agree on which prompts are easy, and on no answer."""
    rng = np.random.default_rng(2)
    easy_G = rng.normal(0, 10, 40)
    groups_GDK = easy_G[:, None, None] + rng.normal(size=(40, 8, 2))
    assert (agreement([groups_GDK.reshape(-1, 2).tolist()]) or 0) > 0.9
    assert abs(agreement(groups_GDK.tolist()) or 1) < 0.15
    # One answer a prompt: nothing but all answers can be ranked.
    assert (agreement([[first] for first in groups_GDK[:, 0].tolist()]) or 0) > 0.9
    # A prompt with one answer says nothing beside others.
    assert agreement([*groups_GDK.tolist(), [(1e9, -1e9)]]) == agreement(groups_GDK.tolist())


def test_spread_is_within_prompts():
    rng = np.random.default_rng(4)
    rewards_GD = rng.normal(0, 10, (6, 1)) + rng.normal(0, 2, (6, 5))
    expected = math.sqrt(rewards_GD.var(axis=1, ddof=1).mean())
    assert spread(rewards_GD.tolist()) == pytest.approx(expected)
    assert spread([*rewards_GD.tolist(), [1e9], []]) == pytest.approx(expected)
    ones = rewards_GD[:, :1].tolist()  # one answer a prompt
    assert spread(ones) == pytest.approx(float(np.std(ones, ddof=1)))
    assert spread([[1.0, 3.0], [5.0, 5.0, 5.0]]) == pytest.approx(math.sqrt(2 / 3))
    assert spread([[1.0]]) is spread([]) is spread([[], []]) is None


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [[(1.0,), (2.0,), (3.0,)]],
        [[(1.0, 2.0), (1.0, 3.0), (1.0, 4.0)]],
        [[(1.0, 2.0), (2.0, 3.0)]],
        [[(1.0, 2.0), (1.0,), ()]],
        [[()], [()], [()]],
    ],
)
def test_no_agreement_where_there_is_none_to_speak_of(groups):
    assert agreement(groups) is None


@pytest.mark.parametrize("window", [4, 5, 10])
def test_on_two_real_runs(window):
    """`one_seed(301, FULL)["rl"]` of lab `reward`, rounded: an alarm before gold's fall where the
    proxy is optimised, and none where gold is. The models agree until gold has fallen."""
    runs = json.loads(Path(__file__).with_name("traces.json").read_text("utf-8"))
    proxy, gold = ([Reading(*values) for values in runs[k]["readings"]] for k in ("proxy", "gold"))
    assert len(proxy) == len(gold) == 60
    found = alarm_at(proxy, window)
    assert found is not None
    step, alarm = found
    assert {"agreement", "spread"} & alarm.signs.keys()
    # Means of the last SMOOTH rollouts.
    curve = runs["proxy"]["gold"]
    fall = first_fall(curve)
    assert fall is not None
    assert step < fall + SMOOTH - 1
    assert curve[step + 1 - SMOOTH] - curve[0] > 0.75 * (max(curve) - curve[0])
    assert alarm_at(gold, window) is None
    assert first_fall(runs["gold"]["gold"]) is None
    # Not for want of anything to see: answers repeat themselves more and go far.
    assert gold[-1].repetition > gold[0].repetition + 0.1
    assert (gold[-1].kl or 0) > 5
    # The same of one model, which cannot be asked how well it agrees.
    one_proxy, one_gold = (
        [reading._replace(disagreement=None, agreement=None) for reading in run]
        for run in (proxy, gold)
    )
    assert (alarm_at(one_proxy, window) or (60,))[0] < fall + SMOOTH - 1
    assert alarm_at(one_gold, window) is None
