import json
import re

import pytest

from stepwell.models.flops import count_parameters
from stepwell.models.hf_config import config_to_hf
from stepwell.plan.dims import PLANNED, dims_from_hf, find_model
from stepwell.plan.job import dims_of
from stepwell.presets import PRESETS, preset
from stepwell.types import CheckpointError, ConfigError

# Totals of the released checkpoints.
PUBLISHED = {
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_planned_models_have_the_published_number_of_parameters(name):
    assert PLANNED[name].parameters() == PUBLISHED[name]
    subject = find_model(name)
    assert subject.config is None
    assert "experts" in subject.missing


def test_nominal_sizes():
    assert round(PLANNED["gpt3-175b"].parameters() / 1e9) == 175
    assert round(PLANNED["nemotron-4-340b"].parameters() / 1e9) == 341
    assert round(PLANNED["qwen3-30b-a3b"].parameters(active=True) / 1e9, 1) == 3.4


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_own_dimensions(name):
    subject = find_model(name)
    assert subject.config == preset(name)
    assert subject.dims.parameters() == count_parameters(preset(name)).total
    assert subject.dims.window == preset(name).sliding_window
    assert subject.missing == ""


@pytest.mark.parametrize(("values", "name"), [(MIXTRAL, "mixtral-8x7b"), (QWEN, "qwen3-30b-a3b")])
def test_mixtures_of_experts_from_their_config(values, name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = find_model(str(tmp_path)).dims
    assert found.parameters() == PUBLISHED[name]
    assert found.experts == PLANNED[name].experts


@pytest.mark.parametrize(
    ("values", "window", "layers"),
    [
        ({}, None, None),
        ({"sliding_window": 1024}, 1024, 32),
        ({"sliding_window": None, "model_type": "mistral", "mlp_bias": True}, None, None),
        ({"model_type": "mistral", "mlp_bias": True}, 4096, 32),
        ({"model_type": "gemma2", "num_hidden_layers": 13}, 4096, 7),
        ({"model_type": "gemma2", "layer_types": ["full_attention"] * 32}, None, None),
        (QWEN | {"sliding_window": 512}, None, None),
        (QWEN | {"sliding_window": 512, "use_sliding_window": True}, 512, 20),
        (QWEN | {"sliding_window": 512, "use_sliding_window": False}, None, None),
    ],
)
def test_windows_of_a_config_json(values, window, layers):
    found = dims_from_hf(MIXTRAL | values, "x", "x")
    assert (found.window, found.num_window_layers) == (window, layers)


def test_a_folder_of_a_model_that_the_engine_has(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(preset("llama3-8b"))))
    for place in (tmp_path, tmp_path / "config.json"):
        subject = find_model(str(place))
        assert subject.config is not None
        assert subject.dims.parameters() == 8_030_261_248


def test_what_the_engine_refuses_can_still_be_planned(tmp_path):
    values = config_to_hf(preset("llama3-8b")) | {"mlp_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    subject = find_model(str(tmp_path))
    assert subject.config is None
    assert "mlp_bias" in subject.missing
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    dims = dims_from_hf(gpt2 | {"vocab_size": 50257}, "gpt2", "x")
    assert (dims.mlp, dims.d_ff, dims.tied, dims.learned_positions) == ("gelu", 3072, True, 1024)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "nemotron"])
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_size", "4096", "hidden_size='4096' must be a whole number"),
        ("hidden_size", 4096.0, "hidden_size=4096.0 must be a whole number"),
        ("vocab_size", True, "vocab_size=True must be a whole number"),
        ("num_hidden_layers", -3, "num_hidden_layers=-3 must be at least 1; the nearest legal"),
        ("num_hidden_layers", 0, "num_hidden_layers=0 must be at least 1"),
        ("num_key_value_heads", 5, "num_key_value_heads=5 must divide num_attention_heads=32; the "
                                   "nearest legal value is 4"),
        ("num_key_value_heads", [8], "must be a whole number"),
        ("num_attention_heads", 24, "hidden_size=4096 is no multiple of num_attention_heads=24"),
    ],
)  # fmt: skip
def test_a_config_json_with_values_that_are_no_sizes(kind, key, value, said, tmp_path):
    """Is refused by the field's name, also for models that the engine has not."""
    values = MIXTRAL | {"model_type": kind, key: value}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=re.escape(said)) as refusal:
        find_model(str(tmp_path))
    assert str(tmp_path / "config.json") in str(refusal.value)


def test_experts_of_a_config_json_are_counts():
    def dims(**values):
        return dims_from_hf(MIXTRAL | values, "mixtral", "x").experts

    for key in ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size"):
        with pytest.raises(ConfigError, match=f"{key}='8' must be a whole number"):
            dims(**{key: "8"})
    with pytest.raises(ConfigError, match="num_experts_per_tok=9 is more than the 8 experts"):
        dims(num_experts_per_tok=9)
    found = dims(num_experts_per_tok=8)
    assert found is not None
    assert found.top_k == 8
    assert dims(num_local_experts=0) is None
    with pytest.raises(ConfigError, match="num_local_experts=-1 must be at least 0"):
        dims(num_local_experts=-1)


def test_dimensions_override():
    subject = find_model("llama3-405b", {"model.num_layers": "124"})
    assert subject.config is not None
    assert subject.config.num_layers == 124
    assert 395e9 < subject.dims.parameters() < 405e9
    experts = {"model.num_experts": "8", "model.top_k": "2", "model.expert_d_ff": "14336"}
    dims = find_model("llama3-8b", experts).dims
    assert dims.parameters() == pytest.approx(8 * 5.64e9 + 2.39e9, rel=0.02)
    assert find_model("mixtral-8x7b", {"model.num_layers": "16"}).dims.num_layers == 16


