"""Chat rows in the usual formats, brought into one: `messages`, or `prompt` and `completion`.

messages: [{role, content, tool_calls?}], as OpenAI and Transformers have them; prompt-completion:
two texts, or two lists of messages; alpaca: instruction, input, output; sharegpt: conversations of
{from, value}. Any of them may have `tools` and `system`, and columns may go by other names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepwell.data.chat_template import UnusableRow
from stepwell.sections.chat import ChatFormat
from stepwell.sections.methods import SFT
from stepwell.types import nearest

# What other data sets call the roles that templates know.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
FUNCTION_CALL = "function_call"
# In the order in which "auto" looks for them.
NEEDED = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}


@dataclass(frozen=True)
class ChatRules:
    """How rows are read and which of their tokens are trained.

    columns: standard name -> what the data call it; `role` and `content` are keys of a message.
    roles: what the data call a role -> its standard name. train_on: the roles that are trained;
    last_turn_only: of these messages only the last.
    """

    format: ChatFormat = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    train_on: tuple[str, ...] = ("assistant",)
    last_turn_only: bool = False


STANDARD = ChatRules()


def chat_rules(method: SFT) -> ChatRules:
    """How the run's rows are read and masked."""
    return ChatRules(
        format=method.format,
        columns=method.columns.named(),
        roles={theirs: ours for ours, theirs in method.roles.named().items()},
        train_on=method.train_on,
        last_turn_only=method.last_turn_only,
    )


def standard_row(row: Mapping[str, Any], rules: ChatRules = STANDARD) -> dict[str, Any]:
    """{"messages", "tools"} or {"prompt", "completion", "tools"} of a row, where prompt and
    completion are both texts or both lists of messages. Raises UnusableRow."""
    kind = _format_of(row, rules)
    needed = {name: _required(row, name, kind, rules) for name in NEEDED[kind]}
    tools = read_tools(_get(row, "tools", rules))
    system = _get(row, "system", rules)
    if kind == "prompt-completion":
        prompt, completion = needed["prompt"], needed["completion"]
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            prompt, completion = two_lists(prompt, completion)
            prompt = with_system(standard_messages(prompt, rules), system)
            completion = standard_messages(completion, rules)
        return {"prompt": prompt, "completion": completion, "tools": tools}
    if kind == "alpaca":
        messages = _alpaca(needed, _get(row, "input", rules))
    else:
        (messages,) = needed.values()
        messages = standard_messages(messages, rules)
    return {"messages": with_system(messages, system), "tools": tools}


def two_lists(prompt: Any, completion: Any) -> tuple[list[Any], list[Any]]:
    """Both as lists of messages, where one may be text. Raises UnusableRow."""
    if isinstance(prompt, list) and isinstance(completion, str):
        if not completion:
            raise UnusableRow("empty_completion", "the completion is empty")
        return prompt, [{"role": "assistant", "content": completion}]
    if isinstance(prompt, list) and isinstance(completion, list):
        return prompt, completion
    if isinstance(prompt, str) and isinstance(completion, list):
        return [{"role": "user", "content": prompt}], completion
    raise UnusableRow(
        "wrong_type",
        "prompt and completion must be text or lists of messages, not "
        f"{type(prompt).__name__} and {type(completion).__name__}",
    )


def standard_messages(messages: Any, rules: ChatRules = STANDARD) -> Any:
    """Messages with `role` and `content` by those names, roles by their standard names, and tool
    calls as objects; what is no list of objects is left for `check_messages` to refuse."""
    if not isinstance(messages, list):
        return messages
    return [_message(m, rules) if isinstance(m, Mapping) else m for m in messages]


def read_tools(value: Any) -> list[Any] | None:
    """The tool definitions of a row: a list, or its JSON. Raises UnusableRow."""
    if isinstance(value, str):
        value = _json(value, "tools") if value.strip() else None
    if isinstance(value, Mapping):
        value = [value]
    if not value:
        return None
    if not isinstance(value, list):
        raise UnusableRow("bad_tools", f"tools must be a list of definitions, not {value!r:.80}")
    return [_json(tool, "tools") if isinstance(tool, str) else tool for tool in value]


