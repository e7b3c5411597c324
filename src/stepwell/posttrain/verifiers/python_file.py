"""A function of the user's own as a verifier."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepwell.types import ConfigError, nearest


def python_function(detail: str) -> Callable[..., Any]:
    """`FILE.py:FUNCTION`, with the signature `f(prompts, completions, **columns)`; also `async`.
    Columns that it has no parameter for are not passed.

    Raises ConfigError for a file that cannot be run and a function that isn't there.
    """
    file, _, name = detail.rpartition(":")
    path = Path(file).resolve()
    if not file or not path.is_file():
        raise ConfigError(
            f"python:{detail}: there is no file {file or detail!r}; write FILE.py:NAME"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"python:{detail}: {file} is not a Python file (its name ends in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{file} cannot be run: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"{file} has no function {name!r}{nearest(name, names)}")
    return _with_its_columns(function)


def _with_its_columns(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return function
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function
    known = {p.name for p in list(parameters)[2:]}

    @functools.wraps(function)
    def call(prompts: Any, completions: Any, /, **columns: Any) -> Any:
        passed = {name: value for name, value in columns.items() if name in known}
        return function(prompts, completions, **passed)

    return call
