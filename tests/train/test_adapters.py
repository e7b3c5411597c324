"""Runs with adapters: what is trained, saved, loaded, merged, and what is refused."""

import gc
import json
import shutil
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from stepwell.generate import Request, Sampling
from stepwell.models.flops import parameter_shapes
from stepwell.models.lora_shapes import adapter_shapes, is_adapter
from stepwell.models.peft import save_peft
from stepwell.models.quantize import dequantise_nf4, quantise_nf4
from stepwell.parallel.adapters import quantised_bytes
from stepwell.parallel.init import normal_
from stepwell.plan.memory.ledger import nf4_bytes_per_parameter
from stepwell.sections.methods import GRPO
from stepwell.train.adapters import RECORD, resolve_adapter
from stepwell.train.checkpoint import load_weights
from stepwell.train.engine import Engine
from stepwell.train.losses import Loss, cross_entropy
from stepwell.train.run_checkpoints import read_state
from stepwell.train.weights import (
    checkpoint_weights,
    drawn_weights,
    first_weights,
    initial_weights,
    resolve,
)
from stepwell.types import CheckpointError, ConfigError, TrainingError
from tests.oracle import base_run, global_batch

SINGLE = {"precision.compute": "fp32", "precision.param": "fp32", "precision.reduce": "fp32"}
LORA = {"lora.rank": 3, "lora.alpha": 6.0, "optim.lr": 0.05, **SINGLE}


def train(engine: Engine, steps: int = 2) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(engine.forward_backward(global_batch(), cross_entropy(engine.run.loss)).loss)
        engine.optim_step()
    return losses


def trained(**more: Any) -> Engine:
    engine = Engine(base_run(**{**LORA, **more}))
    train(engine)
    return engine


def logprobs(engine: Engine) -> torch.Tensor:
    return engine.logprobs(global_batch())


def same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


# --- what is trained -----------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"lora.dora": True}, {"lora.quantize": "nf4"}])
def test_only_adapters_change_have_state_and_are_saved(tmp_path, more):
    engine = Engine(base_run(**{**LORA, **more}))
    before = engine.full_state_dict(merged=False)
    train(engine)
    after = engine.full_state_dict(merged=False)
    wanted = adapter_shapes(engine.run.model, engine.run.lora)
    assert {name for name in after if not torch.equal(after[name], before[name])} == set(wanted)
    slots = engine.optimizer.state_dict()
    assert {name.rsplit(".", 1)[0] for name in slots} == set(wanted)
    engine.save(tmp_path / "c", {}).wait()
    state = read_state(tmp_path / "c")
    assert state["optim"].keys() == wanted.keys()
    assert state[RECORD]["base"]["fingerprint"] == engine.model.base
    assert state[RECORD]["lora"]["rank"] == 3
    stored = dict(load_weights(tmp_path / "c", wanted))  # strict: nothing else is there
    same(stored, {name: after[name] for name in wanted})


@pytest.mark.parametrize("more", [{}, {"lora.dora": True}])
def test_training_begins_at_the_base(more):
    adapted, plain = Engine(base_run(**LORA, **more)), Engine(base_run(**SINGLE))
    assert torch.allclose(logprobs(adapted), logprobs(plain), atol=1e-6)
    losses = train(adapted, 6)
    assert losses[-1] < losses[0] - 0.05


def test_a_frozen_matrix_has_the_bytes_of_compute_precision():
    run = base_run(**{**LORA, "precision.compute": "bf16"})
    engine = Engine(run)
    for name, parameter in engine.named_parameters():
        matrix = not is_adapter(name) and parameter.dim() == 2
        assert parameter.element_size() == (2 if matrix else 4), name


EFFECTS = {
    "lora.rank": {"lora.rank": 4},
    "lora.alpha": {"lora.alpha": 12.0},
    "lora.dropout": {"lora.dropout": 0.3},
    "lora.targets": {"lora.targets": r'["blocks\\.0\\.attn\\.wq"]'},
    "lora.dora": {"lora.dora": True},
    "lora.rslora": {"lora.rslora": True},
    "lora.quantize": {"lora.quantize": "nf4"},
    "lora.double_quantize": {"lora.quantize": "nf4", "lora.double_quantize": False},
}


