"""The steps of a curation as commands of their own: `stepwell dedup in.jsonl -o out/`.

Each is a curation whose steps are chosen by an option, and whose further options are the fields of
these steps.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from stepwell.commands.curate import executor_of, recipe_for, run, split_overrides
from stepwell.commands.training import default_text, type_text
from stepwell.schema import assign
from stepwell.types import ConfigError, nearest


@dataclass(frozen=True)
class Verb:
    """option: which chooses among `kinds` (value -> kinds of steps), several by commas; "" when
    there is nothing to choose."""

    summary: str
    option: str
    kinds: dict[str, tuple[str, ...]]
    default: str


VERBS = {
    "langid": Verb("Labels documents with their language.", "", {"": ("langid",)}, ""),
    "quality": Verb(
        "Drops documents that published rules take for noise, each with its reason.",
        "rules",
        {
            "gopher": ("gopher-repetition", "gopher-quality"),
            "c4": ("c4",),
            "fineweb": ("fineweb",),
            "code": ("code-quality",),
        },
        "gopher,fineweb",
    ),
    "quality-filter": Verb(
        "Scores documents with a classifier (`train-quality-classifier`) and keeps the best.",
        "cut",
        {
            "top": ("quality-score", "quality-top"),
            "threshold": ("quality-score", "quality-threshold"),
            "buckets": ("quality-score", "quality-buckets"),
        },
        "top",
    ),
    "pii": Verb("Redacts, or drops documents with, personal information.", "", {"": ("pii",)}, ""),
    "dedup": Verb(
        "Removes what is there more than once; each removal names the document that stays.\n"
        "`stepwell dedup explain ID --in FOLDER` says why a document went.",
        "method",
        {
            "exact": ("exact-dedup",),
            "fuzzy": ("fuzzy-dedup",),
            "line": ("line-dedup",),
            "substring": ("substring-dedup",),
            "semantic": ("semantic-dedup",),
        },
        "exact,fuzzy",
    ),
    "decontam": Verb(
        "Removes documents that hold items of a benchmark (see `decontam-index`).",
        "",
        {"": ("decontaminate",)},
        "",
    ),
}
SWITCHES = ("--json", "--fresh")
VALUES = ("--out", "--workers", "--text-column", "--documents")


@dataclass
class Words:
    inputs: list[str] = field(default_factory=list)
    switches: set[str] = field(default_factory=set)
    options: dict[str, str] = field(default_factory=dict)


def langid(argv: Sequence[str]) -> int:
    return _verb("langid", argv)


def quality(argv: Sequence[str]) -> int:
    return _verb("quality", argv)


def quality_filter(argv: Sequence[str]) -> int:
    return _verb("quality-filter", argv)


def pii(argv: Sequence[str]) -> int:
    return _verb("pii", argv)


def decontam(argv: Sequence[str]) -> int:
    return _verb("decontam", argv)


def dedup(argv: Sequence[str]) -> int:
    if argv[:1] == ["explain"]:
        return _explain(argv[1:])
    return _verb("dedup", argv)


def _verb(name: str, argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(help_text(name))
        return 0
    rest, overrides = split_overrides(argv)
    words = parse(rest)
    kinds = chosen(name, words)
    steps = steps_of(kinds, words)
    inputs, options = words.inputs, words.options
    if "--out" not in options:
        raise ConfigError(f"stepwell {name} needs -o FOLDER, the folder that is written")
    if "--documents" in options:
        overrides = {"outputs.documents": options["--documents"], **overrides}
    recipe = recipe_for(inputs, options.get("--text-column", "text"), steps, overrides)
    executor = executor_of("local", _number(options.get("--workers")))
    out = Path(options["--out"])
    return run(recipe, out, executor, "--fresh" in words.switches, "--json" in words.switches)


def parse(argv: Sequence[str]) -> Words:
    """Raises ConfigError for an option without a value."""
    words = Words()
    rest = iter(argv)
    for word in rest:
        name, given, value = word.partition("=")
        name = "--out" if name == "-o" else name.replace("_", "-")
        if not word.startswith("-") or word == "-":
            words.inputs.append(word)
        elif name in SWITCHES:
            words.switches.add(name)
        else:
            text = value if given else next(rest, None)
            if text is None:
                raise ConfigError(f"{word} needs a value")
            words.options[name] = text
    return words


def chosen(name: str, words: Words) -> list[str]:
    """The kinds of steps that the verb's option asks for. Raises ConfigError."""
    verb = VERBS[name]
    value = words.options.pop(f"--{verb.option}", verb.default) if verb.option else ""
    kinds: list[str] = []
    for part in value.split(","):
        if part not in verb.kinds:
            raise ConfigError(
                f"--{verb.option} {value}: {part!r} is none of {', '.join(verb.kinds)}"
                f"{nearest(part, verb.kinds)}"
            )
        kinds += verb.kinds[part]
    return kinds


