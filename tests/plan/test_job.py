import pytest

from stepwell.config import Run
from stepwell.models.flops import count_parameters
from stepwell.plan.cluster import cluster
from stepwell.plan.job import Dims, Experts, dims_of, job_of
from stepwell.presets import PRESETS
from stepwell.types import ConfigError


@pytest.mark.parametrize("name", PRESETS)
def test_dimensions_have_the_parameters_of_the_model(name):
    assert dims_of(PRESETS[name]).parameters() == count_parameters(PRESETS[name]).total


def test_a_token_meets_top_k_experts():
    """Qwen3-30B-A3B: 30.5 and 3.3 billion, as its card says."""
    dims = Dims("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 6144, 151936, experts=Experts(128, 8, 768))
    assert dims.parameters() / 1e9 == pytest.approx(30.5, abs=0.05)
    assert dims.parameters(active=True) / 1e9 == pytest.approx(3.3, abs=0.06)


def test_a_run_becomes_a_job():
    values = {"layout.tp": 2, "layout.dp_replicate": 2, "train.global_batch_rows": 24,
              "train.micro_batch_rows": 2, "data.seq_len": 64}  # fmt: skip
    layout = job_of(Run.parse({}, values), 12, cluster("h100-sxm")).layout
    assert layout.num_gpus == 12
    assert (layout.data_ranks, layout.dp_shard, layout.num_micro_batches) == (6, 3, 2)
    assert layout.global_batch_tokens == 24 * 64
    assert layout.tokens_of_rank == 128
    assert layout.reduce_every_micro_batch
    with pytest.raises(ConfigError, match="fp64"):
        job_of(Run.parse({}, {"precision.compute": "fp64", "precision.param": "fp64",
                              "precision.reduce": "fp64"}), 1, cluster("h100-sxm"))  # fmt: skip
