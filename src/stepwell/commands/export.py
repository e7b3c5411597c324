"""`stepwell export MODEL --out FOLDER`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from stepwell.commands.inputs import (
    Model,
    Place,
    last_run,
    load_tokenizer,
    open_model,
    parse_options,
)
from stepwell.config import Run
from stepwell.models.lora_shapes import adapter_shapes, target_shapes
from stepwell.sections.model import ModelConfig
from stepwell.types import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from stepwell.models.hf_reward import RewardNotes
    from stepwell.train.adapters import StoredAdapter


@dataclass
class Export:
    """Writes a Hugging Face folder (safetensors, config, tokenizer) that Transformers loads, with
    the same logits. A reward model becomes a sequence classifier with the same scores, one of steps
    a token classifier."""

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
    adapter: bool = False
    """Of a run with adapters, these alone, as a folder that PEFT loads over the base (in float32);
    else they are merged with it."""
    four_bit_error: bool = False
    """Report how far each adapted layer is moved by bringing it back to 4 bits (nf4)."""
    json: bool = False
    """Print the result as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("export", Export, argv)
    import torch

    from stepwell.models.hf_reward import RewardNotes
    from stepwell.posttrain.reward_model.model import score_notes

    check_place(options.out, options.overwrite)
    if options.adapter:
        return export_adapter(options)
    model = open_model(options.model, options.tokenizer)
    errors: dict[str, float] = {}
    if options.four_bit_error:
        adapter = stored_adapter(options.model)
        model.weights = measured(model.weights, adapter, model.cfg, errors)
    notes = score_notes(model.path) if model.cfg.head == "score" else RewardNotes()
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    write_model(options.out, model, dtype, options.overwrite, notes)
    if options.json:
        found = {"four_bit_error": errors} if options.four_bit_error else {}
        print(json.dumps({"folder": options.out, "dtype": options.dtype, **found}))
    else:
        for name, error in errors.items():
            print(f"{name}: {error:.3%} of its length away in 4 bits")
        print(
            f"{model.cfg.family}, {options.dtype}: {options.out}"
            + ("" if model.tokenizer else " (without a tokenizer: name one with --tokenizer)")
        )
    return 0


def write_model(
    out: str, model: Model, dtype: torch.dtype, overwrite: bool, notes: RewardNotes
) -> None:
    """Writes a language model's folder, a sequence classifier's, or of a model of steps a token
    classifier's. notes: of the scores."""
    from stepwell.models.hf import save_hf

    if model.cfg.head == "score":
        write_reward(out, model, dtype, overwrite, notes)
        return
    ids = {}
    eos_ids = model.eos_ids
    if model.tokenizer is not None:
        tokenizer = load_tokenizer(model)
        ids = {"bos_id": tokenizer.bos_id, "pad_id": tokenizer.pad_id}
        eos_ids = eos_ids or tokenizer.stop_ids
    save_hf(
        out,
        language_model(model.cfg),
        without_score(model.weights),
        dtype,
        tokenizer=model.tokenizer,
        eos_ids=eos_ids,
        overwrite=overwrite,
        **ids,
    )


def write_reward(
    out: str, model: Model, dtype: torch.dtype, overwrite: bool, notes: RewardNotes
) -> None:
    from stepwell.models.hf_reward import save_hf_reward

    load_tokenizer(model)  # a score needs one: it says which token pads
    assert model.tokenizer is not None
    path = model.path
    recipe = (path if (path / "run.toml").is_file() else path.parent.parent) / "run.toml"
    steps = recipe.is_file() and getattr(Run.load(recipe).method, "objective", "") == "process"
    save_hf_reward(
        out,
        model.cfg,
        model.weights,
        dtype,
        tokenizer_path=model.tokenizer,
        kind="token" if steps else "sequence",
        mean=notes.mean,
        sd=notes.sd,
        overwrite=overwrite,
    )


def language_model(cfg: ModelConfig) -> ModelConfig:
    """Of a policy that shares its trunk with its critic, the policy."""
    return cfg if cfg.head == "lm" else cfg.model_copy(update={"head": "lm", "num_labels": 1})


def without_score(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in weights if name != "score.weight")


def export_adapter(options: Export) -> int:
    """Writes the adapters of a run alone."""
    from stepwell.models.peft import save_peft
    from stepwell.train.checkpoint import load_weights
    from stepwell.train.weights import read_model

    adapter = stored_adapter(options.model)
    cfg = read_model(str(adapter.folder))
    if options.four_bit_error:
        raise ConfigError("--four-bit-error is of merged weights; leave out it or --adapter")
    if cfg.has_score:
        raise ConfigError(
            f"{options.model} trains a score beside its adapters (model.head={cfg.head!r}), which "
            "PEFT's folder has no place for; export without --adapter"
        )
    weights = load_weights(adapter.folder, adapter_shapes(cfg, adapter.lora))
    save_peft(options.out, cfg, adapter.lora, weights, adapter.base, options.overwrite)
    found: dict[str, str | float | None] = {"folder": options.out, "base": adapter.base}
    base = adapter.base or "weights drawn from the seed"
    text = f"adapters over {base}: {options.out}"
    if adapter.lora.quantize != "none":
        found["quantize"] = adapter.lora.quantize
        text += (
            f"\nthey were trained over the base in {adapter.lora.quantize} (4 bits), and correct "
            "for it too: load the base in 4 bits with them"
        )
        if adapter.base is not None:
            found["base_difference"] = apart = base_difference(adapter, cfg)
            text += (
                f". Its adapted matrices are {apart:.1%} of their length (mean) from the whole ones"
            )
        text += "; without --adapter, the base is exported as it was in training"
    print(json.dumps(found) if options.json else text)
    return 0


def base_difference(adapter: StoredAdapter, cfg: ModelConfig) -> float:
    """How far the 4-bit base of a run is from the base in full: the mean over adapted matrices of
    |Q(W) - W| / |W|."""
    from stepwell.train.weights import initial_weights

    base = cfg.model_copy(update={"init": adapter.base})
    errors: dict[str, float] = {}
    for _ in measured(initial_weights(base) or (), adapter, cfg, errors):
        continue
    return sum(errors.values()) / len(errors)


def stored_adapter(name: str) -> StoredAdapter:
    """The adapters of a run's folder, a quickstart's or a checkpoint."""
    from stepwell.train.adapters import open_adapter

    return open_adapter(last_run(Path(name)) or name)


def measured(
    weights: Iterable[tuple[str, Tensor]],
    adapter: StoredAdapter,
    cfg: ModelConfig,
    errors: dict[str, float],
) -> Iterator[tuple[str, Tensor]]:
    """The same weights; notes in `errors` how far each adapted layer is moved by 4 bits."""
    from stepwell.models.quantize import quantising_error

    targets = target_shapes(cfg, adapter.lora)
    for name, tensor in weights:
        layer = name.removesuffix(".weight")
        if layer in targets:
            errors[layer] = quantising_error(tensor, adapter.lora.double_quantize)
        yield name, tensor


def check_place(out: str, overwrite: bool) -> None:
    """Raises CheckpointError, before any work, for a folder that holds something already."""
    folder = Path(out)
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise CheckpointError(
            f"{folder} is there already; choose another folder, or replace an earlier export with "
            "--overwrite"
        )
