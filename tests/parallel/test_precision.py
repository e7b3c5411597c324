"""fp8 in the engine, delayed scaling's state, fp16's loss scale, and what bfloat16 leaves alone."""

import json
import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepwell.data.loader import rank_rows
from stepwell.models.fp8 import E4M3, E5M2, ROLES, G, W, scale_for
from stepwell.models.layers import Linear
from stepwell.parallel.fp8_layers import fp8_linears
from stepwell.parallel.precision import LossScale, _check_card, fp8_layers, without_fp8
from stepwell.sections.layout import LossScaleConfig
from stepwell.train.engine import Engine
from stepwell.train.losses import Loss, LossSums, cross_entropy
from stepwell.train.optim import grad_norm
from stepwell.types import ConfigError, TrainingError
from tests import oracle
from tests.oracle import assert_same, base_run, global_batch, one_step
from tests.parallel.ranks import run_ranks

RECIPES = ("tensorwise", "delayed", "rowwise")


def small_run(**overrides):
    """The oracle's run with sizes that 8 bits can do, in bfloat16 over float32 masters."""
    values = {
        "model.d_model": 32,
        "model.head_dim": 8,
        "model.d_ff": 48,
        "model.init_std": 0.1,
        "model.tied": False,
        "precision.compute": "bf16",
        "precision.param": "fp32",
        "precision.reduce": "fp32",
        "train.micro_batch_rows": 7,
    }
    return base_run(**values | overrides)


def build(run) -> Any:
    """Its engine. Any: a test knows which states its run has."""
    return Engine(run)


def layers_of(pieces) -> dict[str, Any]:
    return dict(fp8_layers(pieces))


def gradients(engine, batch=None):
    engine.forward_backward(batch or global_batch(), cross_entropy(engine.run.loss))
    return {name: p.grad.clone() for name, p in engine.named_parameters()}


def relative(got, wanted):
    pairs = [((got[k].double() - v.double()).norm(), v.double().norm()) for k, v in wanted.items()]
    return math.hypot(*(d for d, _ in pairs)) / math.hypot(*(n for _, n in pairs))


# --- fp8 in the engine -----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_layers_that_are_named_compute_in_8_bits(recipe):
    run = small_run(**{"precision.fp8.recipe": recipe, "precision.fp8.keep": ["*.w_down"]})
    engine = build(run)
    found = layers_of(engine.pieces)
    assert list(found) == fp8_linears(run)
    assert len(found) == 12
    others = {n for n, m in engine.decoder.named_modules() if isinstance(m, Linear)} - set(found)
    assert others == {"head", "blocks.0.mlp.w_down", "blocks.1.mlp.w_down"}
    assert all(layer.fp8.recipe == recipe for layer in found.values())
    assert engine.full_state_dict().keys() == build(small_run()).full_state_dict().keys()


def test_every_recipe_follows_bfloat16_and_each_in_its_own_way():
    plain = gradients(build(small_run()))
    settings = [(r, hp) for r in RECIPES for hp in (False, True)]
    found = [
        gradients(
            build(
                small_run(**{"precision.fp8.recipe": r, "precision.fp8.wgrad_high_precision": high})
            )
        )
        for r, high in settings
    ]
    for got in found:
        assert 0.01 < relative(got, plain) < 0.2
    # Delayed scaling without a history is tensorwise; row-wise scales, being powers of two, matter
    # only where values are tiny beside others.
    assert relative(found[0], found[2]) == 0
    assert all(relative(found[i], found[j]) > 1e-2 for i, j in [(0, 1), (4, 5)])


@pytest.mark.parametrize(("recipe", "survive"), [("tensorwise", False), ("rowwise", True)])
def test_rows_beside_a_large_one_survive_with_scales_of_their_own(recipe, survive):
    engine = build(small_run(**{"precision.fp8.recipe": recipe}))
    with torch.no_grad():
        engine.decoder.get_parameter("blocks.1.mlp.w_up.weight")[1:] *= 2.0**-20
    grad = gradients(engine)["blocks.1.mlp.w_gate.weight"]
    assert grad[0].any()
    assert grad[1:].any() == survive