def test_every_key_has_an_effect():
    found = {key: logprobs(trained(**more)) for key, more in {"": {}, **EFFECTS}.items()}
    for key, values in found.items():
        others = [other for name, other in found.items() if name != key]
        assert all((values - other).abs().max() > 1e-5 for other in others), key


# --- dropout -------------------------------------------------------------------------------------


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    engine.forward_backward(global_batch(), cross_entropy(engine.run.loss))
    return {n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_dropout_is_the_same_for_every_split_and_recomputation(mode):
    values = {"lora.rank": 3, "lora.dropout": 0.4, "remat.mode": mode}
    wanted = gradients(Engine(base_run(**{"lora.rank": 3, "lora.dropout": 0.4})))
    dry = gradients(Engine(base_run(**{"lora.rank": 3})))
    for rows in (1, 3, 7):
        found = gradients(Engine(base_run(**values, **{"train.micro_batch_rows": rows})))
        for name, value in wanted.items():
            scale = value.abs().max().item()
            assert (found[name] - value).abs().max() <= 1e-10 * max(scale, 1e-3), name
    far = [n for n in wanted if ".lora_b." in n and (dry[n] - wanted[n]).abs().max() > 1e-3]
    assert len(far) > 10


def test_dropout_changes_from_step_to_step_and_is_off_in_scoring():
    engine = Engine(base_run(**{**LORA, "lora.dropout": 0.4, "optim.lr": 1e-12}))
    losses = train(engine, 2)
    again = train(Engine(engine.run), 2)
    assert losses == again
    values = [value for _, value in engine.named_parameters() if value.dim() == 2]
    for value in values:
        value.data.add_(0.05 if value.requires_grad else 0)
    first = gradients(engine)
    engine.drop_gradients()
    engine.step += 1
    second = gradients(engine)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    dry = Engine(base_run(**{**LORA, "lora.dropout": 0.0}))
    for (_, mine), (_, other) in zip(
        engine.named_parameters(), dry.named_parameters(), strict=True
    ):
        other.data.copy_(mine.data)
    assert torch.equal(logprobs(engine), logprobs(dry))


def test_the_ratio_of_an_on_policy_step_is_exactly_1_under_dropout():
    """The policy loss's NaN for "the current ones" gives the gradient of the plain policy gradient
    with the very same masks."""
    from stepwell.posttrain.policy.loss import policy_loss, streams

    method = GRPO()
    engine = Engine(base_run(**{**LORA, "lora.dropout": 0.4}))
    train(engine, 1)
    batch = global_batch()
    generator = torch.Generator().manual_seed(0)
    advantages_BT = torch.randn(batch.tokens_BT.shape, generator=generator)
    nan_BT = torch.full_like(advantages_BT, torch.nan)
    extra = {name: nan_BT if "logprobs" in name else advantages_BT for name in streams(method)}
    batch.extra.update(extra | {"sampler_logprobs": engine.logprobs(batch)})
    seen = {}

    def watched(inner: Loss) -> Loss:
        def fn(outputs, part):
            sums = inner.fn(outputs, part)
            for name, (total, _) in sums.metrics.items():
                seen[name] = seen.get(name, 0.0) + total.item()
            return sums

        return Loss(inner.needs, inner.denominators, fn, inner.whole_rows)

    engine.forward_backward(batch, watched(policy_loss(method)))
    assert seen["kl_old"] == 0.0
    assert seen["clipped_share"] == 0.0


# --- adapters off --------------------------------------------------------------------------------


def test_reference_logprobs_are_those_of_the_base_and_leave_the_policy_alone():
    engine = trained()
    policy = logprobs(engine)
    found = engine.reference_logprobs(global_batch(), 0.7)
    base = Engine(base_run(**SINGLE))
    assert torch.equal(found, base.logprobs(global_batch(), 0.7))
    assert (policy - engine.reference_logprobs(global_batch())).abs().max() > 1e-2
    assert torch.equal(logprobs(engine), policy)
    with pytest.raises(TrainingError, match=r"lora\.rank=0"):
        base.reference_logprobs(global_batch())


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"lora.dropout": 0.3}, {"lora.quantize": "nf4"}])
def test_going_on_is_bit_equal(tmp_path, more):
    engine = trained(**more)
    engine.save(tmp_path / "c", {}).wait()
    wanted = train(engine, 2)
    again = Engine(engine.run)
    again.load(tmp_path / "c")
    assert train(again, 2) == wanted
    same(again.full_state_dict(), engine.full_state_dict())


