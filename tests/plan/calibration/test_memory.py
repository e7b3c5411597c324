from dataclasses import replace
from functools import cache

import pytest

from stepwell.hardware import GIB
from stepwell.plan.calibration.memory import (
    fit,
    fit_errors,
    left_out,
    memory_error,
    predicted_bytes,
    report,
)
from stepwell.plan.calibration.published import Published
from stepwell.plan.calibration.table import read_runs, shipped_table
from stepwell.plan.cluster import cluster
from stepwell.plan.footprint.coefficients import SHIPPED
from stepwell.plan.footprint.footprint import footprint
from stepwell.plan.job import Arrangement, Dims, Job


@cache
def shipped() -> list[Published]:
    return read_runs(shipped_table())


def test_memory_of_sources_and_families_that_the_fit_has_not_seen():
    """The goal of the planner is 8 % on groups that were left out; what was reached is held."""
    for group in (lambda run: run.source_key, lambda run: run.family):
        scores = left_out(shipped(), group)
        assert scores["all"].num_runs >= 86
        assert scores["all"].median_error < 0.055
        assert abs(scores["all"].bias) < 0.03
        assert len(scores) >= 6


def test_the_shipped_coefficients_are_those_that_the_fit_finds():
    found = fit(shipped())
    assert found.group_bytes == pytest.approx(SHIPPED.group_bytes, rel=0.05)
    assert found.fragmentation == pytest.approx(SHIPPED.fragmentation, abs=0.02)
    assert memory_error(shipped()).median_error < 0.055


def test_what_fits_and_what_does_not():
    """All runs that fitted, and all that did not but one, which checkpointed two layers at a time
    (bigscience, experiments/gpt2.md, "New experiments"), as the table does not say."""
    found = fit_errors(shipped())
    assert found.num_oom >= 5
    assert found.num_fit > 600
    assert set(found.wrong) <= {"bs0220"}
    assert found.num_fit + found.num_oom + found.num_unknown == len(shipped())


def run_of(job: Job, **fields) -> Published:
    values = {
        "row_id": "x1", "job": job, "step_s": 1.0, "peak_bytes": None, "mem_kind": "nvidia-smi",
        "fits": True, "source_key": "one", "family": "f", "config_key": "x1", "quality": "A",
        "workload": "pretrain", "precision": "bf16", "recompute_known": True, "notes": "",
    }  # fmt: skip
    return Published(**{**values, **fields})


GPT = Dims("gpt", 24, 2048, 16, 16, 128, 8192, 50304, mlp="gelu")


def pipeline(**layout) -> Job:
    arrangement = Arrangement(2048, 8, 64, pp=4, dp_shard=2, zero=1, program="megatron", **layout)
    return Job(GPT, arrangement, cluster("v100-32g"))


def test_nvidia_smi_is_of_the_first_machine_and_torchs_figures_of_the_largest_rank():
    job = pipeline(recompute="full", flash=False)
    assert footprint(job).pp_rank == 3  # the loss is there
    shown = predicted_bytes(run_of(job))
    assert shown == footprint(job, 0).nvidia_smi < footprint(job).nvidia_smi
    allocated = predicted_bytes(run_of(job, mem_kind="torch peak allocated"))
    assert allocated == footprint(job).allocated


def test_coefficients_are_recovered_from_runs_that_they_made():
    made = replace(SHIPPED, group_bytes=0.3 * GIB, fragmentation=0.4)
    runs = []
    for i, run in enumerate(shipped()):
        if run.peak_bytes is not None:
            runs.append(replace(run, peak_bytes=predicted_bytes(run, made), config_key=str(i)))
    found = fit(runs)
    assert found.group_bytes == pytest.approx(made.group_bytes, rel=0.04)
    assert found.fragmentation == pytest.approx(made.fragmentation, abs=0.021)
    assert memory_error(runs, made).median_error == pytest.approx(0, abs=1e-12)


def test_errors_are_counted():
    job = pipeline()
    peak = footprint(job, 0).nvidia_smi
    runs = [
        run_of(job, row_id="exact", peak_bytes=peak),
        run_of(job, row_id="high", peak_bytes=peak / 1.05),
        run_of(job, row_id="far", peak_bytes=peak / 1.5),
        run_of(job, row_id="none"),
    ]
    found = memory_error(runs)
    assert (found.num_runs, found.worst) == (3, "far")
    assert found.median_error == pytest.approx(0.05)
    assert found.bias == pytest.approx(0.05)
    assert found.within_10_percent == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="none of the runs"):
        memory_error(runs[-1:])


def test_runs_with_unknown_recomputation_are_no_evidence_that_they_fit():
    large = replace(pipeline(), cluster=cluster("v100-16g"))
    large = replace(large, layout=replace(large.layout, micro_batch_rows=32))
    runs = [
        run_of(large, row_id="a"),
        run_of(large, row_id="b", recompute_known=False),
        run_of(large, row_id="c", fits=False, recompute_known=False),
    ]
    found = fit_errors(runs)
    assert (found.num_fit, found.num_oom, found.num_unknown) == (1, 1, 1)
    assert found.wrong == ("a",)


def test_the_report_has_every_group():
    text = "\n".join(report(shipped()))
    for run in shipped():
        if run.peak_bytes is not None:
            assert f"without {run.source_key}" in text
            assert f"without {run.family}" in text
    assert "fits or not" in text
