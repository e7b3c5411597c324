"""Strict sections: what `config` is declared with, and how its mistakes are explained.

Everything here works on any tree of sections and knows no key of a run.
"""

from __future__ import annotations

import json
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from stepwell.types import ConfigError, nearest

# Strict: pydantic would otherwise take true for 1, "7" for 7 and 1 for true.
Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]
Positive = Annotated[int, Field(strict=True, gt=0)]
Dimension = Annotated[int, Field(strict=True, gt=0, le=1 << 24)]
NonNegative = Annotated[int, Field(strict=True, ge=0)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
Above0 = Annotated[float, Field(strict=True, gt=0)]
AtLeast0 = Annotated[float, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True)]

WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false"}
BOOLEANS = {"true": True, "false": False}


class Section(BaseModel):
    """A frozen table of a recipe; keys it does not declare are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def check_idle(section: Section, table: str, keys: Iterable[str], where: str) -> None:
    """Raises ValueError for a key of `table` that is set although it changes nothing `where`."""
    for key in keys:
        value, usual = getattr(section, key), type(section).model_fields[key].default
        if value != usual:
            raise ValueError(f"{table}.{key}={value!r} changes nothing {where}; leave it out")


def read_toml(path: str | Path, what: str = "recipe") -> dict[str, Any]:
    """what: the kind of file, for errors. Raises ConfigError for a file that can't be read, or is
    no TOML."""
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the {what} {path} is not UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the {what} {path} is not valid TOML: {error}") from error


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key that holds a value, as (dotted name, field); a union's sections in order.

    A tuple of sections (`data.sources`) is one key; an optional section is named by its keys.
    """
    seen: set[str] = set()
    for section in [s for s in _alternatives(model) if _is_section(s)]:
        for name, field in section.model_fields.items():
            if name in seen:
                continue
            seen.add(name)
            inner = [a for a in _alternatives(field.annotation) if _is_section(a)]
            if not inner:
                yield prefix + name, field
            nested: set[str] = set()
            for alternative in inner:
                for key, leaf in dotted_keys(alternative, f"{prefix}{name}."):
                    if key not in nested:
                        nested.add(key)
                        yield key, leaf


def assign(
    values: Mapping[str, Any], overrides: Mapping[str, Any], model: type[BaseModel]
) -> dict[str, Any]:
    """`values` with each dotted key of `overrides` set; a number in a key counts into a list.

    Text stands for what the key holds: `none` for nothing where that is allowed, a number, true or
    false, and TOML where the key holds a list or table. Raises ConfigError for a key that runs
    through a plain value.
    """
    result = _copy(values)
    for key, value in overrides.items():
        *parents, leaf = key.split(".")
        table: Any = result
        for depth, parent in enumerate(parents):
            table = _entry(table, parent, key, ".".join(parents[: depth + 1]))
        if isinstance(value, str):
            value = _from_text(model, key, value)
        if isinstance(table, list):
            table[_index(table, leaf, key)] = value
        else:
            table[leaf] = value
    return result


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """One line a problem; an unknown key names the nearest known one."""
    lines = [f"{where} is not valid:"]
    problems = error.errors()
    # An entry that is wrong doesn't count, so pydantic also finds the list too short.
    lists = {item["loc"][:-1] for item in problems}
    for item in problems:
        if item["type"] == "too_short" and item["loc"] in lists:
            continue
        parts, sections = _walk(model, item["loc"])
        key = ".".join(parts)
        match item["type"]:
            case "extra_forbidden":
                lines.append(f"  unknown key {key!r}{_nearest_key(model, parts)}")
            case "value_error":
                lines.append(f"  {item['msg'].removeprefix('Value error, ')}")
            case "union_tag_not_found":
                kinds = ", ".join(filter(None, (_kind_of(s) for s in sections)))
                lines.append(f"  {key}.kind is missing; it is one of {kinds}")
            case "union_tag_invalid":
                kinds = [k for s in sections if (k := _kind_of(s))]
                tag = str(item.get("ctx", {}).get("tag"))
                lines.append(
                    f"  {key}.kind = {tag!r}: must be one of {', '.join(kinds)}"
                    f"{nearest(tag, kinds)}"
                )
            case "missing":
                lines.append(f"  {key} is missing")
            case _:
                rule = _rule(item, sections) + _default(model, item["loc"])
                lines.append(f"  {key} = {_short(item['input'])}: {rule}")
    return "\n".join(lines)