def steps_of(kinds: Sequence[str], words: Words) -> list[dict[str, Any]]:
    """The steps with the fields that options set. Raises ConfigError for an option that is none."""
    from stepwell.curate.recipe import step_class

    classes = [step_class(kind) for kind in kinds]
    steps: list[dict[str, Any]] = [{"kind": kind} for kind in kinds]
    for option, text in words.options.items():
        if option in VALUES:
            continue
        key = option.removeprefix("--").replace("-", "_")
        name = key.partition(".")[0]
        takers = [i for i, c in enumerate(classes) if name in c.model_fields and name != "kind"]
        if not takers:
            known = [f"--{f.replace('_', '-')}" for c in classes for f in c.model_fields]
            raise ConfigError(
                f"unknown option {option}{nearest(option, [*known, *VALUES, *SWITCHES])} of "
                f"{', '.join(kinds)}; --help lists them"
            )
        for i in takers:
            steps[i] = assign(steps[i], {key: _listed(classes[i], name, text)}, classes[i])
    return steps


def help_text(name: str) -> str:
    from stepwell.curate.recipe import step_class

    verb = VERBS[name]
    lines = [
        f"usage: stepwell {name} INPUT ... -o FOLDER [options]",
        "",
        verb.summary,
        "",
        "INPUT: rows (.jsonl, .jsonl.gz, .jsonl.zst, .parquet), text, HTML, WARC and code files,",
        "folders of them, a curated folder, stdlib-code, stdlib-prose.",
        "",
        "  -o, --out FOLDER       documents/, removed/ (each with its reason), curation.json",
        "  --documents FORM       parquet or jsonl (parquet)",
        "  --text-column NAME     of rows (text)",
        "  --workers INT          processes (one a core)",
        "  --fresh                begin anew",
        "  --json                 print the counts as JSON",
    ]
    if verb.option:
        values = ", ".join(verb.kinds)
        lines.append(
            f"  --{verb.option} LIST".ljust(25) + f"{values}; several by commas ({verb.default})"
        )
    for kind in dict.fromkeys(kind for kinds in verb.kinds.values() for kind in kinds):
        lines += ["", f"{kind}:", *_fields(step_class(kind))]
    return "\n".join(lines)


def _fields(section: Any) -> list[str]:
    doc = " ".join((section.__doc__ or "").split())
    lines = textwrap.wrap(doc, 96, initial_indent="  ", subsequent_indent="  ")
    for name, info in section.model_fields.items():
        if name in ("kind", "sources"):
            continue
        option = f"--{name.replace('_', '-')} {type_text(info.annotation)}"
        value = info.get_default(call_default_factory=True)
        text = ",".join(value) if isinstance(value, tuple) and value else default_text(value)
        default = "needed" if info.is_required() else text
        lines.append(f"  {option:<36} {default}")
    return lines


def _listed(section: Any, name: str, text: str) -> str:
    """`en,de` for a list of words, which TOML would write as ["en", "de"]."""
    is_list = get_origin(section.model_fields[name].annotation) is tuple
    if is_list and not text.lstrip().startswith("["):
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return (
            "[" + ", ".join(f'"{part}"' if not _is_number(part) else part for part in parts) + "]"
        )
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit():
        raise ConfigError(f"--workers {text!r} must be a whole number, at least 1")
    return int(text)


def _explain(argv: Sequence[str]) -> int:
    from stepwell.data.dedup.explain import explain

    words = parse(argv)
    if len(words.inputs) != 1 or "--in" not in words.options:
        raise ConfigError("usage: stepwell dedup explain ID --in FOLDER")
    print(explain(Path(words.options["--in"]), words.inputs[0]))
    return 0
