"""`stepwell average RUN --last K --out FOLDER`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from stepwell.commands.export import check_place, write_model
from stepwell.commands.inputs import Place, open_model, parse_options
from stepwell.types import CheckpointError, ConfigError

Models = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help_behavior_hint="")
]


@dataclass
class Average:
    """Averages the weights of a run's checkpoints, as an alternative to a decay of the learning
    rate, and writes them as a Hugging Face folder, which eval, generate, export and --model.init
    take."""

    models: Models
    """A run's folder; or the folders of two or more checkpoints, in their order."""
    out: str
    """The folder to write."""
    last: int | None = None
    """The last so many checkpoints of the run."""
    from_step: int | None = None
    """All checkpoints of the run from this step on."""
    weights: Literal["uniform", "1-sqrt", "ema"] = "uniform"
    """How much each counts: the same; as a decay of that shape over their steps would let them;
    or ema-decay times as much as the next one."""
    ema_decay: float = 0.8
    """For --weights ema."""
    tokenizer: Place = None
    """Where the run names none: a tokenizer.json or its folder."""
    overwrite: bool = False
    """Replace an earlier average."""
    json: bool = False
    """Print the result as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("average", Average, argv)
    check(options)
    import torch

    from stepwell.models.hf_reward import RewardNotes
    from stepwell.train import average, run_checkpoints

    check_place(options.out, options.overwrite)
    folders = [Path(model) for model in options.models]
    if run_checkpoints.is_run(folders[0]):
        if len(folders) > 1:
            raise ConfigError(
                f"{folders[0]} is a run's folder and stands alone; to average over runs, name the "
                "folders of their checkpoints"
            )
        if options.last is None and options.from_step is None:
            raise ConfigError("say which checkpoints: --last K, or --from-step STEP")
        folders = average.choose(folders[0], options.last, options.from_step)
    elif options.last is not None or options.from_step is not None:
        raise ConfigError(
            "--last and --from-step choose among a run's checkpoints: name its folder"
        )
    elif len(folders) < 2:
        raise CheckpointError(f"one checkpoint ({folders[0]}) has no average; name at least 2")
    average.check_distinct(folders)
    cfg = average.check_alike(folders)
    warnings = average.kinship_warnings(folders)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    steps = [int(run_checkpoints.read_state(folder)["step"]) for folder in folders]
    shares = average.merge_weights(options.weights, steps, options.ema_decay)
    model = open_model(str(folders[-1]), options.tokenizer)
    model.weights = average.averaged(folders, shares, cfg)
    # The mean and spread of a reward model's scores were measured on other weights.
    write_model(options.out, model, torch.float32, options.overwrite, RewardNotes())
    parts = [
        {"checkpoint": str(folder), "step": step, "weight": share}
        for folder, step, share in zip(folders, steps, shares, strict=True)
    ]
    if options.json:
        result = {"folder": options.out, "weights": options.weights, "checkpoints": parts}
        print(json.dumps(result | {"warnings": warnings}))
    else:
        lines = [f"  step {part['step']:>9,}  {part['weight']:.4f}" for part in parts]
        print("\n".join([f"{options.weights} average of {len(parts)}: {options.out}", *lines]))
    return 0


def check(options: Average) -> None:
    """Raises ConfigError for options that cannot be."""
    if not options.models:
        raise ConfigError("no run: name a run's folder, or the folders of its checkpoints")
    if options.last is not None and options.last < 2:
        raise ConfigError(f"--last {options.last} must be at least 2, the nearest legal value")
    if options.last is not None and options.from_step is not None:
        raise ConfigError("--last and --from-step exclude each other; give one of them")
    if not 0 < options.ema_decay <= 1:
        near = 1 if options.ema_decay > 1 else 0.01
        raise ConfigError(
            f"--ema-decay {options.ema_decay} must be above 0 and at most 1, e.g. {near}"
        )
