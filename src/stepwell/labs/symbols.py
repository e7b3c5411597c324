"""A tokenizer whose tokens are single characters, given one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from stepwell.tokenizer import Tokenizer

PAD, EOS = "<|pad|>", "<|eos|>"


def tokenizer_of(symbols: Sequence[str]) -> Tokenizer:
    """Ids 0 and 1 are the padding and the end; each character is a token, none else is known."""
    words = [PAD, EOS, *symbols]
    spec = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, text in enumerate((PAD, EOS))
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated",
                          "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": PAD,
        },
    }  # fmt: skip
    return Tokenizer(json.dumps(spec), {"eos_token": EOS, "pad_token": PAD})
