"""A verifier by its name: what grades texts in plain Python. What a verifier is: `eval.grade`."""

from __future__ import annotations

from stepwell.eval.grade import Verifier
from stepwell.types import ConfigError, nearest

PLAIN = ("exact", "math")
DETAILED = ("regex:PATTERN", "json:SCHEMA_FILE", "gym:SET", "python:FILE.py:FUNCTION")
KINDS = (*PLAIN, *DETAILED)


def find_verifier(name: str) -> Verifier:
    """Raises ConfigError for an unknown name, and for one that lacks its package or file."""
    kind, _, detail = name.partition(":")
    found = _plain(name) or (_detailed(kind, detail) if detail else None)
    if found is None:
        raise ConfigError(
            f"unknown verifier {name!r}{nearest(name, KINDS)}; known: {', '.join(KINDS)}"
        )
    return found


def _plain(kind: str) -> Verifier | None:
    if kind == "exact":
        from stepwell.posttrain.verifiers.exact import exact

        return exact
    if kind == "math":
        from stepwell.posttrain.verifiers.maths import maths

        return maths()
    return None


def _detailed(kind: str, detail: str) -> Verifier | None:
    if kind == "regex":
        from stepwell.posttrain.verifiers.exact import regex

        return regex(detail)
    if kind == "json":
        from stepwell.posttrain.verifiers.schema import json_schema

        return json_schema(detail)
    if kind == "gym":
        from stepwell.posttrain.verifiers.gym import gym

        return gym(detail)
    if kind == "python":
        from stepwell.posttrain.verifiers.python_file import python_function

        return python_function(detail)
    return None
