"""`stepwell quickstart`: a small model's whole life on real text, from raw documents to a report.

Each stage writes into its own folder and leaves a mark when it is done, so the same command goes
on after a kill; the training stages go on inside themselves.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepwell.files import write_text
from stepwell.quickstart.stages import stages_of
from stepwell.quickstart.state import FULL, SMALL, SMOLLM2, Quickstart
from stepwell.types import ConfigError


@dataclass
class Options:
    """A small language model's whole life: curate, tokenizer, pretrain, sft, grpo, evaluate,
    export, report. Killed at any point, the same command goes on where it was."""

    dir: str = "runs/quickstart"
    """Where everything is written."""
    small: bool = False
    """Every stage in under two minutes, to check an installation; the model learns little."""
    model: Literal["scratch", "smollm2"] = "scratch"
    """smollm2: post-train the real SmolLM2-135M instead of pretraining a model (takes longer)."""
    fresh: bool = False
    """Remove what an earlier quickstart left in --dir and start over."""
    json: bool = False
    """Print the results as one JSON object."""


def main(argv: Sequence[str]) -> int:
    from stepwell.commands.inputs import parse_options

    options = parse_options("quickstart", Options, argv)
    root = Path(options.dir)
    if options.fresh:
        remove(root)
    plan = SMALL if options.small else FULL if options.model == "scratch" else SMOLLM2
    state = Quickstart(root, plan, options.model)
    claim(root, {"small": options.small, "model": options.model})
    todo = stages_of(options.model)
    if all(state.done(name) is not None for name in todo):
        print(f"finished before: {root / 'report.html'}; --fresh starts over", file=sys.stderr)
    for number, (name, stage) in enumerate(todo.items(), 1):
        if state.done(name) is not None:
            continue
        print(f"[{number}/{len(todo)}] {name}", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        result = stage(state)
        seconds = time.perf_counter() - begin
        state.finish(name, {"seconds": seconds, **result})
        print(f"      {result.get('summary', 'done')} ({seconds:.0f} s)", file=sys.stderr)
    results = {name: state.done(name) for name in todo}
    print(json.dumps(results) if options.json else closing_text(root))
    return 0


def closing_text(root: Path) -> str:
    return "\n".join(
        [
            f"report:    {root / 'report.html'}",
            f"try it:    stepwell generate {root / 'model'} --chat --prompt '7+5-9+3=?'",
            f"the model: {root / 'model'} (AutoModelForCausalLM.from_pretrained loads it)",
        ]
    )


def claim(root: Path, wanted: dict[str, Any]) -> None:
    """Notes what this folder is for. Raises ConfigError if it holds another quickstart."""
    path = root / "quickstart.json"
    if path.exists():
        found = json.loads(path.read_text("utf-8"))
        if found != wanted:
            raise ConfigError(
                f"{root} holds a quickstart with {found}, not {wanted}; choose another --dir, or "
                "--fresh to start over"
            )
        return
    if root.exists() and any(root.iterdir()):
        raise ConfigError(
            f"{root} is not empty and holds no quickstart; choose another --dir, e.g. {root}-2"
        )
    root.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(wanted))


def remove(root: Path) -> None:
    """Removes an earlier quickstart. Raises ConfigError for a folder that is none."""
    if not root.exists():
        return
    if not (root / "quickstart.json").exists():
        raise ConfigError(f"--fresh: {root} holds no quickstart, so it is left alone")
    shutil.rmtree(root)
