"""Averages of a run's checkpoints: what a decay of the learning rate does, without one.

Parameters are read one at a time from each checkpoint and summed in float32 (float64 for float64
weights), so that memory holds a few tensors, whatever the model and the number of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.models.flops import parameter_shapes
from stepwell.sections.model import ModelConfig
from stepwell.train import checkpoint, run_checkpoints
from stepwell.train.weights import known_tokenizer, read_model
from stepwell.types import CheckpointError, ConfigError

Kind = Literal["uniform", "1-sqrt", "ema"]


def merge_weights(kind: Kind, steps: Sequence[int], ema_decay: float = 0.8) -> list[float]:
    """How much each checkpoint counts, in the order of their steps; they sum to 1.

    uniform: the same (LAWA, 2209.14981). ema: `ema_decay` times as much as the next one.
    1-sqrt: so that updates count as under a decay of that shape from the first checkpoint to the
    last (WSM, 2507.17634). With d_j the mean of 1 - sqrt(p) between checkpoints j - 1
    and j (p: 0 at the first, 1 at the last), the last counts d_k, the first 1 - d_1, and the others
    d_j - d_{j+1}. Needs ascending steps.
    """
    count = len(steps)
    if kind == "uniform":
        return [1 / count] * count
    if kind == "ema":
        powers = [ema_decay ** (count - 1 - j) for j in range(count)]
        return [power / sum(powers) for power in powers]
    if any(a >= b for a, b in pairwise(steps)):
        raise ConfigError(
            f"--weights 1-sqrt goes by the steps of the checkpoints, which must ascend: "
            f"{', '.join(map(str, steps))}; give them in order, or take --weights uniform"
        )
    places = [(step - steps[0]) / (steps[-1] - steps[0]) for step in steps]
    factors = [1 - 2 / 3 * (b**1.5 - a**1.5) / (b - a) for a, b in pairwise(places)]
    return [before - after for before, after in zip([1, *factors], [*factors, 0], strict=True)]


def choose(run_dir: str | Path, last: int | None, from_step: int | None) -> list[Path]:
    """The last so many checkpoints of a run, or all from a step on. Raises CheckpointError if that
    is fewer than two, or than `last`."""
    steps = run_checkpoints.steps_of(run_dir)
    chosen = [step for step in steps if from_step is None or step >= from_step]
    chosen = chosen[-last:] if last is not None else chosen
    if len(chosen) < max(2, last or 0):
        shown = ", ".join(map(str, steps)) or "none"
        if last is not None and len(steps) >= 2:
            advice = f"the nearest legal value is --last {len(steps)}"
        elif len(steps) >= 2:
            advice = f"the nearest legal value is --from-step {steps[-2]}"
        else:
            advice = "an average takes at least 2"
        asked = f"--last {last}" if last is not None else f"--from-step {from_step}"
        raise CheckpointError(
            f"{asked} finds {len(chosen)} of the checkpoints of {run_dir} (steps {shown}); "
            f"{advice} (a larger checkpoint.keep_last keeps more)"
        )
    return [run_checkpoints.step_folder(run_dir, step) for step in chosen]


def check_alike(folders: Sequence[Path]) -> ModelConfig:
    """The dimensions that all checkpoints share. Raises CheckpointError naming the fields in which
    one differs from the first, or that it was trained with another tokenizer."""
    first, tokenizer = read_model(str(folders[0])), known_tokenizer(folders[0])
    for folder in folders[1:]:
        other = read_model(str(folder))
        differing = [
            f"{name} is {getattr(first, name)!r} in the first and {getattr(other, name)!r} in this"
            for name in ModelConfig.model_fields
            if name not in ("init", "init_std") and getattr(first, name) != getattr(other, name)
        ]
        if differing:
            raise CheckpointError(
                f"{folder} is of another architecture than {folders[0]}: {'; '.join(differing)}; "
                "average checkpoints of one run, or of branches of it"
            )
        found = known_tokenizer(folder)
        if None not in (tokenizer, found) and tokenizer != found:
            raise CheckpointError(
                f"{folder} was trained with another tokenizer than {folders[0]}; their ids mean "
                "different tokens"
            )
    return first


def check_distinct(folders: Sequence[Path]) -> None:
    """Raises CheckpointError for a checkpoint that is named twice, also by another path."""
    known: set[Path] = set()
    for folder in folders:
        if folder.resolve() in known:
            raise CheckpointError(
                f"{folder} is named twice, so it would count twice; name each checkpoint once "
                "(--weights says how much one counts)"
            )
        known.add(folder.resolve())


def kinship_warnings(folders: Sequence[Path]) -> list[str]:
    """A line for each checkpoint of a run that neither is the first one's nor has a trunk in common
    with it: their weights lie in different valleys, and the mean of two valleys is a ridge."""
    first = _lineage(folders[0])
    found = []
    for folder in folders[1:]:
        if not first & _lineage(folder):
            found.append(
                f"{folder} is of another run than {folders[0]}, and neither branched from the "
                "other nor from the same one: an average of weights that were not trained from "
                "the same ones is usually worse than each of them"
            )
    return found


def _lineage(folder: Path) -> set[Path | str]:
    """The run that a checkpoint lies in, the runs and weights that it goes back to."""
    found: set[Path | str] = set()
    run_dir = folder.resolve().parents[1]
    while run_dir not in found:
        found.add(run_dir)
        recipe = run_dir / "run.toml"
        if not recipe.is_file():
            break
        run = Run.load(recipe)
        if run.model.init is not None:
            found.add(f"init {Path(run.model.init).resolve()}")
        if run.checkpoint.branch_from is None:
            break
        trunk = Path(run.checkpoint.branch_from).resolve()
        run_dir = trunk if (trunk / "run.toml").is_file() else trunk.parents[1]
    return found


def averaged(
    folders: Sequence[Path], weights: Sequence[float], model: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """(global name, full tensor) of the weighted sum, one at a time. Each checkpoint is verified
    before the first is given; errors as `checkpoint.load_weights`."""
    shapes = parameter_shapes(model)
    readers = [checkpoint.load_weights(folder, shapes) for folder in folders]
    return _sums(readers, weights, list(shapes))


def _sums(
    readers: Sequence[Iterator[tuple[str, Tensor]]], weights: Sequence[float], names: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        total: Tensor | None = None
        for reader, weight in zip(readers, weights, strict=True):
            found, tensor = next(reader)
            assert found == name, "readers give the parameters in the order of their shapes"
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            total = torch.zeros_like(tensor, dtype=dtype) if total is None else total
            total.add_(tensor.to(dtype), alpha=weight)
        assert total is not None
        yield name, total
