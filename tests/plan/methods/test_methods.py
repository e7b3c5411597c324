"""Plans of post-training methods: known figures, both sides of what fits, and the engine itself."""

import json
import subprocess
import sys
from dataclasses import replace
from math import ceil

import pytest

from stepwell.config import Run
from stepwell.hardware import GIB, measure_peak_allocated
from stepwell.parallel.mesh import init_distributed
from stepwell.parallel.rules import check_run
from stepwell.plan.cluster import cluster
from stepwell.plan.dryrun.fakes import fake_device, fake_ranks
from stepwell.plan.dryrun.watch import Watch, watching
from stepwell.plan.footprint.coefficients import SHIPPED
from stepwell.plan.job import dims_of, job_of
from stepwell.plan.memory.ledger import method_bytes_per_parameter
from stepwell.plan.memory.models import ModelBytes, predict_models
from stepwell.plan.methods.evaluated import evaluate, placed_models
from stepwell.plan.methods.methods import MethodPlan, plan_method
from stepwell.plan.methods.placements import (
    METHODS,
    OTHER_TRAINING,
    asked_of,
    changes,
    distance,
    settings_of,
    variants,
)
from stepwell.plan.methods.rollouts import Workload, weight_bytes
from stepwell.plan.methods.training import GATHERED_TRAINED, Question, handed_over, micro_batches
from stepwell.plan.search.space import Pins
from stepwell.plan.steptime.coefficients import SHIPPED as RATES
from stepwell.plan.steptime.step import predict_step
from stepwell.plan.units import size_text
from stepwell.presets import PRESETS
from stepwell.ranks import run_ranks
from stepwell.sections.model import ModelConfig
from stepwell.train.engine import Engine
from stepwell.types import ConfigError
from tests.oracle import base_run

H100 = cluster("h100-sxm")
GB = 1e9
SMALL = PRESETS["smollm2-360m"]
SEVENTY = PRESETS["llama3-70b"]


def plan(method: str, model: str, num_gpus: int, gpu: str = "h100-sxm", **more) -> MethodPlan:
    return plan_method(method, PRESETS[model], cluster(gpu), num_gpus, name=model, **more)


@pytest.fixture(scope="module")
def ppo_70b() -> MethodPlan:
    return plan("ppo", "llama3-70b", 8)


# --- known figures ---------------------------------------------------------------------------


def test_bytes_a_parameter(ppo_70b):
    assert ppo_70b.bytes_per_parameter == 36
    assert ppo_70b.state_bytes == pytest.approx(2540e9, rel=1e-3)
    assert method_bytes_per_parameter("ppo") == 36
    for method in ("grpo", "dpo"):
        found = plan(method, "smollm2-360m", 8).bytes_per_parameter
        assert found == method_bytes_per_parameter(method) == 18
    assert plan("grpo", "smollm2-360m", 8, kl=False).bytes_per_parameter == 16


def test_four_equal_models_of_70b_do_not_fit_on_eight(ppo_70b):
    """By ZeRO's count a model that is trained takes 16/8 bytes a parameter, 141 GB of 84."""
    asked = ppo_70b.asked
    assert not ppo_70b.fits
    assert asked.models["policy"].total == pytest.approx(141.1e9, rel=0.01)
    assert asked.models["critic"].total == pytest.approx(141.1e9, rel=0.02)
    assert asked.models["reference"].total == pytest.approx(17.6e9, rel=0.01)
    assert asked.models["reward"].total == pytest.approx(139e9, rel=0.01)  # whole, without a head
    assert ppo_70b.fewest_gpus is None  # what is whole on each GPU stays so
    # 30 bytes a parameter at once (the gradients of one model at a time), 2,117 GB and
    # activations, and four GPUs that serve
    assert ppo_70b.fewest_served is not None
    assert 32 <= ppo_70b.fewest_served <= 64
    text = "\n".join(ppo_70b.lines())
    assert f"it would fit from {ppo_70b.fewest_served} GPUs on" in text
    assert f"36 bytes a parameter, {size_text(ppo_70b.state_bytes)}" in text
    assert "it does not fit" in text
    assert "more GPUs do not help: the sampler's copy of the weights (131.4 GiB)" in text


