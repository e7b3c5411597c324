"""Adapters between Stepwell and PEFT: each loads the other's, and both compute the same."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepwell.data.packing import pack_rows
from stepwell.models.flops import parameter_shapes
from stepwell.models.hf import load_hf, save_hf
from stepwell.models.lora_shapes import adapter_shapes
from stepwell.models.peft import (
    CONFIG,
    WEIGHTS,
    load_peft,
    our_adapter_name,
    patterns_of,
    peft_name,
    read_peft_config,
    save_peft,
)
from stepwell.sections.model import LoraConfig
from stepwell.train.engine import Engine
from stepwell.types import CheckpointError, ConfigError
from tests.oracle import base_run

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")

SINGLE = {"precision.compute": "fp32", "precision.param": "fp32", "precision.reduce": "fp32"}
KINDS = {
    "lora": {"lora.rank": 3, "lora.alpha": 7.0},
    "rslora": {"lora.rank": 3, "lora.alpha": 7.0, "lora.rslora": True},
    "dora": {"lora.rank": 3, "lora.alpha": 7.0, "lora.dora": True},
    "some layers": {
        "lora.rank": 2,
        "lora.targets": r'["blocks\\.0\\.attn\\.wq", "blocks\\.1\\.mlp\\.w_(up|down)"]',
        "lora.dora": True,
    },
}
MODEL = {"model.num_layers": 2, "model.family": "qwen2", "model.qkv_bias": True}
IDS = [3, 9, 27, 14, 42, 5, 15, 45]


def random_values(shapes, seed: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {n: torch.randn(s, generator=generator) * 0.3 for n, s in shapes.items()}
    return {n: v if v.dim() == 2 else v.abs() + 0.5 for n, v in values.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Hugging Face folder of a model with 2 blocks."""
    folder = tmp_path_factory.mktemp("peft") / "base"
    engine = Engine(base_run(**{**MODEL, **SINGLE}))
    save_hf(folder, engine.run.model, engine.iter_state(), torch.float32)
    return folder


def engine_of(base, **lora) -> Engine:
    run = base_run(**{**MODEL, **SINGLE, "model.init": str(base), **lora})
    return Engine(run, load_hf(base, parameter_shapes(run.model)))


def our_logprobs(engine: Engine) -> torch.Tensor:
    batch = pack_rows([(IDS, [1] * len(IDS))], len(IDS) - 1)
    return engine.logprobs(batch)[0]


def their_logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([IDS[:-1]])).logits[0].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_ours(base, tmp_path, kind):
    engine = engine_of(base, **KINDS[kind])
    cfg, lora = engine.run.model, engine.run.lora
    values = random_values(adapter_shapes(cfg, lora))
    save_peft(tmp_path / "adapter", cfg, lora, values.items(), str(base))
    mine = engine_of(base, **KINDS[kind], **{"lora.init": str(tmp_path / "adapter")})
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = their_logprobs(plain)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    found, wanted = our_logprobs(mine), their_logprobs(theirs)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert (wanted - before).abs().max() > 0.1
    merged = their_logprobs(theirs.merge_and_unload())
    again = engine_of(base)
    again.load_weights(mine.iter_state())
    assert torch.allclose(our_logprobs(again), merged, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_we_load_pefts_and_begin_where_it_does(base, tmp_path, kind):
    options = {"use_rslora": kind == "rslora", "use_dora": kind == "dora"}
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], **options)
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.get_peft_model(plain, config).eval()
    # where a fresh adapter of ours begins, too
    fresh = engine_of(base, **{"lora.rank": 4, "lora.alpha": 6, "lora.dora": kind == "dora",
                               "lora.targets": r'["blocks\\..*(wq|w_down)"]'})  # fmt: skip
    started = {name: p.detach() for name, p in fresh.named_parameters()}
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            ours = our_adapter_name(name.replace(".default", ""))
            assert ours is not None
            if ".lora_A" in name:
                assert started[ours].abs().max() <= parameter.shape[1] ** -0.5
                assert started[ours].std() == pytest.approx(parameter.std().item(), rel=0.25)
            else:
                assert torch.allclose(started[ours], parameter, atol=1e-6)
            torch.nn.init.uniform_(parameter, 0.1, 0.9)
    theirs.save_pretrained(tmp_path / "adapter")
    mine = engine_of(base, **{"lora.init": str(tmp_path / "adapter")})
    assert (mine.run.lora.rank, mine.run.lora.alpha) == (4, 6.0)
    assert mine.run.lora.targets == (r"blocks\.\d+\.(attn\.wq|mlp\.w_down)",)
    assert torch.allclose(our_logprobs(mine), their_logprobs(theirs), atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_gradients_are_pefts(base, tmp_path, kind):
    engine = engine_of(base, **KINDS[kind])
    cfg, lora = engine.run.model, engine.run.lora
    save_peft(tmp_path / "a", cfg, lora, random_values(adapter_shapes(cfg, lora)).items())
    mine = engine_of(base, **KINDS[kind], **{"lora.init": str(tmp_path / "a")})
    from stepwell.train.losses import cross_entropy

    plain_loss = base_run().loss.model_copy(update={"z_loss": 0.0})
    batch = pack_rows([(IDS, [1] * len(IDS))], len(IDS) - 1)
    mine.forward_backward(batch, cross_entropy(plain_loss))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "a", is_trainable=True)
    ids = torch.tensor([IDS])
    theirs(ids, labels=ids).loss.backward()
    found = {name: p.grad for name, p in mine.named_parameters() if p.grad is not None}
    seen = 0
    for name, parameter in theirs.named_parameters():
        ours = our_adapter_name(name.replace(".default", ""))
        if ours is not None:
            scale = parameter.grad.abs().max().item()
            assert (found[ours] - parameter.grad).abs().max().item() <= 1e-4 * scale, ours
            seen += 1
    assert seen == len(found) == len(adapter_shapes(cfg, lora))


