"""Chats to token ids and loss masks, through Hugging Face chat templates in Jinja's sandbox.

The ids are always those of the whole rendering; the mask marks what the assistant says,
including the token that ends its turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from stepwell.data.chat_template import (
    CLOSE,
    OPEN,
    Message,
    Span,
    UnusableRow,
    render,
    take_marks,
    template_of,
)
from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError

ASSISTANT = ("assistant",)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    train_from: int = 0,
    train_on: Collection[str] = ASSISTANT,
    last_turn_only: bool = False,
    **variables: Any,
) -> tuple[list[int], list[int]]:
    """ids and mask of a whole conversation; mask 1 on the tokens of messages of the roles
    `train_on`, from the `train_from`-th message on or only the last of them, each with its
    end-of-turn token.

    There is one bos if the tokenizer uses one, and a last assistant turn whose template ends it
    without a special token gets one eos. Templates with `{% generation %}` say themselves what the
    assistant generates; for others it is what follows the generation prompt, up to the end of the
    turn. Of other roles the content is trained, up to the end of the turn.
    Raises DataError for no template or a broken one, and its subclass UnusableRow for a template's
    own refusal, a special token inside a message, and a mask of all zeros, or of all ones although
    there is a prompt.
    """
    check_messages(messages, tokenizer)
    template = template_of(tokenizer)
    text, marks = take_marks(render(template, tokenizer, messages, False, tools, variables))
    roles = [message["role"] for message in messages]
    if not marks or len(marks) == roles.count("assistant"):
        prefixes = _Prefixes(template, tokenizer, messages, tools, variables, text)
        found = _spans(prefixes, marks, train_on)
        chosen = [(i, span) for i, span in found if i >= train_from]
        spans = [span for _, span in (chosen[-1:] if last_turn_only else chosen)]
    elif train_from or last_turn_only or set(train_on) != set(ASSISTANT):
        raise UnusableRow(
            "unclear_mask",
            f"the template marks {len(marks)} generated parts for {roles.count('assistant')} "
            "assistant messages, so they cannot be told apart",
        )
    else:
        spans = marks
    ids, offsets = tokenizer.encode_with_offsets(text)
    ids, mask = _with_ends(
        tokenizer,
        ids,
        _mask(offsets, spans),
        ends_turn=roles[-1] == "assistant",
        is_trained=bool(spans) and roles[-1] in train_on,
    )
    check_mask(mask, has_prompt=any(role not in train_on for role in roles))
    return ids, mask


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    **variables: Any,
) -> list[int]:
    """ids that a model continues with the assistant's next answer."""
    check_messages(messages, tokenizer)
    text, _ = take_marks(
        render(template_of(tokenizer), tokenizer, messages, True, tools, variables)
    )
    ids = tokenizer.encode(text)
    return _with_ends(tokenizer, ids, [0] * len(ids), ends_turn=False, is_trained=False)[0]


def render_completion(
    tokenizer: Tokenizer, prompt: str, completion: str, train_on: Collection[str] = ASSISTANT
) -> tuple[list[int], list[int]]:
    """ids and mask of plain text without a template: bos (if used), prompt, completion, eos.
    The prompt counts as the user's, the completion as the assistant's.

    The two are encoded apart, so that the prompt's ids are those that sampling starts from.
    Raises UnusableRow for an empty completion.
    """
    if not completion:
        raise UnusableRow(
            "empty_completion", "the completion is empty: there is nothing to train on"
        )
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    head = tokenizer.encode(prompt, special=False)
    tail = [*tokenizer.encode(completion, special=False), tokenizer.eos_id]
    trained = ["user" in train_on] * len(head) + ["assistant" in train_on] * len(tail)
    return bos + head + tail, [0] * len(bos) + [int(is_trained) for is_trained in trained]


def render_text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool = False,
    tools: Sequence[Any] | None = None,
    **variables: Any,
) -> str:
    """The template's text for the messages."""
    template = template_of(tokenizer)
    return take_marks(
        render(template, tokenizer, messages, add_generation_prompt, tools, variables)
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
            "the loss mask is all zeros: there is no token of a role that is trained "
            "(method.train_on)",
        )
    if has_prompt and all(mask):
        raise UnusableRow(
            "mask_all_ones",
            "the loss mask is all ones although there is a prompt: the template's generation "
            "marks cover it",
        )


