"""Weights and dimensions both ways against Transformers' own models, with random weights."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from stepwell.models.flops import parameter_shapes
from stepwell.models.hf import (
    index_hf,
    load_hf,
    read_eos_ids,
    read_hf_config,
    save_hf,
    whole_folder,
)
from stepwell.models.hf_config import config_from_hf, config_to_hf, hf_name, our_name
from stepwell.models.transformer import Decoder, ForwardOptions
from stepwell.sections.model import ModelConfig, RopeScaling
from stepwell.tokenizer import Tokenizer
from stepwell.types import CheckpointError, ConfigError

transformers = pytest.importorskip("transformers")

DIMS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama_mha": ("Llama", {"num_key_value_heads": 4}),
    "llama_mqa_wide_head": ("Llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_tied": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 7, "head_dim": 12}),
}


def hf_model(architecture: str, **settings):
    """Random weights everywhere, also where the initialiser writes ones and zeros."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**{**DIMS, **settings})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
    return model


def decoder_from(folder: Path, dtype=torch.float32) -> Decoder:
    cfg = read_hf_config(folder)
    decoder = Decoder(cfg)
    decoder.load_state_dict(dict(load_hf(folder, parameter_shapes(cfg), dtype)))
    return decoder.to(dtype)


@torch.no_grad()
def our_logits(decoder: Decoder, tokens_BT: torch.Tensor, lengths=None) -> torch.Tensor:
    """lengths: of the documents packed into each row; None: one document a row."""
    B, T = tokens_BT.shape
    lengths = lengths or [T]
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    borders = torch.tensor([0, *lengths * B]).cumsum(0).to(torch.int32)
    options = ForwardOptions(needs=frozenset({"logits"}))
    out = decoder(tokens_BT, positions_T.expand(B, T), borders, options=options)
    assert out.logits_BTV is not None
    return out.logits_BTV


@torch.no_grad()
def hf_logits(model, tokens_BT: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens_BT).logits.float()


def random_tokens(rows: int = 2, length: int = 60) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(DIMS["vocab_size"], (rows, length), generator=generator)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_both_ways(case, tmp_path):
    architecture, settings = CASES[case]
    model = hf_model(architecture, **settings)
    model.save_pretrained(tmp_path / "theirs")
    decoder = decoder_from(tmp_path / "theirs")
    assert {n: tuple(p.shape) for n, p in decoder.named_parameters()} == parameter_shapes(
        decoder.cfg
    )
    tokens_BT = random_tokens()
    theirs = hf_logits(model, tokens_BT)
    assert theirs.std() > 0.5
    torch.testing.assert_close(our_logits(decoder, tokens_BT), theirs, atol=1e-4, rtol=0)

    save_hf(tmp_path / "ours", decoder.cfg, decoder.state_dict().items(), torch.float32)
    assert read_hf_config(tmp_path / "ours") == decoder.cfg
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    assert type(back) is type(model)
    assert back.dtype == torch.float32
    assert torch.equal(hf_logits(back, tokens_BT), theirs)
    if settings.get("tie_word_embeddings"):
        assert back.lm_head.weight.data_ptr() == back.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("case", ["llama3_rope", "qwen3", "mistral_window"])
