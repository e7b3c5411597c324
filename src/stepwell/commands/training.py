"""`stepwell pretrain | sft | dpo | reward | grpo | ... RECIPE [--dotted.key value ...]`."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from stepwell.commands import preview
from stepwell.commands.header import header_text, plan_of
from stepwell.commands.inputs import counted
from stepwell.commands.ranks import Ranks, check, ranks_of
from stepwell.config import Run
from stepwell.launch import environ
from stepwell.launch.local import FAILED_RANK_LOG, launch
from stepwell.launch.peers import watched
from stepwell.launch.stopping import last_saved, what_is_saved
from stepwell.posttrain.first_model import require_model
from stepwell.schema import dotted_keys, read_toml
from stepwell.sections.methods import Method, MethodSection
from stepwell.sections.optim import LossConfig
from stepwell.train.lock import LOCK, folder_lock
from stepwell.types import (
    CheckpointError,
    ConfigError,
    Interrupted,
    StepwellError,
    nearest,
)

METHODS: tuple[type[MethodSection], ...] = get_args(get_args(Method)[0])
OPTIONS = ("nproc", "max_restarts", "rank_timeout", "resume", "fresh", "check", "json", "help")
# Options with a value that is not a key's.
COUNTED = {
    "nproc": "num_procs",
    "max_restarts": "max_restarts",
    "rank_timeout": "rank_timeout_s",
}
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


@dataclass
class Arguments:
    """start: "resume" demands a checkpoint to go on from, "fresh" removes what is there.
    max_restarts: of `num_procs` processes, when one dies. rank_timeout_s: as text."""

    recipe: str | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    num_procs: int | None = None
    max_restarts: int | None = None
    rank_timeout_s: str | None = None
    start: Literal["either", "resume", "fresh"] = "either"
    as_json: bool = False
    check: bool = False


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


def parse(argv: Sequence[str]) -> Arguments:
    """Splits the command line; `-` and `_` are the same in a key. Raises ConfigError."""
    result, rest = Arguments(), list(argv)
    switches = {key for key, leaf in dotted_keys(Run) if leaf.annotation is bool}
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if result.recipe is not None:
                raise ConfigError(
                    f"two recipes, {result.recipe!r} and {word!r}; give one, and settings as "
                    "--dotted.key value"
                )
            result.recipe = word
            continue
        name, has_value, value = word.partition("=")
        if name in ("--json", "--check", "--resume", "--fresh"):
            if has_value:
                raise ConfigError(f"{name} takes no value, {value!r} was given")
            _switch(result, name)
            continue
        key = name.removeprefix("--").replace("-", "_")
        if not has_value:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif key in switches:
                value = "true"
            else:
                check_option(key)
                raise ConfigError(f"{name} needs a value")
        attribute = COUNTED.get(key)
        if key in result.overrides or (attribute and getattr(result, attribute) is not None):
            raise ConfigError(f"{name} is given twice; give it once")
        if key == "rank_timeout":
            result.rank_timeout_s = value
        elif attribute:
            setattr(result, attribute, _count(name, value))
        else:
            result.overrides[key] = value
    return result


def check_option(key: str) -> None:
    """Raises ConfigError for a word that is close to an option and no key of a run."""
    close = nearest(key, OPTIONS).replace("'", "'--", 1)
    if close and key not in OPTIONS and "." not in key and key not in Run.model_fields:
        raise ConfigError(f"unknown option --{key}{close}")


def check_method_key(key: str, method: str) -> None:
    """Raises ConfigError for a key of another method's."""
    section, _, name = key.partition(".")
    owners = {str(m.model_fields["kind"].default): m.model_fields for m in METHODS}
    if section != "method" or name in owners[method]:
        return
    others = [kind for kind, fields in owners.items() if name in fields]
    if others:
        raise ConfigError(
            f"unknown key {key!r} of {method}: it belongs to {' and '.join(others)}; leave it out, "
            f"or see `stepwell {others[0]} --help`"
        )


def own_loss_key(key: str, method: str) -> str:
    """loss.kind is method.loss.kind where the method has a loss of its own with such a key."""
    section, _, name = key.partition(".")
    owner = next(m for m in METHODS if m.model_fields["kind"].default == method)
    if section != "loss" or name in LossConfig.model_fields or "loss" not in owner.model_fields:
        return key
    return f"method.{key}"


def load_run(method: str, arguments: Arguments) -> Run:
    """The run of `method` that the recipe and the overrides describe. Raises ConfigError."""
    overrides = {own_loss_key(key, method): value for key, value in arguments.overrides.items()}
    for key in overrides:
        check_option(key)
        if "method.kind" not in overrides:
            check_method_key(key, method)
    if arguments.recipe is None:
        run = Run.parse({"method": {"kind": method}}, overrides, where="the command line")
    else:
        run = _with_overrides(find_recipe(arguments.recipe), overrides, method)
    if run.method.kind != method:
        raise ConfigError(
            f"method.kind={run.method.kind!r} belongs to `stepwell {run.method.kind}`; "
            f"`stepwell {method}` needs a recipe with method.kind={method!r}"
        )
    return run


