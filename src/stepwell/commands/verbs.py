"""The steps of a curation as commands of their own: `stepwell dedup in.jsonl -o out/`.

Each is a curation whose steps are chosen by an option, and whose further options are the fields of
these steps.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from stepwell.commands.curate import executor_of, recipe_for, run, split_overrides
from stepwell.commands.run_arguments import default_text, type_text
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
EXPLAIN = """usage: stepwell dedup explain ID --in FOLDER [--json]

Says what became of the documents with this id (or SOURCE/ID): kept, or removed by which step, for
which reason, and what it repeats.

  --in FOLDER  what `stepwell dedup` or `stepwell curate` has written
  --json       print the explanation as JSON"""
# What a recipe's dotted keys begin with.
RECIPE = ("sources", "steps", "store", "outputs")
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
    # A step's table by its keys, `--thresholds.de 0.5`, is no key of the recipe.
    for key in [key for key in overrides if key.partition(".")[0] not in RECIPE]:
        words.options[f"--{key}"] = overrides.pop(key)
    kinds = chosen(name, words)
    steps = steps_of(name, kinds, words)
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
            if given:
                raise ConfigError(f"{word}: {name} takes no value; give it alone")
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
    parts = [part.strip() for part in value.split(",")]
    for part in parts:
        if parts.count(part) > 1:
            raise ConfigError(f"--{verb.option} {value} names {part!r} twice; name it once")
        if part not in verb.kinds:
            raise ConfigError(
                f"--{verb.option} {value}: {part!r} is none of {', '.join(verb.kinds)}"
                f"{nearest(part, verb.kinds)}"
            )
        kinds += verb.kinds[part]
    return kinds


def steps_of(verb: str, kinds: Sequence[str], words: Words) -> list[dict[str, Any]]:
    """The steps with the fields that options set. Raises ConfigError for an option that is none,
    and for one that is missing."""
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
            raise ConfigError(_no_taker(verb, option, name, kinds))
        for i in takers:
            value = text if "." in key else _as_toml(classes[i], name, text)
            steps[i] = assign(steps[i], {key: value}, classes[i])
    for kind, found, step in zip(kinds, classes, steps, strict=True):
        for name, info in found.model_fields.items():
            if info.is_required() and name not in step:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is missing, which {kind} needs; stepwell {verb} "
                    "--help says what it is"
                )
    return steps


def _no_taker(verb: str, option: str, name: str, kinds: Sequence[str]) -> str:
    from stepwell.curate.recipe import step_class

    for value, others in VERBS[verb].kinds.items():
        owner = next((kind for kind in others if name in step_class(kind).model_fields), None)
        if owner is not None and owner not in kinds and name != "kind":
            return (
                f"{option} is an option of {owner}, which is not chosen; add it with "
                f"--{VERBS[verb].option} {value}, or leave {option} out"
            )
    fields = [name for kind in kinds for name in step_class(kind).model_fields if name != "kind"]
    known = [f"--{field.replace('_', '-')}" for field in fields]
    close = nearest(option, [*known, *VALUES, *SWITCHES])
    return f"unknown option {option}{close} of {', '.join(kinds)}; --help lists them"


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
        "  --outputs.KEY VALUE    how the result is written, e.g. --outputs.removed_text false",
        "  --steps.N.KEY VALUE    of step N alone, counted from 0",
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
        form = "KEY=VALUE,..." if _holds(info.annotation, dict) else type_text(info.annotation)
        option = f"--{name.replace('_', '-')} {form}"
        value = info.get_default(call_default_factory=True)
        text = ",".join(value) if isinstance(value, tuple) and value else default_text(value)
        default = "needed" if info.is_required() else text
        lines.append(f"  {option:<36} {default}")
    return lines


def _as_toml(section: Any, name: str, text: str) -> str:
    """`en,de` for a list and `de=0.5,en=0.4` for a table, as TOML writes them."""
    annotation = section.model_fields[name].annotation
    bare = text.strip()
    parts = [part.strip() for part in bare.split(",") if part.strip()]
    if _holds(annotation, tuple) and not bare.startswith("["):
        return "[" + ", ".join(_entry(annotation, part) for part in parts) + "]"
    if _holds(annotation, dict) and not bare.startswith("{"):
        pairs = [part.partition("=") for part in parts]
        if not all(given for _, given, _ in pairs):
            raise ConfigError(
                f"--{name.replace('_', '-')} {text}: write pairs such as de=0.5,en=0.4"
            )
        entries = [f"{json.dumps(key.strip())} = {_entry(annotation, v)}" for key, _, v in pairs]
        return "{" + ", ".join(entries) + "}"
    return text


def _holds(annotation: Any, kind: type) -> bool:
    return annotation is kind or get_origin(annotation) is kind


def _entry(annotation: Any, text: str) -> str:
    """An entry of a list or table: quoted unless it is to be a number."""
    inner = get_args(annotation)
    kind = inner[1] if _holds(annotation, dict) else inner[0]
    kind = get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
    return text.strip() if kind in (int, float, bool) else json.dumps(text, ensure_ascii=False)


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit():
        raise ConfigError(f"--workers {text!r} must be a whole number, at least 1")
    return int(text)


def _explain(argv: Sequence[str]) -> int:
    from stepwell.data.dedup.explain import explain

    if {"-h", "--help"} & set(argv):
        print(EXPLAIN)
        return 0
    words = parse(argv)
    unknown = [w for w in (*words.options, *words.switches) if w not in ("--in", "--json")]
    if unknown:
        close = nearest(unknown[0], ("--in", "--json"))
        raise ConfigError(f"unknown option {unknown[0]}{close}; {EXPLAIN.splitlines()[0]}")
    if len(words.inputs) != 1 or "--in" not in words.options:
        raise ConfigError(EXPLAIN.splitlines()[0])
    folder, doc_id = words.options["--in"], words.inputs[0]
    text = explain(Path(folder), doc_id)
    values = {"id": doc_id, "in": folder, "explanation": text}
    print(json.dumps(values) if "--json" in words.switches else text)
    return 0