def test_packed_documents_equal_separate_runs(case, tmp_path):
    architecture, settings = CASES[case]
    model = hf_model(architecture, **settings)
    model.save_pretrained(tmp_path)
    decoder = decoder_from(tmp_path)
    tokens_BT = random_tokens()
    lengths = [23, 1, 36]
    packed = our_logits(decoder, tokens_BT, lengths)
    apart = torch.cat([hf_logits(model, part) for part in tokens_BT.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, apart, atol=1e-4, rtol=0)
    assert (packed - hf_logits(model, tokens_BT)).abs().max() > 0.1


def test_features_change_the_logits(tmp_path):
    """Each reads as it should only if it has an effect: the same weights without it differ."""
    tokens_BT = random_tokens()
    for case, plain in (
        ("llama3_rope", {"rope_scaling": None}),
        ("mistral_window", {"sliding_window": None}),
    ):
        architecture, settings = CASES[case]
        folder = tmp_path / case
        hf_model(architecture, **settings).save_pretrained(folder)
        decoder = decoder_from(folder)
        other = Decoder(decoder.cfg.model_copy(update=plain))
        other.load_state_dict(decoder.state_dict())
        difference = our_logits(decoder, tokens_BT) - our_logits(other, tokens_BT)
        assert difference.abs().max() > 1e-2, case


# --- config.json ---------------------------------------------------------------------------------

# As published with the checkpoints (keys of Transformers 4).
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 49152,
}
LLAMA31_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def test_reads_the_older_keys():
    cfg = config_from_hf(SMOLLM2)
    assert (cfg.head_dim, cfg.rope_theta, cfg.tied, cfg.rope_scaling) == (64, 1e5, True, None)
    cfg = config_from_hf({**SMOLLM2, "rope_scaling": LLAMA31_SCALING})
    assert cfg.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
    )
    assert cfg.rope_theta == 1e5
    older = {k: v for k, v in LLAMA31_SCALING.items() if k != "rope_type"} | {"type": "llama3"}
    assert config_from_hf({**SMOLLM2, "rope_scaling": older}) == cfg


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_absent_keys_mean_what_transformers_takes_them_for(architecture):
    needed = {k: v for k, v in DIMS.items() if not k.startswith(("max_pos", "num_key", "init"))}
    theirs = getattr(transformers, f"{architecture}Config")(**needed, num_key_value_heads=4)
    sparse = {"model_type": architecture.lower(), "num_key_value_heads": 4, **needed}
    assert config_from_hf(sparse) == config_from_hf(theirs.to_dict())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma3"}, "gemma3"),
        ({"model_type": "llama4"}, "did you mean 'llama'"),
        ({"model_type": None}, "None"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"is_causal": False}, "is_causal=False"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by layer"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "modeling_x.X"}}, "auto_map"),
        ({"model_type": ["llama"]}, "'llama'"),
        ({"rope_scaling": 8}, "rope_scaling=8 must be a table"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list of names"),
        ({"max_window_layers": "21"}, "max_window_layers='21' must be a whole number"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 577}, "hidden_size=577"),
        ({"num_key_value_heads": 4}, "num_kv_heads=4"),
        (
            {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 32,
                "max_window_layers": 21,
            },
            "9 of 30",
        ),
    ],
)
def test_unsupported_features_are_refused_by_name(change, named):
    with pytest.raises(ConfigError, match=named):
        config_from_hf({**SMOLLM2, **change})


def test_export_refuses_a_width_that_transformers_refuses():
    cfg = ModelConfig(d_model=256, num_heads=6)
    with pytest.raises(ConfigError, match=r"d_model=256.*num_heads=6.*nearest is 258"):
        config_to_hf(cfg)
    for change in ({"family": "mistral"}, {"family": "qwen3", "qk_norm": True}):
        transformers.AutoConfig.for_model(**config_to_hf(cfg.model_copy(update=change)))


def test_an_export_reads_with_the_keys_of_either_version():
    cfg = ModelConfig(rope_theta=7e4, rope_scaling=RopeScaling(factor=32.0))
    values = config_to_hf(cfg)
    older = {k: v for k, v in values.items() if k != "rope_parameters"}
    newer = {k: v for k, v in values.items() if k not in ("rope_theta", "rope_scaling")}
    assert config_from_hf(older) == config_from_hf(newer) == cfg


