"""What a knob says to set is legal in the recipe that it is said of, and gives the layout that was
priced."""

import pytest

from stepwell.config import Run
from stepwell.parallel.rules import check_run
from stepwell.plan.cluster import cluster
from stepwell.plan.explain.knobs import knobs, together
from stepwell.plan.job import job_of
from stepwell.plan.search.prices import Prices
from stepwell.plan.search.space import Task
from stepwell.presets import preset

H100 = cluster("h100-sxm")
SHARED = {
    "model.num_layers": 12,
    "data.seq_len": 4096,
    "train.global_batch_rows": 64,
    "train.micro_batch_rows": 1,
}
RECIPES = [
    {"offload.parameters": True},
    {"offload.optimizer": True, "offload.activations": True},
    {"remat.mode": "every", "remat.every": 4},
    {"remat.mode": "budget", "remat.budget_bytes": 10**10},
    {"layout.compile": True, "precision.fp8.recipe": "rowwise"},
    {"layout.pp": 2, "layout.pp_schedule": "zbv", "layout.pp_stages_per_rank": 2,
     "layout.zero": 1},
    {"layout.pp": 4, "layout.zero": 1, "layout.pp_schedule": "interleaved-1f1b",
     "layout.pp_stages_per_rank": 2, "layout.compile": True},
    {"layout.reshard_after_forward": "never", "layout.reduce_gradients": "step"},
    {"layout.reduce_gradients": "micro_batch"},
    {"layout.tp": 2, "layout.cp": 2, "layout.dp_replicate": 2},
    {"checkpoint.asynchronous": False, "precision.compute": "fp16"},
    {"lora.rank": 8},
    {"lora.rank": 8, "lora.quantize": "nf4", "method.kind": "sft"},
]  # fmt: skip


def overrides_of(setting):
    words = setting.split()
    return {k.removeprefix("--"): v for k, v in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.parametrize("keys", RECIPES, ids=lambda keys: " ".join(keys))
def test_every_suggestion_is_legal_and_gives_the_layout_that_was_priced(keys):
    run = Run.parse(
        {"model": preset("llama3-8b").model_dump(exclude_none=True)},
        {**SHARED, **keys},
    )
    check_run(run, 16)
    job = job_of(run, 16, H100)
    prices = Prices(job.dims, H100, run.model)
    task = Task(job.dims, H100, 16, 4096, 64)
    suggested = [k for k in knobs(prices, task, job.layout, run.model, run=run) if k.works]
    assert suggested
    for knob in suggested:
        other = Run.parse(run.model_dump(exclude_none=True), overrides_of(knob.setting))
        check_run(other, 16)
        assert job_of(other, 16, H100).layout == knob.changed.layout, knob.setting
    for knob in together(prices, task, job.layout, run.model, run=run):
        run = Run.parse(run.model_dump(exclude_none=True), overrides_of(knob.setting))
        check_run(run, 16)
