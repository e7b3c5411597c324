"""Python's own library: code and prose that every machine has."""

from __future__ import annotations

import ast
import importlib
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import replace

from stepwell.data.sources.texts import Item, checked
from stepwell.data.sources.trees import SKIPPED_FOLDERS, TEST_FOLDERS, source_tree
from stepwell.types import Dropped


def stdlib_code(source: str = "stdlib-code") -> Iterator[Item]:
    """The Python standard library's `.py` files without its tests and installed packages."""
    return source_tree(
        sysconfig.get_path("stdlib"), source, (".py",), SKIPPED_FOLDERS | TEST_FOLDERS
    )


def stdlib_prose(source: str = "stdlib-prose") -> Iterator[Item]:
    """Python's language reference as shipped for `help()` (`pydoc_data.topics`), a document a
    topic, then the docstrings of the standard library, a document a module."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for topic, text in sorted(topics.items()):
        yield checked(f"topics/{topic}", text, source, {"topic": topic})
    for item in stdlib_code(source):
        if isinstance(item, Dropped):
            yield replace(item, id=f"docstrings/{item.id}")
            continue
        if item.id == "pydoc_data/topics.py":
            continue
        module = item.id.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        try:
            text = docstrings(item.text, module)
        except (SyntaxError, ValueError, RecursionError) as error:
            yield Dropped(f"docstrings/{module}", source, "syntax_error", str(error))
            continue
        if text:
            yield checked(f"docstrings/{module}", text, source, {"module": module})
        else:
            yield Dropped(f"docstrings/{module}", source, "no_docstrings")


def docstrings(code: str, module: str) -> str:
    """The docstrings of a module, its classes and functions, each under its name, in order.

    Raises SyntaxError for what Python cannot parse.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in other people's strings
        tree = ast.parse(code)
    parts: list[str] = []
    pending: list[tuple[str, ast.AST]] = [(module, tree)]
    while pending:
        name, node = pending.pop()
        text = ast.get_docstring(node)  # type: ignore[arg-type]
        if text and text.strip():
            parts.append(f"{name}\n\n{text.strip()}")
        inner = [
            (f"{name}.{child.name}", child)
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        pending += reversed(inner)
    return "\n\n\n".join(parts)
