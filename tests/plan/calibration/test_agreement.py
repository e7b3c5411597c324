"""Figures of a row that follow from others of it: on both sides of what is allowed."""

import csv

import pytest

from stepwell.plan.calibration.published import read_row
from stepwell.plan.calibration.table import shipped_table
from stepwell.types import DataError


@pytest.fixture(scope="module")
def row() -> dict[str, str]:
    """A dense model of 64.9 B on 512 H100: 16.27 s, 41.25 % by MFU with all pairs counted."""
    with open(shipped_table(), newline="", encoding="utf-8") as file:
        found = next(row for row in csv.DictReader(file) if row["id"] == "lf0001")
    return found | {"interconnect": "400 Gbit/s per GPU"}


@pytest.mark.parametrize(
    ("bad", "reason", "good"),
    [
        ({"n_layers": "5"}, "n_params_total=6.486e+10 is of another model", {"n_layers": "72"}),
        ({"n_params_active": "1e9"}, "n_params_active=1e+09 is of another",
         {"n_params_active": "6.4e10"}),
        ({"n_params_active": "7e10"}, "n_params_active=7e+10 is more than n_params_total",
         {"n_params_active": ""}),
        ({"gpus_per_node": "7"}, "n_gpus=512 is no multiple of gpus_per_node=7",
         {"gpus_per_node": "4"}),
        ({"tp": "4", "dp": "128", "gpus_per_node": "2", "n_gpus": "513"}, "n_gpus=513 is no", {}),
        ({"mfu_pct": "0.4125"}, "mfu_pct=0.4125 and a step of 16.27 s", {"mfu_pct": "50"}),
        ({"mfu_pct": "101"}, "mfu_pct=101 must be at most 100", {"mfu_pct": "100"}),
        ({"mfu_pct": "-3"}, "mfu_pct='-3' must be above 0", {"mfu_pct": ""}),
        ({"mfu_pct": "nan"}, "mfu_pct='nan' is not a finite number", {"mfu_pct": ""}),
        ({"mfu_pct": "10"}, "mfu_pct=10 and a step of 16.27 s", {"mfu_pct": "19"}),
        ({"tflops_per_gpu": "4"}, "tflops_per_gpu=4 and a step of", {"tflops_per_gpu": "400"}),
        ({"tflops_per_gpu": "4e14"}, "tflops_per_gpu=4e+14 and a step", {"tflops_per_gpu": ""}),
        ({"recompute_counted": "perhaps"}, "is neither true nor false",
         {"recompute_counted": "no"}),
        ({"attn_flops": "some"}, "attn_flops='some' is none of", {"attn_flops": "full"}),
    ],
)  # fmt: skip
def test_two_figures_of_one_row(row, bad, reason, good):
    with pytest.raises(DataError) as caught:
        read_row(row | bad, "x")
    assert reason in str(caught.value)
    read_row(row | good, "x")


@pytest.mark.parametrize(("share", "legal"), [(0.955, True), (0.93, False), (1.04, True)])
def test_a_rate_and_a_step_of_one_run(row, share, legal):
    rate = f"{share * float(row['tokens_per_s_per_gpu'])}"
    assert row["step_time_s"]
    if legal:
        assert read_row(row | {"tokens_per_s_per_gpu": rate}, "x").step_s == 16.2685
        return
    with pytest.raises(DataError, match=r"which is a step of 17.* contradict each other"):
        read_row(row | {"tokens_per_s_per_gpu": rate}, "x")
    alone = row | {"tokens_per_s_per_gpu": rate, "step_time_s": ""}
    assert read_row(alone, "x").step_s == pytest.approx(16.2685 / share, rel=1e-3)


def test_tensor_ranks_fill_machines_evenly(row):
    eight = {"tp": "8", "dp": "64", "n_gpus": "512", "gpus_per_node": "8"}
    assert read_row(row | eight | {"gpus_per_node": "4"}, "x").job.layout.tp == 8
    nine = {"n_gpus": "504", "dp": "63", "gpus_per_node": "12", "global_batch_sequences": "504"}
    nine |= {"micro_batch": "1", "step_time_s": "", "tokens_per_s_per_gpu": "500"}
    nine |= {"mfu_pct": "", "tflops_per_gpu": ""}
    with pytest.raises(DataError, match="tp=8 neither divides gpus_per_node=12 nor is a multiple"):
        read_row(row | eight | nine, "x")
