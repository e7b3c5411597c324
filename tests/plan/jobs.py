"""Jobs that the tests of the step time start from."""

from dataclasses import replace
from typing import Any

from stepwell.plan.cluster import cluster
from stepwell.plan.job import Arrangement, Dims, Experts, Job

LLAMA_8B = Dims("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = Dims("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256)
MIXTURE = replace(LLAMA_8B, name="mixture", experts=Experts(16, 2, 4096))


def job(dims: Dims = LLAMA_8B, gpu: str = "h100-sxm", **layout: Any) -> Job:
    """By default 64 rows of 8192 tokens on 8 GPUs under ZeRO-3."""
    values = {"seq_len": 8192, "micro_batch_rows": 1, "global_batch_rows": 64, "dp_shard": 8}
    return Job(dims, Arrangement(**{**values, **layout}), cluster(gpu))


def changed(of: Job, **layout: Any) -> Job:
    return replace(of, layout=replace(of.layout, **layout))
