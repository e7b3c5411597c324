"""The shadow check: its numbers, that it changes nothing, and that loops log and report it; the
loss scale in the log."""

import math
import os

import pytest
import torch

from stepwell.config import Run
from stepwell.data.loader import rank_rows
from stepwell.metrics import read_events, read_lines
from stepwell.models.axes import AXES
from stepwell.posttrain.sft import sft
from stepwell.tokenizer import Tokenizer
from stepwell.train.losses import cross_entropy
from stepwell.train.pretrain import pretrain
from stepwell.train.shadow import COSINE, DIFFERENCE, compare, kind_of, worst
from stepwell.types import TrainingError
from tests import oracle, runs
from tests.oracle import global_batch
from tests.parallel.ranks import run_ranks
from tests.parallel.test_precision import RECIPES, build, layers_of, small_run


def alone():
    return build(small_run()).mesh


def test_numbers_are_those_of_their_definition():
    names = ["embed.weight", "blocks.0.attn.wq.weight", "blocks.1.attn.wq.weight"]
    wanted = {name: torch.randn(3, 4, dtype=torch.float64) for name in names}
    found = {name: value + 0.1 * torch.randn(3, 4) for name, value in wanted.items()}
    numbers = compare(found, wanted, alone(), names[1:])
    a, b = (torch.cat([x[n].flatten() for n in names[1:]]) for x in (found, wanted))
    assert numbers[DIFFERENCE] == pytest.approx(((a - b).norm() / b.norm()).item())
    assert numbers[COSINE] == pytest.approx(torch.cosine_similarity(a, b, dim=0).item())
    assert numbers[f"{DIFFERENCE}.attn.wq"] == numbers[DIFFERENCE]
    a, b = (x["embed.weight"] for x in (found, wanted))
    assert numbers[f"{DIFFERENCE}.embed"] == pytest.approx(((a - b).norm() / b.norm()).item())
    assert set(numbers) == {DIFFERENCE, COSINE, f"{DIFFERENCE}.embed", f"{DIFFERENCE}.attn.wq"}


def test_equal_gradients_differ_by_nothing_and_nan_is_shown():
    gradients = {"norm.weight": torch.ones(4), "embed.weight": torch.ones(2, 4)}
    numbers = compare(gradients, gradients, alone(), gradients)
    assert numbers[DIFFERENCE] == 0
    assert numbers[COSINE] == 1
    nan = gradients | {"norm.weight": torch.full((4,), math.nan)}
    broken = compare(nan, gradients, alone(), gradients)
    assert math.isnan(broken[DIFFERENCE])
    assert worst(broken) == "norm"
    none = {"norm.weight": None}
    assert compare(none, gradients, alone(), gradients)[DIFFERENCE] == 0


def test_every_parameter_has_a_group():
    assert kind_of("blocks.12.mlp.w_down.weight") == "mlp.w_down"
    assert kind_of("head.weight") == "head"
    assert {kind_of(name) for name in AXES} >= {"attn.wq", "mlp.w_up", "embed", "norm", "attn_norm"}


def steps(recipe, shadow, num_steps=3):
    """This rank's shadow numbers, and everything that a shadow step could have touched."""
    torch.manual_seed(1)
    engine = build(small_run(**{"precision.fp8.recipe": recipe, "train.micro_batch_rows": 2}))
    batch, loss = global_batch(), cross_entropy(engine.run.loss)
    share = rank_rows(batch.num_rows, engine.mesh.data_rank, engine.mesh.data_world)
    mine, numbers = batch.rows(share.start, share.stop), []
    for _ in range(num_steps):
        engine.forward_backward(mine, loss)
        before = {name: p.grad for name, p in engine.named_parameters()}
        if shadow:
            numbers.append(engine.shadow(mine, loss))
            assert all(p.grad is before[name] for name, p in engine.named_parameters())
        layers = layers_of(engine.pieces).values()
        state = {
            f"seen/{i}": x.fp8.seen.clone()
            for i, x in enumerate(layers)
            if x.fp8.scales is not None
        }
        state |= {f"grad/{name}": oracle.full(grad) for name, grad in before.items()}
        engine.optim_step()
    state |= engine.full_state_dict() | {"rng": torch.get_rng_state()}
    state |= {f"state/{k}": oracle.full(v) for k, v in engine.optimizer.state_dict().items()}
    if engine.delayed_scaling is not None:
        state["history"] = engine.delayed_scaling.history_LRH
    return numbers, state


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_shadow_changes_nothing(recipe):
    numbers, with_shadow = steps(recipe, True)
    _, without = steps(recipe, False)
    assert all(torch.equal(with_shadow[name], value) for name, value in without.items())
    assert with_shadow.keys() == without.keys()
    for found in numbers:
        assert 0.01 < found[DIFFERENCE] < 0.2
        assert 0.98 < found[COSINE] < 1
        assert found[f"{DIFFERENCE}.mlp.w_down"] > 0.01
    assert numbers[0] != numbers[1]


