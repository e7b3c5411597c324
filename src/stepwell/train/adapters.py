"""Adapters as a run keeps them: what their checkpoint records of the base, what may be loaded over
it, and the plain weights that both make together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.models.lora_shapes import is_trained, layer_of, target_shapes, trained_shapes
from stepwell.models.peft import is_peft, load_peft, read_peft_config
from stepwell.models.quantize import dequantise_nf4, quantise_nf4
from stepwell.parallel.adapters import copy_full, merged
from stepwell.parallel.fsdp import DTYPES
from stepwell.sections.model import LoraConfig, ModelConfig
from stepwell.train import checkpoint, run_checkpoints
from stepwell.types import CheckpointError, ConfigError

RECORD = "adapter"  # in a checkpoint's state
# Settings without which an adapter's numbers mean something else.
FIXED = ("rank", "alpha", "targets", "dora", "rslora")
DRAWN = "seed "  # how the fingerprint of a base begins that the seed has drawn
_SAMPLES = 4096


@dataclass
class Fingerprint:
    """Of a base's weights, in any order: names, shapes, and evenly spaced values of each tensor as
    they are given, which no training leaves as they were."""

    parts: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        flat = tensor.detach().reshape(-1)
        values = flat[:: max(1, flat.numel() // _SAMPLES)].to("cpu", torch.float32)
        text = f"{tuple(tensor.shape)}".encode() + values.contiguous().numpy().tobytes()
        self.parts[name] = hashlib.sha256(text).hexdigest()

    @property
    def value(self) -> str:
        text = "".join(f"{name} {part}\n" for name, part in sorted(self.parts.items()))
        return hashlib.sha256(text.encode()).hexdigest()


def seen_by(
    fingerprint: Fingerprint, weights: Iterable[tuple[str, Tensor]], lora: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """The same weights, those that stay frozen taken up on their way."""
    for name, tensor in weights:
        if not is_trained(name, lora):
            fingerprint.add(name, tensor)
        yield name, tensor


def drawn_fingerprint(run: Run) -> str:
    """Of a base that the seed has drawn."""
    return f"{DRAWN}{run.train.seed}, init_std {run.model.init_std!r}"


# --- a checkpoint's record -----------------------------------------------------------------------


def record_of(run: Run, fingerprint: str) -> dict[str, Any]:
    """What a checkpoint of adapters says of them and of their base."""
    init = run.model.init
    place = None if init is None or not Path(init).exists() else str(Path(init).resolve())
    return {
        "lora": run.lora.model_dump(mode="json", exclude={"init"}),
        "base": {
            "init": init,
            "place": place,
            "seed": run.train.seed,
            "init_std": run.model.init_std,
            "fingerprint": fingerprint,
            "dtype": run.precision.compute,
        },
    }


def check_record(folder: Path, state: Mapping[str, Any], run: Run, fingerprint: str) -> None:
    """Raises CheckpointError if a checkpoint does not fit the run's adapters, or their base."""
    record = state.get(RECORD)
    if record is None and not run.lora.rank:
        return
    if record is None:
        raise CheckpointError(
            f"{folder} holds a whole model, but lora.rank={run.lora.rank} trains adapters; to "
            "start from its weights, set model.init to it"
        )
    if not run.lora.rank:
        raise CheckpointError(
            f"{folder} holds adapters only; model.init takes it with its base, merged, and "
            "lora.init goes on training it"
        )
    stored, mine = _settings(record), run.lora
    kept = (*FIXED, "quantize", "double_quantize")
    differing = [
        f"lora.{key} is {getattr(stored, key)!r} there and {getattr(mine, key)!r} here"
        for key in kept
        if not _same(key, stored, mine, run.model)
    ]
    if differing:
        raise CheckpointError(f"the adapters in {folder} are others: {'; '.join(differing)}")
    _check_base(folder, record, fingerprint)


def _check_base(folder: str | Path, record: Mapping[str, Any], fingerprint: str) -> None:
    base = record["base"]
    if base["fingerprint"] != fingerprint:
        raise CheckpointError(
            f"the adapters in {folder} were trained over another base: {_base_text(base)} had the "
            f"fingerprint {base['fingerprint'][:12]}, this one has {fingerprint[:12]}"
        )


def _base_text(base: Mapping[str, Any]) -> str:
    return f"model.init={base['init']!r}" if base["init"] else "weights drawn from the seed"


def base_of(folder: str | Path, record: Mapping[str, Any]) -> str | None:
    """The `model.init` of the base that the adapters in a checkpoint belong to, None if the seed
    drew it. Raises CheckpointError if it is no longer there."""
    base = record["base"]
    if base["init"] is None:
        if not base["fingerprint"].startswith(DRAWN):
            raise CheckpointError(
                f"{folder} holds adapters only, and a program gave the weights of their base, "
                "which are in no file; export the model before that program ends"
            )
        return None
    if base["place"] is None:  # the name of a model that a package brings
        return base["init"]
    for place in (base["place"], base["init"]):
        if Path(place).exists():
            return place
    raise CheckpointError(
        f"{folder} holds adapters only, and their base is not where it was, {base['place']}; "
        "put it back"
    )


def _settings(record: Mapping[str, Any]) -> LoraConfig:
    return LoraConfig.model_validate(record["lora"], strict=False)


@dataclass(frozen=True)
class StoredAdapter:
    """The adapters of a checkpoint. base: the `model.init` that they were trained over."""

    folder: Path
    lora: LoraConfig
    base: str | None