def with_system(messages: Any, system: Any) -> Any:
    """The messages behind a system message, unless they begin with one."""
    if not system or not isinstance(messages, list):
        return messages
    first = messages[0] if messages else None
    if isinstance(first, Mapping) and first.get("role") == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _format_of(row: Mapping[str, Any], rules: ChatRules) -> str:
    if rules.format != "auto":
        return rules.format
    for kind, names in NEEDED.items():
        if any(_get(row, name, rules) is not None for name in names):
            return kind
    there = ", ".join(repr(name) for name in row) or "nothing"
    raise UnusableRow(
        "missing_column",
        "a row needs `messages`, `conversations`, `prompt` and `completion`, or `instruction` and "
        f"`output` (or method.columns that name them): it has {there}"[:300],
    )


def _get(row: Mapping[str, Any], name: str, rules: ChatRules) -> Any:
    return row.get(_column(name, rules))


def _column(name: str, rules: ChatRules) -> str:
    """What the data call a column; a ShareGPT conversation is the format's `messages`."""
    standard = "messages" if name == "conversations" else name
    return rules.columns.get(standard, name)


def _required(row: Mapping[str, Any], name: str, kind: str, rules: ChatRules) -> Any:
    column = _column(name, rules)
    value = row.get(column)
    if value is None:
        others = [n for n in row if n != column]
        raise UnusableRow(
            "missing_column", f"a row of format {kind!r} needs {column!r}{nearest(column, others)}"
        )
    return value


def _alpaca(needed: Mapping[str, Any], given: Any) -> list[dict[str, Any]]:
    parts = [needed["instruction"], given or ""]
    if not all(isinstance(part, str) for part in (*parts, needed["output"])):
        raise UnusableRow("wrong_type", "instruction, input and output must be text")
    if not needed["output"]:
        raise UnusableRow("empty_completion", "the output is empty: there is nothing to train on")
    question = "\n\n".join(part for part in parts if part)
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": needed["output"]},
    ]


def _message(message: Mapping[str, Any], rules: ChatRules) -> dict[str, Any]:
    role_key = _key(message, rules, "role", "from")
    content_key = _key(message, rules, "content", "value")
    role, content = message.get(role_key), message.get(content_key)
    rest = {
        name: value
        for name, value in message.items()
        if name not in (role_key, content_key) and value is not None  # as Parquet fills them in
    }
    if isinstance(role, str):
        role = rules.roles.get(role, ROLES.get(role, role))
    if role == FUNCTION_CALL:
        role, content, rest["tool_calls"] = "assistant", None, content
    if "tool_calls" in rest:
        rest["tool_calls"] = _tool_calls(rest["tool_calls"])
    return {"role": role, "content": content, **rest}


def _key(message: Mapping[str, Any], rules: ChatRules, name: str, other: str) -> str:
    """Under which of two names a message has something, unless the rules say a third."""
    return rules.columns.get(name, name if name in message or other not in message else other)


def _tool_calls(calls: Any) -> list[Any]:
    """Calls with their arguments as objects, which templates write as JSON themselves."""
    calls = _json(calls, "tool_calls") if isinstance(calls, str) else calls
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UnusableRow("bad_tools", f"tool_calls must be a list of calls, not {calls!r:.80}")
    return [_tool_call(call) for call in calls]


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    call = {name: value for name, value in call.items() if value is not None}
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"])}
    if "name" not in call:
        raise UnusableRow("bad_tools", f"a tool call has no name: {call!r:.80}")
    return {"type": "function", "function": _with_arguments(call)}


def _with_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function.get("arguments")
    if isinstance(given, str):
        given = _json(given, "a tool call's arguments") if given.strip() else {}
    return {**function, "arguments": {} if given is None else given}


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableRow("bad_tools", f"{what}: no JSON: {text!r:.80} ({error})") from error
