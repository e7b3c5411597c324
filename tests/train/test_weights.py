"""Where first weights come from, and what a run may say about their dimensions."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepwell.config import Run
from stepwell.models.flops import parameter_shapes
from stepwell.models.hf import save_hf
from stepwell.parallel.mesh import init_distributed
from stepwell.sections.model import ModelConfig
from stepwell.tokenizer import Tokenizer
from stepwell.train.checkpoint import load_weights
from stepwell.train.engine import Engine
from stepwell.train.run_checkpoints import read_state
from stepwell.train.weights import (
    check_tokenizer,
    initial_weights,
    kind_of,
    known_tokenizer,
    read_model,
    resolve,
)
from stepwell.types import CheckpointError, ConfigError
from tests.oracle import base_run
from tests.parallel.ranks import run_ranks


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of the oracle's model, and the engine that wrote it."""
    folder = tmp_path_factory.mktemp("trained") / "step-00000001"
    engine = Engine(base_run(**{"precision.param": "fp32", **SINGLE}))
    engine.save(folder, {}).wait()
    return folder, engine


SINGLE = {"precision.compute": "fp32", "precision.reduce": "fp32"}


def test_a_checkpoint_is_a_start(trained):
    folder, engine = trained
    assert kind_of(str(folder)) == "checkpoint"
    found = read_model(str(folder))
    assert found.model_copy(update={"init_std": 0.3}) == engine.run.model
    run = resolve(Run.parse({}, {"model.init": str(folder), "model.max_seq_len": 4096}))
    assert run.model.d_model == 20
    assert run.model.max_seq_len == 4096
    assert run.model.init == str(folder)
    weights = initial_weights(run.model)
    assert weights is not None
    again = Engine(run, weights)
    for (name, got), (other, wanted) in zip(again.iter_state(), engine.iter_state(), strict=True):
        assert name == other
        assert torch.equal(got, wanted)


def test_a_hugging_face_folder_is_a_start(trained, tmp_path):
    _, engine = trained
    save_hf(tmp_path / "hf", engine.run.model, engine.iter_state(), torch.float32)
    assert kind_of(str(tmp_path / "hf")) == "hf"
    run = resolve(Run.parse({}, {"model.init": str(tmp_path / "hf")}))
    weights = initial_weights(run.model)
    assert weights is not None
    found = dict(weights)
    for name, wanted in engine.iter_state():
        assert torch.equal(found[name], wanted)


@pytest.mark.parametrize("kind", ["checkpoint", "hf"])
def test_weights_that_are_not_finite_are_refused_by_name(trained, tmp_path, kind):
    """One value in the row of a token that may not come for a long time."""
    _, engine = trained
    name = "embed.weight"
    state = engine.full_state_dict()
    if kind == "hf":
        save_hf(tmp_path / kind, engine.run.model, state.items(), torch.float32)
        (file,) = (tmp_path / kind).glob("*.safetensors")
        tensors = load_file(file)
        tensors["model.embed_tokens.weight"][7, 3] = -torch.inf
        save_file(tensors, file)
    else:
        state[name][7, 3] = -torch.inf
        Engine(engine.run, state.items()).save(tmp_path / kind, {}).wait()
    run = resolve(Run.parse({}, {"model.init": str(tmp_path / kind)}))
    weights = initial_weights(run.model)
    assert weights is not None
    with pytest.raises(CheckpointError, match=rf"{name} holds 1 values .* in row 7\)"):
        dict(weights)


def test_without_init_the_seed_draws():
    run = base_run()
    assert resolve(run) is run
    assert initial_weights(run.model) is None


def test_a_contradiction_is_named(trained):
    folder, _ = trained
    with pytest.raises(ConfigError, match=r"model\.d_model=64 contradicts .* where it is 20"):
        resolve(Run.parse({}, {"model.init": str(folder), "model.d_model": 64}))
    agreeing = Run.parse({}, {"model.init": str(folder), "model.d_model": 20})
    assert resolve(agreeing).model.d_model == 20


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_what_is_no_model_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"model.init='{name}' is no model"):
        kind_of(name)


def test_gguf_and_smollm2_by_name():
    assert kind_of("a/b.gguf") == "gguf"
    assert kind_of("smollm2") == "gguf"


# --- checkpoint.load_weights ---------------------------------------------------------------------


def test_load_weights_gives_exactly_the_weights(trained):
    folder, engine = trained
    found = dict(load_weights(folder, parameter_shapes(engine.run.model)))
    wanted = engine.full_state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert read_state(folder)["model"]["d_model"] == 20


def _save_on_ranks(folder):
    run = base_run(**{"precision.param": "fp32", **SINGLE})
    engine = Engine(run, mesh=init_distributed(run.layout))
    engine.save(folder, {}).wait()


def test_load_weights_of_sharded_ones_is_the_same(trained, tmp_path):
    _, engine = trained
    run_ranks(_save_on_ranks, 2, str(tmp_path / "c"))
    for name, value in load_weights(tmp_path / "c", parameter_shapes(engine.run.model)):
        assert torch.equal(value, engine.decoder.get_parameter(name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 1}, r"surplus: model\.blocks\.1\."),
        ({"num_layers": 3}, r"missing: model\.blocks\.2\."),
        ({"d_ff": 28}, r"w_down\.weight has shape \(20, 27\) there, \(20, 28\) here"),
        ({"tied": False}, r"1 missing: model\.head\.weight"),
    ],
)
def test_load_weights_is_strict_before_anything_is_read(trained, change, message):
    folder, engine = trained
    cfg: ModelConfig = engine.run.model.model_copy(update=change)
    with pytest.raises(CheckpointError, match=message):
        load_weights(folder, parameter_shapes(cfg))


def test_load_weights_finds_damage(trained, tmp_path):
    import shutil

    folder, engine = trained
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    shard = next(copy.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=shard.name):
        load_weights(copy, parameter_shapes(engine.run.model))


def test_a_tokenizer_of_another_model_is_refused(trained, tmp_path):
    _, engine = trained
    mine, other = (Tokenizer.train([f"{word} " * 20], 270) for word in ("apple", "pear"))
    point = tmp_path / "run" / "checkpoints" / "step-00000001"
    engine.save(point, {"tokenizer": mine.fingerprint}).wait()
    (tmp_path / "run" / "run.toml").write_text("")
    save_hf(tmp_path / "hf", engine.run.model, engine.iter_state(), torch.float32)
    assert known_tokenizer(tmp_path / "hf") is None
    mine.save(tmp_path / "hf")
    for model in (tmp_path / "run", point, tmp_path / "hf"):
        check_tokenizer(model, mine)
        with pytest.raises(ConfigError) as error:
            check_tokenizer(str(model), other, "fruit.json")
        for named in ("fruit.json", str(model), mine.fingerprint[:12], other.fingerprint[:12]):
            assert named in str(error.value)


def test_a_model_of_unknown_tokenizer_takes_any(trained, tmp_path):
    folder, engine = trained
    save_hf(tmp_path / "hf", engine.run.model, engine.iter_state(), torch.float32)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    tokenizer = Tokenizer.train(["apple " * 20], 270)
    for model in (folder, tmp_path / "hf", "smollm2"):
        check_tokenizer(model, tokenizer)
