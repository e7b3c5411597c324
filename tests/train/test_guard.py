import json
import math

import pytest

from stepwell.config import Run
from stepwell.sections.optim import GuardConfig
from stepwell.train.engine import Engine
from stepwell.train.guard import Guard, GuardStop, merged, suspects
from stepwell.types import CheckpointError, ConfigError, TrainingError
from tests.oracle import base_run

CONFIG = GuardConfig(spike_factor=4.0, window=5, min_history=3, max_skips_in_a_row=2)


def configured(**values):
    return GuardConfig(**{**CONFIG.model_dump(), **values})


def _ceilinged(losses, **values):
    """A guard over a vocabulary of 403 (ln is 6.0) that has taken steps of these losses."""
    guard = Guard(configured(**values), vocab_size=403)
    assert all(guard.judge(loss, 1.0).ok for loss in losses)
    return guard


def _fed(norms, config=CONFIG):
    guard = Guard(config)
    assert all(guard.judge(1.0, norm).ok for norm in norms)
    return guard


@pytest.mark.parametrize(
    ("loss", "norm", "update", "words", "watched"),
    [
        (math.nan, 1.0, 1.0, "loss is nan", "loss"),
        (-math.inf, 1.0, 1.0, "loss is -inf", "loss"),
        (1.0, math.inf, 1.0, "gradient norm is inf", "grad_norm"),
        (math.nan, math.nan, None, "loss is nan", "loss"),
        (1.0, math.nan, None, "gradient norm is nan", "grad_norm"),
        (1.0, 1.0, math.nan, "update norm is nan", "update_norm"),
    ],
)
def test_non_finite_steps_are_refused_from_the_first(loss, norm, update, words, watched):
    guard = Guard(CONFIG)
    verdict = guard.judge(loss, norm, update)
    assert (verdict.ok, verdict.action, verdict.watched) == (False, "skip", watched)
    assert words in verdict.reason
    assert verdict.threshold is None
    assert not any(guard.good.values())


def test_a_spike_is_measured_against_the_median_of_good_norms():
    guard = _fed([1.0, 3.0, 2.0])
    assert guard.judge(1.0, 8.0).ok
    verdict = _fed([1.0, 3.0, 2.0]).judge(1.0, 8.001)
    assert (verdict.watched, verdict.value, verdict.median, verdict.threshold) == (
        "grad_norm", 8.001, 2.0, 8.0,
    )  # fmt: skip
    assert "gradient norm, 8.001" in verdict.reason
    assert "guard.spike_factor=4 times the median 2 of" in verdict.reason


def test_a_loss_spikes_by_nats_above_its_median_also_where_losses_are_negative():
    for median in (1.0, -1.0, 0.0):
        guard = Guard(configured(loss_spike=2.0))
        for loss in (median - 0.5, median, median + 0.5):
            guard.judge(loss, 1.0)
        assert guard.judge(median + 2.0, 1.0).ok
        verdict = guard.judge(median + 2.26, 1.0)
        assert (verdict.watched, verdict.threshold) == ("loss", median + 2.25)
        assert "guard.loss_spike=2 above the median" in verdict.reason


def test_an_update_spikes_in_units_of_the_learning_rate():
    """A warm-up makes every update larger than the last one; that is no spike."""
    guard = Guard(configured(update_spike_factor=3.0))
    for lr in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2):
        assert guard.judge(1.0, 1.0, 5.0 * lr, lr).ok
    assert guard.judge(1.0, 1.0, 0.0, 0.0).ok  # a schedule that ends at 0
    verdict = guard.judge(1.0, 1.0, 5.0 * 3.1 * 0.1, 0.1)
    assert (verdict.watched, verdict.median) == ("update_norm", 5.0)
    assert verdict.value == pytest.approx(15.5)
    assert "over the learning rate, 15.5, is more than guard.update_spike_factor=3 times" in (
        verdict.reason
    )


def test_bounds_of_zero_look_for_no_spike():
    guard = _fed([1.0] * 3, configured(loss_spike=0.0, update_spike_factor=0.0))
    assert not guard.watches_updates
    assert Guard(CONFIG).watches_updates
    assert guard.judge(1e9, 1.0).ok
    assert not guard.judge(math.inf, 1.0).ok
    with pytest.raises(ConfigError, match=r"update_spike_factor=0\.5.*above 1, or 0"):
        Run.parse({}, {"guard.update_spike_factor": 0.5})