@pytest.fixture
def saved(tmp_path):
    """A whole model in `base`, adapters over it in `adapters`."""
    Engine(base_run(**SINGLE, **{"train.seed": 8})).save(tmp_path / "base", {}).wait()
    run = base_run(**LORA, **{"model.init": str(tmp_path / "base")})
    engine = Engine(run, initial_weights(run.model))
    train(engine)
    engine.save(tmp_path / "adapters", {}).wait()
    return tmp_path, engine


def test_another_base_is_refused(saved):
    folder, engine = saved
    with pytest.raises(CheckpointError, match=r"over another base: model\.init=.*base"):
        Engine(engine.run).load(folder / "adapters")
    moved = dict(initial_weights(engine.run.model) or ())
    moved["blocks.1.mlp.w_up.weight"] *= 1.0001
    with pytest.raises(CheckpointError, match="over another base"):
        Engine(engine.run, moved.items()).load(folder / "adapters")
    copy = shutil.copytree(folder / "base", folder / "copy")
    run = base_run(**LORA, **{"model.init": str(copy)})
    Engine(run, initial_weights(run.model)).load(folder / "adapters")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lora.alpha": 7.0}, r"lora\.alpha is 6\.0 there and 7\.0 here"),
        ({"lora.rslora": True}, r"lora\.rslora is False there"),
        ({"lora.quantize": "nf4"}, r"lora\.quantize is 'none' there"),
        ({"lora.targets": '["blocks.0.attn.wq"]'}, r"lora\.targets is"),
        ({"lora.rank": 0, "lora.alpha": 16.0}, r"holds adapters only; model\.init takes it"),
    ],
)
def test_other_adapters_are_refused(saved, more, message):
    folder, engine = saved
    run = base_run(**{**LORA, "model.init": str(folder / "base"), **more})
    other = Engine(run, initial_weights(engine.run.model))
    with pytest.raises(CheckpointError, match=message):
        other.load(folder / "adapters")


def test_what_changes_no_number_may_differ(saved):
    folder, engine = saved
    more = {"lora.dropout": 0.2, "lora.targets": r'["blocks\\.[01]\\..*\\.w.*"]'}
    run = base_run(**{**LORA, "model.init": str(folder / "base"), **more})
    again = Engine(run, initial_weights(engine.run.model))
    again.load(folder / "adapters")
    assert torch.equal(logprobs(again), logprobs(engine))


def test_a_whole_model_is_no_checkpoint_of_adapters(saved):
    folder, engine = saved
    with pytest.raises(CheckpointError, match=r"holds a whole model, but lora\.rank=3"):
        Engine(engine.run, initial_weights(engine.run.model)).load(folder / "base")


# --- merged --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [{}, {"lora.dora": True}, {"lora.quantize": "nf4"}, {"precision.compute": "bf16"}],
)
def test_a_checkpoint_of_adapters_is_a_start_with_their_merged_weights(saved, more):
    folder, _ = saved
    run = base_run(**{**LORA, "model.init": str(folder / "base"), **more})
    engine = Engine(run, initial_weights(run.model))
    train(engine)
    engine.save(folder / "more", {}).wait()
    next_run = resolve(base_run(**SINGLE, **{"model.init": str(folder / "more")}))
    weights = dict(initial_weights(next_run.model) or ())
    wanted = engine.full_state_dict()
    assert weights.keys() == parameter_shapes(run.model).keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(weights[name].to(value.dtype), value), name
    plain = Engine(next_run, weights.items())
    if not more.get("precision.compute"):
        assert torch.allclose(logprobs(plain), logprobs(engine), atol=2e-6)
    request = Request(0, (3, 5, 7))
    sampling = Sampling(max_new_tokens=6, temperature=0.0)
    (mine,), (theirs,) = (e.generate([request], sampling) for e in (engine, plain))
    if not more.get("precision.compute"):
        assert mine.token_ids == theirs.token_ids


