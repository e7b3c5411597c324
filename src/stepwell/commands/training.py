"""`stepwell pretrain | sft | dpo | reward | grpo | ... RECIPE [--dotted.key value ...]`."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepwell.commands import preview
from stepwell.commands.header import header_text, plan_of
from stepwell.commands.inputs import counted
from stepwell.commands.ranks import Ranks, check, ranks_of
from stepwell.commands.run_arguments import Arguments, help_text, load_run, parse
from stepwell.config import Run
from stepwell.launch import environ
from stepwell.launch.local import FAILED_RANK_LOG, launch
from stepwell.launch.peers import watched
from stepwell.launch.stopping import last_saved, what_is_saved
from stepwell.posttrain.first_model import require_model
from stepwell.train.lock import LOCK, folder_lock
from stepwell.types import (
    CheckpointError,
    ConfigError,
    Interrupted,
    StepwellError,
)

# What a run writes into its folder, and so what --fresh may remove from it.
WRITTEN = (
    "checkpoints",
    "metrics.jsonl",
    "events.jsonl",
    "samples.jsonl",
    "traces",
    "tensorboard",
    "wandb_id",
    "rollouts",
    "reference",
    "critic",
    "report.html",
    "reference.safetensors",
    "ches.jsonl",
    "data.origin.json",
    "heldout.origin.json",
    FAILED_RANK_LOG,
)


def pretrain(argv: Sequence[str]) -> int:
    return _command("pretrain", argv)


def sft(argv: Sequence[str]) -> int:
    words, num_shown = preview.take_option(argv)
    if num_shown is None or "-h" in argv or "--help" in argv:
        return _command("sft", words)
    arguments = parse(words)
    return preview.show(load_run("sft", arguments), num_shown, arguments.as_json)


def grpo(argv: Sequence[str]) -> int:
    return _command("grpo", argv)


def dpo(argv: Sequence[str]) -> int:
    return _command("dpo", argv)


def online_dpo(argv: Sequence[str]) -> int:
    return _command("online-dpo", argv)


def reward(argv: Sequence[str]) -> int:
    return _command("reward", argv)


def ppo(argv: Sequence[str]) -> int:
    return _command("ppo", argv)


def clear_folder(folder: Path) -> None:
    """Removes an earlier run's files; raises ConfigError for a folder that holds no run, for one in
    which a run is going on, and for one that cannot be written."""
    if folder.is_dir() and not _is_empty(folder):
        ours = ("run.toml", *(name for name in WRITTEN if name.endswith(".origin.json")))
        if not any((folder / name).exists() for name in ours):
            raise ConfigError(
                f"--fresh: {folder} has no run.toml, so it is not a run's folder and is left alone;"
                " choose another --dir"
            )
    elif not folder.exists():
        return
    with folder_lock(folder):
        # The rendered rows of sft; a folder of the same name that holds no store is somebody
        # else's.
        rendered = [n for n in ("data", "heldout") if (folder / n / "manifest.json").is_file()]
        for name in (*WRITTEN, *rendered, "run.toml"):
            _remove(folder / name)


def _is_empty(folder: Path) -> bool:
    try:
        return not [path for path in folder.iterdir() if path.name != LOCK]
    except OSError as error:
        raise ConfigError(f"--fresh: cannot read {folder}: {error.strerror}") from error


def _remove(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--fresh: cannot remove {path}: {error.strerror}") from error


def _command(method: str, argv: Sequence[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(help_text(method))
        return 0
    arguments = parse(argv)
    run = load_run(method, arguments)
    os.environ.update(environ.rank_environment(os.environ))
    if arguments.rank_timeout_s is not None:
        os.environ[environ.RANK_TIMEOUT] = arguments.rank_timeout_s
    environ.rank_timeout_s(os.environ)
    check_options(arguments)
    ranks = ranks_of(run.layout, arguments.num_procs, os.environ, assume=arguments.check)
    resolved = with_weights(run)
    check(resolved, ranks)
    if arguments.check:
        return _check(resolved, ranks, arguments.as_json)
    require_named(resolved)
    is_main = os.environ.get("RANK", "0") == "0"
    # A launcher or Slurm that starts the same command again wants it to go on.
    if arguments.start == "fresh" and is_main and not environ.num_restarts(os.environ):
        check_start(resolved)
        clear_folder(Path(run.dir))
    if arguments.start == "resume" and not any(Path(run.dir).glob("checkpoints/step-*")):
        raise CheckpointError(f"--resume: {run.dir} holds no checkpoint to go on from")
    if arguments.num_procs is not None and not environ.is_rank(os.environ):
        again = arguments.max_restarts or 0
        words = [method, *_without_fresh(argv)]
        return launch(ranks.world, words, max_restarts=again, folder=run.dir)
    if is_main and not arguments.as_json:
        print(header_text(resolved, ranks), file=sys.stderr)
    try:
        with watched(os.environ):
            num_steps = 0 if _is_done_and_closed(resolved) else starts(method).start(resolved)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: ended at once; {what_is_saved(run.dir)}") from None
    if is_main:
        _print_result(resolved, num_steps, arguments.as_json)
    return 0


def _check(run: Run, ranks: Ranks, as_json: bool) -> int:
    """--check: the plan, then what the data say against it. Raises what a start would."""
    found: list[str] = []
    fault = None
    try:
        if run.data.sources or run.data.path:
            found = check_start(run)
    except StepwellError as error:
        fault = error
    if as_json:
        plan = plan_of(run, ranks)
        plan["warnings"] += found
        print(json.dumps(plan | {"fault": None if fault is None else str(fault)}))
    else:
        print("\n".join([header_text(run, ranks), *(f"  warning: {line}" for line in found)]))
    if fault is not None:
        raise fault
    return 0


def require_named(run: Run) -> None:
    """Raises ConfigError where a method after pretraining is told no model, rows or tokenizer to
    start from: before there is a header, or a process more."""
    if run.method.kind == "pretrain":
        return
    require_model(run, None)
    for key in ("path", "tokenizer"):
        if getattr(run.data, key) is None:
            what = {
                "path": "a JSONL or Parquet file of its rows",
                "tokenizer": "a tokenizer.json or its folder",
            }
            raise ConfigError(f"data.{key} is not set; {run.method.kind} needs {what[key]}")


def check_start(run: Run) -> list[str]:
    """Warnings about what a run would start from. Raises what the start itself would: for data,
    tokenizer, weights or a trunk that are missing or don't fit, and for weights in the folder that
    the run begins anew in."""
    for key, place in (
        ("model.init", run.model.init),
        ("checkpoint.branch_from", run.checkpoint.branch_from),
    ):
        if place and Path(run.dir).resolve() in (
            Path(place).resolve(),
            *Path(place).resolve().parents,
        ):
            raise ConfigError(
                f"{key}={place!r} lies in the run's own folder {run.dir}; choose another dir"
            )
    if run.checkpoint.branch_from is not None:
        from stepwell.train.run_checkpoints import of_run_or_itself

        of_run_or_itself(run.checkpoint.branch_from, "checkpoint.branch_from")
    return starts(run.method.kind).check(run)


def starts(method: str) -> Any:
    """The module that knows how a method starts: `check(run) -> warnings`, `start(run) -> steps`.
    It imports torch."""
    return importlib.import_module(f"stepwell.commands.starts.{method.replace('-', '_')}")


def check_options(arguments: Arguments) -> None:
    """Raises ConfigError for options about ranks that cannot be."""
    again = arguments.max_restarts
    if again is not None and (arguments.num_procs is None or again < 0):
        raise ConfigError(
            f"--max-restarts {again} must be at least 0 and goes with --nproc N; torchrun has an "
            "option of the same name"
        )


def _is_done_and_closed(run: Run) -> bool:
    """A finished run whose folder cannot be written: there is nothing to write."""
    from stepwell.train.folder import is_finished

    return os.path.isdir(run.dir) and not os.access(run.dir, os.W_OK) and is_finished(run)


def with_weights(run: Run) -> Run:
    """`model.init` taken up: a run's folder stands for its last checkpoint, and the dimensions come
    from the weights. Raises ConfigError where the recipe contradicts them."""
    init = run.model.init
    if init is None:
        return run
    from stepwell.train.run_checkpoints import is_run, of_run_or_itself
    from stepwell.train.weights import resolve

    if is_run(init):
        folder = of_run_or_itself(init, "model.init")
        model = run.model.model_dump(exclude_unset=True) | {"init": str(folder)}
        run = Run.model_validate(run.model_dump(exclude_unset=True) | {"model": model})
    return resolve(run)


def _print_result(run: Run, num_steps: int, as_json: bool) -> None:
    total = last_saved(run.dir)[0]
    if as_json:
        values = {"name": run.name, "dir": run.dir, "steps_done": num_steps, "step": total}
        print(json.dumps(values))
    elif num_steps:
        now = "" if total == num_steps else f", {num_steps:,} of them now"
        print(f"{run.name}: {counted(total, 'step')} done{now}; everything is in {run.dir}")
    else:
        print(f"{run.name} was finished before ({run.dir}); nothing to do. --fresh starts over")
    sys.stdout.flush()


def _without_fresh(argv: Sequence[str]) -> list[str]:
    return [word for word in argv if word != "--fresh"]