def test_a_bad_step_enters_no_history():
    guard = Guard(configured(loss_spike=3.0))
    for _ in range(3):
        guard.judge(1.0, 2.0, 3.0)
    before = guard.state()["good"]
    for values in ((9.0, 2.0, 3.0), (1.0, 99.0, 3.0), (1.0, 2.0, 99.0)):
        guard.skips_in_a_row = 0
        assert not guard.judge(*values).ok
    assert guard.state()["good"] == before == {
        "loss": [1.0] * 3, "grad_norm": [2.0] * 3, "update_norm": [3.0] * 3,
    }  # fmt: skip


def test_spikes_are_allowed_before_min_history():
    assert _fed([1.0, 1.0]).judge(9.0, 1000.0, 1e9).ok


def test_the_loss_has_a_ceiling_from_the_second_step_on():
    """Above a blind guess, or above where the run began: an explosion within the first steps would
    else be what the medians hold."""
    assert _ceilinged([]).judge(1e6, 1.0).ok  # there is nothing yet to measure it by
    low = _ceilinged([1.0])
    assert low.judge(8.9, 1.0).ok
    verdict = low.judge(962181.0, 1.0)
    assert (verdict.watched, verdict.median) == ("loss", None)
    assert verdict.threshold == pytest.approx(9.0, abs=0.01)
    assert "9.622e+05, is more than guard.loss_spike=3 above the 5.999 of a blind" in verdict.reason
    high = _ceilinged([20.0])
    assert high.judge(22.9, 1.0).ok
    assert "above the first good one, 20" in high.judge(23.1, 1.0).reason
    assert _ceilinged([1.0], loss_spike=0.0).judge(1e6, 1.0).ok
    again = Guard(CONFIG, vocab_size=403)
    again.load(json.loads(json.dumps(high.state())))
    assert again.ceiling == 23.0


def test_losses_of_other_scales_are_no_spikes_unless_a_key_says_so():
    """Of ipo, say, which begins at 1 / (4 beta^2) = 25; three nats are nothing to it."""
    losses = [25.0, 26.0, 24.0]
    for config, ok in ((CONFIG, True), (configured(loss_spike=3.0), False)):
        guard = Guard(config)  # without a vocabulary: no nats of a language model
        assert all(guard.judge(loss, 1.0).ok for loss in losses)
        assert guard.judge(40.0, 1.0).ok is ok
        assert guard.ceiling == math.inf
    assert not _ceilinged(losses).judge(40.0, 1.0).ok


@pytest.mark.parametrize("kind", ["pretrain", "sft", "dpo", "reward", "grpo", "ppo", "online-dpo"])
def test_only_nats_of_a_language_model_have_a_spike_by_default(kind):
    sampled = {"method.max_new_tokens": 4} if kind in ("grpo", "ppo", "online-dpo") else {}
    guard = Engine(base_run(**{"method.kind": kind, **sampled})).guard
    nats = kind in ("pretrain", "sft")
    assert guard.loss_spike == (3.0 if nats else 0.0)
    assert (guard.blind_loss is not None) == nats


def test_advice_against_an_explosion_is_a_lower_rate():
    guard = _ceilinged([6.0])
    guard.judge(99.0, 1.0)
    guard.judge(99.0, 1.0)
    with pytest.raises(GuardStop, match=r"Lower optim\.lr or lengthen.*start again"):
        guard.judge(99.0, 1.0)


