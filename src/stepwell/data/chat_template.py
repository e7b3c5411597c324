"""Chat templates in Jinja's sandbox, with the helpers that Transformers gives them.

`{% generation %}...{% endgeneration %}` says what the assistant generates; the rendering marks it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError

Message = Mapping[str, Any]
Span = tuple[int, int]


class UnusableRow(DataError):
    """One conversation that cannot be trained on; `reason` is a short key that gets counted."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


# Noncharacters, reserved by Unicode for a program's internal use: they mark generated spans.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


def template_of(tokenizer: Tokenizer) -> str:
    """Raises DataError for a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise DataError(
            "this tokenizer has no chat template: add `chat_template` to its "
            "tokenizer_config.json, or give rows of `prompt` and `completion` as plain text"
        )
    return tokenizer.chat_template


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` puts marks around what it holds."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.CallBlock(self.call_method("_mark"), [], [], body)
        return call.set_lineno(line)

    @staticmethod
    def _mark(caller: Any) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template is not valid Jinja: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def render(
    template: str,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
) -> str:
    """The template's text, marked. Raises UnusableRow for what the template refuses."""
    tokens = {"eos_token": tokenizer.eos_token, "pad_token": tokenizer.pad_token}
    if tokenizer.bos_token is not None:
        tokens["bos_token"] = tokenizer.bos_token
    try:
        return _compiled(template).render(
            messages=list(messages),
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**tokens, **variables},
        )
    except DataError:
        raise
    except Exception as error:  # a template is data: whatever it does wrong is a bad input
        raise UnusableRow(
            "template_refused", f"the chat template refuses the messages: {error}"
        ) from error


def take_marks(marked: str) -> tuple[str, list[Span]]:
    """The text without marks, and the character spans that they enclosed."""
    spans: list[Span] = []
    parts: list[str] = []
    length = 0
    for i, part in enumerate(marked.split(OPEN)):
        inside, _, after = part.partition(CLOSE) if i else ("", "", part)
        if i:
            spans.append((length, length + len(inside)))
        parts += [inside, after]
        length += len(inside) + len(after)
    return "".join(parts), spans