def both():
    return steps("delayed", True), steps("delayed", False)


def test_ranks_agree_with_each_other_and_with_one_process():
    ranks = run_ranks(both, 2)
    alone, _ = steps("delayed", True)
    for (numbers, with_shadow), (_, without) in ranks:
        assert all(torch.equal(with_shadow[name], value) for name, value in without.items())
        assert numbers == ranks[0][0][0]
        # bfloat16 sums of other micro-batches round otherwise.
        assert numbers[0][DIFFERENCE] == pytest.approx(alone[0][DIFFERENCE], rel=0.15)


def test_without_fp8_there_is_no_difference():
    """What is compared is fp8 and nothing else: with no layer in 8 bits the gradients are equal."""
    engine = build(small_run())
    loss = cross_entropy(engine.run.loss)
    with pytest.raises(TrainingError, match="forward_backward"):
        engine.shadow(global_batch(), loss)
    engine.forward_backward(global_batch(), loss)
    assert engine.shadow(global_batch(), loss)[DIFFERENCE] == 0


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = runs.make_world(tmp_path_factory.mktemp("world"))
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.mark.parametrize("method", ["pretrain", "sft"])
def test_loops_log_it_every_so_many_steps_and_report_what_is_too_far(world, method):
    fp8 = {"precision.fp8.recipe": "rowwise", "train.steps": 5, "train.log_every": 5}
    fp8["method.kind"] = method
    shadow = {"precision.fp8.shadow_every": 2}

    def run(name, **more):
        run = Run.parse({}, runs.settings(method, f"{method}-{name}", **fp8, **more))
        if method == "pretrain":
            pretrain(run)
        else:
            sft(run, Tokenizer.load("tokenizer"))
        return world / f"{method}-{name}"

    quiet = run("quiet", **shadow)
    lines = [line for line in read_lines(quiet / "metrics.jsonl") if DIFFERENCE in line]
    assert [line["step"] for line in lines] == [2, 4]
    # In the step's own line, whose time is without the check's.
    steps = [
        line["step"] for line in read_lines(quiet / "metrics.jsonl") if "eval/loss" not in line
    ]
    assert steps == [2, 4, 5]
    assert all(line["train/loss"] > 0 for line in lines)
    assert all(line["time/step_s"] > 0 for line in lines)
    assert all(0.01 < line[DIFFERENCE] < 0.2 for line in lines)
    assert all(line["time/shadow_s"] > 0 for line in lines)
    assert not [e for e in read_events(quiet) if e["event"] == "fp8_drift"]
    loud = run("loud", **shadow, **{"precision.fp8.shadow_tolerance": 0.01})
    events = [e for e in read_events(loud) if e["event"] == "fp8_drift"]
    assert [e["step"] for e in events] == [2, 4]
    for event, line in zip(events, lines, strict=True):
        assert event["difference"] == line[DIFFERENCE]
        assert line[f"{DIFFERENCE}.{event['layers']}"] == max(
            value for key, value in line.items() if key.startswith(f"{DIFFERENCE}.")
        )
    runs.assert_equal(runs.final_weights(loud), runs.final_weights(run("none")))


def test_the_log_shows_the_loss_scale_of_each_step(world):
    fp16 = {
        "precision.compute": "fp16",
        "precision.loss_scale.initial": 2.0**24,
        "precision.loss_scale.growth_steps": 2,
    }
    pretrain(Run.parse({}, runs.settings("pretrain", "fp16", **fp16, **{"train.steps": 12})))
    lines = read_lines(world / "fp16" / "metrics.jsonl")
    scale, good = 2.0**24, 0
    for line in lines:
        good = 0 if line["train/skipped"] else good + 1
        scale *= 0.5 if line["train/skipped"] else 2 if good == 2 else 1
        good %= 2
        assert line["precision/loss_scale"] == scale
    skips = [e for e in read_events(world / "fp16") if e["event"] == "skip"]
    assert [e["step"] for e in skips] == [n["step"] for n in lines if n["train/skipped"]]
    assert "overflowed fp16 at the loss scale" in skips[0]["reason"]
    assert not lines[-1]["train/skipped"] or not lines[-2]["train/skipped"]
