"""Dimensions of published models by name. No torch.

Sources: each model's released config.json on the Hugging Face hub. Llama 3 rows carry the 3.1
release's RoPE scaling (2407.21783).
"""

from __future__ import annotations

from stepwell.sections.model import ModelConfig, RopeScaling
from stepwell.types import ConfigError, nearest


def _smollm2(**dims) -> ModelConfig:
    shared = {"vocab_size": 49152, "head_dim": 64, "tied": True, "max_seq_len": 8192}
    return ModelConfig(family="llama", norm_eps=1e-5, **shared, **dims)


def _llama2(**dims) -> ModelConfig:
    return ModelConfig(
        family="llama", vocab_size=32000, head_dim=128, tied=False, max_seq_len=4096, **dims
    )


def _llama3(**dims) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=128256,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(),
        tied=False,
        max_seq_len=131072,
        **dims,
    )


def _qwen2(**dims) -> ModelConfig:
    return ModelConfig(family="qwen2", norm_eps=1e-6, rope_theta=1e6, qkv_bias=True, **dims)


def _qwen3(**dims) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=151936,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-6,
        rope_theta=1e6,
        qk_norm=True,
        max_seq_len=40960,
        **dims,
    )


PRESETS: dict[str, ModelConfig] = {
    "smollm2-135m": _smollm2(
        num_layers=30,
        d_model=576,
        num_heads=9,
        num_kv_heads=3,
        d_ff=1536,
        rope_theta=100_000.0,
        init_std=1 / 24,
    ),
    "smollm2-360m": _smollm2(
        num_layers=32, d_model=960, num_heads=15, num_kv_heads=5, d_ff=2560, rope_theta=100_000.0
    ),
    "smollm2-1.7b": _smollm2(
        num_layers=24, d_model=2048, num_heads=32, num_kv_heads=32, d_ff=8192, rope_theta=130_000.0
    ),
    "llama2-7b": _llama2(num_layers=32, d_model=4096, num_heads=32, num_kv_heads=32, d_ff=11008),
    "llama2-13b": _llama2(num_layers=40, d_model=5120, num_heads=40, num_kv_heads=40, d_ff=13824),
    "llama2-70b": _llama2(num_layers=80, d_model=8192, num_heads=64, num_kv_heads=8, d_ff=28672),
    "llama3-8b": _llama3(num_layers=32, d_model=4096, num_heads=32, d_ff=14336),
    "llama3-70b": _llama3(num_layers=80, d_model=8192, num_heads=64, d_ff=28672),
    "llama3-405b": _llama3(num_layers=126, d_model=16384, num_heads=128, d_ff=53248),
    "qwen2.5-0.5b": _qwen2(
        vocab_size=151936,
        num_layers=24,
        d_model=896,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        d_ff=4864,
        tied=True,
        max_seq_len=32768,
    ),
    "qwen2.5-7b": _qwen2(
        vocab_size=152064,
        num_layers=28,
        d_model=3584,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        d_ff=18944,
        tied=False,
        max_seq_len=131072,
    ),
    "qwen3-0.6b": _qwen3(num_layers=28, d_model=1024, num_heads=16, d_ff=3072, tied=True),
    "qwen3-8b": _qwen3(num_layers=36, d_model=4096, num_heads=32, d_ff=12288, tied=False),
    "qwen3-32b": _qwen3(num_layers=64, d_model=5120, num_heads=64, d_ff=25600, tied=False),
    "mistral-7b": ModelConfig(
        family="mistral",
        vocab_size=32000,
        num_layers=32,
        d_model=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        d_ff=14336,
        norm_eps=1e-5,
        sliding_window=4096,
        tied=False,
        max_seq_len=32768,
    ),
}


def preset(name: str) -> ModelConfig:
    """The dimensions of a published model; ConfigError names the nearest preset."""
    key = name.strip().lower()
    if key not in PRESETS:
        raise ConfigError(
            f"no model preset {name!r}{nearest(key, PRESETS)}; known: {', '.join(PRESETS)}"
        )
    return PRESETS[key]