def test_qlora_of_70b_fits_on_one_gpu():
    found = plan("qlora", "llama3-70b", 1)
    assert found.fits
    assert found.asked.models["policy"].parameters == pytest.approx(39.5e9, rel=0.02)
    assert 35e9 < found.asked.models["policy"].parameters < 40e9
    assert "1 GPU trains" in "\n".join(found.lines())
    assert not plan("lora", "llama3-70b", 1).fits  # 141 GB in 16 bits
    nearest = plan("lora", "llama3-70b", 1).nearest
    assert nearest is not None
    assert nearest.placement.adapters == "qlora"


def test_what_every_gpu_has_whole_is_not_told_as_bytes_a_parameter(ppo_70b):
    """A base in 4 bits is on each GPU: eight copies are not one of eight times the size."""
    one, eight = plan("qlora", "llama3-70b", 1), plan("qlora", "llama3-70b", 8)
    assert eight.bytes_per_parameter == one.bytes_per_parameter < 0.65
    assert eight.held_bytes == pytest.approx(8 * eight.asked.models["policy"].total)
    assert eight.held_bytes > 6 * eight.state_bytes
    assert one.held_bytes == pytest.approx(one.state_bytes, rel=1e-3)
    told = "\n".join(eight.lines())
    held = size_text(eight.held_bytes)
    assert f"a copy, {held} on 8 GPUs, each of which has the base in 4" in told
    assert "a copy" not in "\n".join(one.lines())
    whole = plan("lora", "llama3-70b", 8)
    assert whole.held_bytes < 1.1 * whole.state_bytes  # adapters, in part, on each tensor rank
    assert "a copy" not in "\n".join(whole.lines())
    assert "each of which has the reward model whole" in "\n".join(ppo_70b.lines())


def test_the_text_says_of_what_and_why(ppo_70b):
    found = plan("dpo", "llama3-70b", 8)
    told = "\n".join(found.lines())
    assert "a step's work: pairs of answers in 64 rows of 2,048 tokens" in told
    assert "a GPU has 79.1 GiB, 78.3 of them usable" in told
    assert found.asked.settings["layout.tp"] == 8
    assert "TP 8 comes nearest: at TP 1 training needs" in told
    on_16 = plan("dpo", "llama3-70b", 16).nearest
    assert on_16 is not None
    assert "TP 8 because at TP 1 training needs" in on_16.why_tp
    at_one = plan("dpo", "llama3-70b", 8, pins=Pins(tp=1)).asked
    assert at_one.why_tp == ""
    assert f"needs {size_text(at_one.peak)}" in told
    assert "float32 weights 32.9 GiB" in told
    assert "master 32.9" not in told
    work = Workload(prompts=7, group_size=4, prompt_tokens=100, answer_tokens=200, updates=2)
    told = "\n".join(plan("grpo", "smollm2-360m", 8, workload=work).lines())
    assert "7 prompts of 100 tokens, 4 answers of up to 200 to each, gone through 2 times" in told
    packed = "packed, each prompt once for its answers, they are 24 rows of 300 tokens to train on"
    assert packed in told