def _rule(item: Mapping[str, Any], allowed: list[Any]) -> str:
    """What pydantic says, in words of ours, with the nearest legal value."""
    context, value = item.get("ctx", {}), item["input"]
    match item["type"]:
        case "greater_than":
            bound = context["gt"]
            near = f"; the nearest legal value is {bound + 1:g}" if int in allowed else ""
            return f"must be above {bound:g}{near}"
        case "less_than":
            bound = context["lt"]
            near = f"; the nearest legal value is {bound - 1:g}" if int in allowed else ""
            return f"must be below {bound:g}{near}"
        case "greater_than_equal":
            return f"must be at least {context['ge']}; that is the nearest legal value"
        case "less_than_equal":
            return f"must be at most {context['le']}; that is the nearest legal value"
        case "literal_error":
            options = [str(option) for option in _options(allowed)]
            return f"must be one of {', '.join(options)}{nearest(str(value), options)}"
        case "int_type" if isinstance(value, float):
            return f"must be a whole number; the nearest is {round(value)}"
        case "finite_number":
            return "must be a finite number"
        case "string_type":
            return "must be text"
        case "tuple_type":
            return f"must be a list{_nearest_form(value, allowed)}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"must be a table{_nearest_form(value, allowed)}"
        case "too_short":
            return f"must have at least {_entries(context['min_length'])}"
        case "string_too_short":
            return "must not be empty"
        case "int_type" | "float_type" | "bool_type":
            return f"must be {next(WORDS[a] for a in allowed if a in WORDS)}"
    return item["msg"]


def _entries(count: int) -> str:
    return f"{count} entr{'y' if count == 1 else 'ies'}"


def _nearest_form(value: Any, allowed: list[Any]) -> str:
    """The value in the list or table that the key holds, as TOML, or how such a one looks."""
    kinds = [a for a in allowed if _is_section(a)]
    kind = next((a for a in allowed if _is_section(a) or get_origin(a) in (tuple, dict)), None)
    inner = _alternatives(get_args(kind)[0]) if get_origin(kind) is tuple else []
    kinds = kinds or [a for a in inner if _is_section(a)]
    found = next((_table_form(k, value) for k in kinds if _has_place(k, value)), None)
    if found is None and inner and _fits(value, inner):
        found = _toml(value)
    if found is None:
        return f", e.g. {_example(allowed)}" if kind is not None else ""
    return f"; the nearest legal form is {f'[{found}]' if inner else found}"


def _has_place(section: type[BaseModel], value: Any) -> bool:
    return isinstance(value, Mapping) or _fits(value, [_main_key(section)[1]])


def _fits(value: Any, allowed: list[Any]) -> bool:
    """Whether a plain value is of one of the types."""
    types_ = [a for annotation in allowed for a in _alternatives(annotation)]
    return type(value) in types_ or value in _options(types_)


def _main_key(section: type[BaseModel]) -> tuple[str, Any]:
    """The key that a section is known by, and its type: its kind, the last that it needs, or its
    first."""
    fields = section.model_fields
    needed = [name for name, field in fields.items() if field.is_required()]
    name = "kind" if "kind" in fields else needed[-1] if needed else next(iter(fields))
    return name, fields[name].annotation


def _table_form(section: type[BaseModel], value: Any = None) -> str:
    """A table of the section with what it needs; `value` is that of its main key."""
    if isinstance(value, Mapping):
        return _toml(value)
    main, fields = _main_key(section)[0], section.model_fields
    needed = [name for name, field in fields.items() if field.is_required()]
    filled = {
        name: "..." if fields[name].default in (None, PydanticUndefined) else fields[name].default
        for name in dict.fromkeys([*needed, main])
    }
    return _toml(filled if value is None else {**filled, main: value})