def test_adapters_over_a_drawn_base_merge_too(tmp_path):
    engine = trained()
    engine.save(tmp_path / "c", {}).wait()
    found = dict(checkpoint_weights(tmp_path / "c", engine.run.model))
    same(found, engine.full_state_dict())
    drawn = dict(drawn_weights(engine.run.model, engine.run.train.seed))
    same(drawn, Engine(base_run(**SINGLE)).full_state_dict())


def test_adapters_over_adapters(saved):
    """The second run's base is the first one's merged weights, and its merge finds both."""
    folder, first = saved
    run = resolve(base_run(**{**LORA, "model.init": str(folder / "adapters"), "train.seed": 4}))
    second = Engine(run, initial_weights(run.model))
    assert torch.allclose(logprobs(second), logprobs(first), atol=2e-6)
    train(second)
    second.save(folder / "second", {}).wait()
    same(dict(checkpoint_weights(folder / "second", run.model)), second.full_state_dict())
    shutil.rmtree(folder / "adapters")
    with pytest.raises(CheckpointError, match=r"base is not where it was, .*adapters; put it back"):
        checkpoint_weights(folder / "second", run.model)


def test_a_base_that_has_changed_is_found_before_the_end(saved):
    folder, engine = saved
    shutil.rmtree(folder / "base")
    Engine(base_run(**SINGLE, **{"train.seed": 9})).save(folder / "base", {}).wait()
    weights = checkpoint_weights(folder / "adapters", engine.run.model)
    with pytest.raises(CheckpointError, match="over another base"):
        dict(weights)


def test_a_base_that_a_program_gave_cannot_be_found(tmp_path):
    weights = Engine(base_run(**SINGLE, **{"train.seed": 8})).full_state_dict()
    engine = Engine(base_run(**LORA), weights.items())
    engine.save(tmp_path / "c", {}).wait()
    with pytest.raises(CheckpointError, match="a program gave the weights of their base"):
        checkpoint_weights(tmp_path / "c", engine.run.model)


# --- going on from an adapter --------------------------------------------------------------------


@pytest.mark.parametrize("peft", [False, True])
def test_training_goes_on_from_an_adapter(saved, peft):
    folder, engine = saved
    cfg, lora = engine.run.model, engine.run.lora
    place = folder / "adapters"
    if peft:
        place = folder / "peft"
        state = engine.full_state_dict(merged=False)
        save_peft(place, cfg, lora, [(n, v) for n, v in state.items() if is_adapter(n)])
    values = {"model.init": str(folder / "base"), "lora.init": str(place)}
    run = resolve(base_run(**SINGLE, **values))
    assert run.lora.rank == 3
    assert run.lora.alpha == 6.0
    again = Engine(run, initial_weights(run.model))
    assert torch.equal(logprobs(again), logprobs(engine))
    assert resolve_adapter(run) == run
    plain = dict(first_weights(run) or ())
    same(plain, again.full_state_dict())
    train(again, 1)
    assert not torch.equal(logprobs(again), logprobs(engine))


def test_a_contradiction_with_the_adapter_is_named(saved):
    folder, _ = saved
    values = {**SINGLE, "model.init": str(folder / "base"), "lora.init": str(folder / "adapters")}
    for more in ({"lora.alpha": 5.0}, {"lora.rank": 3, "lora.alpha": 5.0}):
        with pytest.raises(ConfigError, match=r"lora\.alpha=5\.0 contradicts .* it is 6\.0"):
            resolve(base_run(**values, **more))
    with pytest.raises(CheckpointError, match="holds a whole model, no adapter"):
        resolve(base_run(**{**values, "lora.init": str(folder / "base")}))


