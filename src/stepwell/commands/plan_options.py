"""The command line of `stepwell plan`: options as data, numbers with units, what was asked. No
torch."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stepwell.hardware import GIB
from stepwell.plan.dims import EXPERT_KEYS, PLANNED
from stepwell.plan.measured.gap import MEASURES
from stepwell.plan.search.space import KINDS, Pins
from stepwell.plan.units import nearest_of
from stepwell.presets import PRESETS
from stepwell.types import ConfigError, nearest

METHODS = ("pretrain", "ppo", "dpo", "grpo", "lora", "qlora")
# Of context lengths and batches, as they are usually written: 8k is 8,192.
BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "b": 2**30}
HELP_WIDTH = 92
WIDTH = 38  # of an option in the help, or more
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
        Option(
            "reduce-gradients", "step|micro-batch", "how often data ranks sum them", "choice",
            ("step", "micro-batch"), "reduce_gradients",
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
            "precision", "bf16|fp8|...|any", "of products (bf16); any: also with fp8", "choice",
            ("bf16", "fp16", "fp32", "fp8", "any"), "precision",
        ),
        Option("offload", "LIST", "optimizer,parameters,activations, none or any", "words"),
        Option(
            "checkpoint", "synchronous|asynchronous", "how they are written (asynchronous)",
            "choice", ("synchronous", "asynchronous"), "checkpoint",
        ),
        Option("max-tp", "N", "bound", "count", pin="max_tp"),
        Option("max-cp", "N", "bound", "count", pin="max_cp"),
        Option("max-pp", "N", "bound", "count", pin="max_pp"),
        Option("headroom", "GIB", "memory of a GPU that must stay free", "gib"),
    ),
    "Other questions": (
        Option("measured", "KEY=X|PATH", "step_s=, mfu= ..., a trace or a run: what explains it"),
        Option("zero-table", "", "DDP and ZeRO 1, 2, 3 beside each other", "switch"),
        Option("dry-run", "", "one step of the real program on fake ranks (torch)", "switch"),
        Option("validate", "FILE", "score the predictions on measured runs in a CSV"),
    ),
    "Output": (
        Option("quick", "", "no searches for what else could be", "switch"),
        Option("top", "N", "how many layouts are listed (8)", "count"),
        Option("json", "", "one JSON object", "switch"),
        Option("html", "FILE", "one page, self-contained"),
        Option("write", "FILE", "what was chosen as a recipe of the method (`stepwell pretrain`)"),
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


SAMPLED = ("ppo", "grpo")
OF_SAMPLING = ("prompts", "group-size", "prompt-tokens", "answer-tokens")
OF_ROWS = ("seq-len", "global-batch-tokens")
MACHINES = ("gpus", "gpu", "cluster")
OF_A_METHOD = ("tp", "max-tp", "recompute", "micro-batch", "headroom")
OF_A_MODEL = ("model", *MACHINES, "json")


def check_read(asked: Asked) -> None:
    """Raises ConfigError for an option that the question asked does not read, with where it is."""
    if "validate" in asked.given and (asked.recipe or asked.overrides):
        name = asked.recipe or f"--{next(iter(asked.overrides))}"
        raise ConfigError(f"{name} is not read with --validate; ask for one thing at a time")
    what, read = _question(asked)
    method = asked.get("method", "pretrain")
    for name in asked.given:
        if name in read or (name == "method" and method == "pretrain"):
            continue
        raise ConfigError(f"--{name} is not read {what}{_instead(asked, name)}")


def _question(asked: Asked) -> tuple[str, Collection[str]]:
    """In words, and the options that belong to it."""
    method = asked.get("method", "pretrain")
    if "validate" in asked.given:
        return "with --validate", ("validate", "json")
    if asked.recipe is not None:
        pins = [option.name for option in GROUPS["Held fixed"]]  # refused with advice of their own
        others = ("model", *MACHINES, "measured", "dry-run", "quick", "json", "html", "write")
        return "with a recipe", (*others, *pins)
    if "zero-table" in asked.given:
        return "with --zero-table", ("zero-table", "seq-len", *OF_A_MODEL)
    if method != "pretrain":
        work = OF_SAMPLING if method in SAMPLED else OF_ROWS
        output = ("html", "write", "dry-run")
        read = ("method", "lora-rank", *work, *output, *OF_A_MODEL, *OF_A_METHOD)
        return f"with --method {method}", read
    beside = (*OF_SAMPLING, "lora-rank", "validate", "zero-table")
    return "without --method", [name for name in OPTIONS if name not in beside]


def _instead(asked: Asked, name: str) -> str:
    """What does what was wanted, or what the question reads."""
    method = asked.get("method", "pretrain")
    if asked.recipe is not None:
        keys = {"seq-len": "data.seq_len", "global-batch-tokens": "train.global_batch_rows"}
        if name in keys:
            return f"; a recipe says it itself: --{keys[name]}"
        return "; a recipe is planned as it is configured" if name == "method" else ""
    if "zero-table" in asked.given or "validate" in asked.given:
        return "; ask for one thing at a time"
    if method == "pretrain":
        known = SAMPLED if name in OF_SAMPLING else METHODS[1:]
        return f" ({OPTIONS[name].help}); give --method, one of {', '.join(known)}"
    if name in OF_ROWS:
        return "; its rows are a prompt with an answer: --prompt-tokens, --answer-tokens, --prompts"
    if name in OF_SAMPLING:
        return f", which samples nothing; its rows are {' and '.join(f'--{n}' for n in OF_ROWS)}"
    if name in ("quick", "top"):
        return "; its text, --json and --html list the placements that fit"
    held = ", ".join(f"--{n}" for n in OF_A_METHOD)
    return f": where models are placed is searched; what can be held fixed is {held}"


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
        found = measured(value)
        if key in place:
            raise ConfigError(f"--measured {value} beside another; give one of them")
        asked.given[key] = found
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
    found = re.fullmatch(r"(-?[\d_,]*\.?\d+(?:e\d+)?)([a-z]?)", text.strip().lower())
    if found is None or found[2] not in units:
        legal = ", ".join(unit for unit in units if unit)
        raise ConfigError(f"{name} {text!r} is no number such as 8192 or 8k (units: {legal})")
    value = float(found[1].replace("_", "").replace(",", "")) * units[found[2]]
    if value < 1 or value != round(value):
        near = nearest_of(value, (max(1, math.floor(value)), max(1, math.ceil(value))))
        raise ConfigError(f"{name} {text} must be a positive whole number; {near}")
    return round(value)


def amount(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{name} {text!r} must be a number of GiB") from None
    if not 0 <= value < 1e6:
        raise ConfigError(f"{name} {text} must be 0 or more; the nearest legal value is 0")
    return value


def words(name: str, text: str) -> tuple[str, ...] | Literal["any"]:
    if text == "any":
        return text
    found = tuple(word for word in text.split(",") if word and word != "none")
    for word in found:
        if word not in KINDS:
            raise ConfigError(
                f"{name} {word!r} must be of {', '.join(KINDS)}, or none, or any alone"
                f"{nearest(word, KINDS)}"
            )
    once = tuple(dict.fromkeys(found))
    if once != found:
        raise ConfigError(f"{name} {text} names one twice; the nearest is {name} {','.join(once)}")
    return found


def measured(text: str) -> dict[str, float] | Path:
    """`step_s=12.3`; a percent sign is understood of mfu. Or a trace, or a run's folder. Raises
    ConfigError for another name, a share above 1 and a path that is not there."""
    key, equals, value = text.partition("=")
    path = Path(text).expanduser()
    if key not in MEASURES and path.exists():
        return path
    if not equals and ("/" in text or path.suffix in (".json", ".gz")):
        raise ConfigError(f"--measured {text}: there is no such trace or run's folder")
    if equals and key not in MEASURES:
        raise ConfigError(
            f"--measured {text!r}: {key!r} is none of {', '.join(MEASURES)}{nearest(key, MEASURES)}"
        )
    try:
        found = float(value.removesuffix("%"))
    except ValueError:
        found = None
    if not equals or found is None:
        raise ConfigError(
            f"--measured {text!r} must be KEY=NUMBER, such as step_s=12.3 or mfu=0.35, a trace "
            "(trace.json.gz) or a run's folder"
        )
    if value.endswith("%") and key != "mfu":
        raise ConfigError(f"--measured {text!r}: only mfu is a share; leave the % out")
    found = found / 100 if value.endswith("%") else found
    if not 0 < found < math.inf:
        raise ConfigError(f"--measured {text!r} must be above 0, and finite")
    if key == "mfu" and found > 1:
        raise ConfigError(
            f"--measured {text!r} is more than the peak; a share is below 1, so perhaps "
            f"mfu={found / 100:g}, or mfu={found:g}%"
        )
    return {key: found}


def help_text() -> str:
    lines = [
        "usage: stepwell plan --model NAME --gpus N [--gpu NAME] [option ...]",
        "       stepwell plan RECIPE [--gpus N] [--dotted.key value ...] [option ...]",
        "",
        "Predicts memory, traffic, step time and MFU of a run before it starts. With a model:",
        "searches the layouts and says why each axis is what it is. With a recipe: that run, as",
        "configured, and what would make it faster.",
        "",
        *textwrap.wrap(f"Presets: {', '.join([*PRESETS, *PLANNED])}.", HELP_WIDTH),
        *textwrap.wrap(
            "Dimensions: --model.num_layers, --model.d_model (without --model both are needed, the "
            "rest is derived), num_heads, num_kv_heads, head_dim, d_ff, vocab_size, tied; of "
            f"experts: {', '.join(f'--{key}' for key in EXPERT_KEYS)}.",
            HELP_WIDTH,
            break_on_hyphens=False,
        ),
    ]
    for title, options in GROUPS.items():
        lines += ["", f"{title}:"]
        left = {option: f"--{option.name} {option.metavar}".strip() for option in options}
        width = max(WIDTH, 2 + max(map(len, left.values())))
        lines += [f"  {words:<{width}}{option.help}" for option, words in left.items()]
    lines += [
        "",
        "What a question does not read is refused. Exit code: 0 it fits; 1 it does not; 2 a wrong",
        "command line or an impossible layout; 3 a table of runs that cannot be read; 4 a recipe's",
        "weights that are no model.",
        "",
        "  stepwell plan --model llama3-405b --gpus 1024 --gpu h100-sxm --seq-len 8k \\",
        "    --global-batch-tokens 16M",
        "  stepwell plan llama3-8b-pretrain --gpus 64 --measured mfu=0.3",
    ]
    return "\n".join(lines)
