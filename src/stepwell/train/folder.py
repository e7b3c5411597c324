"""Whether a run's folder may be gone on with: what a run and its continuation may differ in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stepwell.config import Run
from stepwell.train import run_checkpoints
from stepwell.types import ConfigError

RECIPE = "run.toml"

# What may change between a run and its continuation without changing what is computed.
FREE_SECTIONS = ("name", "dir", "log", "layout", "remat")
FREE_KEYS = (
    "checkpoint.asynchronous",
    "checkpoint.every_steps",
    "checkpoint.keep_best",
    "checkpoint.keep_last",
    "method.displacement",
    "method.overopt",
    "precision.fp8.shadow_every",
    "precision.fp8.shadow_tolerance",
    "train.eval_every",
    "train.log_every",
    "train.micro_batch_rows",
)


def check_folder(run: Run, others: Iterable[str] = ()) -> Path | None:
    """The last checkpoint in the run's folder, which a killed process's leftovers are cleared from,
    as its folders `others` are. Refuses a folder whose checkpoints belong to a different run."""
    latest, path = run_checkpoints.latest(run.dir), Path(run.dir) / RECIPE
    if path.exists() and latest is not None:
        changed = differing_keys(Run.load(path), run)
        if changed:
            raise ConfigError(
                f"{run.dir} holds checkpoints of a run with other settings "
                f"({', '.join(changed)}); choose another dir, or --fresh to start over. To go on "
                "from its last checkpoint with these settings, choose another dir and set "
                f"checkpoint.branch_from={run.dir!r}"
            )
    for folder in (run.dir, *(Path(run.dir) / name for name in others)):
        run_checkpoints.remove_leftovers(folder)
    return latest


def is_finished(run: Run) -> bool:
    """Whether the run's folder holds this very run, done; only reads."""
    path, latest = Path(run.dir) / RECIPE, run_checkpoints.latest(run.dir)
    if latest is None or not path.is_file():
        return False
    old = Run.load(path)
    # `method.epochs` has cut the steps of the one that was saved.
    changed = set(differing_keys(old, run))
    changed -= {"train.steps"} if getattr(run.method, "epochs", None) else set()
    return not changed and run_checkpoints.read_state(latest)["step"] >= old.train.steps


def differing_keys(old: Run, new: Run) -> list[str]:
    """Dotted keys in which two runs differ, but for those that don't change what is computed."""
    a, b = (flat_keys(r.model_dump(exclude=set(FREE_SECTIONS))) for r in (old, new))
    keys = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
    return [k for k in keys if k not in FREE_KEYS]


def flat_keys(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(flat_keys(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