def test_names_are_a_bijection(base):
    cfg = engine_of(base).run.model
    shapes = adapter_shapes(cfg, LoraConfig(rank=2, dora=True))
    names = {name: peft_name(name) for name in shapes}
    assert len(set(names.values())) == len(names)
    assert all(our_adapter_name(theirs) == ours for ours, theirs in names.items())
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    assert names["blocks.1.attn.wq.lora_a.weight"] == key
    vector = "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector"
    assert our_adapter_name(f"{vector}.weight") == our_adapter_name(vector)
    assert our_adapter_name("base_model.model.lm_head.lora_A.weight") is None


def test_patterns_match_exactly_the_layers(base):
    cfg = engine_of(base).run.model
    for names in (["blocks.0.attn.wq", "blocks.1.attn.wq"], ["blocks.1.mlp.w_up"]):
        lora = LoraConfig(rank=1, targets=patterns_of(names, cfg))
        assert sorted({n.split(".lora")[0] for n in adapter_shapes(cfg, lora)}) == sorted(names)


# --- what is refused -----------------------------------------------------------------------------


@pytest.fixture
def adapter(base, tmp_path):
    cfg, lora = engine_of(base).run.model, LoraConfig(rank=2, targets=(r"blocks\.\d\.attn\.wq",))
    save_peft(tmp_path / "adapter", cfg, lora, random_values(adapter_shapes(cfg, lora)).items())
    return tmp_path / "adapter", cfg, lora


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("bias", "all"),
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 4}),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa_niter_4"),
    ],
)
def test_a_setting_that_would_change_the_numbers_is_refused(adapter, key, value):
    folder, cfg, lora = adapter
    values = json.loads((folder / CONFIG).read_text())
    assert read_peft_config(folder, cfg).rank == lora.rank
    (folder / CONFIG).write_text(json.dumps(values | {key: value}))
    with pytest.raises(ConfigError, match=key):
        read_peft_config(folder, cfg)


def changed(folder, **changes) -> None:
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        key = next(k for k in tensors if name in k) if tensor is None else name
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, folder / WEIGHTS)


def test_weights_that_do_not_fit_are_named(adapter):
    folder, cfg, lora = adapter
    copy = folder.with_name("copy")
    cases = [
        ({"layers.1.self_attn.q_proj.lora_B": None}, CheckpointError, r"lack blocks\.1\.attn\.wq"),
        (
            {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 3)},
            CheckpointError,
            r"blocks\.0\.attn\.wq\.lora_a\.weight .* has shape \(2, 3\), expected",
        ),
        (
            {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.ones(2, 3)},
            CheckpointError,
            r"have blocks\.7\.attn\.wq",
        ),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(1)}, ConfigError, "lm_head"),
    ]
    for change, kind, message in cases:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        changed(copy, **change)
        with pytest.raises(kind, match=message):
            load_peft(copy, cfg, lora)
    with pytest.raises(ConfigError, match="lm_head"):
        read_peft_config(copy, cfg)


def test_damage_and_pickles_are_refused(adapter):
    folder, cfg, lora = adapter
    weights = folder / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        load_peft(folder, cfg, lora)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickled"):
        load_peft(folder, cfg, lora)
    (folder / CONFIG).write_text("{")
    with pytest.raises(CheckpointError, match=CONFIG):
        read_peft_config(folder, cfg)


def test_what_is_saved_is_whole_and_takes_no_place_of_anything(adapter):
    folder, cfg, lora = adapter
    values = random_values(adapter_shapes(cfg, lora))
    with pytest.raises(CheckpointError, match="already"):
        save_peft(folder, cfg, lora, values.items())
    values.pop("blocks.0.attn.wq.lora_a.weight")
    with pytest.raises(CheckpointError, match=r"lack blocks\.0\.attn\.wq\.lora_a"):
        save_peft(folder.with_name("new"), cfg, lora, values.items())
    assert not folder.with_name("new").exists()