def test_kept_layers_and_small_ones_see_no_8_bits():
    plain = gradients(build(small_run()))
    fp8 = {"precision.fp8.recipe": "tensorwise"}
    every = relative(gradients(build(small_run(**fp8))), plain)
    for more in ({"precision.fp8.keep": ["*.mlp.*"]}, {"precision.fp8.min_dim": 32}):
        assert 0 < relative(gradients(build(small_run(**fp8, **more))), plain) < every
    one = {"precision.fp8.keep": ["*.w?", "*.wo", "*.w_up", "*.w_gate", "blocks.0.*"]}
    engine = build(small_run(**fp8, **one))
    assert list(layers_of(engine.pieces)) == ["blocks.1.mlp.w_down"]
    engine.logprobs(global_batch())
    with without_fp8(engine.pieces):
        # Only the order of sums differs: with 8-bit layers the last block sees idle tokens, too.
        assert relative(gradients(engine), plain) < 1e-6
    assert list(layers_of(engine.pieces)) == ["blocks.1.mlp.w_down"]


def test_qkv_biases_are_added():
    run = {"model.family": "qwen2", "model.qkv_bias": True}
    results = []
    for recipe in ("none", "rowwise"):
        engine = build(small_run(**run, **{"precision.fp8.recipe": recipe}))
        with torch.no_grad():
            for name, parameter in engine.named_parameters():
                if name.endswith("bias"):
                    parameter.fill_(3.0)
        results.append(gradients(engine))
    assert relative(results[1], results[0]) < 0.2


def test_a_card_without_8_bits_is_refused():
    run = small_run(**{"precision.fp8.recipe": "rowwise"})
    _check_card((9, 0), run)
    with pytest.raises(ConfigError, match=r"capability 8\.9 .* has 8\.0; set recipe='none'"):
        _check_card((8, 0), run)
    wide = small_run(**{"precision.fp8.recipe": "rowwise", "precision.compute": "fp64"})
    with pytest.raises(ConfigError, match="compute='bf16', not 'fp64'"):
        _check_card((9, 0), wide)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_blocks_compute_the_same(recipe):
    fp8 = {"precision.fp8.recipe": recipe, "precision.compute": "fp32"}
    eager, compiled = (build(small_run(**fp8, **{"layout.compile": c})) for c in (False, True))
    assert relative(gradients(compiled), gradients(eager)) < 0.02
    if recipe == "delayed":
        for engine in (eager, compiled):
            engine.optim_step()
        torch.testing.assert_close(
            compiled.delayed_scaling.history_LRH, eager.delayed_scaling.history_LRH
        )
    with without_fp8(compiled.pieces), without_fp8(eager.pieces):
        assert relative(gradients(compiled), gradients(eager)) < 1e-4


# --- delayed scaling -------------------------------------------------------------------------

DELAYED = {"precision.fp8.recipe": "delayed", "precision.fp8.history": 3}


def test_history_is_the_maxima_of_the_last_steps():
    engine = build(small_run(**DELAYED))
    scaling, layers = engine.delayed_scaling, layers_of(engine.pieces)
    seen = []
    for _ in range(4):
        gradients(engine)
        gradients(engine)  # accumulating, or computing again, counts once
        seen.append(torch.stack([layer.fp8.seen for layer in layers.values()]).clone())
        engine.optim_step()
        assert not any(layer.fp8.seen.any() for layer in layers.values())
    assert seen[0].shape == (14, len(ROLES))
    assert torch.equal(scaling.history_LRH, torch.stack(seen[:0:-1], dim=-1))
    amax = scaling.history_LRH.amax(-1)
    for i, layer in enumerate(layers.values()):
        assert torch.equal(layer.fp8.scales[W], scale_for(amax[i, W], E4M3))
        assert torch.equal(layer.fp8.scales[G], scale_for(amax[i, G], E5M2))
    weight = layers["blocks.0.mlp.w_up"].weight
    index = list(layers).index("blocks.0.mlp.w_up")
    assert scaling.history_LRH[index, W, 0] != weight.abs().max()  # of before the last step


def step_with(engine, factor):
    """One step on the batch with its loss times `factor`, without changing the weights."""
    plain = cross_entropy(engine.run.loss)

    def fn(outputs, batch):
        found = plain.fn(outputs, batch)
        return LossSums({k: v * factor for k, v in found.sums.items()}, found.metrics)

    engine.forward_backward(global_batch(), Loss(plain.needs, plain.denominators, fn))
    grads = {name: p.grad.clone() for name, p in engine.named_parameters()}
    engine.delayed_scaling.update(engine.mesh)
    engine.optimizer.zero_grad()
    return grads


