"""Reward models as Hugging Face folders: sequence classifiers, and token classifiers for steps.

Transformers reads a sequence's score at its last token that is not the padding token, whatever the
attention mask says. So the padding token must be one that no text ends with: a folder whose padding
token is its end-of-text token would have scores read a token too early.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stepwell.models.hf import save_hf
from stepwell.sections.model import ModelConfig
from stepwell.tokenizer import Tokenizer
from stepwell.types import CheckpointError, ConfigError

NOTES = "stepwell"  # the key of config.json under which ours are


@dataclass(frozen=True)
class RewardNotes:
    """pad_id: the token that Transformers passes over at a text's end. mean, sd: of the scores on
    held-out data."""

    pad_id: int | None = None
    mean: float | None = None
    sd: float | None = None


def read_hf_notes(folder: str | Path) -> RewardNotes:
    """What a folder's config.json says of its scores. Raises CheckpointError for a broken file."""
    path = Path(folder) / "config.json"
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    ours = values.get(NOTES) or {}
    return RewardNotes(values.get("pad_token_id"), ours.get("score_mean"), ours.get("score_sd"))


def save_hf_reward(
    folder: str | Path,
    cfg: ModelConfig,
    state: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    tokenizer_path: str | Path,
    kind: Literal["sequence", "token"] = "sequence",
    mean: float | None = None,
    sd: float | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a folder that `AutoModelForSequenceClassification` (kind token: its relative for
    tokens) and `AutoTokenizer` load, with the same scores.

    The tokenizer's padding token is replaced where it ends texts too. mean, sd: as in RewardNotes.
    Errors as `save_hf` and `padding_token`; ConfigError for a model without a score of its own.
    """
    if cfg.head != "score":
        raise ConfigError(
            f"model.head={cfg.head!r} is no reward model's; export it as a language model"
        )
    tokenizer = Tokenizer.load(tokenizer_path)
    pad = padding_token(tokenizer)
    ours: dict[str, Any] = {"score_mean": mean, "score_sd": sd}
    known = {key: value for key, value in ours.items() if value is not None}
    save_hf(
        folder,
        cfg,
        state,
        dtype,
        tokenizer=tokenizer_path,
        eos_ids=(tokenizer.eos_id,),
        bos_id=tokenizer.bos_id,
        pad_id=tokenizer.token_id(pad),
        overwrite=overwrite,
        scored=kind,
        notes={NOTES: known} if known else None,
        special_tokens={"pad_token": pad},
    )


def padding_token(tokenizer: Tokenizer) -> str:
    """The tokenizer's padding token, or, if that ends texts, another special token: one that is
    called so, else the last that neither ends nor begins texts nor is in the chat template.

    Raises ConfigError where there is none.
    """
    ends = {tokenizer.token(i) for i in tokenizer.stop_ids}
    if tokenizer.pad_token not in ends:
        return tokenizer.pad_token
    template = tokenizer.chat_template or ""
    free = [
        token
        for token in tokenizer.special_tokens
        if token not in ends and token != tokenizer.bos_token and token not in template
    ]
    named = [token for token in free if "pad" in token.lower()]
    if not free:
        raise ConfigError(
            f"the tokenizer's padding token {tokenizer.pad_token!r} also ends texts, so that "
            "Transformers would read scores before it, and there is no other special token to pad "
            "with; add one to the tokenizer (e.g. <|pad|>) and train with that"
        )
    return (named or free)[-1]
