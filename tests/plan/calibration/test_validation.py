"""Scores: errors against naive ones, sweeps, and what the shipped coefficients reach."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from stepwell.plan.calibration.table import (
    measurement,
    read_runs,
    shipped_measurements,
    shipped_table,
)
from stepwell.plan.calibration.validation import (
    Errors,
    errors,
    mean_correlation,
    score,
    sweeps,
    validate,
)
from stepwell.plan.steptime.coefficients import SHIPPED
from stepwell.plan.steptime.step import predict_step
from stepwell.types import DataError


@pytest.fixture(scope="module")
def runs():
    return read_runs(shipped_table())


@pytest.fixture(scope="module")
def whole():
    return validate(shipped_table())


def test_errors_of_a_handful():
    assert errors([0.1, -0.2, 0.3, -0.4, 0.5]) == Errors(5, 0.3, 0.1, 0.5)


def test_a_step_that_is_predicted_exactly(runs):
    some = [replace(run, step_s=predict_step(run.job).total_s) for run in runs[:20]]
    found = score(some).step_errors()["all"]
    assert (found.num, found.median_error, found.bias) == (20, 0, 0)
    twice = [replace(run, step_s=2 * run.step_s) for run in some]
    assert score(twice).step_errors()["all"].bias == pytest.approx(-0.5)


def sweep_rows(runs, steps):
    """Three layouts of one model that were measured, and their predictions."""
    base = next(run for run in runs if run.row_id == "bs0136")
    layouts = [replace(base.job.layout, micro_batch_rows=rows) for rows in (1, 2, 4)]
    measured = [
        replace(base, job=replace(base.job, layout=layout), step_s=step)
        for layout, step in zip(layouts, (3.0, 2.0, 1.0), strict=True)
    ]
    return list(zip(measured, steps, strict=True))


@pytest.mark.parametrize(
    ("predicted", "correlation", "place"),
    [((3.0, 2.0, 1.0), 1.0, 1), ((1.0, 2.0, 3.0), -1.0, 3), ((3.0, 1.0, 2.0), 0.5, 2)],
)
def test_a_sweep_says_how_layouts_are_ranked(runs, predicted, correlation, place):
    (found,) = sweeps(sweep_rows(runs, predicted))
    assert found.num_layouts == 3
    assert found.correlation == pytest.approx(correlation)
    assert found.place_of_best == place


def test_repeats_of_a_layout_count_once(runs):
    rows = sweep_rows(runs, (3.0, 2.0, 1.0))
    odd = (replace(rows[0][0], step_s=2.9), 3.0)
    (found,) = sweeps([*rows, odd])
    assert found.num_layouts == 3


def test_two_layouts_are_no_sweep(runs):
    assert sweeps(sweep_rows(runs, (3.0, 2.0, 1.0))[:2]) == []
    assert mean_correlation([]) is None


def test_other_batches_are_other_sweeps(runs):
    rows = sweep_rows(runs, (3.0, 2.0, 1.0))
    run, step = rows[0]
    other = replace(run.job, layout=replace(run.job.layout, global_batch_rows=1024))
    assert sweeps([(replace(run, job=other), step), *rows[1:]]) == []


def test_the_shipped_coefficients_reach_what_is_reported(whole):
    """docs/planner-calibration.md; bounds leave room for a refit."""
    by_source = whole.step_errors(lambda run: run.source_key)
    assert whole.step_errors()["all"].num >= 740
    assert whole.step_errors()["all"].median_error < 0.06
    assert abs(whole.step_errors()["all"].bias) < 0.03
    assert by_source["llm-foundry"].median_error < 0.05
    assert by_source["dgxc-benchmarking"].median_error < 0.06
    assert by_source["internevo"].median_error < 0.06
    assert (mean_correlation(whole.sweeps()) or 0.0) > 0.8
    assert all(sweep.place_of_best <= 3 for sweep in whole.sweeps())


def test_runs_outside_the_table_are_predicted_nearly_as_well():
    """benchmarks/plan_outside_runs.csv: nothing is fitted to them."""
    found = validate(Path(__file__).parents[3] / "benchmarks" / "plan_outside_runs.csv")
    assert not found.skipped
    assert len(found.predictions) >= 70
    assert not shipped_measurements() & {measurement(p.run) for p in found.predictions}
    assert found.step_errors()["all"].median_error < 0.1
    assert (mean_correlation(found.sweeps()) or 0.0) > 0.5


def test_the_shipped_coefficients_beat_a_rule_of_thumb(runs, whole):
    """40 % of the peak for all: what one would say without a planner."""
    rule = [
        0.4 and step.model_flops / step.peak_flops_per_s / 0.4 / run.step_s - 1
        for run in runs
        if run.step_s
        for step in [predict_step(run.job)]
    ]
    assert whole.step_errors()["all"].median_error < errors(rule).median_error / 2


def test_what_is_printed_adds_up(whole):
    found = json.loads(json.dumps(whole.as_json()))
    assert found["num_rows"] == 787 == len(found["rows"]) + len(found["skipped"])
    assert sum(found["reasons"].values()) == len(found["skipped"])
    by_source = found["step_time_by_source"].values()
    assert sum(one["num"] for one in by_source) == found["step_time"]["all"]["num"]
    row = next(row for row in found["rows"] if row["id"] == "lf0001")
    assert row["step_error"] == pytest.approx(row["step_time_s"] / 16.2685 - 1)
    text = "\n".join(whole.lines())
    assert "d_model is not printed" in text
    assert f"{len(whole.predictions)} of them are rows that the coefficients were fitted to" in text
    assert "megatron-bridge-cards" in text
    assert "assumed: no micro_batch: one row in a pipeline, else up to four: 18 rows" in text
    worst = max(found["rows"], key=lambda row: abs(row["step_error"] or 0))
    assert f"  {worst['id']} " in text.partition("furthest off in step time")[2].splitlines()[1]
    heaviest = max(found["rows"], key=lambda row: abs(row["memory_error"] or 0))
    assert f"  {heaviest['id']} " in text.partition("furthest off in memory")[2].splitlines()[1]


def test_other_coefficients_are_scored_as_well(runs):
    slow = score(runs[:50], SHIPPED.changed(matmul_16=0.3)).step_errors()["all"]
    assert slow.bias > 0.5


def test_a_table_of_a_user_s_own(tmp_path):
    with open(shipped_table(), newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["id"] in ("lf0001", "bs0143")]
    with open(tmp_path / "mine.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    found = validate(tmp_path / "mine.csv")
    assert found.step_errors()["all"].num == 1
    assert sum(found.fit_table().values()) == 2
    assert "2 of them are rows that the coefficients were fitted to" in "\n".join(found.lines())
    rows[0] |= {"tokens_per_s_per_gpu": "", "step_time_s": "17"}  # another run's, of the same id
    rows[1]["id"] = "bad"
    rows[1]["gpu"] = "h100-sxn"
    with open(tmp_path / "other.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    text = "\n".join(validate(tmp_path / "other.csv").lines())
    assert "were fitted to" not in text
    assert "unknown accelerator 'h100-sxn'" in text
    assert ": bad" in text
    with pytest.raises(DataError, match="there is no table"):
        validate(tmp_path / "missing.csv")