@pytest.mark.parametrize(("history", "remembers"), [(1, False), (3, True)])
def test_length_of_the_history_changes_the_scales(history, remembers):
    """A large step is two steps ago: it still bounds the scale, or does not."""
    engine = build(small_run(**DELAYED | {"precision.fp8.history": history}))
    layer = layers_of(engine.pieces)["blocks.1.mlp.w_down"]
    step_with(engine, 1024.0)
    large = layer.fp8.scales[G].item()
    step_with(engine, 1.0)
    step_with(engine, 1.0)
    assert layer.fp8.scales[G].item() == large * (1 if remembers else 1024)


def test_a_stale_scale_clips_for_one_step():
    engine = build(small_run(**DELAYED))
    step_with(engine, 1.0)
    clipped, fitting = step_with(engine, 4096.0), step_with(engine, 4096.0)
    name = "blocks.1.mlp.w_down.weight"
    assert clipped[name].norm() < 0.5 * fitting[name].norm()


def test_what_is_not_finite_does_not_enter_the_history():
    engine = build(small_run(**DELAYED))
    step_with(engine, 1.0)
    before = engine.delayed_scaling.history_LRH.clone()
    step_with(engine, math.nan)
    after = engine.delayed_scaling.history_LRH
    assert after.isfinite().all()
    # The last layer's gradients and, behind it, all others' were NaN: only x and w moved on.
    assert torch.equal(after[:, G], before[:, G])
    assert torch.equal(after[:, W, 1], before[:, W, 0])


def test_a_refused_step_still_counts_in_the_history():
    """Otherwise a scale that clips could make every later step a refused one, too."""
    engine = build(small_run(**DELAYED, **{"guard.min_history": 1, "guard.spike_factor": 2.0}))
    gradients(engine)
    engine.optim_step()
    engine.forward_backward(global_batch(), cross_entropy(engine.run.loss))
    for parameter in engine.decoder.parameters():
        parameter.grad.mul_(100)
    assert engine.optim_step().skipped
    assert (engine.delayed_scaling.history_LRH[:, :, 1] > 0).all()


def test_a_pass_that_is_dropped_leaves_no_maxima():
    engine = build(small_run(**DELAYED))
    gradients(engine)
    assert all(layer.fp8.seen.all() for layer in layers_of(engine.pieces).values())
    engine.drop_gradients()
    engine.delayed_scaling.update(engine.mesh)
    assert not engine.delayed_scaling.history_LRH.any()


def test_scoring_uses_the_scales_and_records_nothing():
    engine = build(small_run(**DELAYED))
    engine.logprobs(global_batch())
    engine.delayed_scaling.update(engine.mesh)
    assert not engine.delayed_scaling.history_LRH.any()


def train(run, folder, num_steps, resume):
    engine = build(run)
    if resume:
        engine.load(folder / resume)
    batch, loss = global_batch(), cross_entropy(run.loss)
    share = rank_rows(batch.num_rows, engine.mesh.data_rank, engine.mesh.data_world)
    found = {}
    for _ in range(num_steps):
        mine = batch.rows(share.start, share.stop)
        engine.forward_backward(mine, loss)
        numbers = engine.shadow(mine, loss)
        found = {f"grad/{n}": oracle.full(p.grad) for n, p in engine.named_parameters()}
        found["shadow"] = torch.tensor([numbers[key] for key in sorted(numbers)])
        norm = torch.tensor(engine.optim_step().grad_norm)
        found |= {"norm": norm, "history": engine.delayed_scaling.history_LRH.double()}
    found |= {f"weight/{n}": v for n, v in engine.iter_state()}
    engine.save(folder / f"at{engine.step}", {}).wait()
    return found


def test_delayed_scaling_goes_on_exactly_after_a_load(tmp_path):
    run = small_run(**DELAYED)
    straight = train(run, tmp_path / "a", 5, None)
    train(run, tmp_path / "b", 3, None)
    resumed = train(run, tmp_path / "b", 2, "at3")
    assert all(torch.equal(resumed[name], value) for name, value in straight.items())
    state = json.loads((tmp_path / "b" / "at3" / "state.json").read_text())["precision"]
    history = state["delayed_scaling"]["blocks.0.attn.wq"]
    assert [len(values) for values in history] == [3, 3, 3]
    assert all(value > 0 for values in history for value in values)


