"""The words after `stepwell pretrain | sft | ...`: a recipe, keys and options, and their help."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from stepwell.commands import preview
from stepwell.config import Run
from stepwell.schema import dotted_keys, read_toml
from stepwell.sections.methods import Method, MethodSection
from stepwell.sections.optim import LossConfig
from stepwell.types import ConfigError, nearest

METHODS: tuple[type[MethodSection], ...] = get_args(get_args(Method)[0])
OPTIONS = ("nproc", "max_restarts", "rank_timeout", "resume", "fresh", "check", "json", "help")
# Options with a value that is not a key's.
COUNTED = {
    "nproc": "num_procs",
    "max_restarts": "max_restarts",
    "rank_timeout": "rank_timeout_s",
}


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
