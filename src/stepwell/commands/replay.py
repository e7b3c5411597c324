"""`stepwell replay RUN --step N`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from stepwell.commands.inputs import counted, parse_options
from stepwell.commands.ranks import check, check_num_procs, fewest_ranks, ranks_of
from stepwell.config import Run
from stepwell.launch import environ
from stepwell.launch.local import launch
from stepwell.launch.stopping import last_saved
from stepwell.metrics import SHOWN_ITEMS, encode
from stepwell.types import ConfigError

if TYPE_CHECKING:
    from stepwell.diagnose.replay import Replay
    from stepwell.train.probe import LayerRow, Tally


@dataclass
class Options:
    """Computes a step of a pretrain or sft run again, from the nearest earlier checkpoint, and
    prints what passed through its layers. Says whether loss and gradient norm come out as logged,
    bit for bit. Writes nothing into the run's folder."""

    run: Positional[str]
    """A run's folder."""
    step: int
    """Which step, counted from 1."""
    nproc: int | None = None
    """Start so many processes here: a run of several ranks is repeated exactly by as many."""
    json: bool = False
    """Print everything as JSON."""


def main(argv: Sequence[str]) -> int:
    options = parse_options("replay", Options, argv)
    joined = environ.is_rank(os.environ)
    os.environ.update(environ.rank_environment(os.environ))
    check_num_procs(options.nproc)
    if not joined:
        check_ranks(Path(options.run), options.nproc)
        if options.nproc is not None:
            return launch(options.nproc, ["replay", *argv])
    from stepwell.diagnose.replay import replay

    found = replay(options.run, options.step)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(as_json(found)) if options.json else text_of(found))
    return 0


def check_ranks(folder: Path, num_procs: int | None) -> None:
    """Raises ConfigError for a number of ranks that the run's layout does not fit."""
    if not (folder / "run.toml").is_file():
        return  # `replay` says so
    run = Run.load(folder / "run.toml")
    if num_procs is None:
        made_by = ranks_that_saved(folder) or fewest_ranks(run.layout)
        if fewest_ranks(run.layout) > 1:
            raise ConfigError(
                f"{folder} is a run of {made_by} ranks, and this is one process; give --nproc "
                f"{made_by}"
            )
        return
    check(run, ranks_of(run.layout, num_procs, {}))


def ranks_that_saved(folder: Path) -> int | None:
    """How many wrote the run's last checkpoint."""
    path = last_saved(folder)[1]
    if path is None:
        return None
    return (
        json.loads((path / "state.json").read_text("utf-8"))["extra"]
        .get("machine", {})
        .get("ranks")
    )


def text_of(found: Replay) -> str:
    """What was found in words, and a line a layer."""
    begin = f"the checkpoint of step {found.start}" if found.start else "the first weights"
    lines = [
        f"step {found.step}, from {begin}: loss {found.loss:.6g}, gradient norm "
        f"{found.grad_norm:.6g}, rows {_short(found.sample_ids)}",
        outcome(found),
    ]
    if not found.verdict.ok:
        lines.append(f"the guard: {found.verdict.action}, because {found.verdict.reason}")
    width = max(len(row.layer) for row in found.layers)
    head = "".join(f"{name:>12}" for name in ("rms", "largest", "not finite"))
    lines += [
        "",
        f"{'':{width}}{'activations':>36}{'gradients of them':>36}{'of weights':>12}",
        f"{'layer':{width}}{head}{head}{'norm':>12}",
        *(line_of(row, width) for row in found.layers),
    ]
    return "\n".join(lines)


def outcome(found: Replay) -> str:
    """Whether the numbers are those of metrics.jsonl, and why not."""
    difference = found.difference
    if difference is None and found.num_compared == 0:
        return "not compared: metrics.jsonl has no line of these steps"
    if difference is None:
        unlogged = "" if found.is_logged else ", which this one is not"
        return (
            "loss and gradient norm are those of metrics.jsonl, bit for bit "
            f"({counted(found.num_compared, 'logged step')}{unlogged})"
        )
    return (
        f"NOT as in metrics.jsonl: at step {difference.step} {difference.metric} is "
        f"{difference.computed!r}, logged was {difference.logged!r}; "
        + "; ".join(difference.reasons)
    )


def line_of(row: LayerRow, width: int) -> str:
    cells = [cell for tally in (row.activation, row.gradient) for cell in cells_of(tally)]
    norm = "" if row.weight_gradient is None else f"{row.weight_gradient:.4g}"
    return f"{row.layer:{width}}" + "".join(f"{cell:>12}" for cell in (*cells, norm))


def cells_of(tally: Tally) -> list[str]:
    if not tally.num_values:
        return ["", "", ""]
    return [f"{tally.rms:.4g}", f"{tally.largest:.4g}", f"{100 * tally.bad_share:.3g} %"]


def as_json(found: Replay) -> dict[str, Any]:
    """Numbers that are not finite as strings, as in metrics.jsonl."""
    layers = [
        {
            "layer": row.layer,
            "activation": numbers_of(row.activation),
            "gradient": numbers_of(row.gradient),
            "weight_gradient_norm": row.weight_gradient,
        }
        for row in found.layers
    ]
    difference = found.difference
    values = {
        "step": found.step,
        "start": found.start,
        "sample_ids": found.sample_ids,
        "loss": found.loss,
        "grad_norm": found.grad_norm,
        "verdict": found.verdict._asdict(),
        "num_compared": found.num_compared,
        "is_logged": found.is_logged,
        "bit_equal": None if found.num_compared == 0 else difference is None,
        "difference": asdict(difference) if difference is not None else None,
        "layers": layers,
    }
    return encode(values)


def numbers_of(tally: Tally) -> dict[str, float]:
    return {"rms": tally.rms, "largest": tally.largest, "non_finite_share": tally.bad_share}


def _short(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:SHOWN_ITEMS]))
    return shown if len(ids) <= SHOWN_ITEMS else f"{shown}, ... ({len(ids)} in all)"
