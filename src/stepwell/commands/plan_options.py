"""The command line of `stepwell plan`: options as data, numbers with units, what was asked. No
torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from stepwell.hardware import GIB
from stepwell.plan.dims import EXPERT_KEYS, PLANNED
from stepwell.plan.search.space import Pins
from stepwell.presets import PRESETS
from stepwell.types import ConfigError, nearest

METHODS = ("pretrain", "ppo", "dpo", "grpo", "lora", "qlora")
# Of context lengths and batches, as they are usually written: 8k is 8,192.
BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "b": 2**30}
DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}


class Option(NamedTuple):
    """metavar: empty for a switch. choices: of words. pin: the field of `Pins` that it sets."""

    name: str
    metavar: str
    help: str
    kind: Literal["text", "count", "tokens", "total", "gib", "choice", "switch", "words"] = "text"
    choices: tuple[str, ...] = ()
    pin: str = ""


GROUPS: dict[str, tuple[Option, ...]] = {
    "What": (
        Option("model", "NAME|PATH", "a preset, a config.json, or the folder of one"),
        Option("seq-len", "N", "tokens of a row (8k is 8,192)", "tokens"),
        Option("global-batch-tokens", "N", "of a step (4M is 4,194,304)", "tokens"),
        Option("tokens", "N", "of the whole training (15T): how long, how many GPU-hours", "total"),
        Option("method", "|".join(METHODS), "what is trained (pretrain)", "choice", METHODS),
        Option("prompts", "N", "of a step, for methods that sample", "count"),
        Option("group-size", "N", "answers to each", "count"),
        Option("prompt-tokens", "N", "of a prompt", "tokens"),
        Option("answer-tokens", "N", "of an answer, at most", "tokens"),
        Option("lora-rank", "N", "of lora and qlora (16)", "count"),
    ),
    "On what": (
        Option("gpus", "N", "how many", "count"),
        Option("gpu", "NAME", "of `hardware`, in its usual machines (h100-sxm)"),
        Option("cluster", "FILE", "machines of your own, as TOML (docs/planner.md)"),
    ),
    "Held fixed": (
        Option("tp", "N", "tensor ranks; may leave the scale-up domain", "count", pin="tp"),
        Option("cp", "N", "context ranks", "count", pin="cp"),
        Option("pp", "N", "pipeline ranks", "count", pin="pp"),
        Option("ep", "N", "expert ranks", "count", pin="ep"),
        Option("dp-replicate", "N", "replicas (HSDP)", "count", pin="dp_replicate"),
        Option("dp-shard", "N", "ranks that shard", "count", pin="dp_shard"),
        Option("zero", "0|1|2|3", "stage", "choice", ("0", "1", "2", "3"), "zero"),
        Option(
            "reshard", "always|never|node", "of stage 3", "choice", ("always", "never", "node"),
            "reshard",
        ),
        Option("micro-batch", "N", "rows at a time", "count", pin="micro_batch_rows"),
        Option(
            "recompute", "none|selective|full|...", "activation checkpointing", "choice",
            ("none", "selective", "every", "full", "sqrt"), "recompute",
        ),
        Option(
            "schedule", "NAME", "of the pipeline", "choice",
            ("gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev"), "schedule",
        ),
        Option("stages-per-rank", "N", "virtual stages", "count", pin="stages_per_rank"),
        Option(
            "precision", "bf16|fp16|fp32|fp8", "of products", "choice",
            ("bf16", "fp16", "fp32", "fp8"), "precision",
        ),
        Option("offload", "LIST", "optimizer,parameters,activations or none", "words"),
        Option("max-tp", "N", "bound", "count", pin="max_tp"),
        Option("max-cp", "N", "bound", "count", pin="max_cp"),
        Option("max-pp", "N", "bound", "count", pin="max_pp"),
        Option("headroom", "GIB", "memory of a GPU that must stay free", "gib"),
    ),
    "Other questions": (
        Option("measured", "KEY=X", "step_s=, mfu=, tokens_per_s= ...: what explains it"),
        Option("zero-table", "", "DDP and ZeRO 1, 2, 3 beside each other", "switch"),
        Option("dry-run", "", "one step of the real program on fake ranks (torch)", "switch"),
        Option("validate", "FILE", "score the predictions on measured runs in a CSV"),
    ),
    "Output": (
        Option("quick", "", "no searches for what else could be", "switch"),
        Option("top", "N", "how many layouts are listed (8)", "count"),
        Option("json", "", "one JSON object", "switch"),
        Option("html", "FILE", "one page, self-contained"),
        Option("write", "FILE", "the layout as a recipe that `stepwell pretrain` takes"),
    ),
}  # fmt: skip
OPTIONS = {option.name: option for group in GROUPS.values() for option in group}


@dataclass
class Asked:
    """overrides: dotted keys of the recipe, or `model.*` dimensions. given: options' values."""

    recipe: str | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        return self.given.get(name, default)

    @property
    def pins(self) -> Pins:
        values = {
            option.pin: self.given[name]
            for name, option in OPTIONS.items()
            if option.pin and name in self.given
        }
        if "zero" in values:
            values["zero"] = int(values["zero"])
        if "offload" in self.given:
            values["offload"] = self.given["offload"]
        return Pins(**values, headroom_bytes=self.given.get("headroom", 0) * GIB)


