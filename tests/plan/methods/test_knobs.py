"""Knobs of a recipe with several models cost what the recipe with them costs."""

import pytest

from stepwell.config import Run
from stepwell.parallel.rules import check_run
from stepwell.plan.cluster import cluster
from stepwell.plan.measured.gap import gap
from stepwell.plan.methods.knobs import method_knobs, method_together
from stepwell.plan.methods.recipes import as_configured
from stepwell.plan.steptime.step import predict_step
from stepwell.presets import preset
from tests.plan.explain.test_knobs import overrides_of

H100 = cluster("h100-sxm")
SAMPLED = {"data.seq_len": 1536, "method.max_new_tokens": 1024, "method.prompts_per_step": 512}
RECIPES = {
    "ppo": {**SAMPLED, "remat.mode": "full", "train.micro_batch_rows": 4},
    "ppo-shared": {**SAMPLED, "method.critic": "shared", "layout.tp": 2},
    "grpo": {**SAMPLED, "method.kl_coef": 0.01, "method.reference": "host"},
    "grpo-lora": {**SAMPLED, "lora.rank": 16, "model.num_layers": 8},
    "dpo": {"method.reference": "separate", "method.pairs_per_step": 64, "data.seq_len": 2048},
}


def run_of(name):
    shared = {"method.kind": name.split("-")[0], "layout.compile": False, "data.tokenizer": "t"}
    model = {"model": preset("llama3-8b").model_dump(exclude_none=True, exclude_unset=True)}
    return Run.parse(model, {**shared, "train.micro_batch_rows": 1, **RECIPES[name]})


def priced(run):
    found = as_configured(run, 8, H100)
    assert found is not None
    return found


def turned(run, knob):
    other = Run.parse(run.model_dump(exclude_none=True), overrides_of(knob.setting))
    check_run(other, 8)
    return other, priced(other)


@pytest.mark.parametrize("name", RECIPES)
def test_a_knob_costs_what_the_recipe_with_it_costs(name):
    run = run_of(name)
    now = priced(run)
    found = method_knobs(run, H100, now)
    assert [k.gain for k in found] == sorted((k.gain for k in found), reverse=True)
    assert len(found) > 3
    for knob in found:
        _, there = turned(run, knob)
        assert knob.changed.peak_bytes == there.peak, knob.name
        assert knob.changed.fits == there.fits
        assert knob.step_s == there.step_s
        assert knob.gain == pytest.approx(1 - there.step_s / now.step_s)
    best = now
    for knob in method_together(run, H100, now):
        run, there = turned(run, knob)
        assert there.fits
        assert there.step_s < best.step_s
        assert knob.step_s == there.step_s
        best = there


def test_of_a_measured_training_pass_no_knobs_are_told():
    run = run_of("dpo")
    now = priced(run)
    found = gap(now.job, 2 * predict_step(now.job).total_s, run.model)
    assert any(suspect.knobs for suspect in found.suspects)
    assert not any(suspect.knobs for suspect in found.without_knobs().suspects)


def test_what_only_the_policy_alone_has_room_for_does_not_work():
    run = run_of("ppo")
    found = {knob.name: knob for knob in method_knobs(run, H100, priced(run))}
    knob = found["recompute none"]
    assert knob.gain > 0
    assert not knob.works
    assert knob.changed.peak_bytes > H100.accelerator.memory_bytes
