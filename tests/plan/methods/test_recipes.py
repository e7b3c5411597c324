"""A plan as a recipe, read back: the engine's schema takes it, and its figures are the plan's."""

from dataclasses import replace

import pytest
import tomli_w

from stepwell.commands.run_arguments import Arguments, load_run
from stepwell.config import Run
from stepwell.parallel.rules import check_run
from stepwell.plan.cluster import cluster
from stepwell.plan.job import dims_of, job_of
from stepwell.plan.methods.evaluated import evaluate
from stepwell.plan.methods.methods import KEYS, MethodPlan, check_work, plan_method
from stepwell.plan.methods.page import render
from stepwell.plan.methods.placements import METHODS, asked_of
from stepwell.plan.methods.recipes import (
    as_configured,
    check_writable,
    heading,
    placement_of,
    recipe,
)
from stepwell.plan.methods.rollouts import Workload, own_sampler
from stepwell.plan.methods.text import of_limit
from stepwell.plan.methods.training import Question
from stepwell.plan.search.space import Pins
from stepwell.plan.steptime.step import predict_step
from stepwell.plan.units import seconds_text
from stepwell.presets import PRESETS
from stepwell.types import ConfigError

H100 = cluster("h100-sxm")
SMALL = "smollm2-1.7b"


def plan(method: str, model: str = SMALL, num_gpus: int = 8, **more) -> MethodPlan:
    return plan_method(method, PRESETS[model], H100, num_gpus, name=model, **more)


@pytest.mark.parametrize("method", METHODS)
def test_a_recipe_is_the_plan(method, tmp_path):
    pins = Pins(tp=1 if method == "qlora" else 4, recompute="selective", micro_batch_rows=2)
    work = Workload(
        prompts=24, group_size=1 if method == "ppo" else 4, prompt_tokens=100, answer_tokens=156,
        rows=48, seq_len=256, updates=1,
    )  # fmt: skip
    found = plan(method, workload=work, pins=pins, lora_rank=8)
    path = tmp_path / "planned.toml"
    text = heading(found, H100) + tomli_w.dumps(recipe(found, PRESETS[SMALL], "planned"))
    path.write_text(text)
    kind = "sft" if method in ("lora", "qlora") else method
    run = load_run(kind, Arguments(str(path)))  # as `stepwell ppo planned.toml` reads it
    check_run(run, 8)
    chosen = found.chosen
    assert chosen is not None
    assert placement_of(run) == chosen.placement
    assert (run.lora.rank, run.data.seq_len) == (8 if kind == "sft" else 0, 256)
    told = as_configured(run, 8, H100, SMALL)
    if told is None:
        job = job_of(run, 8, H100, SMALL)
        assert job == chosen.job
        assert predict_step(job).total_s == pytest.approx(chosen.step_s, rel=1e-9)
    else:
        assert told.job == chosen.job
        assert told.models == chosen.models
        assert told.parts == chosen.parts
        assert told.times == chosen.times
    assert f"{of_limit(chosen)}; a whole step: {seconds_text(chosen.step_s)} (" in text
    assert "# Still to say: model.init" in text


def test_what_changes_to_fit_is_in_the_recipe():
    found = plan("dpo", "llama3-70b")
    assert not found.fits
    run = Run.parse(recipe(found, PRESETS["llama3-70b"], "x"))
    assert run.offload.parameters
    assert run.train.micro_batch_rows > 1
    one = as_configured(run, 8, H100, "llama3-70b")
    assert one is not None
    assert one.fits
    assert one.peak == found.nearest.peak  # type: ignore[union-attr]
    assert "live on the host" in heading(found, H100)


def test_places_that_no_recipe_describes_are_refused_with_the_reason():
    model, asked = PRESETS["llama3-70b"], asked_of("grpo")
    served = replace(asked, adapters="lora", reference="adapter-off", sampler="server")

    def on(gpu: str):
        question = Question("grpo", model, dims_of(model), cluster(gpu), Workload(), model, 16)
        return evaluate(question, asked, served, 8)

    with pytest.raises(ConfigError, match="packs a whole copy of the policy on every GPU"):
        check_writable(on("h100-sxm"))
    with pytest.raises(ConfigError, match=r"GPUs of its own .*1 for the sampler.*only the 7 that"):
        check_writable(on("b200"))
    with pytest.raises(ConfigError, match="nothing that the engine knows fits"):
        check_writable(None)
    found = plan("grpo")
    assert check_writable(found.asked) is found.chosen is found.asked


def test_a_recipe_of_many_kinds_is_a_placement():
    values = {"model": PRESETS[SMALL].model_dump(exclude_defaults=True)}
    two = [{"name": "reward", "source": "model:a,b"}]
    keys = {"method.kind": "ppo", "data.seq_len": 512, "method.critic": "shared"}
    shared = Run.parse(values, {**keys, "method.reference": "host", "offload.optimizer": True})
    asked = asked_of("ppo")
    assert placement_of(shared) == replace(
        asked, critic="shared", reference="host", reward="program", offload="optimizer"
    )
    alone = as_configured(Run.parse(values | {"method": {"kind": "ppo", "rewards": two}}), 4, H100)
    one = as_configured(Run.parse(values | {"method": {"kind": "ppo"}}), 4, H100)
    assert alone is not None
    assert one is not None
    weights = 2 * 1.71e9
    assert alone.models["reward"].total == pytest.approx(2 * weights, rel=0.01)  # two of them
    assert one.models["reward"].total == 0
    served = Run.parse(values, {"method.kind": "grpo", "method.server": "http://localhost:8000/v1"})
    told = as_configured(served, 4, H100)
    assert told is not None
    assert told.servers == {"sampler": 1}
    assert told.num_gpus == 5
    assert as_configured(Run.parse(values), 4, H100) is None


@pytest.mark.parametrize("method", KEYS)
def test_the_bounds_of_a_methods_work_are_those_of_its_recipe(method):
    usual = Workload(prompts=8, group_size=4)
    for field, key in KEYS[method].items():
        legal = []
        for value in (1, 2, 3):
            try:
                Run.parse({"method": {"kind": method, key: value}})
                legal.append(value)
                check_work(method, replace(usual, **{field: value}))
            except ConfigError:
                option = f"--{field.replace('_', '-')} {value} is not valid"
                with pytest.raises(ConfigError, match=option):
                    check_work(method, replace(usual, **{field: value}))
        assert legal == ([2, 3] if (method, field) == ("grpo", "group_size") else [1, 2, 3])


def test_what_is_sampled_more_than_once_is_said():
    work = Workload(prompts=64, group_size=4, prompt_tokens=64, answer_tokens=64)
    for tp in (1, 4):
        found = plan("grpo", workload=work, pins=Pins(tp=tp))
        one = found.asked
        assert one.sampled_alike == tp
        alone = own_sampler(dims_of(PRESETS[SMALL], SMALL), work, H100, 8 // tp)
        assert one.times["decoding"] == alone.decode_s
        told = "\n".join(found.lines())
        for text in (told, render(found)):
            assert ("each answer is sampled 4 times" in text) == (tp > 1)
        run = Run.parse(recipe(found, PRESETS[SMALL], "x"))
        configured = as_configured(run, 8, H100)
        assert configured is not None
        assert configured.sampled_alike == found.as_json()["asked"]["sampled_alike"] == tp