def _toml(value: Any) -> str:
    """A value as it is written inline."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(v)}" for key, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False, default=str)


def _default(model: type[BaseModel], location: tuple[Any, ...]) -> str:
    """What the key is when it is left out, for a number."""
    _, sections = _walk(model, location[:-1])
    fields = [s.model_fields.get(location[-1]) for s in sections if _is_section(s)]
    default = next((f.default for f in fields if f is not None), None)
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    return f" (the default is {default})" if is_number else ""


def _nearest_key(model: type[BaseModel], parts: list[str]) -> str:
    """The same name elsewhere, if only one key has it; else a sibling that is spelled alike, else
    a similar full key."""
    *parents, name = parts
    _, sections = _walk(model, tuple(parents))
    siblings = {f for s in sections if _is_section(s) for f in s.model_fields} - {name}
    prefix = "".join(f"{p}." for p in parents)
    everywhere = [key for key, _ in dotted_keys(model)]
    same = [key for key in everywhere if key.rpartition(".")[2] == name]
    close = nearest(name, sorted(siblings))
    if len(same) != 1 and close:
        return close.replace("'", f"'{prefix}", 1)
    return nearest(same[0], same) if same else nearest(prefix + name, everywhere)


def _walk(model: Any, location: tuple[Any, ...]) -> tuple[list[str], list[Any]]:
    """The written key of `location` and the types that may stand there.

    pydantic puts a union's tag into a location, which is no part of the written key.
    """
    parts: list[str] = []
    here = _alternatives(model)
    for part in location:
        tagged = [a for a in here if _is_section(a) and _kind_of(a) == part]
        if tagged and not any(part in a.model_fields for a in tagged):
            here = tagged
            continue
        parts.append(str(part))
        here = [inner for a in here for inner in _inside(a, part)]
    return parts, here


def _inside(annotation: Any, part: Any) -> list[Any]:
    if _is_section(annotation):
        field = annotation.model_fields.get(part)
        return _alternatives(field.annotation) if field is not None else []
    if get_origin(annotation) is tuple and str(part).isdigit():
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        return _alternatives(get_args(annotation)[1])
    return []


def _alternatives(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [a for arg in get_args(annotation) for a in _alternatives(arg)]
    return [annotation]


def _options(allowed: list[Any]) -> list[Any]:
    """The values of all literals."""
    return [option for a in allowed if get_origin(a) is Literal for option in get_args(a)]


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _kind_of(section: type[BaseModel]) -> str | None:
    field = section.model_fields.get("kind")
    return field.default if field is not None else None


def _from_text(model: type[BaseModel], key: str, text: str) -> Any:
    _, allowed = _walk(model, tuple(key.split(".")))
    if text.lower() == "none" and type(None) in allowed:
        return None
    tables = any(_is_section(a) or get_origin(a) in (tuple, dict) for a in allowed)
    if not tables:
        return _plain(text, allowed)
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{key} = {text!r} holds a list or table and is written as TOML, "
            f"e.g. '{_example(allowed)}': {error}"
        ) from error


def _example(allowed: list[Any]) -> str:
    """How a value of the first such type is written as TOML."""
    kind = next(a for a in allowed if _is_section(a) or get_origin(a) in (tuple, dict))
    if _is_section(kind):
        return _table_form(kind)
    inner = _alternatives(get_args(kind)[-1 if get_origin(kind) is dict else 0])
    if get_origin(kind) is dict:
        return "{name = 1}" if {int, float} & {*inner} else '{name = "value"}'
    tables = [a for a in inner if _is_section(a)]
    if tables:
        return f"[{_table_form(tables[0])}]"
    options = _options(inner)
    if options:
        return "[" + ", ".join(f'"{option}"' for option in options[:2]) + "]"
    return "[1, 2]" if {int, float} & {*inner} else '["one", "two"]'


def _plain(text: str, allowed: list[Any]) -> Any:
    """The number, true or false that `text` says; text that says none is left for the message."""
    if bool in allowed:
        return BOOLEANS.get(text.lower(), text)
    numbers = {*allowed, *map(type, _options(allowed))}
    for kind in [k for k in (int, float) if k in numbers]:
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _entry(table: Any, name: str, key: str, path: str) -> Any:
    """The list or table called `name` in `table`, made if it is not there."""
    if isinstance(table, list) or name.isdigit():
        entry = table[_index(table, name, key)]
    else:
        entry = table.setdefault(name, {})
    if not isinstance(entry, (dict, list)):
        raise ConfigError(f"cannot set {key}: {path} = {_short(entry)} is a value, not a table")
    return entry


def _index(entries: Any, name: str, key: str) -> int:
    if name.isdigit() and int(name) < len(entries):
        return int(name)
    raise ConfigError(
        f"cannot set {key}: the list has {len(entries)} entries, counted from 0; "
        f"{name!r} is none of them"
    )


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(v) for v in value]
    return value


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