def test_names_are_a_bijection():
    cfg = ModelConfig(family="qwen2", qkv_bias=True, tied=False, num_layers=12)
    qwen3 = ModelConfig(family="qwen3", qk_norm=True)
    names = {**parameter_shapes(cfg), **parameter_shapes(qwen3)}
    assert all(our_name(hf_name(name)) == name for name in names)
    assert our_name("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    with pytest.raises(CheckpointError, match=r"blocks\.0\.moe"):
        hf_name("blocks.0.moe.router.weight")


# --- reading -------------------------------------------------------------------------------------


@pytest.fixture
def llama_folder(tmp_path) -> Path:
    hf_model("Llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def wanted(folder: Path):
    return parameter_shapes(read_hf_config(folder))


def test_sharded_folder_streams_and_slices(tmp_path):
    model = hf_model("Qwen3", head_dim=16)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    state = {our_name(name): tensor for name, tensor in model.state_dict().items()}
    for name, tensor in load_hf(tmp_path, wanted(tmp_path)):
        assert torch.equal(tensor, state[name])
    stored = index_hf(tmp_path, wanted(tmp_path))
    name = "blocks.1.mlp.w_down.weight"
    assert stored[name].shape == (32, 80)
    assert torch.equal(stored[name].read((slice(8, 16), slice(40, 80))), state[name][8:16, 40:])
    assert torch.equal(stored["norm.weight"].read(slice(3, 9)), state["norm.weight"][3:9])


def test_dtype_as_asked_or_as_stored(tmp_path):
    hf_model("Llama").to(torch.bfloat16).save_pretrained(tmp_path)
    stored = dict(load_hf(tmp_path, wanted(tmp_path), dtype=None))
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    for name, tensor in load_hf(tmp_path, wanted(tmp_path), torch.float64):
        assert tensor.dtype == torch.float64
        assert torch.equal(tensor, stored[name].double())


def test_loaded_tensors_do_not_depend_on_the_file(llama_folder):
    loaded = dict(load_hf(llama_folder, wanted(llama_folder), dtype=None))
    before = {name: tensor.clone() for name, tensor in loaded.items()}
    with (llama_folder / "model.safetensors").open("r+b") as stream:
        stream.seek(-3000, 2)
        stream.write(b"\0" * 3000)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.items())


def test_missing_surplus_and_wrong_shapes_are_named_together(llama_folder):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
        tensors["score.weight"] = torch.zeros(2, 32)
        tensors["model.norm.weight"] = torch.ones(31)

    rewrite(llama_folder, change)
    with pytest.raises(CheckpointError) as caught:
        load_hf(llama_folder, wanted(llama_folder))
    for part in (
        "missing: blocks.1.mlp.w_up.weight (model.layers.1.mlp.up_proj.weight)",
        "model.layers.0.self_attn.q_proj.bias",
        "score.weight",
        "norm.weight is (31,), expected (32,)",
    ):
        assert part in str(caught.value)


def test_rotary_buffers_and_an_equal_tied_head_are_accepted(tmp_path):
    hf_model("Llama", tie_word_embeddings=True).save_pretrained(tmp_path)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(tmp_path, add)
    assert "head.weight" not in dict(load_hf(tmp_path, wanted(tmp_path)))

    def bend(tensors):
        tensors["lm_head.weight"][95, 31] += 1e-3

    rewrite(tmp_path, bend)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*differs"):
        load_hf(tmp_path, wanted(tmp_path))


def test_a_missing_head_says_that_the_model_may_be_tied(llama_folder):
    rewrite(llama_folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"head\.weight.*\n.*tied=true"):
        load_hf(llama_folder, wanted(llama_folder))


def test_pickled_weights_are_refused(llama_folder):
    (llama_folder / "model.safetensors").rename(llama_folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*only safetensors"):
        load_hf(llama_folder, {})


def test_damaged_and_absent_files_are_named(llama_folder, tmp_path):
    shapes = wanted(llama_folder)
    weights = llama_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_hf(llama_folder, shapes)
    weights.unlink()
    with pytest.raises(CheckpointError, match="neither"):
        load_hf(llama_folder, shapes)
    with pytest.raises(CheckpointError, match="nowhere"):
        load_hf(tmp_path / "nowhere", shapes)
    with pytest.raises(CheckpointError, match="nowhere"):
        read_hf_config(tmp_path / "nowhere")
    index = llama_folder / "model.safetensors.index.json"
    for name, words in (
        ("../model.safetensors", "points at"),
        ("x.bin", "points at"),
        ("x.safetensors", "missing"),
    ):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(CheckpointError, match=words):
            load_hf(llama_folder, shapes)
    (llama_folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_hf_config(llama_folder)


def test_integer_weights_are_refused(llama_folder):
    def quantise(tensors):
        tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)

    rewrite(llama_folder, quantise)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*I8"):
        load_hf(llama_folder, wanted(llama_folder))


# --- writing -------------------------------------------------------------------------------------

TINY = ModelConfig(
    vocab_size=300, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64
)


def random_state(cfg: ModelConfig = TINY, dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in parameter_shapes(cfg).items()
    }


def test_sharded_export_streams_in_any_order_and_loads(tmp_path):
    state = random_state()
    items = iter(reversed(state.items()))
    save_hf(tmp_path / "out", TINY, items, torch.float32, max_shard_bytes=30_000)
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) >= 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(t.numel() for t in state.values())
    assert sorted(set(index["weight_map"].values())) == files
    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}
    for name, tensor in load_hf(tmp_path / "out", parameter_shapes(TINY)):
        assert torch.equal(tensor, state[name])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.model.norm.weight.data, state["norm.weight"])


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    alive: list[weakref.ref] = []

    def counted(items):
        for name, tensor in items:
            assert not any(ref() is not None for ref in alive), name
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    def made():
        return ((name, torch.ones(shape)) for name, shape in parameter_shapes(TINY).items())

    save_hf(tmp_path / "out", TINY, counted(made()), torch.float32)
    assert len(alive) == len(parameter_shapes(TINY))
    alive.clear()
    for _item in counted(load_hf(tmp_path / "out", parameter_shapes(TINY))):
        del _item
    assert len(alive) == len(parameter_shapes(TINY))