def test_an_adapter_of_another_base_is_refused(saved):
    folder, _ = saved
    with pytest.raises(CheckpointError, match="over another base"):
        Engine(base_run(**SINGLE, **{"lora.init": str(folder / "adapters")}))


# --- 4 bits --------------------------------------------------------------------------------------


def live_bytes() -> int:
    """Of all tensors that Python can reach; those that compilation left behind hold nothing."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, (FakeTensor, FunctionalTensor)):
            continue
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            try:
                found[storage.data_ptr()] = storage.nbytes()
            except RuntimeError:  # of other kinds that hold nothing
                continue
    return sum(found.values())


@pytest.mark.parametrize("double", [True, False])
def test_a_base_in_4_bits_really_is(double):
    """Measured on every tensor alive: the engine's, less what is no base weight."""
    values = {"model.d_model": 256, "model.d_ff": 512, "model.num_heads": 4, "model.head_dim": 64,
              **LORA, "lora.quantize": "nf4", "lora.double_quantize": double,
              "lora.rank": 1}  # fmt: skip
    quantise_nf4(torch.ones(4, 64))  # what every use shares
    before = live_bytes()
    engine = Engine(base_run(**values))
    rest = sum(p.nbytes for _, p in engine.named_parameters())
    num_bytes, num_elements = quantised_bytes(engine.pieces)
    assert num_elements == 2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512)
    assert all(n.startswith("blocks.") is False or p.dim() == 1 or is_adapter(n)
               for n, p in engine.named_parameters())  # fmt: skip
    per_element = (live_bytes() - before - rest) / num_elements
    wanted = nf4_bytes_per_parameter(double_quantised=double)
    assert num_bytes / num_elements == pytest.approx(wanted, abs=2e-4)
    assert wanted <= per_element < wanted + 0.05
    train(engine, 1)
    engine.optimizer.zero_grad()


def test_the_base_in_4_bits_is_the_restored_weight_in_every_use(saved):
    folder, _ = saved
    run = base_run(**{**LORA, "model.init": str(folder / "base"), "lora.quantize": "nf4"})
    engine = Engine(run, initial_weights(run.model))
    weights = dict(initial_weights(run.model) or ())
    for name, shape in parameter_shapes(run.model).items():
        if name.startswith("blocks.") and len(shape) == 2:
            weights[name] = dequantise_nf4(quantise_nf4(weights[name]), torch.float32)
    plain = Engine(base_run(**{**LORA, "model.init": str(folder / "base")}), weights.items())
    assert torch.allclose(logprobs(engine), logprobs(plain), atol=1e-6)
    mine, theirs = train(engine, 3), train(plain, 3)
    assert mine == pytest.approx(theirs, rel=1e-5)


def test_a_drawn_base_in_4_bits_is_the_drawn_one_quantised():
    engine = Engine(base_run(**LORA, **{"lora.quantize": "nf4"}))
    state = engine.full_state_dict(merged=False)
    name = "blocks.0.attn.wq.weight"
    std = engine.run.model.init_std
    drawn = normal_(torch.empty(*state[name].shape), engine.run.train.seed, name, std)
    assert torch.equal(state[name], dequantise_nf4(quantise_nf4(drawn), torch.float32))


def test_weights_that_are_not_finite_have_no_4_bit_form():
    weights = Engine(base_run(**SINGLE)).full_state_dict()
    weights["blocks.0.attn.wq.weight"][0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"blocks\.0\.attn\.wq\.weight holds values"):
        Engine(base_run(**LORA, **{"lora.quantize": "nf4"}), weights.items())


def test_a_record_is_json(saved):
    folder, _ = saved
    record = read_state(folder / "adapters")[RECORD]
    assert json.loads(json.dumps(record)) == record
    assert record["base"]["init"].endswith("base")