def open_adapter(path: str | Path, key: str = "model") -> StoredAdapter:
    """Of a run's last checkpoint, or a checkpoint. key: what named it. Raises CheckpointError where
    there are none."""
    folder = run_checkpoints.of_run_or_itself(path, key)
    record = run_checkpoints.read_state(folder).get(RECORD)
    if record is None:
        raise CheckpointError(f"{key}={str(path)!r} holds a whole model, no adapter")
    return StoredAdapter(folder, _settings(record), record["base"]["init"])


# --- going on from an adapter --------------------------------------------------------------------


def resolve_adapter(run: Run) -> Run:
    """The run with the settings of `lora.init` filled in.

    Raises ConfigError if the run sets one that the adapter contradicts, CheckpointError for what is
    no adapter.
    """
    init, mine = run.lora.init, run.lora
    if init is None:
        return run
    found = _read_settings(init, run.model)
    fresh, values = LoraConfig(), mine.model_dump()
    for key in FIXED:
        value, there = getattr(mine, key), getattr(found, key)
        if mine.rank == 0 and value == getattr(fresh, key):
            values[key] = there
        elif not _same(key, mine, found, run.model):
            raise ConfigError(
                f"lora.{key}={value!r} contradicts the adapter at {init}, where it is {there!r}; "
                f"leave {', '.join(f'lora.{k}' for k in FIXED)} out"
            )
    return Run.model_validate({**run.model_dump(), "lora": values})


def _same(key: str, mine: LoraConfig, other: LoraConfig, cfg: ModelConfig) -> bool:
    """Whether a setting means the same; patterns do that match the same layers."""
    if key != "targets":
        return getattr(mine, key) == getattr(other, key)
    layers = (target_shapes(cfg, c.model_copy(update={"rank": 1})) for c in (mine, other))
    return next(layers) == next(layers)


def _read_settings(init: str, cfg: ModelConfig) -> LoraConfig:
    if is_peft(init):
        return read_peft_config(init, cfg)
    return open_adapter(init, "lora.init").lora


def load_adapter(run: Run, parameters: Iterable[tuple[str, Tensor]], fingerprint: str) -> None:
    """Copies the adapter at `lora.init` into the run's (sharded) parameters.

    Raises CheckpointError if it does not fit them, or was trained over another base (which PEFT
    folders don't say).
    """
    _check_base_of_init(run, fingerprint)
    mine = dict(parameters)
    with torch.no_grad():
        for name, value in _values_of_init(run):
            if name in mine:  # else another stage's
                copy_full(mine[name], value)


def with_adapter(run: Run, base: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(global name, full tensor) of the plain model that a base and the adapter at `lora.init`
    make: what an engine of the run begins as. Errors: as `load_adapter`, the last at the end."""
    run = resolve_adapter(run)
    fingerprint, adapter = Fingerprint(), dict(_values_of_init(run))
    dtype = DTYPES[run.precision.compute]
    pairs = beside(seen_by(fingerprint, base, run.lora), adapter, run.model, run.lora, dtype)
    yield from merged(pairs, run.lora)
    _check_base_of_init(run, fingerprint.value)


def _values_of_init(run: Run) -> Iterator[tuple[str, Tensor]]:
    init = run.lora.init
    assert init is not None
    if is_peft(init):
        return load_peft(init, run.model, run.lora)
    folder = open_adapter(init, "lora.init").folder
    return checkpoint.load_weights(folder, trained_shapes(run.model, run.lora))


def _check_base_of_init(run: Run, fingerprint: str) -> None:
    init = run.lora.init
    assert init is not None
    if not is_peft(init):
        folder = open_adapter(init, "lora.init").folder
        _check_base(folder, run_checkpoints.read_state(folder)[RECORD], fingerprint)


# --- merged --------------------------------------------------------------------------------------


def merged_weights(
    folder: str | Path,
    record: Mapping[str, Any],
    cfg: ModelConfig,
    base: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """(global name, full tensor) of the plain model that base and adapters make: the base as it was
    while they were trained (rounded to compute precision, or to 4 bits), plus what they add.

    Raises CheckpointError if the adapters do not fit, and, at the end, if the base is another.
    """
    lora = _settings(record)
    trained = dict(checkpoint.load_weights(folder, trained_shapes(cfg, lora)))
    dtype = DTYPES[record["base"]["dtype"]]

    fingerprint = Fingerprint()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        given = seen_by(fingerprint, base, lora)
        yield from merged(beside(given, trained, cfg, lora, dtype), lora)
        if not record["base"]["fingerprint"].startswith(DRAWN):
            _check_base(folder, record, fingerprint.value)

    return tensors()


def beside(
    base: Iterable[tuple[str, Tensor]],
    trained: Mapping[str, Tensor],
    cfg: ModelConfig,
    lora: LoraConfig,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """A base as a run in this compute precision holds it, what was trained in its place or, for an
    adapter, after its layer."""
    targets = target_shapes(cfg, lora)
    for name, tensor in base:
        if name in trained:
            yield name, trained[name]
            continue
        layer = layer_of(name)
        adapted = name == f"{layer}.weight" and layer in targets
        frozen = not is_trained(name, lora)
        yield name, as_trained(tensor, lora, dtype, adapted) if frozen else tensor
        if adapted:
            yield from ((n, t) for n, t in trained.items() if n.startswith(f"{layer}."))


def as_trained(tensor: Tensor, lora: LoraConfig, dtype: torch.dtype, adapted: bool) -> Tensor:
    """A frozen weight as a run holds it, in the precision that it is given."""
    if tensor.dim() < 2:
        return tensor
    if adapted and lora.quantize == "nf4":
        return dequantise_nf4(quantise_nf4(tensor, lora.double_quantize), tensor.dtype)
    return tensor.to(dtype).to(tensor.dtype)