def preview(tokenizer: Tokenizer, ids: Sequence[int], mask: Sequence[int]) -> Text:
    """The tokens as coloured text: trained ones bold green, the others dim."""
    text = Text()
    for part, is_trained in parts(tokenizer, ids, mask):
        text.append(part, style="bold green" if is_trained else "dim")
    return text


def parts(tokenizer: Tokenizer, ids: Sequence[int], mask: Sequence[int]) -> list[tuple[str, bool]]:
    """The text in runs that are trained and runs that are not."""
    found, start = [], 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or bool(mask[i]) != bool(mask[start]):
            found.append((tokenizer.decode(ids[start:i]), bool(mask[start])))
            start = i
    return found


@dataclass(frozen=True)
class _Prefixes:
    """The whole rendering `text` of messages, and those of their beginnings."""

    template: str
    tokenizer: Tokenizer
    messages: Sequence[Message]
    tools: Sequence[Any] | None
    variables: Mapping[str, Any]
    text: str

    def of(self, stop: int, prompt: bool) -> str | None:
        """The first `stop` messages, with or without the generation prompt, if that is how the
        whole begins."""
        messages = self.messages[:stop]
        try:
            part = render(
                self.template, self.tokenizer, messages, prompt, self.tools, self.variables
            )
        except DataError:  # some templates refuse a conversation that stops here
            return None
        part, _ = take_marks(part)
        return part if self.text.startswith(part) else None

    def turn_end(self, i: int, start: int) -> int:
        """Where message i ends that begins at `start`: after its end-of-turn token."""
        last = i == len(self.messages) - 1
        whole = self.text if last else self.of(i + 1, False)
        if whole is not None and len(whole) > start:
            return _without_blank_tail(self.tokenizer, self.text, start, len(whole))
        return _first_special_end(self.tokenizer, self.text, start)


def _spans(
    prefixes: _Prefixes, marks: Sequence[Span], roles: Collection[str]
) -> list[tuple[int, Span]]:
    """(number, span) of each message of these roles. marks: what the template says that the
    assistant generates, one a message of it, or nothing."""
    spans, end, answers = [], 0, iter(marks)
    for i, message in enumerate(prefixes.messages):
        mark = next(answers, None) if message["role"] == "assistant" else None
        if message["role"] not in roles:
            end = end if mark is None else mark[1]
            continue
        if mark is None and not message.get("content") and message["role"] != "assistant":
            continue
        span = mark or _span(prefixes, i, end)
        spans.append((i, span))
        end = span[1]
    return spans


def _span(prefixes: _Prefixes, i: int, after: int) -> Span:
    """An answer's span begins after the generation prompt, another message's with its content.
    after: where the message before ends at the earliest."""
    message = prefixes.messages[i]
    if message["role"] == "assistant":
        head = prefixes.of(i, True)
        start = _find_content(message, prefixes.text, after) if head is None else len(head)
    else:
        head = prefixes.of(i, False) if i else None
        start = _find_content(message, prefixes.text, max(after, len(head or "")))
    return start, prefixes.turn_end(i, start)


def _find_content(message: Message, text: str, start: int) -> int:
    content = message.get("content")
    found = text.find(content.strip(), start) if isinstance(content, str) else -1
    if found < 0:
        raise UnusableRow(
            "unclear_mask",
            f"cannot tell where a message of {message['role']!r} begins in the rendering: the "
            "template renders a part of the conversation, or the message's content, differently; "
            "mark answers with {% generation %} in the template",
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
    tokenizer: Tokenizer, ids: list[int], mask: list[int], ends_turn: bool, is_trained: bool
) -> tuple[list[int], list[int]]:
    """Exactly one bos where the tokenizer uses one, and something that ends the last turn."""
    bos_id = tokenizer.bos_id
    if bos_id is not None and ids[:1] != [bos_id]:
        ids, mask = [bos_id, *ids], [0, *mask]
    if ends_turn and not _ends_with_special(tokenizer, ids):
        ids, mask = [*ids, tokenizer.eos_id], [*mask, int(is_trained)]
    return ids, mask


def _ends_with_special(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    specials = set(tokenizer.special_tokens)
    for token_id in reversed(ids):
        if tokenizer.token(token_id) in specials:
            return True
        if tokenizer.decode([token_id]).strip():
            return False
    return False
