"""The checkpoints in a run's folder: which there are, what their states say, which of them go. No
torch: what is in one is `train.checkpoint`."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stepwell.types import CheckpointError

STATE, MANIFEST = "state.json", "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")


def step_folder(run_dir: str | Path, step: int) -> Path:
    return Path(run_dir) / "checkpoints" / f"step-{step:08d}"


def is_run(path: str | Path) -> bool:
    """Whether `path` is a run's folder (and not one of its checkpoints)."""
    return (Path(path) / "run.toml").is_file()


def latest(run_dir: str | Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    complete = _complete(run_dir)
    return complete[max(complete)] if complete else None


def steps_of(run_dir: str | Path) -> list[int]:
    """The steps of the complete checkpoints, in order."""
    return sorted(_complete(run_dir))


def newest_until(run_dir: str | Path, step: int) -> Path:
    """The complete checkpoint of the highest step up to `step`; the oldest, if all are later.
    Raises CheckpointError if there is none."""
    complete = _complete(run_dir)
    if not complete:
        raise CheckpointError(f"{run_dir} holds no complete checkpoint to go back to")
    until = [number for number in complete if number <= step]
    return complete[max(until) if until else min(complete)]


def of_run_or_itself(path: str | Path, key: str) -> Path:
    """The last checkpoint of a run's folder, or the checkpoint that `path` itself is.

    key: the setting that named it. Raises CheckpointError for anything else.
    """
    if is_run(path):
        found = latest(path)
        if found is None:
            raise CheckpointError(f"{key}={str(path)!r} is a run without a finished checkpoint")
        return found
    if not any((Path(path) / name).is_file() for name in (STATE, MANIFEST)):
        raise CheckpointError(
            f"{key}={str(path)!r} is no checkpoint: give a run's folder (its last checkpoint), or "
            f"a checkpoint's folder (with {MANIFEST})"
        )
    return Path(path)


def read_state(folder: str | Path) -> dict[str, Any]:
    """What `extra` was when the checkpoint was saved."""
    return read_json(Path(folder), STATE)


def loop_states(run_dir: str | Path) -> list[dict[str, Any]]:
    """What the loop had saved with each complete checkpoint, by their steps."""
    complete = _complete(run_dir)
    return [read_state(complete[step])["extra"] for step in sorted(complete)]


def remove_after(run_dir: str | Path, step: int) -> list[Path]:
    """Removes the checkpoints of later steps; returns them. One rank calls it."""
    complete = _complete(run_dir)
    return _remove([complete[at] for at in sorted(complete) if at > step])


def prune(
    run_dir: str | Path, keep_last: int, keep_best: int = 0, keep_also: Iterable[int] = ()
) -> list[Path]:
    """Removes all but the last `keep_last` (at least 1) checkpoints, the `keep_best` of the lowest
    `eval/loss` that was saved with them (of equals the later), and those of the steps `keep_also`;
    returns what it removed. One rank calls it.
    """
    complete = _complete(run_dir)
    kept = set(sorted(complete)[-keep_last:]) | set(keep_also)
    losses = {}
    for step, folder in complete.items() if keep_best else ():
        loss = read_state(folder)["extra"].get("metrics", {}).get("eval/loss")
        if loss is not None and math.isfinite(loss):
            losses[step] = loss
    kept |= set(sorted(losses, key=lambda step: (losses[step], -step))[:keep_best])
    return _remove([complete[step] for step in sorted(set(complete) - kept)])


def remove_leftovers(run_dir: str | Path) -> list[Path]:
    """Cleans up after a killed process; one rank calls it before training starts."""
    removed = []
    for path in sorted((Path(run_dir) / "checkpoints").glob(".step-*")):
        proper = path.with_name(path.name[1:].rsplit(".", 1)[0])
        if path.suffix == ".replaced" and not proper.exists():
            path.rename(proper)
            continue
        shutil.rmtree(path)
        removed.append(path)
    return removed


def way_out(damaged: Path) -> str:
    """Which other checkpoint of the same run can be gone on from, and how."""
    if damaged.parent.name != "checkpoints":
        return ""
    others = {
        step: folder
        for step, folder in _complete(damaged.parent.parent).items()
        if folder.name != damaged.name
    }
    if not others:
        return "; the run has no other complete checkpoint, so it must start over (--fresh)"
    return (
        f"; the newest other complete checkpoint is {others[max(others)]}: to go on from it, "
        f"remove the folder {damaged} and give the same command again"
    )


def _complete(run_dir: str | Path) -> dict[int, Path]:
    folders = (Path(run_dir) / "checkpoints").glob("step-*")
    matches = [(_STEP.fullmatch(folder.name), folder) for folder in folders]
    return {
        int(match[1]): folder for match, folder in matches if match and (folder / MANIFEST).exists()
    }


def _remove(folders: list[Path]) -> list[Path]:
    for folder in folders:
        # Renamed first, so that a kill in the middle leaves no incomplete checkpoint.
        gone = folder.with_name(f".{folder.name}.removed")
        folder.rename(gone)
        shutil.rmtree(gone)
    return folders


def read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        return json.loads((folder / name).read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: no {name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
