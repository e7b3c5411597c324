"""Prefill and decode steps against the decoder itself, for every family."""

import pytest
import torch

from stepwell.models.decode import DecodeWeights, KVCache, decode_step, prefill
from stepwell.models.transformer import Decoder, ForwardOptions
from stepwell.sections.model import ModelConfig, RopeScaling
from stepwell.types import CheckpointError

FAMILIES = {
    "llama": {},
    "llama3-scaled": {
        "rope_scaling": RopeScaling(factor=4.0, original_max_seq_len=32),
        "tied": False,
    },
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True},
    "mistral-window": {"family": "mistral", "sliding_window": 7, "tied": False},
}


def config(**changes) -> ModelConfig:
    base = {
        "vocab_size": 100,
        "num_layers": 2,
        "d_model": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "d_ff": 80,
        "max_seq_len": 128,
    }
    return ModelConfig.model_validate(base | changes)


def random_decoder(cfg: ModelConfig, seed: int = 0) -> Decoder:
    decoder = Decoder(cfg)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            center = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(center + 0.15 * torch.randn(parameter.shape, generator=generator))
    return decoder


def full_logits(decoder: Decoder, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    T = len(tokens)
    options = ForwardOptions(needs=frozenset({"logits"}), dtype=dtype)
    borders = torch.tensor([0, T], dtype=torch.int32)
    with torch.no_grad():
        out = decoder(tokens[None], torch.arange(T)[None], borders, options=options)
    return out.logits_BTV[0]


def decoded_logits(decoder: Decoder, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """After 20 tokens at once, and each of the others."""
    weights = DecodeWeights.pack(decoder.cfg, decoder.state_dict().items(), dtype)
    rope, cache = weights.rope(64), KVCache.empty(weights, 8, 64)
    with torch.inference_mode():
        kv_LT, first = prefill(weights, rope, tokens[:20])
        cache.put(3, kv_LT)
        got = [first]
        for t in range(20, len(tokens)):
            tokens_R, positions_R = torch.zeros(8, dtype=torch.int64), torch.zeros(8).long()
            tokens_R[3], positions_R[3] = tokens[t], t
            length = 32 if t < 32 else 64
            got.append(decode_step(weights, rope, cache, tokens_R, positions_R, length)[3])
    return torch.stack(got)


def some_decoder(name: str) -> tuple[Decoder, torch.Tensor]:
    cfg = config(**FAMILIES[name])
    generator = torch.Generator().manual_seed(1)
    return random_decoder(cfg), torch.randint(0, cfg.vocab_size, (50,), generator=generator)


def farthest(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.double() - other.double()).abs().max().item()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
def test_logits_equal_the_decoders(name, dtype, tolerance):
    decoder, tokens = some_decoder(name)
    expected = full_logits(decoder, tokens, dtype)[19:]
    assert farthest(decoded_logits(decoder, tokens, dtype), expected) < tolerance
    assert expected.abs().max() > 0.5  # the comparison is not between zeros


@pytest.mark.parametrize("name", FAMILIES)
def test_in_bf16_they_are_as_near_the_exact_ones_as_the_decoders(name):
    """Where two roundings differ, neither is the truth."""
    decoder, tokens = some_decoder(name)
    exact = full_logits(decoder, tokens, torch.float64)[19:]
    usual = farthest(full_logits(decoder, tokens, torch.bfloat16)[19:], exact)
    assert farthest(decoded_logits(decoder, tokens, torch.bfloat16), exact) < 1.5 * usual < 0.15


def test_pack_names_what_does_not_fit():
    cfg = config()
    state = random_decoder(cfg).state_dict()
    missing = {k: v for k, v in state.items() if k != "blocks.1.attn.wo.weight"}
    with pytest.raises(CheckpointError, match=r"blocks\.1\.attn\.wo\.weight' is missing"):
        DecodeWeights.pack(cfg, missing.items(), torch.float32)
    with pytest.raises(CheckpointError, match=r"'head\.weight' is not part"):
        DecodeWeights.pack(
            cfg, (state | {"head.weight": torch.ones(100, 48)}).items(), torch.float32
        )
    with pytest.raises(CheckpointError, match=r"\(100, 47\)"):
        DecodeWeights.pack(
            cfg, (state | {"embed.weight": torch.ones(100, 47)}).items(), torch.float32
        )


def test_packing_copies_so_later_training_does_not_reach_the_sampler():
    cfg = config()
    decoder = random_decoder(cfg)
    weights = DecodeWeights.pack(cfg, decoder.state_dict().items(), torch.float32)
    rope, tokens = weights.rope(32), torch.arange(5)
    with torch.inference_mode():
        before = prefill(weights, rope, tokens)[1]
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(3.0)
    with torch.inference_mode():
        assert torch.equal(prefill(weights, rope, tokens)[1], before)


def test_a_tied_head_is_the_embedding_and_takes_nothing_more():
    for tied in (True, False):
        cfg = config(tied=tied)
        weights = DecodeWeights.pack(cfg, random_decoder(cfg).state_dict().items(), torch.float32)
        same = weights.head_VD.data_ptr() == weights.embed_VD.data_ptr()
        assert same == tied
