"""Answers that must be JSON of a given form (extra `schema`: jsonschema)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from stepwell.eval.grade import Verifier
from stepwell.types import ConfigError

FENCE = re.compile(r"^```(?:json)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


def json_schema(path: str) -> Verifier:
    """1.0 where the completion is JSON, alone or in its only fence, that fits the schema in a file.

    Raises ConfigError for a file that is missing or no schema, and without the package.
    """
    try:
        import jsonschema
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ImportError as error:
        raise ConfigError(
            "verifier 'json:...' needs the package: pip install 'stepwell[schema]'"
        ) from error
    try:
        schema = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the JSON schema {path}: {error}") from error
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{path} is not a JSON schema: {error.message}") from error
    validator = kind(schema, registry=Registry())  # nothing is fetched

    def verify(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float | None]:
        return [float(_fits(text, validator)) for text in completions]

    return verify


def _fits(text: str, validator: Any) -> bool:
    fenced = FENCE.findall(text)
    if len(fenced) > 1:
        return False
    try:
        value = json.loads(fenced[0] if fenced else text, parse_constant=_no_constant)
        return validator.is_valid(value)
    except (ValueError, RecursionError):
        return False


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
