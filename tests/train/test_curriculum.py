"""Shares of the learning rate, and the warning about a low-rate tail."""

import math
import re
import tomllib
from pathlib import Path

import pytest

from stepwell.cli import main
from stepwell.commands.header import header_text, plan_of
from stepwell.commands.ranks import Ranks
from stepwell.config import Run
from stepwell.curate.recipe import Recipe
from stepwell.sections.optim import ScheduleConfig
from stepwell.train.curriculum import low_rate_warnings, lr_mass, shares_of


def staged(start, kind="cosine", **more) -> Run:
    data = {"sources": [{"path": "a"}], "stages": [{"start": start, "sources": [{"path": "b"}]}]}
    schedule = {"optim.schedule.kind": kind, "train.steps": 10_000}
    return Run.parse({"data": data}, {**schedule, **more})


@pytest.mark.parametrize("start", [0.5, 0.8, 0.9])
def test_the_tails_shares_have_a_closed_form(start):
    """Of (1 + cos(pi p)) / 2 over [0, 1], and of 1 - sqrt(p) over the decay."""
    tail = shares_of(staged(start))[-1]
    length = 1 - start
    assert tail.token_share == pytest.approx(length)
    assert tail.lr_share == pytest.approx(length - math.sin(math.pi * start) / math.pi, rel=2e-2)
    assert tail.wsd_lr_share == pytest.approx((length / 3) / (start + length / 3), rel=1e-2)
    assert shares_of(staged(start, "linear"))[-1].lr_share == pytest.approx(length**2, rel=1e-2)


def test_shares_add_up_and_a_constant_rate_gives_the_share_of_the_tokens():
    for kind in ("cosine", "linear", "constant"):
        found = shares_of(staged(0.7, kind, **{"optim.schedule.warmup_steps": 100}))
        assert sum(shares.lr_share for shares in found) == pytest.approx(1)
        assert sum(shares.token_share for shares in found) == pytest.approx(1)
    for shares in shares_of(staged(0.7, "constant")):
        assert shares.lr_share == pytest.approx(shares.token_share)


def test_mass_of_many_steps_is_sampled_closely():
    schedule = ScheduleConfig(kind="cosine", warmup_steps=30_001)
    from stepwell.train.schedule import lr_fraction

    exact = sum(lr_fraction(schedule, step, 200_000) for step in range(1_000, 199_000))
    assert lr_mass(schedule, 1_000, 199_000, 200_000) == pytest.approx(exact, rel=1e-4)
    assert lr_mass(schedule, 5, 5, 200_000) == 0


@pytest.mark.parametrize(
    ("kind", "below", "above"), [("cosine", 0.615, 0.625), ("linear", 0.8, 0.815)]
)
def test_the_warning_begins_at_half_of_wsds_share(kind, below, above):
    assert low_rate_warnings(staged(below, kind)) == []
    (warning,) = low_rate_warnings(staged(above, kind))
    tail = shares_of(staged(above, kind))[-1]
    assert tail.lr_share < tail.wsd_lr_share / 2
    assert f"{tail.lr_share:.2%} of the learning-rate mass" in warning
    steps = round((1 - above) * 10_000)
    assert f"optim.schedule.kind='wsd', decay_steps={steps} it would be" in warning
    assert f"{tail.wsd_lr_share:.2%}" in warning


def test_the_advice_is_not_warned_of():
    for start in (0.5, 0.8, 0.95):
        decay = {"optim.schedule.decay_steps": round((1 - start) * 10_000)}
        run = staged(start, "wsd", **decay)
        assert low_rate_warnings(run) == []
        tail = shares_of(run)[-1]
        assert tail.lr_share == pytest.approx(tail.wsd_lr_share)
    # The end of a decay is a low-rate tail as well.
    late = staged(0.97, "wsd", **{"optim.schedule.decay_steps": 1_000})
    assert len(low_rate_warnings(late)) == 1


def test_a_warm_up_stage_is_none_of_it():
    values = {"data": {"stages": [{"phase": "warmup", "sources": [{"path": "b"}]}]}}
    more = {"optim.schedule.kind": "cosine", "optim.schedule.warmup_steps": 100}
    assert low_rate_warnings(Run.parse(values, more)) == []


def test_the_best_rows_of_an_ascending_order_are_judged_too():
    ascending = {"data.order": "quality-ascending"}
    cosine = Run.parse({}, {**ascending, "optim.schedule.kind": "cosine"})
    (warning,) = low_rate_warnings(cosine)
    assert "order='quality-ascending' keeps the best of each epoch" in warning
    assert low_rate_warnings(Run.parse({}, {"optim.schedule.kind": "cosine"})) == []
    assert low_rate_warnings(Run.parse({}, {**ascending, "optim.schedule.kind": "constant"})) == []


def test_header_and_check_show_it(capsys):
    run = staged(0.9)
    text = header_text(run)
    tail = shares_of(run)[-1]
    assert (
        f"data.stages.0   steps 9,001 to 10,000: 10.0% of the tokens, {tail.lr_share:.1%}" in text
    )
    assert "warning: data.stages.0" in text
    plan = plan_of(run, Ranks())
    assert [stage["name"] for stage in plan["stages"]] == ["sources", "stages.0"]
    assert plan["warnings"] == low_rate_warnings(run)
    stages = '[{start = 0.9, sources = [{path = "b"}]}]'
    words = ["pretrain", "--check", "--optim.schedule.kind", "cosine", "--data.stages", stages]
    assert main(words) == 0
    assert "warning: data.stages.0" in capsys.readouterr().out
    assert "stages" not in header_text(Run())
    assert plan_of(Run.parse({"method": {"kind": "sft"}}), Ranks())["stages"] == []


def test_the_examples_of_the_page_are_legal():
    page = (Path(__file__).parents[2] / "docs" / "curriculum.md").read_text("utf-8")
    blocks = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    assert len(blocks) == 3
    for block in blocks:
        (Recipe if "steps" in block else Run).parse(block)
    runs = [Run.parse(block) for block in blocks if "steps" not in block]
    assert all(low_rate_warnings(run) == [] for run in runs)
