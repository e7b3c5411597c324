"""A user's own Python file, run as a module: rewards and environments are named in it."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from stepwell.types import ConfigError, nearest


def load(file: str | Path, what: str) -> ModuleType:
    """Runs a file as `python FILE` would: its folder comes first where modules are looked for, and
    it is a module of its own, whatever its name. what: names it in errors.

    Raises ConfigError for a file that isn't there, is no Python, or ends otherwise than well, also
    by `sys.exit`.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"{what}: there is no Python file {str(file)!r}; write FILE.py:NAME")
    # Not the file's own name: that may be a library's.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what}: {file} is not a Python file (its name ends in .py)")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path[:1]:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses look their annotations up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{what}: {file} cannot be run: {_said(error)}") from error
    return module


def attribute(module: ModuleType, name: str, what: str, kind: str) -> Any:
    """What `name` stands for. kind: "function" or "class", what it should be, for errors. Raises
    ConfigError if there is nothing of that name, or nothing that can be called."""
    values = vars(module)
    file = module.__file__
    if name not in values:
        own = [key for key, value in values.items() if is_own(value, module)]
        raise ConfigError(f"{what}: {file} has no {kind} {name!r}{nearest(name, own)}")
    if not callable(values[name]):
        found = type(values[name]).__name__
        raise ConfigError(f"{what}: {name!r} of {file} is of type {found}, and no {kind}")
    return values[name]


def is_own(value: Any, module: ModuleType) -> bool:
    """Whether it can be called, and was not imported."""
    return callable(value) and getattr(value, "__module__", module.__name__) == module.__name__


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
