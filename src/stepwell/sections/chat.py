"""How rows of chat data are read: the tables `method.columns` and `method.roles`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from stepwell.schema import Section

ChatFormat = Literal["auto", "messages", "prompt-completion", "alpaca", "sharegpt"]
ChatRole = Literal["system", "user", "assistant", "tool"]


class _Names(Section):
    """What the data call something; None: its usual name. table: where the section stands. reads:
    the keys that each format reads."""

    table: ClassVar[str]
    reads: ClassVar[dict[str, tuple[str, ...]]]

    def named(self) -> dict[str, str]:
        """Standard name -> name in the data, of those that are set."""
        return {k: v for k, v in self.model_dump().items() if v is not None}

    @model_validator(mode="after")
    def _rules(self) -> _Names:
        names = list(self.named().values())
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            keys = " and ".join(k for k, v in self.named().items() if v == twice)
            raise ValueError(
                f"{self.table}: {keys} are both {twice!r}; give each a name of its own"
            )
        return self


class ChatColumns(_Names):
    """messages: of the formats messages and sharegpt. role, content: keys of a message."""

    table: ClassVar[str] = "method.columns"
    reads: ClassVar[dict[str, tuple[str, ...]]] = {
        "messages": ("messages", "role", "content", "system", "tools"),
        "sharegpt": ("messages", "role", "content", "system", "tools"),
        "prompt-completion": ("prompt", "completion", "role", "content", "system", "tools"),
        "alpaca": ("instruction", "input", "output", "system", "tools"),
    }

    messages: str | None = None
    role: str | None = None
    content: str | None = None
    prompt: str | None = None
    completion: str | None = None
    instruction: str | None = None
    input: str | None = None
    output: str | None = None
    system: str | None = None
    tools: str | None = None


class RoleNames(_Names):
    table: ClassVar[str] = "method.roles"
    reads: ClassVar[dict[str, tuple[str, ...]]] = {
        "messages": ("system", "user", "assistant", "tool"),
        "sharegpt": ("system", "user", "assistant", "tool"),
        "prompt-completion": ("system", "user", "assistant", "tool"),
        "alpaca": (),
    }

    system: str | None = None
    user: str | None = None
    assistant: str | None = None
    tool: str | None = None