def _with_overrides(path: Path, overrides: Mapping[str, Any], method: str) -> Run:
    """A recipe that does not say what its method is is of the command's."""
    values = read_toml(path)
    section = values.get("method", {})
    if isinstance(section, dict):
        values["method"] = {"kind": method, **section}
    try:
        return Run.parse(values, overrides, where=f"the recipe {path}")
    except ConfigError:
        recipe = _parsed_alone(values)
        if recipe is not None:  # so the fault is not the recipe's
            values = recipe.model_dump(exclude_unset=True)
            Run.parse(values, overrides, where=f"the command line (over the recipe {path})")
        raise


def _parsed_alone(values: Mapping[str, Any]) -> Run | None:
    try:
        return Run.parse(values)
    except ConfigError:
        return None


def find_recipe(name: str) -> Path:
    """A file, or the name of a recipe that ships with Stepwell. Raises ConfigError."""
    shipped = {p.name.removesuffix(".toml"): p for p in shipped_recipes()}
    if Path(name).exists() or name not in shipped:
        if not Path(name).exists():
            raise ConfigError(
                f"no recipe {name!r}: neither a file nor one that ships with Stepwell "
                f"({', '.join(shipped)}){nearest(name, shipped)}"
            )
        return Path(name)
    return shipped[name]


def shipped_recipes(method: str | None = None) -> list[Path]:
    """All recipes of runs that ship, or those of one method."""
    found = []
    for path in sorted(Path(str(files("stepwell.recipes"))).glob("*.toml")):
        values = tomllib.loads(path.read_text("utf-8"))
        kind = values.get("method", {}).get("kind", "pretrain")
        is_run = "sources" not in values  # a curation's are its first table
        if is_run and method in (None, kind):
            found.append(path)
    return found


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


def help_text(method: str) -> str:
    """Every key that this method's runs have, with type and default."""
    run = Run.parse({"method": {"kind": method}})
    keys = [(k, f) for k, f in dotted_keys(Run) if not k.startswith("method.")]
    keys += list(dotted_keys(type(run.method), "method."))
    lines = [
        f"usage: stepwell {method} [recipe.toml] [--dotted.key value ...]",
        "",
        "A recipe is a TOML file, or the name of one that ships with Stepwell:",
        f"  {', '.join(p.stem for p in shipped_recipes(method))}",
        "",
        "  --nproc N   start N processes on this machine (under torchrun or srun: join them)",
        "  --max-restarts K  when one of N processes dies, start all again, up to K times (0)",
        "  --rank-timeout S  how long a process waits for another one, in seconds (600)",
        "  --resume    fail unless there is a checkpoint to go on from",
        "  --fresh     remove what an earlier run left in --dir, and start over",
        "  --check     say what the run is and how much memory it will need, without starting",
        "  --json      print the result as one JSON object",
        *([preview.HELP] if method == "sft" else []),
        "",
        "Keys (docs/config.md explains them), with type and default:",
    ]
    section = None
    for key, leaf in keys:
        if key.count(".") and key.split(".")[0] != section:
            section = key.split(".")[0]
            lines.append("")
        default = "" if leaf.is_required() else default_text(leaf.default)
        lines.append(f"  --{key:<42} {type_text(leaf.annotation):<32} {default}".rstrip())
    return "\n".join(lines)


def type_text(annotation: Any) -> str:
    """A key's type as a reader of help and docs wants it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(str(choice) for choice in inner)
    if origin is tuple:
        tables = hasattr(inner[0], "model_fields")
        return f"list of {'tables' if tables else type_text(inner[0])}"
    if hasattr(annotation, "__metadata__"):
        return type_text(inner[0])
    if inner:
        return "|".join("none" if a is type(None) else type_text(a) for a in inner)
    return annotation.__name__


def default_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if value in ((), {}):
        return "[]" if value == () else "{}"
    if isinstance(value, tuple) or (isinstance(value, str) and not value.isprintable()):
        return json.dumps(value)
    return str(value)


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
        from stepwell.train.checkpoint import of_run_or_itself

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
    from stepwell.train.checkpoint import is_run, of_run_or_itself
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


def _switch(arguments: Arguments, name: str) -> None:
    if name == "--json":
        arguments.as_json = True
        return
    if name == "--check":
        arguments.check = True
        return
    wanted: Literal["resume", "fresh"] = "resume" if name == "--resume" else "fresh"
    if arguments.start not in ("either", wanted):
        raise ConfigError("--resume and --fresh exclude each other; give one of them")
    arguments.start = wanted


def _count(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name} {value!r} must be a whole number") from None