def test_dimensions_alone_have_llamas_proportions():
    """Not quickstart's: 32 layers of 4,096 are Llama 7B's, but for the vocabulary."""
    subject = find_model(None, {"model.num_layers": "32", "model.d_model": "4096"})
    dims = subject.dims
    assert (dims.num_heads, dims.num_kv_heads, dims.head_dim, dims.d_ff) == (32, 32, 128, 11008)
    assert (dims.vocab_size, dims.tied) == (128256, False)
    assert dims.parameters() == pytest.approx(6.738e9 + 2 * (128256 - 32000) * 4096, rel=1e-3)
    told = "\n".join(subject.assumed)
    for key in ("num_heads", "num_kv_heads", "head_dim", "d_ff", "vocab_size", "tied"):
        assert f"--model.{key})" in told
    given = {"model.num_layers": "2", "model.d_model": "320", "model.num_heads": "5",
             "model.num_kv_heads": "1", "model.d_ff": "999", "model.vocab_size": "500"}  # fmt: skip
    subject = find_model(None, given)
    assert (subject.dims.head_dim, subject.dims.d_ff, subject.dims.vocab_size) == (64, 999, 500)
    assert len(subject.assumed) == 2
    small = find_model(None, {"model.num_layers": "2", "model.d_model": "96"}).dims
    assert (small.num_heads, small.head_dim) == (3, 32)
    experts = {**given, "model.num_experts": "4"}
    more = ("1 expert for a token (--model.top_k)", "experts of 999, the MLP's width "
            "(--model.expert_d_ff)")  # fmt: skip
    assert find_model(None, experts).assumed == subject.assumed + more
    assert find_model("llama3-8b", {"model.num_experts": "4", "model.top_k": "2"}).assumed == (
        "experts of 14,336, the MLP's width (--model.expert_d_ff)",
    )
    all_given = {**experts, "model.top_k": "2", "model.expert_d_ff": "99"}
    assert find_model(None, all_given).assumed == subject.assumed


@pytest.mark.parametrize(
    ("name", "dimensions", "said"),
    [
        ("llama3-8", {}, "did you mean 'llama3-8b'"),
        ("llama3-8b", {"model.top_k": "2"}, "give --model.num_experts"),
        ("mixtral-8x7b", {"model.top_k": "9"}, "the nearest is 8"),
        ("mixtral-8x7b", {"model.top_k": "0"}, "must be positive"),
        ("mixtral-8x7b", {"model.num_dense_layers": "32"}, "nearest legal value is 31"),
        ("mixtral-8x7b", {"model.rope_theta": "1"}, "cannot be changed"),
        ("mixtral-8x7b", {"model.num_kv_heads": "5"}, "nearest legal value is 4"),
        ("llama3-8b", {"model.num_layer": "5"}, "did you mean 'model.num_layers'"),
        ("llama3-8b", {"model.num_layers": "x"}, "whole number"),
        (None, {"model.num_layers": "3"}, "--model.d_model must be given"),
        (None, {"model.num_experts": "3"}, "num_layers and --model.d_model must be given"),
        (None, {"model.num_layers": "3", "model.d_model": "127"}, "must be even.*nearest is 128"),
        (None, {"model.num_layers": "3", "model.d_model": "1000"}, "multiple of 64 is 1024"),
        (None, {"model.num_layers": "3", "model.d_model": "x"}, "d_model 'x' must be a whole"),
    ],
)
def test_mistakes_are_named(name, dimensions, said):
    with pytest.raises(ConfigError, match=said):
        find_model(name, dimensions)


def test_broken_files_and_unknown_kinds(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        find_model(str(tmp_path))
    with pytest.raises(ConfigError, match="'mamba' cannot be planned"):
        dims_from_hf({"model_type": "mamba"}, "m", "x")
    with pytest.raises(ConfigError, match="x lacks model_type"):
        dims_from_hf({"hidden_size": 64}, "m", "x")
    with pytest.raises(ConfigError, match="lacks num_hidden_layers"):
        dims_from_hf({k: v for k, v in MIXTRAL.items() if k != "num_hidden_layers"}, "m", "x")


def test_biases_of_a_config_json_are_counted():
    """GPT-2's 124,439,808 parameters, but for the last norm's bias; Qwen1.5-MoE's as its release
    has them (q, k, v); Llama's by what the file asks for."""
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    assert dims_from_hf(gpt2 | {"vocab_size": 50257}, "x", "x").parameters() == 124_439_808 - 768
    values = config_to_hf(preset("llama3-8b"))
    of_attention, of_mlp = 2 * 4096 + 2 * 1024, 2 * 14336 + 4096
    for more, biases in (
        ({}, 0),
        ({"attention_bias": True}, of_attention),
        ({"mlp_bias": True}, of_mlp),
        ({"attention_bias": True, "mlp_bias": True}, of_attention + of_mlp),
    ):
        dims = dims_from_hf(values | more, "x", "x")
        assert dims.parameters() == 8_030_261_248 + 32 * biases
    moe = QWEN | {"model_type": "qwen2_moe"}
    assert dims_from_hf(moe, "x", "x").biases == 128 * (32 + 8)
    assert dims_from_hf(QWEN, "x", "x").biases == 2 * 128
    neox = values | {"model_type": "starcoder2"}
    with_biases = 2 * 4096 + 2 * 1024 + 14336 + 4096 + 2 * 4096
    assert dims_from_hf(neox, "x", "x").biases == with_biases
    assert dims_from_hf(neox | {"use_bias": False}, "x", "x").biases == 2 * 4096


def test_dims_of_a_preset_name_themselves():
    assert dims_of(preset("qwen3-8b"), "a").name == "a"
