"""Chats to token ids and loss masks, through Hugging Face chat templates in Jinja's sandbox.

The ids are always those of the whole rendering; the mask marks what the assistant says,
including the token that ends its turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from rich.text import Text

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


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    train_from: int = 0,
    **variables: Any,
) -> tuple[list[int], list[int]]:
    """ids and mask of a whole conversation; mask 1 on the tokens of assistant messages from the
    `train_from`-th message on, with their end-of-turn token.

    There is one bos if the tokenizer uses one, and a last assistant turn whose template ends it
    without a special token gets one eos. Templates with `{% generation %}` say themselves what is
    trained; for others it is what follows the generation prompt, up to the end of the turn.
    Raises DataError for no template or a broken one, and its subclass UnusableRow for a template's
    own refusal, a special token inside a message, and a mask of all zeros, or of all ones although
    there is a prompt.
    """
    check_messages(messages, tokenizer)
    template = _template_of(tokenizer)
    marked = _render(template, tokenizer, messages, False, tools, variables)
    text, spans = _take_marks(marked)
    if not spans:
        spans = _spans_by_prefix(template, tokenizer, messages, text, tools, variables)
    roles = [message["role"] for message in messages]
    assistant_at = [i for i, role in enumerate(roles) if role == "assistant"]
    if len(spans) == len(assistant_at):
        spans = [s for s, i in zip(spans, assistant_at, strict=True) if i >= train_from]
    elif train_from:
        raise UnusableRow(
            "unclear_mask",
            f"the template marks {len(spans)} generated parts for {len(assistant_at)} assistant "
            "messages, so the trained ones cannot be told from the prompt's",
        )
    ids, offsets = tokenizer.encode_with_offsets(text)
    mask = _mask(offsets, spans)
    ids, mask = _with_ends(tokenizer, ids, mask, roles[-1] == "assistant")
    check_mask(mask, has_prompt=any(role != "assistant" for role in roles))
    return ids, mask


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    **variables: Any,
) -> list[int]:
    """ids that a model continues with the assistant's next answer."""
    check_messages(messages, tokenizer)
    text, _ = _take_marks(
        _render(_template_of(tokenizer), tokenizer, messages, True, tools, variables)
    )
    ids = tokenizer.encode(text)
    return _with_ends(tokenizer, ids, [0] * len(ids), ends_turn=False)[0]


def render_completion(
    tokenizer: Tokenizer, prompt: str, completion: str
) -> tuple[list[int], list[int]]:
    """ids and mask of plain text without a template: bos (if used), prompt, completion, eos.

    The two are encoded apart, so that the prompt's ids are those that sampling starts from.
    Raises UnusableRow for an empty completion.
    """
    if not completion:
        raise UnusableRow(
            "empty_completion", "the completion is empty: there is nothing to train on"
        )
    head = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    head += tokenizer.encode(prompt, special=False)
    tail = [*tokenizer.encode(completion, special=False), tokenizer.eos_id]
    return head + tail, [0] * len(head) + [1] * len(tail)


def render_text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool = False,
    tools: Sequence[Any] | None = None,
    **variables: Any,
) -> str:
    """The template's text for the messages."""
    template = _template_of(tokenizer)
    return _take_marks(
        _render(template, tokenizer, messages, add_generation_prompt, tools, variables)
    )[0]


def check_messages(messages: Any, tokenizer: Tokenizer) -> None:
    """Raises UnusableRow unless `messages` is a list of {role, content} without control tokens."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UnusableRow(
            "bad_messages", f"messages must be a list of at least one message, not {messages!r:.80}"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UnusableRow(
                "bad_messages", f"message {i} must be an object with a role, not {message!r:.80}"
            )
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise UnusableRow("bad_messages", f"message {i} ({message['role']}) has no content")
        for token in (*tokenizer.special_tokens, OPEN, CLOSE):
            if any(token in text for text in _strings(message)):
                raise UnusableRow(
                    "control_token",
                    f"message {i} ({message['role']}) holds {token!r}, which is a control token "
                    "of this tokenizer: it would be read as the end of a turn or the like",
                )


def _strings(value: Any) -> Iterator[str]:
    """Every text inside a message: its content or parts of it, tool calls, reasoning, names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)