def test_export_dtype_is_the_one_asked_for(tmp_path):
    """A float32 export of a bf16 model is float32, and a bf16 one of float32 masters bf16."""
    state = random_state(dtype=torch.bfloat16)
    save_hf(tmp_path / "fp32", TINY, state.items(), torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp32")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.model.norm.weight.data, state["norm.weight"].float())
    save_hf(tmp_path / "bf16", TINY, random_state().items(), torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="int8"):
        save_hf(tmp_path / "int8", TINY, state.items(), torch.int8)


def test_export_with_tokenizer_and_eos_ids_works_in_transformers(tmp_path):
    tokenizer = Tokenizer.train(["one two three, 123 four five"] * 4, 290)
    tokenizer.save(tmp_path / "tokenizer")
    eos_ids = tuple(dict.fromkeys((tokenizer.eos_id, 3)))
    save_hf(
        tmp_path / "out",
        TINY,
        random_state().items(),
        torch.float32,
        tokenizer=tmp_path / "tokenizer",
        eos_ids=eos_ids,
        pad_id=tokenizer.pad_id,
    )
    assert read_eos_ids(tmp_path / "out") == eos_ids
    text = "two five 32, three  é"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    assert theirs.eos_token_id == tokenizer.eos_id
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == list(eos_ids)
    assert model.generation_config.pad_token_id == tokenizer.pad_id

    small = TINY.model_copy(update={"vocab_size": tokenizer.vocab_size - 1})
    with pytest.raises(CheckpointError, match="do not belong together"):
        save_hf(
            tmp_path / "small",
            small,
            random_state(small).items(),
            torch.float32,
            tokenizer=tmp_path / "tokenizer",
        )
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "bpe.json"])
def test_a_tokenizer_named_by_its_file_keeps_what_tells_of_it(name, tmp_path):
    tokenizer = Tokenizer.train(["one two three, 123 four five"] * 4, 290)
    tokenizer.save(tmp_path / "tokenizer")
    file = (tmp_path / "tokenizer" / "tokenizer.json").rename(tmp_path / "tokenizer" / name)
    out = tmp_path / "out"
    save_hf(out, TINY, random_state().items(), torch.float32, tokenizer=file)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.eos_token_id == tokenizer.eos_id
    assert theirs.chat_template == tokenizer.chat_template
    assert Tokenizer.load(out).chat_template == tokenizer.chat_template


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s.pop("blocks.1.attn.wo.weight"), r"blocks\.1\.attn\.wo\.weight"),
        (lambda s: s.update({"norm.weights": torch.ones(32)}), "did you mean 'norm.weight'"),
        (lambda s: s.update({"norm.weight": torch.ones(33)}), r"\(33,\), expected \(32,\)"),
        (lambda s: s["norm.weight"].fill_(float("nan")), "norm.weight.*non-finite"),
    ],
)
def test_a_refused_export_leaves_nothing(change, named, tmp_path):
    state = random_state()
    change(state)
    with pytest.raises(CheckpointError, match=named):
        save_hf(tmp_path / "out", TINY, state.items(), torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_an_export_is_replaced_only_when_asked_and_never_by_half_of_one(tmp_path):
    folder = tmp_path / "out"
    save_hf(folder, TINY, random_state().items(), torch.float32)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="there already"):
        save_hf(folder, TINY, random_state().items(), torch.float32)
    with pytest.raises(CheckpointError, match="no tensor came"):
        save_hf(folder, TINY, [], torch.float32, overwrite=True)
    assert (folder / "model.safetensors").read_bytes() == before
    save_hf(folder, TINY, random_state().items(), torch.bfloat16, overwrite=True)
    assert (folder / "model.safetensors").stat().st_size < len(before)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        save_hf(folder, TINY, random_state().items(), torch.float32, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_export_left_is_mended(tmp_path):
    """Killed while writing; killed between taking the old export away and naming the new one."""
    folder = tmp_path / "out"
    save_hf(folder, TINY, random_state().items(), torch.float32)
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "half").write_text("x")
    folder.rename(tmp_path / ".out.old")
    with pytest.raises(CheckpointError, match="no tensor came"):
        save_hf(folder, TINY, [], torch.float32)
    assert read_hf_config(folder).vocab_size == TINY.vocab_size
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_one_clear_error(tmp_path):
    def export():
        with whole_folder(tmp_path / "out") as temporary:
            (temporary / "full").symlink_to("/dev/full")
            (temporary / "full").write_bytes(b"x" * 100_000)

    with pytest.raises(CheckpointError, match="No space left"):
        export()
    assert list(tmp_path.iterdir()) == []


def test_export_is_deterministic(tmp_path):
    for name in "ab":
        save_hf(tmp_path / name, TINY, random_state().items(), torch.float32)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