@pytest.mark.parametrize("compute", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("any_good", [True, False])
def test_advice_where_nothing_is_finite(compute, any_good):
    """bf16 has fp32's range, so a narrow format is the only one to be left; and a lower learning
    rate is no help to a first step."""
    guard = Guard(configured(action="stop"), compute=compute)
    if any_good:
        guard.judge(1.0, 1.0)
    with pytest.raises(GuardStop) as error:
        guard.judge(math.nan, 1.0)
    text = str(error.value)
    assert ("precision.compute='bf16' instead of 'fp16'" in text) == (compute == "fp16")
    assert "precision.compute='fp32'" not in text
    assert ("lower optim.lr" in text) == any_good
    assert ("model.init_std" in text) == (not any_good)


def test_the_window_forgets():
    guard = _fed([1.0, 1.0, 1.0, 3.9, 3.9, 3.9, 3.9, 3.9])
    assert guard.judge(1.0, 15.0).ok


def test_spike_factor_has_an_effect():
    wide = GuardConfig(spike_factor=50.0, window=5, min_history=3)
    assert _fed([1.0] * 3, wide).judge(1.0, 30.0).ok
    assert not _fed([1.0] * 3).judge(1.0, 30.0).ok


def test_action_none_lets_everything_through():
    guard = Guard(configured(action="none"))
    assert all(guard.judge(math.nan, math.inf, 1.0).ok for _ in range(20))
    assert guard.num_skips == 0
    assert not guard.watches_updates


def test_action_stop_stops_at_the_first():
    guard = _fed([1.0] * 3, configured(action="stop"))
    with pytest.raises(GuardStop, match=r"guard\.action='stop', and the loss is nan") as error:
        guard.judge(math.nan, 1.0)
    assert error.value.verdict.action == "stop"
    assert isinstance(error.value, TrainingError)


def test_too_many_in_a_row_stop_with_advice_and_a_good_step_resets_the_count():
    guard = _fed([1.0] * 3)
    for _ in range(3):
        assert not guard.judge(math.nan, 1.0).ok
        assert not guard.judge(1.0, 99.0).ok
        assert guard.judge(1.0, 1.0).ok
    assert guard.num_skips == 6
    guard.judge(math.nan, 1.0)
    guard.judge(math.nan, 1.0)
    with pytest.raises(TrainingError, match=r"3 steps in a row.*optim\.lr.*action='rewind'"):
        guard.judge(math.nan, 1.0)


@pytest.mark.parametrize(
    ("values", "knob"),
    [
        ((9.0, 1.0, 1.0), "loss_spike"),
        ((1.0, 99.0, 1.0), "spike_factor"),
        ((1.0, 1.0, 99.0), "update_spike_factor"),
    ],
)
def test_advice_for_spikes_names_the_knob(values, knob):
    guard = Guard(configured(loss_spike=3.0))
    for _ in range(3):
        guard.judge(1.0, 1.0, 1.0)
    guard.judge(*values)
    guard.judge(*values)
    with pytest.raises(TrainingError, match=rf"raise guard\.{knob}"):
        guard.judge(*values)


# --- rewinds -------------------------------------------------------------------------------------

REWIND = configured(action="rewind", suspect_steps=4, max_rewinds=2, cooldown_steps=10)


def rewound_at(guard, step, number, stream="sources"):
    """As a session does it: judged, an earlier state loaded, the rewind added."""
    assert guard.judge(math.nan, 1.0).action == "rewind"
    before = json.loads(json.dumps(guard.state()))
    guard.load(Guard(REWIND).state())
    guard.rewound(before, step, stream, number)


def test_a_rewind_leaves_out_the_suspects_and_lowers_the_rate_for_a_while():
    guard = _fed([1.0] * 3, REWIND)
    assert guard.lr_scale_at(0) == 1.0
    rewound_at(guard, step=30, number=30)
    assert guard.jumped == {"sources": [[27, 30]]}
    left_out = [n for n in range(1, 99) if guard.is_jumped("sources", n)]
    assert left_out == [27, 28, 29, 30]
    assert not guard.is_jumped("stages.0", 28)
    assert [guard.lr_scale_at(step) for step in (0, 39, 40)] == [0.5, 0.5, 1.0]
    assert (guard.rewinds, guard.num_skips, guard.num_jumped) == (1, 1, 4)


def test_suspects_are_the_last_batches_wherever_they_came_from():
    guard = Guard(REWIND)
    for number in range(1, 10):
        guard.takes("sources", number)
    guard.takes("stages.0", 1)
    guard.takes("stages.0", 1)  # a rollout of several steps
    rewound_at(guard, step=10, number=1, stream="stages.0")
    assert guard.jumped == {"stages.0": [[1, 1]], "sources": [[7, 9]]}
    assert suspects([], "rows", 3, 4) == [("rows", 3), ("rows", 2), ("rows", 1)]
    assert suspects([["rows", 8]], "rows", 9, 3) == [("rows", 9), ("rows", 8), ("rows", 7)]
    beside = suspects([["a", 4], ["a", 7]], "b", 1, 3)  # 5 and 6 were left out before
    assert beside == [("b", 1), ("a", 7), ("a", 4)]
    skipping = Guard(CONFIG)
    skipping.takes("sources", 1)
    assert not skipping.recent


def test_a_branch_keeps_what_was_learnt_and_counts_anew():
    guard = _fed([1.0] * 3, REWIND)
    rewound_at(guard, step=30, number=30)
    for _ in range(3):
        guard.judge(1.0, 1.0)
    assert guard.judge(math.nan, 1.0).action == "rewind"
    guard.branched()
    state = guard.state()
    counts = [state[k] for k in ("rewinds", "num_skips", "skips_in_a_row")]
    assert (counts, state["lr_scale"], state["cooldown_until"]) == ([0, 0, 0], 1.0, None)
    assert state["jumped"] == {"sources": [[27, 30]]}
    assert state["good"]["loss"] == [1.0] * 3


def test_rewinds_add_up_while_the_first_one_cools_down():
    guard = _fed([1.0] * 3, REWIND)
    rewound_at(guard, step=30, number=30)
    rewound_at(guard, step=31, number=35)
    assert guard.jumped == {"sources": [[27, 30], [32, 35]]}
    assert guard.lr_scale_at(35) == 0.25
    late = _fed([1.0] * 3, REWIND)
    rewound_at(late, step=30, number=30)
    rewound_at(late, step=90, number=2, stream="stages.0")
    assert late.jumped == {"sources": [[27, 30]], "stages.0": [[1, 2]]}
    assert late.lr_scale_at(90) == 0.5


def test_cooldown_of_zero_is_for_good():
    guard = Guard(configured(action="rewind", cooldown_steps=0, lr_factor=0.1))
    guard.rewound(guard.state(), 30, "sources", 30)
    assert guard.lr_scale_at(10**9) == 0.1
    guard.rewound(guard.state(), 900, "sources", 930)
    assert guard.lr_scale_at(10**9) == pytest.approx(0.01)


def test_after_max_rewinds_it_stops_with_advice():
    guard = _fed([1.0] * 3, REWIND)
    rewound_at(guard, step=30, number=30)
    rewound_at(guard, step=31, number=35)
    with pytest.raises(GuardStop) as error:
        guard.judge(math.nan, 1.0)
    assert error.value.verdict.action == "stop"
    for word in ("guard.max_rewinds=2", "8 batches", "optim.lr", "guard.suspect_steps"):
        assert word in str(error.value)


def test_merged():
    assert merged([[5, 8], [1, 3], [4, 4], [20, 30], [25, 26]]) == [[1, 8], [20, 30]]


def test_state_round_trips_through_json():
    guard = Guard(REWIND)
    for value in (0.1, 0.7, 1 / 3):
        guard.judge(value, value, value)
    rewound_at(guard, step=7, number=9)
    guard.judge(0.5, 0.5, 0.5)
    other = Guard(REWIND)
    other.load(json.loads(json.dumps(guard.state())))
    assert other.state() == guard.state()
    for norm in (0.5, 9.0, 0.2, 0.2, 0.2, 0.9):
        assert other.judge(1.0, norm) == guard.judge(1.0, norm)
        assert other.lr_scale_at(8) == guard.lr_scale_at(8) == 0.5


def test_state_of_an_earlier_version_is_refused():
    old = {"good_norms": [1.0], "skips_in_a_row": 0, "num_skips": 0}
    with pytest.raises(CheckpointError, match=r"has no cooldown_until, good, jumped.*model\.init"):
        Guard(CONFIG).load(old)


def test_steps_without_a_gradient_are_fine_and_measure_nothing():
    """Rollouts of dead groups have a norm of exactly zero."""
    guard = _fed([1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 3.0, *[0.0] * 9, 2.5])
    assert list(guard.good["grad_norm"]) == [1.0, 2.0, 3.0, 2.5]
    assert not guard.judge(1.0, 9.1).ok
    assert guard.judge(1.0, 0.0).ok
    assert guard.skips_in_a_row == 0


def test_rewinding_needs_checkpoints_that_are_old_enough():
    values = {"guard.action": "rewind", "checkpoint.every_steps": 5, "guard.suspect_steps": 11}
    with pytest.raises(ConfigError, match=r"nearest legal values are keep_last=3, or.*_steps=6"):
        Run.parse({}, values)
    Run.parse({}, {**values, "checkpoint.keep_last": 3})
    Run.parse({}, {**values, "guard.suspect_steps": 6})
    Run.parse({}, {**values, "guard.action": "skip"})