def test_a_shorter_history_takes_the_newest(tmp_path):
    train(small_run(**DELAYED), tmp_path, 3, None)
    shorter, plain = small_run(**DELAYED | {"precision.fp8.history": 2}), small_run()
    engine = build(shorter)
    engine.load(tmp_path / "at3")
    longer = build(small_run(**DELAYED))
    longer.load(tmp_path / "at3")
    wanted = longer.delayed_scaling.history_LRH[..., :2]
    assert torch.equal(engine.delayed_scaling.history_LRH, wanted)
    build(plain).load(tmp_path / "at3")  # and a run without fp8 can take over


EXACT = {
    "precision.compute": "fp64",
    "precision.param": "fp64",
    "precision.reduce": "fp64",
}
ROWWISE_HP = {"precision.fp8.recipe": "rowwise", "precision.fp8.wgrad_high_precision": True}


def layouts(folder, kinds):
    """In each rank: a step that goes on from the checkpoint, and a first step with row-wise scales,
    with 2 rows a micro-batch."""
    cut = {"train.micro_batch_rows": 2, "layout.zero": kinds}
    delayed = train(exact_run(**DELAYED, **cut), folder, 1, "at1")
    return delayed, one_step(exact_run(**ROWWISE_HP, **cut))


def exact_run(**overrides):
    return small_run(**EXACT, **overrides)


def test_a_layout_never_changes_the_numbers_of_fp8(tmp_path):
    """Delayed scales are those of the global batch, row-wise scales those of a token or a weight's
    row: how rows are split over ranks and micro-batches cannot matter."""
    train(exact_run(**DELAYED), tmp_path, 1, None)
    wanted = train(exact_run(**DELAYED), tmp_path, 1, "at1"), one_step(exact_run(**ROWWISE_HP))
    for num_ranks, zero in ((1, 3), (3, 1)):
        ranks = (
            [layouts(tmp_path, zero)]
            if num_ranks == 1
            else run_ranks(layouts, num_ranks, tmp_path, zero)
        )
        for found in ranks:
            for got, want, what in zip(found, wanted, ("delayed", "rowwise"), strict=True):
                assert_same(got, want, 1e-9, f"{what}, {num_ranks} ranks, zero {zero}")


WIDE = EXACT | DELAYED | {"model.vocab_size": 64, "model.head_dim": 16, "model.d_ff": 64}
AXES = {
    "tensor": {"layout.tp": 2},
    "pipeline": {"layout.pp": 2, "train.micro_batch_rows": 1},
    "zero bubble": {
        "layout.pp": 2,
        "layout.pp_schedule": "zbv",
        "layout.zero": 1,
        "layout.pp_stages_per_rank": 2,
        "train.micro_batch_rows": 1,
    },
    "context": {"layout.cp": 2},
    "recomputed": {"remat.mode": "full", "train.micro_batch_rows": 2},
}


def axes(folder):
    return {name: train(small_run(**WIDE, **more), folder, 1, "at1") for name, more in AXES.items()}


def test_delayed_scaling_is_the_same_on_every_axis(tmp_path):
    """Each goes on from one process's checkpoint, with its histories, records the same, and its
    shadow differs as much."""
    train(small_run(**WIDE), tmp_path, 1, None)
    wanted = train(small_run(**WIDE), tmp_path, 1, "at1")
    for rank in run_ranks(axes, 2, tmp_path):
        for name, got in rank.items():
            assert {"norm", "history", "shadow"} < got.keys()
            mine = {key: value for key, value in wanted.items() if key in got}
            assert_same(got, mine, 1e-9, name)


# --- fp16 ------------------------------------------------------------------------------------

FP16 = {"precision.compute": "fp16"}


def test_loss_scale_halves_and_doubles():
    scale = LossScale(LossScaleConfig(initial=64.0, growth_steps=3))
    for overflowed in (True, False, False, True, False, False, False, False, False):
        scale.update(overflowed)
    assert scale.value == 64 / 2 / 2 * 2
    assert scale.good_steps == 2
    again = LossScale(LossScaleConfig(growth_steps=3))
    again.load(json.loads(json.dumps(scale.state())))
    for s in (scale, again):
        s.update(False)
    assert again.value == scale.value == 64
    top = LossScale(LossScaleConfig(initial=2.0**24, growth_steps=1))
    top.update(False)
    assert top.value == 2.0**24


