"""`stepwell pretrain | sft | grpo RECIPE [--dotted.key value ...]`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from stepwell import launch
from stepwell.config import GRPO, Run
from stepwell.schema import dotted_keys
from stepwell.types import CheckpointError, ConfigError, nearest

if TYPE_CHECKING:
    from stepwell.tokenizer import Tokenizer

OPTIONS = ("nproc", "resume", "fresh", "json", "help")
# What a run writes into its folder, and so what --fresh may remove from it.
WRITTEN = (
    "checkpoints",
    "metrics.jsonl",
    "events.jsonl",
    "samples.jsonl",
    "report.html",
    "data.origin.json",
    "heldout.origin.json",
)


@dataclass
class Arguments:
    """start: "resume" demands a checkpoint to go on from, "fresh" removes what is there."""

    recipe: str | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    num_procs: int | None = None
    start: Literal["either", "resume", "fresh"] = "either"
    as_json: bool = False


def pretrain(argv: Sequence[str]) -> int:
    return _command("pretrain", argv)


def sft(argv: Sequence[str]) -> int:
    return _command("sft", argv)


def grpo(argv: Sequence[str]) -> int:
    return _command("grpo", argv)


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
        if name in ("--json", "--resume", "--fresh"):
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
                raise ConfigError(f"{name} needs a value")
        if name == "--nproc":
            result.num_procs = _count(name, value)
        else:
            result.overrides[key] = value
    return result


def load_run(method: str, arguments: Arguments) -> Run:
    """The run of `method` that the recipe and the overrides describe. Raises ConfigError."""
    for key in arguments.overrides:
        close = nearest(key, OPTIONS).replace("'", "'--", 1)
        if close and "." not in key and key not in Run.model_fields:
            raise ConfigError(f"unknown option --{key}{close}")
    overrides: dict[str, Any] = dict(arguments.overrides)
    if arguments.recipe is None:
        run = Run.parse({"method": {"kind": method}}, overrides, where="the command line")
    else:
        path = find_recipe(arguments.recipe)
        run = Run.load(path, overrides)
    if run.method.kind != method:
        raise ConfigError(
            f"method.kind={run.method.kind!r} belongs to `stepwell {run.method.kind}`; "
            f"`stepwell {method}` needs a recipe with method.kind={method!r}"
        )
    return run


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


def shipped_recipes() -> list[Path]:
    return sorted(Path(str(files("stepwell.recipes"))).glob("*.toml"))


def clear_folder(folder: Path) -> None:
    """Removes an earlier run's files; raises ConfigError for a folder that holds no run."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / "run.toml").exists():
        raise ConfigError(
            f"--fresh: {folder} has no run.toml, so it is not a run's folder and is left alone; "
            "choose another --dir"
        )
    # The rendered rows of sft; a folder of the same name that holds no store is somebody else's.
    rendered = [n for n in ("data", "heldout") if (folder / n / "manifest.json").is_file()]
    for name in (*WRITTEN, *rendered, "run.toml"):
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def help_text(method: str) -> str:
    """Every key that this method's runs have, with type and default."""
    run = Run.parse({"method": {"kind": method}})
    keys = [(k, f) for k, f in dotted_keys(Run) if not k.startswith("method.")]
    keys += list(dotted_keys(type(run.method), "method."))
    lines = [
        f"usage: stepwell {method} [recipe.toml] [--dotted.key value ...]",
        "",
        "A recipe is a TOML file, or the name of one that ships with Stepwell:",
        f"  {', '.join(p.stem for p in shipped_recipes())}",
        "",
        "  --nproc N   start N processes on this machine (under torchrun or srun: join them)",
        "  --resume    fail unless there is a checkpoint to go on from",
        "  --fresh     remove what an earlier run left in --dir, and start over",
        "  --json      print the result as one JSON object",
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
        return "list of tables"
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
    return "[]" if value == () else str(value)


def _command(method: str, argv: Sequence[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(help_text(method))
        return 0
    arguments = parse(argv)
    run = load_run(method, arguments)
    joined = launch.is_rank(os.environ)
    rows = run.train.global_batch_rows if method != "grpo" else None
    if arguments.num_procs is not None:
        launch.check_num_procs(arguments.num_procs, rows)
    os.environ.update(launch.rank_environment(os.environ))
    is_main = os.environ.get("RANK", "0") == "0"
    if arguments.start == "fresh" and is_main:
        clear_folder(Path(run.dir))
    if arguments.start == "resume" and not any(Path(run.dir).glob("checkpoints/step-*")):
        raise CheckpointError(f"--resume: {run.dir} holds no checkpoint to go on from")
    if arguments.num_procs is not None and arguments.num_procs > 1 and not joined:
        return launch.launch(arguments.num_procs, [method, *_without_fresh(argv)])
    loop = {"pretrain": _pretrain, "sft": _sft, "grpo": _grpo}[method]
    num_steps = loop(with_weights(run))
    if is_main:
        _print_result(run, num_steps, arguments.as_json)
    return 0


def with_weights(run: Run) -> Run:
    """`model.init` taken up: a run's folder stands for its last checkpoint, and the dimensions come
    from the weights. Raises ConfigError where the recipe contradicts them."""
    from stepwell.train.checkpoint import latest
    from stepwell.train.weights import resolve

    init = run.model.init
    if init is not None and (Path(init) / "run.toml").is_file():
        folder = latest(init)
        if folder is None:
            raise CheckpointError(f"model.init={init!r} is a run without a finished checkpoint")
        model = run.model.model_dump(exclude_unset=True) | {"init": str(folder)}
        run = Run.model_validate(run.model_dump(exclude_unset=True) | {"model": model})
    return resolve(run)


def _pretrain(run: Run) -> int:
    from stepwell.train.pretrain import pretrain

    return pretrain(run)


def _sft(run: Run) -> int:
    from stepwell.posttrain.sft import sft

    return sft(run, _tokenizer(run))


def _grpo(run: Run) -> int:
    from stepwell.eval.items import load_prompts
    from stepwell.posttrain.grpo import grpo
    from stepwell.posttrain.verifiers import find_verifier

    method = run.method
    assert isinstance(method, GRPO)
    verifier = find_verifier(method.verifier)
    if run.data.path is None:
        raise ConfigError("data.path is not set; grpo needs a JSONL or Parquet file of prompts")
    tokenizer = _tokenizer(run)
    longest = min(run.data.seq_len, run.model.max_seq_len) - method.max_new_tokens
    found, broken = load_prompts(run.data.path, tokenizer)
    prompts = [prompt for prompt in found if len(prompt.ids) <= longest]
    num_long = len(found) - len(prompts)
    if (broken or num_long) and os.environ.get("RANK", "0") == "0":
        print(
            f"{run.data.path}: left out {len(broken)} broken prompts and {num_long} of more than "
            f"{longest} tokens (data.seq_len - method.max_new_tokens)",
            file=sys.stderr,
        )
    return grpo(run, prompts, verifier, tokenizer)


def _tokenizer(run: Run) -> Tokenizer:
    from stepwell.tokenizer import Tokenizer

    if run.data.tokenizer is None:
        raise ConfigError("data.tokenizer is not set; name a tokenizer.json or its folder")
    tokenizer = Tokenizer.load(run.data.tokenizer)
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"the tokenizer {run.data.tokenizer} has {tokenizer.vocab_size} ids, but "
            f"model.vocab_size={run.model.vocab_size}; the nearest legal value is "
            f"{tokenizer.vocab_size}, or take the tokenizer that the model was trained with"
        )
    return tokenizer


def _print_result(run: Run, num_steps: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"name": run.name, "dir": run.dir, "steps_done": num_steps}))
    elif num_steps:
        print(f"{run.name}: {num_steps} steps done; everything is in {run.dir}")
    else:
        print(f"{run.name} was finished before ({run.dir}); nothing to do. --fresh starts over")
    sys.stdout.flush()


def _without_fresh(argv: Sequence[str]) -> list[str]:
    return [word for word in argv if word != "--fresh"]


def _switch(arguments: Arguments, name: str) -> None:
    if name == "--json":
        arguments.as_json = True
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
