"""`stepwell export MODEL --out FOLDER`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from stepwell.commands.inputs import Place, load_tokenizer, open_model, parse_options
from stepwell.types import CheckpointError


@dataclass
class Export:
    """Writes a Hugging Face folder (safetensors, config, tokenizer) that Transformers loads, with
    the same logits."""

    model: Positional[str]
    """A run's folder (its last checkpoint), a quickstart's, a checkpoint, a .gguf file, or
    smollm2."""
    out: str
    """The folder to write."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    tokenizer: Place = None
    """Where the model comes without one: a tokenizer.json or its folder."""
    overwrite: bool = False
    """Replace an earlier export."""
    json: bool = False
    """Print the result as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("export", Export, argv)
    import torch

    from stepwell.models.hf import save_hf

    check_place(options.out, options.overwrite)
    model = open_model(options.model, options.tokenizer)
    ids = {}
    eos_ids = model.eos_ids
    if model.tokenizer is not None:
        tokenizer = load_tokenizer(model)
        ids = {"bos_id": tokenizer.bos_id, "pad_id": tokenizer.pad_id}
        eos_ids = eos_ids or tokenizer.stop_ids
    save_hf(
        options.out,
        model.cfg,
        model.weights,
        torch.bfloat16 if options.dtype == "bf16" else torch.float32,
        tokenizer=model.tokenizer,
        eos_ids=eos_ids,
        overwrite=options.overwrite,
        **ids,
    )
    if options.json:
        print(json.dumps({"folder": options.out, "dtype": options.dtype}))
    else:
        print(
            f"{model.cfg.family}, {options.dtype}: {options.out}"
            + ("" if model.tokenizer else " (without a tokenizer: name one with --tokenizer)")
        )
    return 0


def check_place(out: str, overwrite: bool) -> None:
    """Raises CheckpointError, before any work, for a folder that holds something already."""
    folder = Path(out)
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise CheckpointError(
            f"{folder} is there already; choose another folder, or replace an earlier export with "
            "--overwrite"
        )
