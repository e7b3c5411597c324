"""What every library is given: one model shape, one corpus, one optimiser.

Imports only numpy and torch, so that it runs in each library's own environment. `prepare.py` makes
the files that are read here.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("STEPWELL_BENCH_CACHE", ROOT / ".cache" / "bench"))
DATA = CACHE / "data"
SCRATCH = CACHE / "scratch"

# Qwen3-shaped, 15.7 million parameters, head not tied.
VOCAB, D_MODEL, LAYERS, HEADS, KV_HEADS, HEAD_DIM, D_FF = 8192, 384, 6, 6, 2, 64, 1024
SEQ_LEN, ROWS = 512, 8
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP_NORM = 3e-4, 0.9, 0.95, 1e-8, 0.1, 1.0
PREFERENCE_LR, PREFERENCE_PAIRS = 1e-5, 64
PROMPTS, NEW_TOKENS = 16, 128
PAIRS = 8
PAD_ID, EOS_ID = 0, 1

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def arguments(**defaults: Any) -> argparse.Namespace:
    """Every worker takes --compile and --dtype; `defaults` name further options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", type=int, default=0)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


def token_rows() -> Iterator[Any]:
    """int64 (ROWS, SEQ_LEN + 1) windows of the corpus, for ever, the same for every library."""
    import numpy as np
    import torch

    tokens = np.fromfile(DATA / "tokens.bin", dtype=np.uint16)
    size = ROWS * SEQ_LEN
    while True:
        for start in range(0, len(tokens) - size - 1, size):
            window = torch.from_numpy(tokens[start : start + size + 1].astype(np.int64))
            yield window.unfold(0, SEQ_LEN + 1, SEQ_LEN)


def json_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def labelled_rows() -> list[dict[str, Any]]:
    """The pairs as two rows each, as KTO learns from them."""
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in json_rows("pairs")[:PREFERENCE_PAIRS]
        for side in ("chosen", "rejected")
    ]
