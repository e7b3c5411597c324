"""The benchmark's model for Transformers and TRL."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks import workload as w


def build_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(build_config())


def build_config(**more: Any) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=w.VOCAB,
        hidden_size=w.D_MODEL,
        intermediate_size=w.D_FF,
        num_hidden_layers=w.LAYERS,
        num_attention_heads=w.HEADS,
        num_key_value_heads=w.KV_HEADS,
        head_dim=w.HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=w.PAD_ID,
        eos_token_id=w.EOS_ID,
        bos_token_id=w.EOS_ID,
        **more,
    )


def load_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(w.DATA / "tokenizer.json"), pad_token="<|pad|>", eos_token="<|eos|>"
    )
    tokenizer.chat_template = w.CHAT_TEMPLATE
    return tokenizer