def parse(argv: Sequence[str]) -> Asked:
    """Raises ConfigError that names the nearest option or value."""
    asked, rest = Asked(), list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if asked.recipe is not None:
                raise ConfigError(f"two recipes, {asked.recipe!r} and {word!r}; give one")
            asked.recipe = word
            continue
        name, has_value, value = word.removeprefix("--").partition("=")
        option = OPTIONS.get(name.replace("_", "-"))
        if option is not None and option.kind == "switch":
            if has_value:
                raise ConfigError(f"--{name} takes no value, {value!r} was given")
            asked.given[option.name] = True
            continue
        if option is None and "." not in name:
            raise ConfigError(f"unknown option --{name}{_close(name)}; `stepwell plan --help`")
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name} needs a value")
            value = rest.pop(0)
        _store(asked, option, name, value)
    return asked


def _close(name: str) -> str:
    return nearest(name, OPTIONS).replace("'", "'--", 1)


def _store(asked: Asked, option: Option | None, name: str, value: str) -> None:
    key = name.replace("-", "_") if option is None else option.name
    place = asked.overrides if option is None else asked.given
    if key == "measured":
        asked.given.setdefault(key, {}).update(measured(value))
        return
    if key in place:
        raise ConfigError(f"--{name} is given twice; give it once")
    place[key] = value if option is None else converted(option, value)


def converted(option: Option, value: str) -> Any:
    """The value of an option. Raises ConfigError."""
    name = f"--{option.name}"
    if option.kind == "choice" and value not in option.choices:
        raise ConfigError(
            f"{name} {value!r} must be one of {', '.join(option.choices)}"
            f"{nearest(value, option.choices)}"
        )
    match option.kind:
        case "count":
            return number(name, value, {"": 1, "k": 2**10})
        case "tokens":
            return number(name, value, BINARY)
        case "total":
            return number(name, value, DECIMAL)
        case "gib":
            return amount(name, value)
        case "words":
            return words(name, value)
    return value


def number(name: str, text: str, units: dict[str, int]) -> int:
    """`8192`, `8k`, `1.5M`, `16e6`: a positive whole number. Raises ConfigError."""
    found = re.fullmatch(r"([\d_,]*\.?\d+(?:e\d+)?)([a-z]?)", text.strip().lower())
    if found is None or found[2] not in units:
        legal = ", ".join(unit for unit in units if unit)
        raise ConfigError(f"{name} {text!r} is no number such as 8192 or 8k (units: {legal})")
    value = float(found[1].replace("_", "").replace(",", "")) * units[found[2]]
    if value < 1 or value != round(value):
        raise ConfigError(
            f"{name} {text} must be a positive whole number; the nearest is {max(1, round(value))}"
        )
    return round(value)


def amount(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{name} {text!r} must be a number of GiB") from None
    if not 0 <= value < 1e6:
        raise ConfigError(f"{name} {text} must be 0 or more; the nearest legal value is 0")
    return value


def words(name: str, text: str) -> tuple[str, ...]:
    legal = ("optimizer", "parameters", "activations")
    found = tuple(word for word in text.split(",") if word and word != "none")
    for word in found:
        if word not in legal:
            raise ConfigError(
                f"{name} {word!r} must be of {', '.join(legal)}, or none{nearest(word, legal)}"
            )
    return found


def measured(text: str) -> dict[str, float]:
    """`step_s=12.3`; a percent sign is understood."""
    key, equals, value = text.partition("=")
    try:
        found = float(value.removesuffix("%"))
    except ValueError:
        found = None
    if not equals or found is None:
        raise ConfigError(
            f"--measured {text!r} must be KEY=NUMBER, such as step_s=12.3 or mfu=0.35"
        )
    return {key: found / 100 if value.endswith("%") else found}


def help_text() -> str:
    lines = [
        "usage: stepwell plan --model NAME --gpus N [--gpu NAME] [option ...]",
        "       stepwell plan RECIPE [--gpus N] [--dotted.key value ...] [option ...]",
        "",
        "Predicts memory, traffic, step time and MFU of a run before it starts. With a model:",
        "searches the layouts and says why each axis is what it is. With a recipe: that run, as",
        "configured, and what would make it faster.",
        "",
        f"Presets: {', '.join([*PRESETS, *PLANNED])}.",
        "Dimensions: --model.num_layers, d_model, num_heads, num_kv_heads, head_dim, d_ff,",
        "vocab_size, tied; of experts: " + ", ".join(f"--{key}" for key in EXPERT_KEYS) + ".",
    ]
    for title, options in GROUPS.items():
        lines += ["", f"{title}:"]
        for option in options:
            left = f"--{option.name} {option.metavar}".strip()
            lines.append(f"  {left:<38}{option.help}")
    lines += [
        "",
        "Exit code: 0 it fits; 1 it does not; 2 a wrong command line or an impossible layout; 3 a",
        "table of runs that cannot be read.",
        "",
        "  stepwell plan --model llama3-405b --gpus 1024 --gpu h100-sxm --seq-len 8k \\",
        "    --global-batch-tokens 16M",
        "  stepwell plan llama3-8b-pretrain --gpus 64 --measured mfu=0.35",
    ]
    return "\n".join(lines)