def test_gradients_are_unscaled_before_norm_clip_and_step():
    tiny = {"optim.clip_norm": 0.05}
    results = []
    for scale in (2.0**8, 2.0**12):
        engine = build(small_run(**FP16, **tiny, **{"precision.loss_scale.initial": scale}))
        scaled = gradients(engine)
        true_norm = grad_norm(engine.decoder.parameters()) / scale
        info = engine.optim_step()
        assert info.grad_norm == pytest.approx(true_norm, rel=1e-6)
        assert not info.skipped
        results.append((scaled, info.grad_norm, engine.full_state_dict()))
    wide = build(small_run(**tiny, **{"precision.compute": "fp32"}))
    wanted = gradients(wide)
    norm = wide.optim_step().grad_norm
    assert results[0][1] == pytest.approx(norm, rel=1e-2)
    assert results[1][1] == pytest.approx(norm, rel=1e-2)
    unscaled = {name: grad / 2**12 for name, grad in results[1][0].items()}
    assert relative(unscaled, wanted) < 0.01
    assert relative(results[1][2], wide.full_state_dict()) < 0.01


def test_without_a_scale_small_gradients_vanish():
    """The reason for it: of a loss that is 1e-5 times as large, fp16 keeps little."""
    errors = {}
    plain = cross_entropy(small_run().loss)

    def fn(outputs, batch):
        found = plain.fn(outputs, batch)
        return LossSums({k: v * 1e-5 for k, v in found.sums.items()}, found.metrics)

    small = Loss(plain.needs, plain.denominators, fn)
    wide = build(small_run(**{"precision.compute": "fp32"}))
    wide.forward_backward(global_batch(), small)
    wanted = {name: p.grad for name, p in wide.named_parameters()}
    for scale in (1.0, 65536.0):
        engine = build(small_run(**FP16, **{"precision.loss_scale.initial": scale}))
        engine.forward_backward(global_batch(), small)
        found = {name: p.grad / scale for name, p in engine.named_parameters()}
        errors[scale] = relative(found, wanted)
    assert errors[65536.0] < 0.01
    assert errors[1.0] > 0.1


def overflowing_run(**more):
    return small_run(**FP16, **{"precision.loss_scale.initial": 2.0**24}, **more)


def test_overflow_skips_halves_and_is_no_matter_of_the_guard():
    engine = build(overflowing_run(**{"guard.max_skips_in_a_row": 1}))
    before = engine.full_state_dict()
    infos = []
    while not infos or infos[-1].skipped:
        gradients(engine)
        infos.append(engine.optim_step())
        if infos[-1].skipped:
            after = engine.full_state_dict()
            assert all(torch.equal(after[name], value) for name, value in before.items())
            assert "overflowed fp16 at the loss scale" in infos[-1].reason
    assert len(infos) > 3
    assert engine.loss_scale.value == 2.0 ** (24 - len(infos) + 1)
    assert math.isfinite(infos[-1].grad_norm)
    assert engine.guard.num_skips == 0
    assert engine.step == len(infos)
    assert engine.updates == 1


def test_a_gradient_that_no_scale_can_help_is_the_guards():
    engine = build(
        small_run(**FP16, **{"guard.max_skips_in_a_row": 1, "precision.loss_scale.initial": 2.0})
    )
    with torch.no_grad():
        engine.decoder.get_parameter("blocks.0.mlp.w_up.weight").mul_(math.nan)
    gradients(engine)
    assert engine.optim_step().reason == "the loss is nan"
    gradients(engine)
    with pytest.raises(TrainingError, match="in a row"):
        engine.optim_step()
    assert engine.loss_scale.value == 2.0


def test_scale_is_in_the_checkpoint(tmp_path):
    run = small_run(**FP16, **{"precision.loss_scale.growth_steps": 2})
    engine = build(run)
    for _ in range(3):
        gradients(engine)
        assert not engine.optim_step().skipped
    engine.save(tmp_path / "at", {}).wait()
    again = build(run)
    again.load(tmp_path / "at")
    assert again.loss_scale.state() == engine.loss_scale.state()
    assert again.loss_scale.value == 2 * run.precision.loss_scale.initial


def fp16_steps():
    run = small_run(**FP16, **{"precision.loss_scale.initial": 2.0**20})
    engine = build(run)
    batch = global_batch()
    share = rank_rows(batch.num_rows, engine.mesh.data_rank, engine.mesh.data_world)
    seen = []
    for _ in range(8):
        engine.forward_backward(batch.rows(share.start, share.stop), cross_entropy(run.loss))
        info = engine.optim_step()
        seen.append((info.skipped, engine.loss_scale.value))
    dtypes = {p.dtype for p in engine.decoder.parameters()}
    return seen, info.grad_norm, engine.full_state_dict(), dtypes