def test_both_sides_of_what_is_held_fixed():
    free = plan("dpo", "smollm2-360m", 8).asked
    held = plan("dpo", "smollm2-360m", 8, pins=Pins(recompute="full", micro_batch_rows=2)).asked
    assert free.settings["remat.mode"] == "none"
    assert held.settings["remat.mode"] == "full"
    assert "micro-batch 2" in held.layout
    spare = free.limit - held.peak
    for more, fits in ((-1e6, True), (1e6, False)):
        pins = Pins(recompute="full", micro_batch_rows=2, headroom_bytes=spare + more)
        assert plan("dpo", "smollm2-360m", 8, pins=pins).fits is fits
    for pins, said in ((Pins(pp=2), "--pp is not held fixed.*--micro-batch, --headroom"),
                       (Pins(tp=3), "--tp 3 must divide the 8 GPUs"),
                       (Pins(tp=8, max_tp=4), "--tp 8 is more than --max-tp 4"),
                       (Pins(headroom_bytes=80 * GIB), "80: a h100-sxm has")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            plan("dpo", "smollm2-360m", 8, pins=pins)
    with pytest.raises(ConfigError, match="with --tp 2: lora.quantize='nf4'"):
        plan("qlora", "llama3-8b", 8, pins=Pins(tp=2))


def test_micro_batches_are_as_even_as_their_number_allows():
    assert micro_batches(1) == [1]
    assert micro_batches(8) == [1, 2, 4, 8]
    assert micro_batches(5) == [1, 2, 3, 5]
    for rows in range(1, 400):
        sizes = micro_batches(rows)
        assert sizes[0] == 1
        assert sizes[-1] == rows
        assert all(ceil(rows / size) * size - rows < ceil(rows / size) for size in sizes)


def test_rows_that_eight_does_not_divide_are_gone_through_eight_at_a_time():
    """The answers of GRPO fill 364 rows; nothing that fits is faster than what is chosen."""
    free = plan("grpo", "smollm2-135m", 2).asked
    assert free.job.layout.global_batch_rows == 364
    assert free.job.layout.micro_batch_rows >= 4
    for rows in (2, 4, 8, 16, 32):
        held = plan("grpo", "smollm2-135m", 2, pins=Pins(micro_batch_rows=rows)).asked
        assert not held.fits or held.step_s > 0.98 * free.step_s, rows


@pytest.mark.parametrize("method", ["dpo", "lora"])
def test_the_rows_of_a_micro_batch_are_the_fastest_that_fit(method):
    """Before anything is said of another training."""
    free = plan(method, "llama3-8b", 8)
    assert free.asked.job.layout.micro_batch_rows > 1
    for rows in (1, 2, 4, 8):
        held = plan(method, "llama3-8b", 8, pins=Pins(micro_batch_rows=rows)).asked
        assert not held.fits or held.step_s > 0.98 * free.asked.step_s
    told = "\n".join(free.lines())
    if "another training" in told:
        assert told.index("another training") > told.index("and are faster")
    assert [one.trains_the_same for one in free.others] == sorted(
        (one.trains_the_same for one in free.others), reverse=True
    )


def test_a_frozen_base_is_divided_only_where_it_must_be():
    """16 GB of bf16 on every GPU, and nothing to gather; 141 GB are too much."""
    small, large = plan("lora", "llama3-8b", 8).asked, plan("lora", "llama3-70b", 8).asked
    assert (small.job.layout.dp_replicate, small.job.layout.dp_shard) == (8, 1)
    assert small.settings["layout.dp_replicate"] == 8
    assert small.models["policy"].total > 16e9
    assert large.fits
    assert large.job.layout.dp_shard * large.job.layout.tp > 1
    assert plan("dpo", "llama3-8b", 8).asked.job.layout.dp_replicate == 1


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_base_in_4_bits_is_never_faster_than_one_that_nobody_gathers(recompute):
    """At equal settings; restoring costs a share of what each pass does."""
    pins = Pins(recompute=recompute, micro_batch_rows=2)
    in_16, in_4 = (plan(method, "llama3-8b", 8, pins=pins).asked for method in ("lora", "qlora"))
    assert in_16.job.layout.dp_shard == 1
    layout = replace(in_16.job.layout, adapters=in_4.job.layout.adapters)
    same = predict_step(replace(in_16.job, layout=layout)).total_s
    assert in_16.step_s < 0.95 * same
    assert in_16.step_s < in_4.step_s <= same < 1.5 * in_16.step_s
    alone = plan("lora", "llama3-8b", 1, pins=pins).asked, plan("qlora", "llama3-8b", 1, pins=pins)
    assert alone[0].step_s < alone[1].asked.step_s


def test_dpo_of_70b_needs_more_gpus_or_the_host():
    found = plan("dpo", "llama3-70b", 8)
    assert not found.fits
    assert found.nearest is not None
    assert found.nearest.fits
    assert found.nearest.placement.offload == "parameters"
    # What is trained, a checkpoint on its way, eight processes.
    expected = (16 + 12) * 70.55e9 + 8 * 2.3 * GIB
    assert found.nearest.host_of_machine == pytest.approx(expected, rel=0.001)
    fewest = found.fewest_gpus
    assert fewest is not None
    assert 16 <= fewest <= 48  # 18 bytes a parameter are 1,270 GB, 16 GPUs' whole memory
    assert plan("dpo", "llama3-70b", fewest).fits
    assert not plan("dpo", "llama3-70b", fewest - 8).fits


# --- what fits -------------------------------------------------------------------------------


def test_the_nearest_fits_and_nothing_nearer_does(ppo_70b):
    question = Question("ppo", SEVENTY, dims_of(SEVENTY, "x"), H100, ppo_70b.workload, SEVENTY, 16)
    asked, nearest = asked_of("ppo"), ppo_70b.nearest
    assert nearest is not None
    assert nearest.peak <= nearest.limit
    assert nearest.lacks  # as it is, the engine cannot
    for placement in variants("ppo", asked):
        if distance(asked, placement) < nearest.distance:
            found = evaluate(question, asked, placement, 8)
            assert found is None or not found.fits, placement
    for other in ppo_70b.others:
        assert other.fits
        assert other.step_s < nearest.step_s


def test_both_sides_of_the_limit():
    """Where nothing fits, the layout is told that needs the least."""

    def on(memory_bytes: int):
        device = replace(H100.accelerator, memory_bytes=memory_bytes)
        at = replace(H100, accelerator=device)
        question = Question("grpo", SMALL, dims_of(SMALL, "x"), at, Workload(), SMALL, 16)
        found = evaluate(question, asked_of("grpo"), asked_of("grpo"), 2)
        assert found is not None
        return found

    least = on(1).peak
    enough = ceil(least / (1 - SHIPPED.margin))
    assert on(enough + 1).fits
    assert on(enough + 1).peak == pytest.approx(least)
    assert not on(enough - 1).fits


def test_the_host_has_a_limit_too():
    known = replace(H100, host_memory_bytes=1900 * GIB)
    enough = plan_method("dpo", SEVENTY, known, 8)
    assert enough.nearest is not None
    assert enough.nearest.placement.offload != "none"
    short = plan_method("dpo", SEVENTY, replace(known, host_memory_bytes=1800 * GIB), 8)
    assert short.nearest is not None
    assert short.nearest.placement.offload == "none"
    assert short.nearest.placement.adapters != "none"


def test_gpus_that_serve_count_for_what_a_machine_has(ppo_70b):
    """Four of a machine's eight GPUs train, and the others are used, too."""
    assert ppo_70b.nearest.servers
    assert ppo_70b.nearest.host_limit == ppo_70b.asked.host_limit == 8 * 256 * GIB


def test_every_setting_is_a_run_that_the_engine_takes():
    """The keys that a plan names, on as many ranks."""
    for method in METHODS:
        asked = asked_of(method)
        for placement in variants(method, asked):
            settings = settings_of(method, placement, 8)
            values = {"model": SMALL.model_dump(exclude_defaults=True)}
            run = Run.parse(values, {**settings, "data.seq_len": 1024})
            check_run(run, 8)
            assert run.method.kind == ("sft" if "lora" in method else method)
            if placement.reference in ("host", "cached", "adapter-off"):
                assert run.method.reference == placement.reference  # type: ignore[union-attr]
            assert (run.lora.quantize == "nf4") == (placement.adapters == "qlora")


def test_places_change_what_models_take_there():
    apart = {
        "policy": ModelBytes(0, 4, 4, 8),
        "critic": ModelBytes(0, 4, 4, 8),
        "reference": ModelBytes(2),
        "reward": ModelBytes(2),
    }
    full = placed_models(apart, asked_of("ppo"))
    assert sum(model.total for model in full.values()) == 36
    less = placed_models(apart, replace(asked_of("ppo"), critic="shared", reference="host"))
    assert sum(model.total for model in less.values()) == 18
    assert less["reference"].host == 2
    served = placed_models(apart, replace(asked_of("ppo"), reward="served"))
    assert served["reward"].total == 0
    grpo = placed_models(apart, asked_of("grpo", kl=False))
    assert sum(model.total for model in grpo.values()) == 16


def test_distances_are_those_of_what_changes():
    asked = asked_of("ppo")
    first = next(iter(variants("ppo", asked)))
    assert first == asked
    assert distance(asked, asked) == 0
    other = replace(asked, adapters="lora", reference="adapter-off")
    assert distance(asked, other) == OTHER_TRAINING
    same = [p for p in variants("ppo", asked) if p.adapters == "none"]
    assert max(distance(asked, p) for p in same) < OTHER_TRAINING
    assert changes(asked, other) == (
        "only adapters are trained",
        "the reference is the policy without its adapters",
    )
    every = list(variants("ppo", asked))
    assert len(every) == len(set(every)) > 30
    assert all(p.adapters != "none" for p in every if p.reference == "adapter-off")
    assert all(p.adapters == "qlora" for p in variants("qlora", asked_of("qlora")))


# --- against the engine ----------------------------------------------------------------------


def test_models_are_those_of_the_engines_own_ledger():
    values = {"model": SMALL.model_dump(exclude_defaults=True)}
    found = plan("ppo", "smollm2-360m", 4).asked
    run = Run.parse(values, {**found.settings, "data.seq_len": 1024})
    wanted = predict_models(run, 4)
    for name in ("policy", "critic", "reference"):
        assert found.models[name] == wanted[name], name


def test_packing_the_weights_holds_a_block_beside_the_copy():
    """In float32: of a run with adapters the block at work is merged. The copy of before is gone by
    then, as far as the new one takes its place."""
    model = ModelConfig(
        num_layers=8, d_model=128, num_heads=4, num_kv_heads=2, d_ff=384, vocab_size=512,
        head_dim=32,
    )  # fmt: skip
    precision = {f"precision.{key}": "fp32" for key in ("compute", "param", "reduce")}
    values = base_run().model_dump(exclude_none=True) | {"model": model.model_dump()}
    run = Run.parse(values, {"lora.rank": 4, **precision})
    engine, dims = Engine(run), dims_of(model, "tiny")
    new = 2 * weight_bytes(dims)  # float32
    block = (dims.parameters() - dims.embedding_parameters) // model.num_layers
    peak = measure_peak_allocated(engine.snapshot)
    assert new + 4 * block < peak < new + 12 * block
    engine.updates += 1
    assert measure_peak_allocated(engine.snapshot) < 12 * block


def pack_on_a_rank() -> tuple[float, float]:
    """Bytes a parameter at the peaks of packing a first and a second time."""
    keys = {"num_layers": 8, "d_model": 256, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 512}
    run = Run.parse({"model": {**keys, "d_ff": 1024}}, {"precision.compute": "bf16"})
    engine = Engine(run, mesh=init_distributed(run.layout))
    first = measure_peak_allocated(engine.snapshot)
    engine.updates += 1
    again = measure_peak_allocated(engine.snapshot)
    elements = dims_of(run.model).parameters()
    return first / elements, again / elements


@pytest.mark.slow
def test_ranks_gather_a_block_at_a_time_to_pack():
    """A block of eight in float32, and as it is packed."""
    for first, again in run_ranks(pack_on_a_rank, 2):
        assert 2 + GATHERED_TRAINED / 8 < first < 2 + 1.5 * GATHERED_TRAINED / 8
        assert again < 1.5 * GATHERED_TRAINED / 8


def test_new_weights_are_sent_as_the_engine_gathers_them():
    """A matrix at a time, by rows or by columns first. A base in 4 bits is whole already."""
    keys = {"num_layers": 2, "d_model": 256, "num_heads": 4, "num_kv_heads": 4, "d_ff": 1024}
    four = {"rank": 1, "quantize": "nf4"}
    for tp, lora in ((1, {}), (2, {}), (2, {"rank": 1}), (1, four)):
        run = Run.parse({"model": {**keys, "vocab_size": 8192}, "layout": {"tp": tp}, "lora": lora})
        with fake_ranks(run.layout, 8, 0) as mesh, fake_device():
            watch = Watch(list)
            engine = Engine(run, mesh=mesh)
            with watching(watch):
                for _ in engine.iter_state(merged=False):
                    pass
        layout = job_of(run, 8, H100).layout
        predicted = sum(
            one.calls * one.wire_bytes for one in handed_over(dims_of(run.model), layout)
        )
        counted = sum(one.calls * one.wire_bytes for one in watch.issued)
        assert predicted == pytest.approx(counted, rel=0.05), (tp, lora)


def test_new_weights_go_through_every_card_of_a_machine():
    """70B on 64: of what tensor ranks have by rows an eighth crosses each card."""
    asked = asked_of("grpo")

    def on(num_gpus: int, model: ModelConfig = SEVENTY):
        question = Question("grpo", model, dims_of(model, "x"), H100, Workload(), model, 16)
        found = evaluate(question, asked, asked, num_gpus)
        assert found is not None
        return found

    near, far = on(8), on(64)
    assert near.settings["layout.tp"] == far.settings["layout.tp"] == 8
    by_columns = 80 * 8192 * (8192 + 28672)
    least = 4 * 7 / 8 * (by_columns + (70.55e9 - by_columns) / 8) / (50e9 * RATES.network)
    inside = near.times["new weights"]
    assert far.times["new weights"] == pytest.approx(least + inside, rel=0.1)
    whole = on(64, PRESETS["llama3-8b"]).times["new weights"]
    assert whole == pytest.approx(4 * 63 / 64 * 8.03e9 / (8 * 50e9 * RATES.network), rel=0.6)


# --- time, words -----------------------------------------------------------------------------


def test_a_step_is_the_sum_of_its_parts():
    work = Workload(prompts=64, group_size=8, prompt_tokens=512, answer_tokens=512)
    one = plan("grpo", "smollm2-360m", 8, workload=work).asked
    assert one.step_s == pytest.approx(sum(one.times.values()))
    assert {"decoding", "scoring", "training", "new weights"} <= set(one.times)
    twice = plan("grpo", "smollm2-360m", 8, workload=replace(work, updates=2)).asked
    assert twice.times["training"] == pytest.approx(2 * one.times["training"])
    longer = plan("grpo", "smollm2-360m", 8, workload=replace(work, answer_tokens=1024)).asked
    assert longer.times["decoding"] > 1.9 * one.times["decoding"]
    critic = plan("ppo", "smollm2-360m", 8).asked
    assert critic.times["training the critic"] == critic.times["training"]


def test_json_and_lines(ppo_70b):
    found = json.loads(json.dumps(ppo_70b.as_json()))
    assert found["fits"] is False
    assert found["asked"]["peak"] == ppo_70b.asked.peak
    assert found["nearest"]["placement"]["sampler"] == "server"
    assert found["text"] == ppo_70b.lines()
    fits = plan("qlora", "llama3-70b", 8)
    assert any(line.startswith("it fits: ") for line in fits.lines())


def test_what_cannot_be_planned():
    with pytest.raises(ConfigError, match="--method 'gpro' .*did you mean 'grpo'.*ppo, grpo, dpo"):
        plan("gpro", "smollm2-360m", 8)
    with pytest.raises(ConfigError, match="--gpus 0 must be at least 1"):
        plan("dpo", "smollm2-360m", 0)


def test_without_torch():
    code = (
        "import sys; from stepwell.plan.methods.methods import plan_method; "
        "from stepwell.plan.cluster import cluster; from stepwell.presets import PRESETS; "
        "plan_method('dpo', PRESETS['smollm2-135m'], cluster('l4'), 2).lines(); "
        "from stepwell.plan.memory import host; from stepwell.plan.methods import zero; "
        "from stepwell.plan.pipeline import bubble, split, timeline_svg; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
