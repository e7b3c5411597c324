import itertools
import math

import pytest

from stepwell.sections.optim import ScheduleConfig
from stepwell.train.schedule import lr_fraction

WSD = ScheduleConfig(kind="wsd", warmup_steps=10, decay_steps=20, final_fraction=0.1)


@pytest.mark.parametrize(
    ("shape", "half", "quarter"),
    [
        ("1-sqrt", 1 - math.sqrt(0.5), 0.5),
        ("linear", 0.5, 0.75),
        ("cosine", 0.5, (1 + math.sqrt(0.5)) / 2),
    ],
)
def test_wsd_closed_forms(shape, half, quarter):
    schedule = WSD.model_copy(update={"decay_shape": shape})
    assert [lr_fraction(schedule, step, 100) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert {lr_fraction(schedule, step, 100) for step in range(10, 81)} == {1.0}
    assert lr_fraction(schedule, 90, 100) == pytest.approx(0.1 + 0.9 * half)
    assert lr_fraction(schedule, 85, 100) == pytest.approx(0.1 + 0.9 * quarter)
    assert lr_fraction(schedule, 100, 100) == pytest.approx(0.1)
    assert lr_fraction(schedule, 500, 100) == pytest.approx(0.1)


def test_constant_linear_and_cosine():
    constant = ScheduleConfig(kind="constant", warmup_steps=4)
    assert [lr_fraction(constant, s, 10) for s in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    linear = ScheduleConfig(kind="linear", warmup_steps=0)
    assert [lr_fraction(linear, s, 4) for s in range(5)] == [1, 0.75, 0.5, 0.25, 0]
    cosine = ScheduleConfig(kind="cosine", warmup_steps=2, final_fraction=0.5)
    got = [lr_fraction(cosine, s, 6) for s in range(2, 7)]
    expected = [0.75 + 0.25 * math.cos(math.pi * i / 4) for i in range(5)]
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_every_step_of_a_run_has_a_positive_rate_and_nothing_jumps(kind):
    schedule = ScheduleConfig(
        kind=kind,
        warmup_steps=10,
        **({"decay_steps": 50, "decay_shape": "linear"} if kind == "wsd" else {}),
    )
    fractions = [lr_fraction(schedule, step, 200) for step in range(200)]
    assert min(fractions) > 0
    assert max(fractions) == 1
    assert max(abs(a - b) for a, b in itertools.pairwise(fractions)) <= 0.1 + 1e-9


def test_a_run_of_only_warmup_or_only_decay():
    assert lr_fraction(ScheduleConfig(kind="cosine", warmup_steps=5), 4, 5) == 1
    assert lr_fraction(ScheduleConfig(kind="cosine", warmup_steps=5), 5, 5) == 1
    assert (
        lr_fraction(ScheduleConfig(kind="wsd", decay_steps=4, decay_shape="linear"), 1, 4) == 0.75
    )
