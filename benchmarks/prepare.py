"""Makes the benchmark's inputs from the Python standard library, once: tokenizer, token stream,
chat rows of 50 to 400 tokens, prompts of 32 tokens, pairs of answers."""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.workload import CHAT_TEMPLATE, DATA, EOS_ID, VOCAB

SPECIAL = ["<|pad|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CORPUS_CHARS = 6_000_000


def prepare() -> None:
    if not (DATA / "complete").exists():
        prepare_all()
    if not (DATA / "pairs.jsonl").exists():
        prepare_pairs()


def prepare_pairs() -> None:
    """Prompts of 64 tokens with two answers of 50 to 200."""
    ids = np.fromfile(DATA / "tokens.bin", dtype=np.uint16)
    tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    rng = random.Random(1)

    def piece(num_tokens: int) -> str:
        start = rng.randrange(len(ids) - num_tokens)
        return tokenizer.decode(ids[start : start + num_tokens].tolist())

    rows = [
        {
            "prompt": piece(64),
            "chosen": piece(rng.randint(50, 200)),
            "rejected": piece(rng.randint(50, 200)),
        }
        for _ in range(512)
    ]
    write("pairs", rows)


def prepare_all() -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    texts = corpus()
    tokenizer = train_tokenizer(texts)
    ids = [i for e in tokenizer.encode_batch(texts) for i in [*e.ids, EOS_ID]]
    np.array(ids, dtype=np.uint16).tofile(DATA / "tokens.bin")
    rng = random.Random(0)

    def piece(num_tokens: int) -> str:
        start = rng.randrange(len(ids) - num_tokens)
        return tokenizer.decode(ids[start : start + num_tokens])

    write("chat", (chat_row(rng.randint(50, 400) - 8, rng, piece) for _ in range(1024)))
    prompts: list[dict] = []
    while len(prompts) < 64:
        encoded = tokenizer.encode(piece(32)).ids
        if len(encoded) == 32:
            prompts.append({"ids": encoded})
    write("prompts", prompts)
    (DATA / "complete").touch()


def corpus() -> list[str]:
    texts, total = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py")):
        if total >= CORPUS_CHARS:
            break
        if "site-packages" not in path.parts and "test" not in path.parts:
            texts.append(path.read_text("utf-8", errors="replace"))
            total += len(texts[-1])
    return texts


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(DATA / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": "<|eos|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (DATA / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def chat_row(num_tokens: int, rng: random.Random, piece) -> dict:
    question = max(8, int(num_tokens * rng.uniform(0.15, 0.5)))
    return {
        "messages": [
            {"role": "user", "content": piece(question)},
            {"role": "assistant", "content": piece(num_tokens - question)},
        ]
    }


def write(name: str, rows) -> None:
    (DATA / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
