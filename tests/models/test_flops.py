"""The FLOP counter against torch's traced count, and its closed forms."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stepwell.models.flops import (
    attended_seq_len,
    count_parameters,
    flops_per_token,
    parameter_shapes,
)
from stepwell.models.hf_config import config_to_hf
from stepwell.models.transformer import Decoder
from stepwell.presets import preset
from stepwell.sections.model import ModelConfig
from stepwell.types import ConfigError

BASE = ModelConfig(
    vocab_size=130, num_layers=3, d_model=36, num_heads=6, num_kv_heads=2, head_dim=8, d_ff=48
)
CONFIGS = {
    "tied": BASE,
    "untied": BASE.model_copy(update={"tied": False}),
    "qwen2": BASE.model_copy(update={"family": "qwen2", "qkv_bias": True, "head_dim": 10}),
    "qwen3_wide": BASE.model_copy(update={"family": "qwen3", "qk_norm": True, "head_dim": 16}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_torchs_traced_count(name):
    """Transformers' model with the maths backend: torch counts nothing for the CPU flash kernel."""
    transformers = pytest.importorskip("transformers")
    cfg = CONFIGS[name]
    values = config_to_hf(cfg)
    model_type = values.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    B, T = 2, 24
    tokens_BT = torch.zeros(B, T, dtype=torch.int64)
    counts = {}
    for key in ("forward", "training"):
        counter = FlopCounterMode(display=False)
        with counter, sdpa_kernel(SDPBackend.MATH):
            logits = model(input_ids=tokens_BT).logits
            if key == "training":
                logits.sum().backward()
        # The rotary table is a batched product of its own: (E/2 x 1) with (1 x T), per row.
        rotary = counter.get_flop_counts().get(f"{type(model).__name__}.model.rotary_emb", {})
        counts[key] = counter.get_total_flops() - sum(rotary.values())
    flops = flops_per_token(cfg, T, attention="full")
    assert counts["forward"] == B * T * flops.forward
    assert counts["training"] == B * T * flops.training


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_and_counts_are_the_decoders(name):
    cfg = CONFIGS[name]
    decoder = Decoder(cfg)
    shapes = {n: tuple(p.shape) for n, p in decoder.named_parameters()}
    assert shapes == parameter_shapes(cfg)
    counts = count_parameters(cfg)
    assert counts.total == sum(p.numel() for p in decoder.parameters())
    matrices = sum(p.numel() for n, p in decoder.named_parameters() if p.dim() == 2)
    assert counts.matmul == matrices - (0 if cfg.tied else counts.embedding)


def test_closed_form():
    """6N + 6 L d s (causal half) and 6N + 12 L d s; a tied head costs what an untied one does."""
    cfg = preset("llama3-8b")
    N = count_parameters(cfg).matmul
    attention = cfg.num_layers * cfg.num_heads * cfg.head_dim * 8192
    assert flops_per_token(cfg, 8192).training == 6 * N + 6 * attention
    assert flops_per_token(cfg, 8192, "full").training == 6 * N + 12 * attention
    everything_but_embedding = count_parameters(cfg).total - count_parameters(cfg).embedding
    assert abs(N / everything_but_embedding - 1) < 1e-3
    tied = flops_per_token(CONFIGS["tied"], 64)
    assert tied.training == flops_per_token(CONFIGS["untied"], 64).training
    assert count_parameters(CONFIGS["tied"]).total < count_parameters(CONFIGS["untied"]).total


def test_sliding_window_counts_the_keys_that_are_seen():
    cfg = preset("mistral-7b")
    for window, seq_len in ((4, 16), (7, 9), (16, 16), (4096, 32)):
        windowed = cfg.model_copy(update={"sliding_window": window})
        per_key = 4 * cfg.num_layers * cfg.num_heads * cfg.head_dim
        seen = sum(min(i + 1, window) for i in range(seq_len)) / seq_len
        counted = flops_per_token(windowed, seq_len).attention / per_key
        # The convention halves the square and drops the diagonal: half a key at most.
        assert 0 < seen - counted <= 0.5
        full = flops_per_token(windowed, seq_len, "full").attention / per_key
        assert full == min(window, seq_len)


def test_packed_documents_are_credited_with_their_own_length_only():
    assert attended_seq_len([100]) == 100
    assert attended_seq_len([10, 30, 0]) == (100 + 900) / 40
    cfg = CONFIGS["tied"]
    lengths = [5, 11, 48]
    apart = sum(n * flops_per_token(cfg, n).training for n in lengths)
    packed = sum(lengths) * flops_per_token(cfg, attended_seq_len(lengths)).training
    assert packed == pytest.approx(apart, rel=1e-12)
    with pytest.raises(ConfigError, match="no document"):
        attended_seq_len([0])


def test_the_convention_is_printable():
    half, full = (flops_per_token(CONFIGS["tied"], 8, a) for a in ("causal_half", "full"))
    assert "6N + 6*L*d*s" in half.convention
    assert "6N + 12*L*d*s" in full.convention
    for flops in (half, full):
        assert "without the input embedding" in flops.convention
        assert "\n" not in flops.convention


def test_recomputed():
    flops = flops_per_token(preset("smollm2-135m"), 2048)
    assert flops.recomputed(blocks=1, attention=1) == flops.forward - flops.head
    both = flops.recomputed(blocks=1, attention=1, head=1)
    assert flops.training + both == pytest.approx(flops.training * 4 / 3)


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match=r"'causal'.*did you mean 'causal_half'"):
        flops_per_token(CONFIGS["tied"], 8, "causal")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="seq_len=0"):
        flops_per_token(CONFIGS["tied"], 0)
