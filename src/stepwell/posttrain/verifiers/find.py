"""A verifier by its name. What a verifier is: `eval.grade`."""

from __future__ import annotations

from collections.abc import Callable

from stepwell.eval.grade import Verifier
from stepwell.types import ConfigError, nearest

KINDS = ("exact", "regex:PATTERN", "gym:SET")


def find_verifier(name: str) -> Verifier:
    """`exact`, `regex:PATTERN` or `gym:SET`. Raises ConfigError for another name."""
    kind, _, detail = name.partition(":")
    open_kind = _plain(kind) if not detail else _detailed(kind)
    if open_kind is None:
        raise ConfigError(
            f"unknown verifier {name!r}{nearest(name, KINDS)}; known: {', '.join(KINDS)}"
        )
    return open_kind(detail)


def _plain(kind: str) -> Callable[[str], Verifier] | None:
    if kind == "exact":
        from stepwell.posttrain.verifiers.exact import exact

        return lambda _: exact
    return None


def _detailed(kind: str) -> Callable[[str], Verifier] | None:
    if kind == "regex":
        from stepwell.posttrain.verifiers.exact import regex

        return regex
    if kind == "gym":
        from stepwell.posttrain.verifiers.gym import gym

        return gym
    return None