def test_ranks_agree_on_overflow_and_follow_one_process():
    """Only some ranks' gradients may overflow; all skip, and halve alike."""
    seen, norm, weights, _ = fp16_steps()
    assert seen[0][0]
    assert not seen[-1][0]
    ranks = run_ranks(fp16_steps, 2)
    assert ranks[0][0] == ranks[1][0]
    for ranks_seen, ranks_norm, ranks_weights, dtypes in ranks:
        assert not ranks_seen[-1][0]
        assert dtypes == {torch.float32}
        if ranks_seen == seen:
            assert ranks_norm == pytest.approx(norm, rel=0.02)
            assert relative(ranks_weights, weights) < 0.02


# --- what bfloat16 leaves alone --------------------------------------------------------------


class Dtypes(TorchDispatchMode):
    """Which floating dtypes each operation was given."""

    def __init__(self):
        super().__init__()
        self.seen = defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs or {})):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.seen[func.overloadpacket._qualified_op_name.split("::")[1]].add(x.dtype)
        return found


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_what_stays_in_float32(compute):
    """The table of docs/precision.md: norms, rotary angles, softmax of the loss, its logarithms."""
    qwen = {"model.family": "qwen3", "model.qk_norm": True}
    engine = build(small_run(**qwen, **{"precision.compute": compute}))
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    plain, outputs = cross_entropy(engine.run.loss), []

    def fn(found, batch):
        outputs.append(found)
        return plain.fn(found, batch)

    needs = plain.needs | {"logprobs", "lse", "entropy"}
    with Dtypes() as dtypes:
        engine.forward_backward(global_batch(), Loss(needs, plain.denominators, fn))
    assert {x.dtype for x in outputs[0] if x is not None} == {torch.float32}
    wide = {"rsqrt": "norms", "cos": "rotary angles", "sin": "rotary angles",
            "_softmax": "loss", "log": "loss", "expm1": "loss's gradient"}  # fmt: skip
    for op, what in wide.items():
        assert dtypes.seen[op], f"{op} ({what}) was not called"
        assert dtypes.seen[op] <= {torch.float32, torch.float64}, what
    assert dtypes.seen["mm"] == {low}
    assert dtypes.seen["silu"] == {low}
    engine.optim_step()
    state = engine.optimizer.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert {p.dtype for p in engine.decoder.parameters()} == {torch.float32}


def reduced(reduce):
    """One step's full gradients of two ranks, and dtypes of what was summed over them."""
    run = small_run(**{"precision.reduce": reduce})
    engine = build(run)
    batch = global_batch()
    share = rank_rows(batch.num_rows, engine.mesh.data_rank, engine.mesh.data_world)
    with Dtypes() as dtypes:
        engine.forward_backward(batch.rows(share.start, share.stop), cross_entropy(run.loss))
    grads = {name: oracle.full(p.grad) for name, p in engine.named_parameters()}
    sums = {op: seen for op, seen in dtypes.seen.items() if "reduce_scatter" in op}
    return grads, sums


def both_reductions():
    return reduced("fp32"), reduced("bf16")


def test_gradients_are_summed_over_ranks_in_the_reduce_dtype():
    (wide, wide_sums), (low, low_sums) = run_ranks(both_reductions, 2)[0]
    assert set().union(*wide_sums.values()) == {torch.float32}
    assert torch.bfloat16 in set().union(*low_sums.values())
    assert all(grad.dtype == torch.float32 for grad in wide.values())
    one = gradients(build(small_run()))
    assert relative(wide, one) < relative(low, one)


def test_masters_keep_what_bfloat16_would_lose():
    """Steps a thousandth of a weight's size add up, though none changes its bfloat16 copy."""
    engine = build(small_run(**{"optim.lr": 1e-6, "optim.weight_decay": 0.0}))
    before = engine.full_state_dict()
    for _ in range(3):
        gradients(engine)
        engine.optim_step()
    after = engine.full_state_dict()
    name = "blocks.0.mlp.w_up.weight"
    moved = before[name] != after[name]
    assert moved.float().mean() > 0.9
    assert (before[name].bfloat16() != after[name].bfloat16()).float().mean() < 0.05
