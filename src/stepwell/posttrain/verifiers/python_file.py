"""A function of the user's own as a verifier."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any

from stepwell.posttrain.user_code import attribute, load
from stepwell.types import ConfigError

FORM = "f(prompts, completions, **columns)"
PLACES = ("prompts", "completions")


def python_function(detail: str) -> Callable[..., Any]:
    """`FILE.py:FUNCTION`, with the signature `f(prompts, completions, **columns)`; also `async`,
    or an object that can be called. Its first two parameters may have any name; where `prompts` or
    `completions` stands elsewhere, both are passed by name. Columns that it has no parameter for
    are not passed.

    Raises ConfigError for a file that cannot be run, and a function that isn't there or could not
    be called so.
    """
    what = f"python:{detail}"
    file, _, name = detail.rpartition(":")
    if not file:
        raise ConfigError(f"{what}: there is no file {detail!r}; write FILE.py:NAME")
    function = attribute(load(file, what), name, what, "function")
    if isinstance(function, type):
        raise ConfigError(
            f"{what}: {name!r} is a class, whose objects are no scores; name a function {FORM}, or "
            "an object that can be called so"
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some callables written in C have none to be seen
        return function
    return _as_verifier(function, parameters, what)


def _as_verifier(
    function: Callable[..., Any], parameters: Sequence[Parameter], what: str
) -> Callable[..., Any]:
    """What is called as `f(prompts, completions, /, **columns)`, and whose signature says so."""
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_name = _is_by_name(parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if by_name:
        passed = [name for name in PLACES if name in named or takes_all]
        columns = [p for name, p in named.items() if name not in PLACES]
        unfed = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
    else:
        if not _takes_two(parameters):
            names = ", ".join(map(str, parameters)) or "nothing"
            raise ConfigError(
                f"{what} takes ({names}), but is called as {FORM}; give it both parameters"
            )
        passed = []
        own = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        columns = [p for p in named.values() if p not in own[:2]]
        unfed = [p for p in own[2:] if p.kind is p.POSITIONAL_ONLY]
    needed = next((p.name for p in unfed if p.default is p.empty), None)
    if needed is not None:
        raise ConfigError(
            f"{what}: its parameter {needed!r} can be given by position only, and columns are "
            "passed by name; move the `/` before it"
        )
    known = {p.name for p in columns}

    def arguments(prompts: Any, completions: Any, row: dict[str, Any]) -> tuple[list, dict]:
        given = {name: value for name, value in row.items() if takes_all or name in known}
        if not by_name:
            return [prompts, completions], given
        both = {"prompts": prompts, "completions": completions}
        return [], {**given, **{name: both[name] for name in passed}}

    @functools.wraps(function)
    def call(prompts: Any, completions: Any, /, **columns: Any) -> Any:
        args, given = arguments(prompts, completions, columns)
        return function(*args, **given)

    first = PLACES if by_name else _first_two(parameters)
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            *(Parameter(name, Parameter.POSITIONAL_ONLY) for name in first),
            *(p.replace(kind=Parameter.KEYWORD_ONLY) for p in columns if p.name not in first),
            *(p for p in parameters if p.kind is p.VAR_KEYWORD),
        ]
    )
    return call


def _is_by_name(parameters: Sequence[Parameter]) -> bool:
    """Whether the first two by position are not what they are called as."""
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    order, names = _positional(parameters), {p.name for p in parameters}
    if names.issuperset(PLACES):
        return order[:2] != list(PLACES)
    if len(order) < 2:
        return "completions" in names or any(p.kind is p.VAR_KEYWORD for p in parameters)
    return order[0] == "completions" or order[1] == "prompts"


def _takes_two(parameters: Sequence[Parameter]) -> bool:
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return several or len(_positional(parameters)) >= 2


def _first_two(parameters: Sequence[Parameter]) -> tuple[str, ...]:
    names = _positional(parameters)[:2]
    return (*names, *PLACES[len(names) :])


def _positional(parameters: Sequence[Parameter]) -> list[str]:
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]