def check_mask(mask: Sequence[int], has_prompt: bool) -> None:
    """Raises UnusableRow for a mask that trains on nothing, or on everything despite a prompt."""
    if not any(mask):
        raise UnusableRow(
            "mask_all_zeros",
            "the loss mask is all zeros: no assistant token was found (look at it with "
            "data.chat.preview)",
        )
    if has_prompt and all(mask):
        raise UnusableRow(
            "mask_all_ones",
            "the loss mask is all ones although there is a prompt: the template's generation "
            "marks cover it (look at it with data.chat.preview)",
        )


def preview(tokenizer: Tokenizer, ids: Sequence[int], mask: Sequence[int]) -> Text:
    """The tokens as coloured text: trained ones bold green, the others dim."""
    text = Text()
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or bool(mask[i]) != bool(mask[start]):
            style = "bold green" if mask[start] else "dim"
            text.append(tokenizer.decode(ids[start:i]), style=style)
            start = i
    return text


def _template_of(tokenizer: Tokenizer) -> str:
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


def _render(
    template: str,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
) -> str:
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


def _take_marks(marked: str) -> tuple[str, list[Span]]:
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


def _spans_by_prefix(
    template: str,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    text: str,
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
) -> list[Span]:
    """Each assistant message's span: after the generation prompt, to the end of its turn."""

    def rendered(stop: int, prompt: bool) -> str | None:
        try:
            return _render(template, tokenizer, messages[:stop], prompt, tools, variables)
        except DataError:  # some templates refuse a conversation that stops here
            return None

    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        head = rendered(i, True)
        if head is None or not text.startswith(head):
            start = _find_content(message, text, spans[-1][1] if spans else 0)
        else:
            start = len(head)
        whole = text if i == len(messages) - 1 else rendered(i + 1, False)
        if whole is not None and len(whole) > start and text.startswith(whole):
            stop = _without_blank_tail(tokenizer, text, start, len(whole))
        else:
            stop = _first_special_end(tokenizer, text, start)
        spans.append((start, stop))
    return spans


def _find_content(message: Message, text: str, start: int) -> int:
    content = message.get("content")
    found = text.find(content.strip(), start) if isinstance(content, str) else -1
    if found < 0:
        raise UnusableRow(
            "unclear_mask",
            "cannot tell where the assistant's answer begins in the rendering: the template "
            "renders a part of the conversation differently from the whole; mark the answer with "
            "{% generation %} in the template",
        )
    return found


def _without_blank_tail(tokenizer: Tokenizer, text: str, start: int, stop: int) -> int:
    """`stop`, or earlier: right after a special token that only blanks follow."""
    end = start + len(text[start:stop].rstrip())
    is_special = any(text.endswith(t, start, end) for t in tokenizer.special_tokens)
    return end if is_special else stop


def _first_special_end(tokenizer: Tokenizer, text: str, start: int) -> int:
    found = [
        (at, at + len(token))
        for token in tokenizer.special_tokens
        if (at := text.find(token, start)) >= 0
    ]
    return min(found)[1] if found else len(text)


def _mask(offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """1 for tokens that share a character with a span."""
    mask = [0] * len(offsets)
    token = 0
    for start, stop in spans:
        while token < len(offsets) and offsets[token][1] <= start:
            token += 1
        while token < len(offsets) and offsets[token][0] < stop:
            mask[token] = 1
            token += 1
    return mask


def _with_ends(
    tokenizer: Tokenizer, ids: list[int], mask: list[int], ends_turn: bool
) -> tuple[list[int], list[int]]:
    """Exactly one bos where the tokenizer uses one, and something that ends the last turn."""
    bos_id = tokenizer.bos_id
    if bos_id is not None and ids[:1] != [bos_id]:
        ids, mask = [bos_id, *ids], [0, *mask]
    if ends_turn and not _ends_with_special(tokenizer, ids):
        ids, mask = [*ids, tokenizer.eos_id], [*mask, 1]
    return ids, mask


def _ends_with_special(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    specials = set(tokenizer.special_tokens)
    for token_id in reversed(ids):
        if tokenizer.token(token_id) in specials:
            return True
        if tokenizer.decode([token_id]).strip():
            return False
    return False
